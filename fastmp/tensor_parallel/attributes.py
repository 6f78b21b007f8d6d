"""Typed records of the marks on parameters and hooks: how a weight is sharded, what graphs do with a hook."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

__all__ = [
    "HookTraits", "ParallelAttributes", "hook_traits", "mark_hook", "parallel_attributes", "shard_of",
    "whole_of",
]  # fmt: skip

Hook = TypeVar("Hook", bound=Callable[..., Any])


class ParallelAttributes(NamedTuple):
    """How a parameter is divided over the tensor-parallel group.

    `tensor_model_parallel`: it is a shard, cut along `partition_dim` in each of the `partition_stride` blocks
    that are fused there. When False, it is replicated; with `sequence_parallel` its gradient is a partial
    sum, to be added over the group. `expert_parallel`: dimension 0 counts the experts of this rank, a
    contiguous part of all experts of the `ep` group; the cut is then over the `etp` group, and replicas are
    the ranks of `edp`. `pipeline_shared`: another stage of the pipeline holds it too, and their gradients are
    added up; `pipeline_replica`: the other stage counts it in sums over the model.

    Blocks are matrices of their own to an optimizer that looks at whole matrices. So are those of a weight
    with `fused_rows`: its rows repeat in groups, of which each matrix has as many rows as stand there. `rows`
    are those of the undivided tensor where the ones behind them are padding, which checkpoints leave out.
    """

    tensor_model_parallel: bool = False
    partition_dim: int = -1
    partition_stride: int = 1
    sequence_parallel: bool = False
    expert_parallel: bool = False
    pipeline_shared: bool = False
    pipeline_replica: bool = False
    fused_rows: tuple[int, ...] = ()
    rows: int = 0


def parallel_attributes(param: torch.Tensor) -> ParallelAttributes:
    """The marks of `param`; a parameter without marks is replicated and has a complete gradient."""
    defaults = ParallelAttributes._field_defaults.items()
    return ParallelAttributes._make(getattr(param, name, default) for name, default in defaults)


class HookTraits(NamedTuple):
    """How CUDA graphs treat a hook of a module or parameter; a hook without traits runs in eager code only.

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


def shard_of(full: torch.Tensor, dim: int, stride: int, size: int, rank: int) -> torch.Tensor:
    """Rank `rank`'s shard of `full`, whose `stride` blocks along `dim` are each cut into `size` parts.

    A fused weight of query, key and value (stride 3) gives each rank its part of every block.
    """
    return torch.cat(full.chunk(size * stride, dim)[rank::size], dim) if size > 1 else full


def whole_of(shards: Sequence[torch.Tensor], dim: int, stride: int) -> torch.Tensor:
    """The tensor of which `shard_of` gives the ranks these shards."""
    blocks = zip(*(shard.chunk(stride, dim) for shard in shards), strict=True)
    return torch.cat([part for block in blocks for part in block], dim)
