"""Products of sequence-parallel linear layers in one piece with their communication.

torch.ops.symm_mem has an all-gather before a product and a reduce-scatter behind one that work in parts:
while one part is multiplied, another travels over NVLink. Parts have a price, so products of few rows are
slower that way, and `overlap_rows` says from how many on it is worth it.

All such ops of a group share one workspace, so no two may be at work at once. On one stream they never are:
each ends on the stream it began on. Beside the current stream layers work on those of
`fastmp.distributed.streams` only, and there these ops are not used. torch frees the workspace of a group when
an op needs a larger one. Captured graphs contain its address, so it does not grow while such a graph lives.

S sequence, P ranks of the group, I and O inputs and outputs of a product.
"""

from __future__ import annotations

import functools
import gc
import math
import socket
import weakref

import torch
import torch.distributed as dist
from torch import Tensor

from fastmp.distributed import streams
from fastmp.distributed.collectives import group_size
from fastmp.profiling import traced
from fastmp.status import process_status

__all__ = ["gather_matmul", "is_fused", "matmul_scatter"]

_graphs: dict[str, weakref.WeakSet[object]] = {}  # of each group, those that contain its workspace's address
_MULTICAST_ROWS = 2048  # of all ranks together: torch's own limit


def is_fused(
    x: Tensor, weight: Tensor, group: dist.ProcessGroup | None, rows: int | None, *, gathers: bool
) -> bool:
    """Whether a product of x with `weight` is to be one with its communication: alike on all ranks.

    x: (S/P, ..., I) that is gathered, with `gathers`; else (S, ..., I), of whose product parts are scattered.
    rows: how many (S times the dimensions between) it needs; None: no product has enough.

    The first call for a group is a collective of hosts. False on a device whose kernels are not there, where
    ranks are on several machines, under compilers and torch.func, and on streams beside the current one.
    """
    size = group_size(group)
    if rows is None or group is None or size == 1 or x.is_meta or x.dim() < 2 or x.dtype != weight.dtype:
        return False
    whole = math.prod(x.shape[:-1]) * (size if gathers else 1)
    if whole < rows or (not gathers and x.shape[0] % size):
        return False
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    if x.is_cuda and torch.cuda.current_stream(x.device) in streams.beside(x.device):
        return False
    return _can_fuse(group, x.device)


@traced("fastmp.collective.gather_matmul")
def gather_matmul(
    x: Tensor, weight_IO: Tensor, group: dist.ProcessGroup, *, keep: bool
) -> tuple[Tensor | None, Tensor]:
    """The parts (S/P, ..., I) of all ranks joined, with `keep`, and their product (S, ..., O)."""
    # torch gathers few rows by one multicast, into a workspace that has room for those of all ranks.
    multicast = not keep and math.prod(x.shape[:-1]) * group.size() <= _MULTICAST_ROWS
    _use_workspace(group, x, x.nbytes * (group.size() if multicast else 1))
    whole, products = torch.ops.symm_mem.fused_all_gather_matmul(
        x.contiguous(), [weight_IO], 0, group.group_name, return_A=keep
    )
    return whole, products[0]


@traced("fastmp.collective.matmul_scatter")
def matmul_scatter(x: Tensor, weight_IO: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's part (S/P, ..., O) of the sum over the group of products of x (S, ..., I)."""
    rows = math.prod(x.shape[:-1]) // group.size()
    _use_workspace(group, x, 2 * rows * weight_IO.shape[1] * x.itemsize)  # two parts at a time
    return torch.ops.symm_mem.fused_matmul_reduce_scatter(x, weight_IO, "sum", 0, group.group_name)


def _use_workspace(group: dist.ProcessGroup, x: Tensor, nbytes: int) -> None:
    """Note the graph being captured as a user of the group's workspace, of which an op needs `nbytes`.

    Raises RuntimeError if the workspace is smaller than that and a captured graph uses it.
    """
    from torch.distributed import _symmetric_memory as symmetric

    workspace = symmetric._group_name_to_workspace_tensor.get(group.group_name)
    if workspace is None:
        return
    graphs = _graphs.setdefault(group.group_name, weakref.WeakSet())
    grows = nbytes > workspace.nbytes
    if grows and graphs:
        gc.collect()  # graphs that nobody replays any more
    if grows and graphs:
        raise RuntimeError(
            f"tp_overlap: the symmetric workspace of group {group.group_name} would grow from "
            f"{workspace.nbytes} to {nbytes} bytes, but captured graphs contain its address; run the largest "
            "microbatch once before graphs are captured, let go of the graphs, or raise "
            "parallel.tp_overlap_rows above the microbatch's tokens"
        )
    if process_status.graph is not None:
        graphs.add(process_status.graph)
    elif x.is_cuda and torch.cuda.is_current_stream_capturing():
        graphs.add(_use_workspace)  # a capture outside of fastmp, whose end is unknown


@functools.cache
def _can_fuse(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether the devices of all ranks can, on one machine."""
    own = (socket.gethostname(), _has_kernels(device))
    everyones = [own] * group.size()
    dist.all_gather_object(everyones, own, group=group)
    return own[1] and all(each == own for each in everyones)


def _has_kernels(device: torch.device) -> bool:
    """Whether the ops have kernels for `device`; of GPUs, those whose switch reaches all of a machine."""
    from torch.distributed import _symmetric_memory as symmetric  # registers the ops

    names = ("fused_all_gather_matmul", "fused_matmul_reduce_scatter")
    key = device.type.upper()
    if not all(torch._C._dispatch_has_kernel_for_dispatch_key(f"symm_mem::{name}", key) for name in names):
        return False
    if device.type != "cuda":
        return True
    kind = torch._C._autograd.DeviceType.CUDA
    return bool(symmetric._SymmetricMemory.has_multicast_support(kind, device.index))
