"""The product of a column-parallel linear layer as a function, with its communication behind other work.

T tokens (all leading dims), I this rank's inputs, O this rank's outputs, S sequence, B batch, H hidden, V
vocabulary, P ranks of the group.
"""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd.function import Function, once_differentiable

from fastmp.ops import checks
from fastmp.ops.registry import autocast
from fastmp.ops.wgrad import deferral, leaf_of, linear, main_grad_of, weight_grad
from fastmp.parallel.collectives import all_gather, all_reduce_, group_size, reduce_scatter

__all__ = ["column_linear", "parallel_logits"]


def parallel_logits(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    *,
    group: dist.ProcessGroup | None,
    sequence_parallel: bool = False,
) -> torch.Tensor:
    """Logits (S, B, V/P) of this rank's part of the vocabulary, for an output embedding tied to the input's.

    hidden (S, B, H), the same on every rank, or (S/P, B, H) with `sequence_parallel`; weight (V/P, H), the
    shard of a VocabParallelEmbedding. The backward sums the gradient of `hidden` over the group.
    """
    return column_linear(hidden, weight, None, group, sequence_parallel)


def column_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    group: dist.ProcessGroup | None,
    sequence_parallel: bool,
) -> torch.Tensor:
    """This rank's outputs (..., O) for x (..., I), the same on every rank, and its weight (O, I), bias (O,).

    With `sequence_parallel`, x is this rank's shard of the sequence, dimension 0. The gradient of the weight
    goes to its `main_grad` where there is one, as in `fastmp.ops.wgrad.linear`, which serves a group of one.
    """
    if group_size(group) == 1 or not (torch.is_grad_enabled() or sequence_parallel):
        return linear(x, weight, bias)
    main_grad, defer = main_grad_of(weight), deferral(weight)
    # Autocast does not reach into the backward of a Function: cast outside it.
    x, narrow, bias = autocast(x, weight, bias)
    checks.main_grad("column_linear", main_grad, weight=narrow)
    if main_grad is None and narrow is not weight:  # the rest of the backward pass needs the gradient
        defer = None
    if defer is not None:
        narrow = leaf_of(narrow)
    return _ColumnLinear.apply(x, narrow, bias, group, sequence_parallel, main_grad, defer)


class _ColumnLinear(Function):
    @staticmethod
    def forward(ctx, x, weight, bias, group, sequence_parallel, main_grad, defer):
        ctx.group, ctx.sequence_parallel = group, sequence_parallel
        ctx.main_grad, ctx.defer = main_grad, defer
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        return F.linear(all_gather(x, group)[0] if sequence_parallel else x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        group, sequence_parallel = ctx.group, ctx.sequence_parallel
        need_x, need_weight, need_bias = ctx.needs_input_grad[:3]
        grad_x = grad_weight = grad_bias = x_work = grad_work = None
        need_now = need_weight and ctx.defer is None
        if need_now and sequence_parallel:
            x, x_work = all_gather(x, group, overlap=True)
        grad_TO = grad.reshape(-1, grad.shape[-1])
        if need_x:
            grad_x = (grad_TO @ weight).view(*grad.shape[:-1], weight.shape[1])
            if sequence_parallel:
                grad_x, grad_work = reduce_scatter(grad_x, group, overlap=True)
            else:
                grad_work = all_reduce_(grad_x, group, overlap=True)
        if need_bias:
            grad_bias = grad_TO.sum(0)
        if x_work is not None:
            x_work.wait()
        if need_now:
            grad_weight = weight_grad(grad_TO, x.reshape(-1, x.shape[-1]), ctx.main_grad)
        elif need_weight:
            ctx.defer(functools.partial(_deferred, grad_TO, x, group, sequence_parallel, ctx.main_grad))
        if grad_work is not None:
            grad_work.wait()
        return grad_x, grad_weight, grad_bias, None, None, None, None


def _deferred(
    grad_TO: torch.Tensor,
    x: torch.Tensor,
    group: dist.ProcessGroup,
    sequence_parallel: bool,
    main_grad: torch.Tensor | None,
) -> torch.Tensor | None:
    """`weight_grad` where `_ColumnLinear` has left it for later."""
    x = all_gather(x, group)[0] if sequence_parallel else x
    return weight_grad(grad_TO, x.reshape(-1, x.shape[-1]), main_grad)
