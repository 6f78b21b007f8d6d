"""Collectives of a tensor-parallel region, as pairs of conjugate autograd functions.

The forward of one is the backward of the other (Shoeybi et al. 2019, f and g; Korthikanti et al. 2022 for the
sequence-parallel pair):

| forward | communication | backward |
|---|---|---|
| `copy_to_group` | none | all-reduce |
| `reduce_from_group` | all-reduce | none |
| `split_to_group` | none | all-gather |
| `gather_from_group` | all-gather | none |
| `gather_sequence` | all-gather | reduce-scatter |
| `reduce_scatter_sequence` | reduce-scatter | all-gather |
| `all_to_all` | all-to-all | all-to-all |

`group` is a ProcessGroup, or None for this rank alone: then, as for a group of one, a function returns its
input. No input is modified, except by functions whose name ends in an underscore. Tensors may have any
layout; the buffers passed to the backend are contiguous. The functions at the end are not differentiable and
can be asynchronous. Each is a range for profilers, which ends with the call even if the work is asynchronous.

own_stream: run the collective, forward and backward, on the group's stream, and let the current stream wait
for it. NCCL runs synchronous collectives on the current stream, at its priority: set own_stream if kernels of
another stream fill the GPU at the same time, because the streams of `ParallelGroups` have high priority.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.autograd import Function

from fastmp.profiling import traced

__all__ = [
    "all_to_all",
    "copy_to_group",
    "gather_from_group",
    "gather_objects",
    "gather_sequence",
    "group_rank",
    "group_size",
    "reduce_from_group",
    "reduce_from_group_",
    "reduce_scatter_sequence",
    "split_to_group",
]

T = TypeVar("T")

# torch renamed these two; the old names warn where the new ones exist.
_RENAMED = hasattr(dist, "all_gather_single")


def communication_device() -> str:
    """Return the device type for tensors of the default process group: "cpu" if it has gloo, else "cuda"."""
    return "cpu" if "gloo" in dist.get_backend_config() else "cuda"


def group_size(group: dist.ProcessGroup | None) -> int:
    """Return the number of ranks in `group`; 1 for None."""
    return 1 if group is None else group.size()


def group_rank(group: dist.ProcessGroup | None) -> int:
    """Return this process's rank in `group`; 0 for None."""
    return 0 if group is None else group.rank()


def gather_objects(value: T, group: dist.ProcessGroup | None) -> list[T]:
    """Return the picklable `value` of every rank of `group`, in rank order; [value] for None."""
    values = [value] * group_size(group)
    if group is not None:
        dist.all_gather_object(values, value, group=group)
    return values


def copy_to_group(x: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Return `x`; backward all-reduces its gradient (f of Shoeybi et al.). Any shape."""
    return x if group_size(group) == 1 else _Copy.apply(x, group)


def reduce_from_group(x: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """All-reduce `x`; backward returns the gradient as it is (g of Shoeybi et al.). Any shape."""
    return x if group_size(group) == 1 else _Reduce.apply(x, group)


def reduce_from_group_(x: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """All-reduce `x` in place; otherwise as `reduce_from_group`.

    Args:
        x: contiguous, not saved for the backward of the op that produced it, and not a leaf that requires
            grad.
    """
    return x if group_size(group) == 1 else _ReduceInPlace.apply(x, group)


def split_to_group(x: torch.Tensor, group: dist.ProcessGroup | None, dim: int = -1) -> torch.Tensor:
    """Return this rank's equal part of `x` along `dim`, a view; backward all-gathers the gradient.

    Raises:
        ValueError: the group does not divide the dimension.
    """
    size = group_size(group)
    if x.shape[dim] % size:
        raise ValueError(
            f"split_to_group: dimension {dim} has size {x.shape[dim]}, which a group of {size} "
            "does not divide"
        )
    return x if size == 1 else _Split.apply(x, group, dim)


def gather_from_group(x: torch.Tensor, group: dist.ProcessGroup | None, dim: int = -1) -> torch.Tensor:
    """All-gather `x` along `dim`, in rank order; backward takes this rank's part of the gradient.

    Use it if every rank then computes the same from the result. Parts have equal shapes.
    """
    return x if group_size(group) == 1 else _Gather.apply(x, group, dim)


def gather_sequence(
    x: torch.Tensor, group: dist.ProcessGroup | None, *, own_stream: bool = False
) -> torch.Tensor:
    """All-gather sequence shards along dim 0, (S/P, ...) -> (S, ...); backward reduce-scatters the gradient.

    Use it if each rank then computes something else from the result, as a column-parallel GEMM does.
    """
    return x if group_size(group) == 1 else _GatherSequence.apply(x, group, own_stream)


def reduce_scatter_sequence(
    x: torch.Tensor, group: dist.ProcessGroup | None, *, own_stream: bool = False
) -> torch.Tensor:
    """Reduce-scatter `x` along dim 0, (S, ...) -> (S/P, ...); backward all-gathers the gradient.

    Raises:
        ValueError: the group does not divide dim 0.
    """
    return x if group_size(group) == 1 else _ReduceScatterSequence.apply(x, group, own_stream)


def all_to_all(
    x: torch.Tensor,
    send_sizes: Sequence[int],
    receive_sizes: Sequence[int],
    group: dist.ProcessGroup | None,
    *,
    check: bool = True,
    own_stream: bool = False,
) -> torch.Tensor:
    """Send rows to every rank and receive rows from every rank; backward sends the gradients back.

    Args:
        x: (sum of send_sizes, ...); the first send_sizes[0] rows go to the group's first rank, and so on. The
            other dimensions are equal on all ranks.
        send_sizes, receive_sizes: rows for and from each rank; they may be zero.
        check: compare the sizes of all ranks first: an all-gather of 2P integers and, on a GPU, a
            host-device synchronisation. Sizes that all ranks have from one source need no check.

    Returns:
        (sum of receive_sizes, ...), in rank order.

    Raises:
        ValueError: the same on every rank, if one sends more or fewer rows than the other expects, or sizes
            do not fit `x` or the group.

    Example:
        >>> all_to_all(torch.ones(3, 2), [3], [3], None).shape
        torch.Size([3, 2])
    """
    size, send, receive = group_size(group), list(send_sizes), list(receive_sizes)
    problem = _size_problem(x, send, receive, size)
    if check and group is not None and size > 1:
        problem = _first_problem(problem, send, receive, group)
    if problem:
        raise ValueError(f"all_to_all: {problem}")
    return x if size == 1 else _AllToAll.apply(x, send, receive, group, own_stream)


def _size_problem(x: torch.Tensor, send: list[int], receive: list[int], size: int) -> str:
    if len(send) != size or len(receive) != size:
        return f"send_sizes {send} and receive_sizes {receive} must have one number for each of {size} ranks"
    if min(*send, *receive) < 0:
        return f"send_sizes {send} and receive_sizes {receive} must not be negative"
    if sum(send) != x.shape[0]:
        return f"send_sizes {send} sum to {sum(send)}, but x has {x.shape[0]} rows"
    if size == 1 and send != receive:
        return f"rank 0 sends {send[0]} rows to itself and expects {receive[0]}"
    return ""


def _first_problem(problem: str, send: list[int], receive: list[int], group: dist.ProcessGroup) -> str:
    """Return the first rank's problem, else the first pair of ranks whose sizes differ, else ""."""
    everyones = gather_objects((problem, send, receive), group)
    for rank, (found, _, _) in enumerate(everyones):
        if found:
            return f"on rank {rank} of the group {found}"
    for source, (_, sent, _) in enumerate(everyones):
        for target, (_, _, expected) in enumerate(everyones):
            if sent[target] != expected[source]:
                return (
                    f"rank {source} of the group sends {sent[target]} rows to rank {target}, which "
                    f"expects {expected[source]}; send_sizes are {[s for _, s, _ in everyones]}, "
                    f"receive_sizes {[r for _, _, r in everyones]}"
                )
    return ""


# A forward returns tensors that it has written in place as `.detach()`: compiled by torch 2.11, the gradient
# of a Function whose output was written in place is zero.


class _Copy(Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return reduce_from_group(grad, ctx.group), None


class _Reduce(Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        total = x.clone(memory_format=torch.contiguous_format)
        all_reduce_(total, group)
        return total.detach()

    @staticmethod
    def backward(ctx, grad):
        return copy_to_group(grad, ctx.group), None


class _ReduceInPlace(Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        ctx.mark_dirty(x)
        all_reduce_(x, group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return copy_to_group(grad, ctx.group), None


class _Split(Function):
    @staticmethod
    def forward(ctx, x, group, dim):
        ctx.group, ctx.dim = group, dim
        part = x.shape[dim] // group.size()
        return x.narrow(dim, group.rank() * part, part)

    @staticmethod
    def backward(ctx, grad):
        return gather_from_group(grad, ctx.group, ctx.dim), None, None


class _Gather(Function):
    @staticmethod
    def forward(ctx, x, group, dim):
        ctx.group, ctx.dim = group, dim
        dim = dim % x.dim()
        joined, _ = all_gather(x, group)
        if dim == 0:
            return joined.detach()
        return torch.cat(joined.chunk(group.size()), dim)

    @staticmethod
    def backward(ctx, grad):
        return split_to_group(grad, ctx.group, ctx.dim), None, None


class _GatherSequence(Function):
    @staticmethod
    def forward(ctx, x, group, own_stream):
        ctx.group, ctx.own_stream = group, own_stream
        return _waited_for(all_gather(x, group, own_stream)).detach()

    @staticmethod
    def backward(ctx, grad):
        return reduce_scatter_sequence(grad, ctx.group, own_stream=ctx.own_stream), None, None


class _ReduceScatterSequence(Function):
    @staticmethod
    def forward(ctx, x, group, own_stream):
        ctx.group, ctx.own_stream = group, own_stream
        return _waited_for(reduce_scatter(x, group, own_stream)).detach()

    @staticmethod
    def backward(ctx, grad):
        return gather_sequence(grad, ctx.group, own_stream=ctx.own_stream), None, None


class _AllToAll(Function):
    @staticmethod
    def forward(ctx, x, send, receive, group, own_stream):
        ctx.send, ctx.receive, ctx.group, ctx.own_stream = send, receive, group, own_stream
        return _waited_for(_exchange(x, send, receive, group, own_stream)).detach()

    @staticmethod
    def backward(ctx, grad):
        back = _AllToAll.apply(grad, ctx.receive, ctx.send, ctx.group, ctx.own_stream)
        return back, None, None, None, None


def _waited_for(started: tuple[torch.Tensor, dist.Work | None]) -> torch.Tensor:
    """Let the current stream wait for a collective, and return its result."""
    made, work = started
    if work is not None:
        work.wait()
    return made


@traced("fastmp.collective.all_to_all")
def _exchange(
    x: torch.Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup, overlap: bool
) -> tuple[torch.Tensor, dist.Work | None]:
    arrived = x.new_empty((sum(receive), *x.shape[1:]))
    overlap = overlap and not torch.compiler.is_compiling()
    work = dist.all_to_all_single(arrived, x.contiguous(), receive, send, group=group, async_op=overlap)
    return arrived, work if overlap else None  # torch 2.10 returns a tensor where a program is exported


@traced("fastmp.collective.all_reduce")
def all_reduce_(
    x: torch.Tensor,
    group: dist.ProcessGroup,
    overlap: bool = False,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
) -> dist.Work | None:
    """All-reduce `x` in place; with `overlap`, asynchronously: wait for the returned Work.

    Under torch.compile the call is synchronous, as the compiler orders communication, and returns None.
    """
    if not x.is_contiguous():
        raise ValueError(
            f"all_reduce_: a tensor of shape {tuple(x.shape)} and strides {x.stride()} is not contiguous"
        )
    if overlap and not torch.compiler.is_compiling():
        return dist.all_reduce(x, op, group=group, async_op=True)
    dist.all_reduce(x, op, group=group)
    return None


def sum_over_(x: torch.Tensor, *groups: dist.ProcessGroup | None) -> torch.Tensor:
    """All-reduce contiguous `x` in place over one group after the other; all ranks get the same bits."""
    for group in groups:
        if group is not None:
            all_reduce_(x, group)
    return x


@traced("fastmp.collective.all_gather")
def all_gather(
    x: torch.Tensor, group: dist.ProcessGroup, overlap: bool = False
) -> tuple[torch.Tensor, dist.Work | None]:
    """All-gather (N, ...) -> (P*N, ...) in rank order; return it with the Work to wait for, or None."""
    joined = x.new_empty((group.size() * x.shape[0], *x.shape[1:]))
    gather = dist.all_gather_single if _RENAMED else dist.all_gather_into_tensor
    if overlap and not torch.compiler.is_compiling():
        return joined, gather(joined, x.contiguous(), group=group, async_op=True)
    gather(joined, x.contiguous(), group=group)
    return joined, None


@traced("fastmp.collective.reduce_scatter")
def reduce_scatter(
    x: torch.Tensor, group: dist.ProcessGroup, overlap: bool = False
) -> tuple[torch.Tensor, dist.Work | None]:
    """Reduce-scatter (P*N, ...) -> (N, ...); return this rank's rows with the Work to wait for, or None.

    Raises:
        ValueError: the group does not divide dim 0.
    """
    size = group.size()
    if x.shape[0] % size:
        raise ValueError(
            f"reduce_scatter_sequence: dimension 0 has size {x.shape[0]}, which a group of "
            f"{size} does not divide"
        )
    part = x.new_empty((x.shape[0] // size, *x.shape[1:]))
    scatter = dist.reduce_scatter_single if _RENAMED else dist.reduce_scatter_tensor
    if overlap and not torch.compiler.is_compiling():
        return part, scatter(part, x.contiguous(), group=group, async_op=True)
    scatter(part, x.contiguous(), group=group)
    return part, None


@traced("fastmp.collective.reduce_scatter")
def reduce_scatter_(x: torch.Tensor, group: dist.ProcessGroup, overlap: bool = False) -> dist.Work | None:
    """Reduce-scatter contiguous `x` (P*N,) in place: this rank's part is then the sum, the others undefined.

    With `overlap`, asynchronously: wait for the returned Work.
    """
    scatter = dist.reduce_scatter_single if _RENAMED else dist.reduce_scatter_tensor
    return scatter(_local_part(x, group), x, group=group, async_op=overlap)


@traced("fastmp.collective.all_gather")
def all_gather_(x: torch.Tensor, group: dist.ProcessGroup, overlap: bool = False) -> dist.Work | None:
    """All-gather contiguous `x` (P*N,) in place, from each rank's own part.

    With `overlap`, asynchronously: wait for the returned Work.
    """
    gather = dist.all_gather_single if _RENAMED else dist.all_gather_into_tensor
    return gather(x, _local_part(x, group), group=group, async_op=overlap)


def _local_part(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    part = x.numel() // group.size()
    return x[group.rank() * part : (group.rank() + 1) * part]
