"""`evaluate`: WikiText and LAMBADA, besides the held-out text of `fastmp eval`."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fastmp.apps import evaluate
from fastmp.apps.evaluate import TaskCommand, window_of
from fastmp.config import GPTConfig

if TYPE_CHECKING:
    from fastmp.apps.evaluation.tasks import EvalTask
    from fastmp.training.checkpoint.storage import CheckpointReader

__all__ = ["main"]


def _wikitext(options: Namespace, reader: CheckpointReader, config: GPTConfig) -> EvalTask:
    from examples.megatron_paper.evaluation.zero_shot_tasks import wikitext_task
    from fastmp.apps.generation.trained_models import model_tokenizer

    tokenizer, window = model_tokenizer(options, reader), window_of(options, config)
    return wikitext_task(options.data, tokenizer, window=window, stride=options.stride)


def _lambada(options: Namespace, reader: CheckpointReader, config: GPTConfig) -> EvalTask:
    from examples.megatron_paper.evaluation.zero_shot_tasks import lambada_task
    from fastmp.apps.generation.trained_models import model_tokenizer

    tokenizer = model_tokenizer(options, reader)
    return lambada_task(options.data, tokenizer, max_seq_len=config.max_seq_len)


TASKS = {
    "wikitext": TaskCommand(
        "perplexity per original word of WikiText",
        "a file of words, such as wiki.test.tokens",
        "wiki.test.tokens --hf Qwen3-0.6B",
        ("perplexity", "perplexity_per_token", "nats", "num_words", "num_tokens"),
        _wikitext,
        stride=32,
    ),
    "lambada": TaskCommand(
        "accuracy of the last word of a passage",
        'a file of lines {"text": "..."}',
        "lambada_test.jsonl --hf Qwen3-0.6B",
        ("accuracy", "perplexity", "num_correct", "num_examples"),
        _lambada,
        windows=False,
    ),
    **evaluate.TASKS,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run `evaluate` with the arguments `argv`; return the exit status."""
    return evaluate.main(argv, "python -m examples.megatron_paper evaluate", TASKS)
