"""Training: data, tokenizers, schedule, loop, checkpoints, metrics. Names are imported when first used."""

from __future__ import annotations

from fastmp._lazy import exports

__getattr__, __dir__, __all__ = exports(
    __name__,
    {
        "data.tokenize": "ByteTokenizer FileTokenizer load_tokenizer train_bpe",
        "data.corpus": "build",
        "data.dataset": "TokenDataset",
        "data.masked": "MaskedDataset",
        "trainer": "Trainer",
        "microbatches": "ExpertStats PipelineLoss",
        "checkpoint": "Checkpointer",
        "metrics": "RunInfo TrainLog read_metrics",
        "plot": "plot_learning_rates plot_loads plot_loss plot_runs",
        "validation": "Evaluation evaluate",
    },
)
