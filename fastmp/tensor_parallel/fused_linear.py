"""Sequence-parallel GEMMs fused with their collectives (asynchronous tensor parallelism).

torch.ops.symm_mem has an all-gather before a GEMM and a reduce-scatter after one that work in chunks: while
one chunk is multiplied, another travels over NVLink. Chunks have overhead, so GEMMs of few rows are slower
that way; `overlap_rows` is the number of rows from which fusion pays.

All such ops of a group share one workspace, so no two may run concurrently. On one stream they never do: each
ends on the stream it started on. Layers use the streams of `fastmp.distributed.streams` as well, and there
these ops are not used. torch frees the workspace of a group when an op needs a larger one. Captured graphs
contain its address, so it does not grow while such a graph lives.

S sequence, P ranks of the group, I and O inputs and outputs of a GEMM.
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

from fastmp.config import Environment
from fastmp.distributed import streams
from fastmp.distributed.collectives import group_size
from fastmp.profiling import traced
from fastmp.status import process_status

__all__ = ["gather_matmul", "is_fused", "matmul_scatter"]

_graphs: dict[str, weakref.WeakSet[object]] = {}  # by group: graphs that contain the address of its workspace
_MULTICAST_ROWS = 2048  # rows of all ranks up to which torch gathers by one multicast


def is_fused(
    x: Tensor, weight: Tensor, group: dist.ProcessGroup | None, rows: int | None, *, gathers: bool
) -> bool:
    """Return True if the GEMM of x and `weight` is fused with its collective; the same on all ranks.

    The first call for a group is a collective of hosts. False on devices without these kernels, if ranks are
    on several machines, under compilers and torch.func, and on the streams of `fastmp.distributed.streams`.

    Args:
        x: (S/P, ..., I), to be gathered, with `gathers`; else (S, ..., I), whose GEMM is reduce-scattered.
        rows: minimum number of rows (S times the dimensions between); None: never fused.
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
    """Return the gathered x (S, ..., I) if `keep`, else None, and its GEMM (S, ..., O)."""
    # torch gathers few rows by one multicast, into a workspace with room for the rows of all ranks.
    multicast = not keep and math.prod(x.shape[:-1]) * group.size() <= _MULTICAST_ROWS
    _use_workspace(group, x, x.nbytes * (group.size() if multicast else 1))
    whole, products = torch.ops.symm_mem.fused_all_gather_matmul(
        x.contiguous(), [weight_IO], 0, group.group_name, return_A=keep
    )
    return whole, products[0]


@traced("fastmp.collective.matmul_scatter")
def matmul_scatter(x: Tensor, weight_IO: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's shard (S/P, ..., O) of the GEMM of x (S, ..., I), reduced over the group."""
    rows = math.prod(x.shape[:-1]) // group.size()
    _use_workspace(group, x, 2 * rows * weight_IO.shape[1] * x.itemsize)  # two chunks at a time
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
        gc.collect()  # drops graphs that are no longer referenced
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
    """Return True if all ranks are on one machine and their devices have the fused ops."""
    own = (socket.gethostname(), _has_kernels(device))
    everyones = [own] * group.size()
    dist.all_gather_object(everyones, own, group=group)
    return own[1] and all(each == own for each in everyones)


def _has_kernels(device: torch.device) -> bool:
    """Return True if the ops have kernels for `device`; GPUs need multicast by an NVSwitch, one a rank."""
    from torch.distributed import _symmetric_memory as symmetric  # registers the ops

    names = ("fused_all_gather_matmul", "fused_matmul_reduce_scatter")
    key = device.type.upper()
    if not all(torch._C._dispatch_has_kernel_for_dispatch_key(f"symm_mem::{name}", key) for name in names):
        return False
    if device.type != "cuda":
        return True
    if Environment.read().shares_gpus:
        return False
    kind = torch._C._autograd.DeviceType.CUDA
    return bool(symmetric._SymmetricMemory.has_multicast_support(kind, device.index))
