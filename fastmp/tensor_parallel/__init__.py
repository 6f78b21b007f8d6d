"""Tensor and context parallelism: sharded layers, fused GEMM and collective, loss, parameter attributes."""

from __future__ import annotations

from fastmp._lazy import exports

__getattr__, __dir__, __all__ = exports(
    __name__,
    {
        "embedding": "VocabParallelEmbedding",
        "layers": "ColumnParallelLinear RowParallelLinear",
        "linear": "parallel_logits",
        "loss": "vocab_parallel_cross_entropy",
        "linear_loss": "vocab_parallel_linear_cross_entropy vocab_parallel_linear_log_probs"
        " vocab_parallel_linear_distillation vocab_parallel_linear_topk_distillation",
        "context": "cut_sequence join_sequence",
        "attributes": "ParallelAttributes parallel_attributes",
        "sharded_state": "sharded_state_dict",
    },
)
