"""The global gradient norm over all ranks and layouts, and the coefficient that clips it.

The host waits for nothing: the norm is a tensor on the device, the same on all ranks, and not finite on all
of them if one gradient anywhere is not.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from fastmp.distributed.collectives import all_reduce_, group_rank
from fastmp.optim.grad_buffers import GradBuffer

__all__ = ["clip_coefficient", "global_grad_norm"]


def global_grad_norm(
    grads: GradBuffer,
    *,
    tp_group: dist.ProcessGroup | None = None,
    mp_group: dist.ProcessGroup | None = None,
    etp_group: dist.ProcessGroup | None = None,
    expert_mp_group: dist.ProcessGroup | None = None,
    world_group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Return the 2-norm of all main gradients of the model; each parameter counts once on any layout.

    Args:
        grads: this rank's gradients, reduced. Another stage counts parameters marked `pipeline_replica`. A
            rank without trainable parameters counts 0 and joins the all-reduces.
        tp_group: the group over which parameters not marked `tensor_model_parallel` are replicated; its
            first rank counts them.
        mp_group: ranks that together hold one copy of the model (tensor and pipeline parallel); one
            all-reduce.
        etp_group, expert_mp_group: the same for parameters marked `expert_parallel`: tensor parallelism
            inside an expert, and the ranks that together hold one copy of all experts. If both grids hold a
            copy of the model on the same ranks, `expert_mp_group` is `mp_group` and one all-reduce serves
            both.
        world_group: all ranks. They hold one copy of sharded gradients together, so one all-reduce over them
            replaces the others.

    Returns:
        a 0-dim float64 tensor on the gradients' device, with the same bits on every rank. It is not finite if
        one gradient on one rank is not, even a replicated one on a rank that does not count it.

    Raises:
        ValueError: a buffer without parameters and no group of other ranks, or sharded gradients without
            `world_group`.

    Example:
        grads = GradBuffer(model.named_parameters())
        optimizer = fastmp.optim.AdamW(grads, lr=3e-4)
        grads.zero()
        loss.backward()
        grads.reduce()
        norm = global_grad_norm(grads)
        optimizer.step(grad_norm=norm, clip_coefficient=clip_coefficient(norm, 1.0))
    """
    if not grads.flats and mp_group is expert_mp_group is world_group is None:
        raise ValueError("global_grad_norm: no parameters given, and no group of ranks that have some")
    if world_group is None and any(flat.layout.num_ranks > 1 for flat in grads.flats):
        raise ValueError(
            "global_grad_norm: gradients are sharded, so each rank has a part of the norm; pass the group of "
            "all ranks as world_group"
        )
    # 1. Sum the squares of the gradients that this rank counts.
    totals = torch.zeros(2, dtype=torch.float64, device=grads.device)  # of all but experts, of experts
    for flat in grads.flats:
        first = group_rank(etp_group if flat.plan.experts else tp_group) == 0
        sharded, replicated, elsewhere = flat.own_by_replicas
        counted, others = (sharded + replicated, elsewhere) if first else (sharded, replicated + elsewhere)
        total = totals[int(flat.plan.experts)]
        if counted:
            total += _square(counted)
        if others:  # 0 x inf is nan: a rank that does not count replicated gradients still shows a bad one
            total += _square(others) * 0.0
    # 2. Sum over the ranks that together hold the model: one all-reduce, or two if experts have other ranks.
    if grads.shard:
        groups: list[tuple[Tensor, dist.ProcessGroup | None]] = [(totals.sum(0, keepdim=True), world_group)]
    elif expert_mp_group is mp_group:
        groups = [(totals.sum(0, keepdim=True), mp_group)]
    else:
        groups = [(totals[0:1], mp_group), (totals[1:2], expert_mp_group)]
    for total, group in groups:
        if group is not None:
            all_reduce_(total, group)
    return torch.cat([total for total, _ in groups]).sum().sqrt()


def _square(grads: list[Tensor]) -> Tensor:
    """Return the sum of squares, 0-dim float64."""
    narrow = grads[0].dtype.itemsize < 4
    norms = torch._foreach_norm(grads, 2, dtype=torch.float32) if narrow else torch._foreach_norm(grads)
    return torch.stack(norms).double().square().sum()


def clip_coefficient(norm: Tensor, max_norm: float) -> Tensor:
    """Return the factor in (0, 1] that brings `norm` down to `max_norm`; a `max_norm` of 0 never clips."""
    if max_norm < 0:
        raise ValueError(f"clip_coefficient: max_norm must not be negative, got {max_norm}")
    return (max_norm / (norm + 1e-6)).clamp(max=1.0) if max_norm else torch.ones_like(norm)
