"""Everything that knows ranks: the grid and its groups, collectives, layers, loss, gradients, optimizer.

Names are loaded when first used: `RankGrid` and `fastmp plan` never import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_EXPORTS = {
    name: module
    for module, names in {
        "grid": "RankGrid",
        "groups": "ParallelGroups",
        "runtime": "Runtime init main_guard",
        "collectives": "copy_to_group reduce_from_group split_to_group gather_from_group gather_sequence "
        "reduce_scatter_sequence group_size group_rank",
        "rng": "RngTracker",
        "layers": "ColumnParallelLinear RowParallelLinear VocabParallelEmbedding parallel_logits "
        "parallel_attributes",
        "loss": "vocab_parallel_cross_entropy",
        "grads": "GradBuffer",
        "optimizer": "AdamW global_grad_norm",
    }.items()
    for name in names.split()
}

__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(import_module(f"fastmp.parallel.{_EXPORTS[name]}"), name)
    if name in _EXPORTS.values():
        return import_module(f"fastmp.parallel.{name}")
    raise AttributeError(f"module 'fastmp.parallel' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
