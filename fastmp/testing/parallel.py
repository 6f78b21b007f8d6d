"""Helpers for tests of parallel code: recorded collectives, full tensors from shards, delayed gathers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from fastmp.distributed.collectives import group_size
from fastmp.optim import param_all_gather as gather
from fastmp.tensor_parallel.attributes import join_shards, parallel_attributes

__all__ = ["Collectives", "count_collectives", "full_gradient", "full_tensor", "late_gathers"]

_NAMES = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "broadcast_": "broadcast",
    "barrier": "barrier",
    "send": "send",
    "recv_": "recv",
    "alltoall_base_": "all_to_all",
    "alltoall_": "all_to_all",
    "scatter_": "scatter",
    "gather_": "gather",
    "reduce_": "reduce",
}


@dataclass
class Collectives:
    """Collectives that ran, in order.

    Attributes:
        calls: (name, shapes of the tensors, outputs first).
        sizes: bytes of the larger side of each: an all-gather's output, a reduce-scatter's input.
    """

    calls: list[tuple[str, list[tuple[int, ...]]]] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)

    @property
    def counts(self) -> dict[str, int]:
        """Return the number of calls of each collective: {"all_reduce": 2, ...}."""
        return dict(Counter(name for name, _ in self.calls))


class _CollectiveRecorder(TorchDispatchMode):
    def __init__(self, seen: Collectives) -> None:
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        space, _, name = func.name().partition("::")
        if space in ("c10d", "_c10d_functional"):
            name = _NAMES.get(name, name)
            if name != "wait_tensor":
                leaves = torch.utils._pytree.tree_leaves(args)
                tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
                self.seen.calls.append((name, [tuple(t.shape) for t in tensors]))
                self.seen.sizes.append(max((t.nbytes for t in tensors), default=0))
        return func(*args, **(kwargs or {}))


@contextmanager
def count_collectives() -> Iterator[Collectives]:
    """Record the collectives that run inside the block, forward and backward, in the yielded `Collectives`.

    Names are all_reduce, all_gather, reduce_scatter, broadcast, all_to_all, send, recv and so on. Calls of
    this process in eager mode count, on any group; no process group is needed where there are none.
    """
    seen = Collectives()
    with _CollectiveRecorder(seen):
        yield seen


def full_tensor(
    shard: torch.Tensor,
    param: torch.Tensor,
    group: dist.ProcessGroup | None,
    *,
    etp_group: dist.ProcessGroup | None = None,
    ep_group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Return the full tensor of which `shard` is this rank's shard, by the attributes of `param`.

    Shards are put together over `group`; replicas stay as they are. Experts are put together over
    `etp_group`, then those of all ranks of `ep_group` joined.
    """
    marks = parallel_attributes(param)
    group = etp_group if marks.expert_parallel else group
    if marks.tensor_model_parallel and group_size(group) > 1:
        shard = join_shards(_parts(shard, group), marks.partition_dim, marks.partition_stride)
    if marks.expert_parallel and group_size(ep_group) > 1:
        shard = torch.cat(_parts(shard, ep_group))
    return shard


def _parts(shard: torch.Tensor, group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    """Return the shards of all ranks of `group`, in rank order."""
    parts = [torch.empty_like(shard, memory_format=torch.contiguous_format) for _ in range(group_size(group))]
    dist.all_gather(parts, shard.contiguous(), group=group)
    return parts


def full_gradient(param: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Return the full gradient of a parameter: shards are joined, partial sums of replicas added."""
    assert param.grad is not None, "the parameter has no gradient"
    grad = full_tensor(param.grad, param, group)
    if group_size(group) > 1 and parallel_attributes(param).sequence_parallel:
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=group)
    return grad


@contextmanager
def late_gathers() -> Iterator[None]:
    """Delay the result of an optimizer's parameter all-gather until the wait for it.

    Until then the shards of other ranks are NaN, so a parameter that is used too early makes the loss NaN.
    """
    module: Any = gather
    real = module.all_gather_

    def late(x: torch.Tensor, group: dist.ProcessGroup, overlap: bool = False) -> Any:
        part, sent = x.numel() // group.size(), x.clone()
        x.fill_(torch.nan if x.is_floating_point() else 0x7F)  # of bytes, NaN in FP8
        x[group.rank() * part :][:part] = sent[group.rank() * part :][:part]

        def wait() -> None:
            real(sent, group)
            x.copy_(sent)

        return SimpleNamespace(wait=wait)

    module.all_gather_ = late
    try:
        yield
    finally:
        module.all_gather_ = real
