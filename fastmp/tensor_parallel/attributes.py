"""Typed records of the marks on parameters and hooks: how a weight is sharded, what graphs do with a hook."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

__all__ = [
    "HookTraits", "ParallelAttributes", "hook_traits", "mark_hook", "parallel_attributes", "local_shard",
    "join_shards",
]  # fmt: skip

Hook = TypeVar("Hook", bound=Callable[..., Any])


class ParallelAttributes(NamedTuple):
    """Sharding of a parameter, as `parallel_attributes` reads it from attributes of the same names.

    Attributes:
        tensor_model_parallel: it is a shard of the tensor-parallel group. False: replicated.
        partition_dim: dimension that is sharded.
        partition_stride: number of blocks fused along that dimension, each sharded by itself.
        sequence_parallel: it is replicated and its gradient is a partial sum, all-reduced over the group.
        expert_parallel: dimension 0 counts this rank's experts, a contiguous slice of all experts of the `ep`
            group; the shards are those of the `etp` group, and replicas are the ranks of `edp`.
        pipeline_shared: another pipeline stage holds it too, and their gradients are summed.
        pipeline_replica: that other stage counts it in sums over the model.
        fused_rows: rows of each matrix in a group of fused matrices; the groups repeat. Muon orthogonalises
            each of these matrices, and each block, by itself.
        num_valid_rows: rows of the full tensor that are not padding, 0 for all; checkpoints omit padding.
    """

    tensor_model_parallel: bool = False
    partition_dim: int = -1
    partition_stride: int = 1
    sequence_parallel: bool = False
    expert_parallel: bool = False
    pipeline_shared: bool = False
    pipeline_replica: bool = False
    fused_rows: tuple[int, ...] = ()
    num_valid_rows: int = 0


def parallel_attributes(param: torch.Tensor) -> ParallelAttributes:
    """Return the marks of `param`; without marks it is replicated and its gradient is complete."""
    defaults = ParallelAttributes._field_defaults.items()
    return ParallelAttributes._make(getattr(param, name, default) for name, default in defaults)


class HookTraits(NamedTuple):
    """Treatment of a module or parameter hook by CUDA graphs; without traits it runs in eager code only.

    Attributes:
        replayed: call it next to every replay, as hook(module, ()).
        in_graph: its kernels are captured with the backward that calls it.
        in_step: the graph of a whole step may contain its kernels, and nothing else of it is needed again.
    """

    replayed: bool = False
    in_graph: bool = False
    in_step: bool = False


def hook_traits(hook: Callable[..., Any]) -> HookTraits:
    """Return the traits of `hook`, which are attributes of these names on it."""
    return HookTraits._make(getattr(hook, name, False) for name in HookTraits._fields)


def mark_hook(hook: Hook, traits: HookTraits) -> Hook:
    """Set the traits of `hook` and return it."""
    for name, value in traits._asdict().items():
        setattr(hook, name, value)
    return hook


def local_shard(full: torch.Tensor, dim: int, stride: int, size: int, rank: int) -> torch.Tensor:
    """Return the shard of rank `rank` out of `size`, which copies unless the shard is contiguous.

    Args:
        full: the full tensor.
        dim: dimension to shard.
        stride: number of blocks fused along `dim`, each split into `size` shards; a fused query-key-value
            weight has 3.

    Example:
        >>> full = torch.arange(8)
        >>> local_shard(full, dim=0, stride=2, size=2, rank=1)
        tensor([2, 3, 6, 7])
        >>> join_shards([local_shard(full, 0, 2, 2, rank) for rank in range(2)], 0, 2).equal(full)
        True
    """
    return torch.cat(full.chunk(size * stride, dim)[rank::size], dim) if size > 1 else full


def join_shards(shards: Sequence[torch.Tensor], dim: int, stride: int) -> torch.Tensor:
    """Return the full tensor whose `local_shard`s these are, in rank order."""
    blocks = zip(*(shard.chunk(stride, dim) for shard in shards), strict=True)
    return torch.cat([part for block in blocks for part in block], dim)
