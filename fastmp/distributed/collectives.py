"""Communication at the borders of a tensor-parallel region, as pairs of conjugate autograd functions.

The forward of one is the backward of the other (Shoeybi et al. 2019, f and g; Korthikanti et al. 2022 for the
sequence-parallel pair): copy / reduce, split / gather, gather_sequence / reduce_scatter_sequence; all_to_all
is its own conjugate. `group` is a ProcessGroup, or None for this rank alone: then, as for a group of one, a
function returns its input. Nobody's tensor is modified, except by the functions whose name ends in an
underscore. Tensors may have any layout: the buffers given to the backend are contiguous. The functions at the
end are not differentiable and can run in the background. Each is a range for profilers, which ends with the
call also where the work goes on.

own_stream: run the collective, forward and backward, on the group's stream, and let the current stream wait
for it. NCCL runs other collectives on the current stream, at its priority: set it where kernels of another
stream fill the GPU at the same time, because the streams of `ParallelGroups` have high priority.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.autograd import Function

from fastmp.profiling import traced

__all__ = [
    "all_to_all",
    "copy_to_group",
    "gather_from_group",
    "gather_sequence",
    "group_rank",
    "group_size",
    "reduce_from_group",
    "reduce_from_group_",
    "reduce_scatter_sequence",
    "split_to_group",
]

# torch renamed these two; the old names warn where the new ones exist.
_RENAMED = hasattr(dist, "all_gather_single")


def communication_device() -> str:
    """The device of tensors for the default process group: the host where one of its backends takes them."""
    return "cpu" if "gloo" in dist.get_backend_config() else "cuda"


def group_size(group: dist.ProcessGroup | None) -> int:
    """Number of ranks in `group`; 1 for None."""
    return 1 if group is None else group.size()


def group_rank(group: dist.ProcessGroup | None) -> int:
    """This process's rank in `group`; 0 for None."""
    return 0 if group is None else group.rank()


def copy_to_group(x: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """f: the same tensor forward, the sum of the group's gradients backward. Any shape."""
    return x if group_size(group) == 1 else _Copy.apply(x, group)


def reduce_from_group(x: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """g: the sum over the group forward, the same gradient backward. Any shape."""
    return x if group_size(group) == 1 else _Reduce.apply(x, group)


def reduce_from_group_(x: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """`reduce_from_group` that writes the sum into `x`: for a tensor the caller has just made and owns alone.

    `x` is contiguous, is not needed by the backward of the op that made it, and is not a leaf that requires
    grad.
    """
    return x if group_size(group) == 1 else _ReduceInPlace.apply(x, group)


def split_to_group(x: torch.Tensor, group: dist.ProcessGroup | None, dim: int = -1) -> torch.Tensor:
    """This rank's equal part of `x` along `dim` (a view of `x`); backward gathers the parts' gradients.

    ValueError where the group does not divide the dimension.
    """
    size = group_size(group)
    if x.shape[dim] % size:
        raise ValueError(
            f"split_to_group: dimension {dim} has size {x.shape[dim]}, which a group of {size} "
            "does not divide"
        )
    return x if size == 1 else _Split.apply(x, group, dim)


def gather_from_group(x: torch.Tensor, group: dist.ProcessGroup | None, dim: int = -1) -> torch.Tensor:
    """The group's parts joined along `dim`, in rank order; backward takes this rank's part of the gradient.

    For a result that every rank then uses alike. Parts have equal shapes.
    """
    return x if group_size(group) == 1 else _Gather.apply(x, group, dim)


def gather_sequence(
    x: torch.Tensor, group: dist.ProcessGroup | None, *, own_stream: bool = False
) -> torch.Tensor:
    """(S/P, ...) -> (S, ...): the sequence shards joined along dim 0; backward reduce-scatters the gradient.

    For a result that each rank then uses in its own way (a column-parallel product).
    """
    return x if group_size(group) == 1 else _GatherSequence.apply(x, group, own_stream)


def reduce_scatter_sequence(
    x: torch.Tensor, group: dist.ProcessGroup | None, *, own_stream: bool = False
) -> torch.Tensor:
    """(S, ...) -> (S/P, ...): this rank's sequence shard of the sum over the group; backward all-gathers.

    ValueError where the group does not divide dim 0.
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
    """Rows to every rank and rows from every rank, in rank order; backward sends the gradients back.

    x (sum of send_sizes, ...): its first send_sizes[0] rows go to the group's first rank, and so on. Returns
    (sum of receive_sizes, ...). Sizes may be zero. The other dimensions are equal on all ranks.

    check: compare the sizes of all ranks before rows are sent, which costs an exchange of 2P integers and, on
    a GPU, a wait of the host. Sizes that all ranks have from one source need no check.

    ValueError, the same on every rank, where one sends more or fewer rows than the other expects; and for
    sizes that are not those of `x` or the group.
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
    """The first problem that a rank has found, else the first pair of ranks whose sizes differ."""
    everyones: list[tuple[str, list[int], list[int]]] = [("", [], [])] * group.size()
    dist.all_gather_object(everyones, (problem, send, receive), group=group)
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


# A forward returns what it has written to as `.detach()`: compiled by torch 2.11, the gradient of a Function
# whose output was written in place is zero.


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
    """Let the current stream wait for a collective; its result."""
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
    return arrived, work


@traced("fastmp.collective.all_reduce")
def all_reduce_(x: torch.Tensor, group: dist.ProcessGroup, overlap: bool = False) -> dist.Work | None:
    """Sum over the group into `x`, which is contiguous. With `overlap`, to be waited for by the returned
    Work.

    Under torch.compile nothing is overlapped here (the compiler orders communication) and the result is None.
    """
    if not x.is_contiguous():
        raise ValueError(
            f"all_reduce_: a tensor of shape {tuple(x.shape)} and strides {x.stride()} is not contiguous"
        )
    if overlap and not torch.compiler.is_compiling():
        return dist.all_reduce(x, group=group, async_op=True)
    dist.all_reduce(x, group=group)
    return None


def sum_over_(x: torch.Tensor, *groups: dist.ProcessGroup | None) -> torch.Tensor:
    """Sum over one group after the other into `x`, which is contiguous, with the same bits on all ranks."""
    for group in groups:
        if group is not None:
            all_reduce_(x, group)
    return x


@traced("fastmp.collective.all_gather")
def all_gather(
    x: torch.Tensor, group: dist.ProcessGroup, overlap: bool = False
) -> tuple[torch.Tensor, dist.Work | None]:
    """(N, ...) -> (P*N, ...) in rank order, with the Work to wait for (None: it is there)."""
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
    """(P*N, ...) -> (N, ...): this rank's rows of the sum, with the Work to wait for (None: it is there).

    ValueError where the group does not divide dim 0.
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
    """Sum over the group each rank's part of `x` (P*N,), which is contiguous, into that rank's part.

    The other parts are then undefined. With `overlap`, to be waited for by the returned Work.
    """
    scatter = dist.reduce_scatter_single if _RENAMED else dist.reduce_scatter_tensor
    return scatter(_own_part(x, group), x, group=group, async_op=overlap)


@traced("fastmp.collective.all_gather")
def all_gather_(x: torch.Tensor, group: dist.ProcessGroup, overlap: bool = False) -> dist.Work | None:
    """Give all ranks the part of `x` (P*N,), which is contiguous, that each rank has.

    With `overlap`, to be waited for by the returned Work.
    """
    gather = dist.all_gather_single if _RENAMED else dist.all_gather_into_tensor
    return gather(x, _own_part(x, group), group=group, async_op=overlap)


def _own_part(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    part = x.numel() // group.size()
    return x[group.rank() * part : (group.rank() + 1) * part]
