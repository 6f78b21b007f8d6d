"""GEMMs of parallel linear layers as functions, with their collectives overlapped with other work.

Under sequence parallelism a GEMM is fused with its own collective where `fastmp.tensor_parallel.fused_linear`
supports it.

T tokens (all leading dims), I this rank's inputs, O this rank's outputs, S sequence, B batch, H hidden, V
vocabulary, P ranks of the group.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd.function import Function, once_differentiable

from fastmp.distributed.collectives import (
    all_gather,
    all_reduce_,
    group_size,
    reduce_scatter,
    reduce_scatter_sequence,
)
from fastmp.ops.core import checks
from fastmp.ops.core.registry import autocast
from fastmp.ops.wgrad import MainGrad, deferral, kept_operands, leaf_of, linear, main_grad_of, weight_grad
from fastmp.tensor_parallel.fused_linear import gather_matmul, is_fused, matmul_scatter

__all__ = ["column_linear", "gradient_of", "parallel_logits", "row_linear_scattered"]

Defer = Callable[[Callable[[], torch.Tensor | None]], None]


def parallel_logits(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    *,
    group: dist.ProcessGroup | None,
    sequence_parallel: bool = False,
) -> torch.Tensor:
    """Return the logits (S, B, V/P) of this rank's shard of the vocabulary, for a tied output embedding.

    Backward all-reduces (with `sequence_parallel` reduce-scatters) the gradient of `hidden`.

    Args:
        hidden: (S, B, H), the same on every rank, or (S/P, B, H) with `sequence_parallel`.
        weight: (V/P, H), the shard of a `VocabParallelEmbedding`.

    Example:
        >>> parallel_logits(torch.zeros(4, 2, 8), torch.zeros(16, 8), group=None).shape
        torch.Size([4, 2, 16])
    """
    return column_linear(hidden, weight, None, group, sequence_parallel)


def column_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    group: dist.ProcessGroup | None,
    sequence_parallel: bool,
    overlap_rows: int | None = None,
) -> torch.Tensor:
    """Return this rank's outputs (..., O) for x (..., I), the same on every rank.

    The weight gradient is added to `weight.main_grad` if there is one, now or deferred, as in
    `fastmp.ops.wgrad.linear`, which serves a group of one.

    Args:
        weight, bias: this rank's shards (O, I) and (O,).
        sequence_parallel: x is this rank's sequence shard along dim 0. Only the shard is saved: backward
            gathers it again, overlapped with the dgrad GEMM.
        overlap_rows: rows from which the GEMM is fused with its all-gather, and in backward with the
            reduce-scatter. None: never.
    """
    if group_size(group) == 1 or not (torch.is_grad_enabled() or sequence_parallel):
        return linear(x, weight, bias)
    # Autocast does not apply inside the backward of a Function: cast outside it.
    x, narrow, bias = autocast(x, weight, bias)
    fused = sequence_parallel and is_fused(x, narrow, group, overlap_rows, gathers=True)
    narrow, main_grad, defer = gradient_of("column_linear", weight, narrow)
    return _ColumnLinear.apply(x, narrow, bias, group, sequence_parallel, fused, main_grad, defer)


def row_linear_scattered(
    x: torch.Tensor, weight: torch.Tensor, group: dist.ProcessGroup, overlap_rows: int | None = None
) -> torch.Tensor:
    """Return this rank's shard (S/P, ..., O) of the reduce-scattered GEMM of x (S, ..., I) and weight (O, I).

    From `overlap_rows` rows on the GEMM is fused with its reduce-scatter, and in backward the dgrad GEMM with
    the all-gather of the gradient, which wgrad then uses as well.

    Raises:
        ValueError: the group does not divide S.
    """
    cast, narrow = autocast(x, weight)
    if not is_fused(cast, narrow, group, overlap_rows, gathers=False):
        return reduce_scatter_sequence(linear(x, weight), group)
    narrow, main_grad, defer = gradient_of("row_linear", weight, narrow)
    cast, kept = kept_operands(cast, cast, narrow)
    return _FusedRowLinear.apply(cast, narrow, group, kept, main_grad, defer)


def gradient_of(
    name: str, weight: torch.Tensor, narrow: torch.Tensor
) -> tuple[torch.Tensor, MainGrad, Defer | None]:
    """Return the weight for a Function (`narrow`: after autocast), its main_grad, and how to defer wgrad."""
    main_grad, defer = main_grad_of(weight), deferral(weight)
    checks.check_main_grad(name, main_grad, weight=narrow)
    if main_grad is None and narrow is not weight:  # autograd casts the gradient in this backward
        defer = None
    return narrow if defer is None else leaf_of(narrow), MainGrad(main_grad, weight), defer


class _ColumnLinear(Function):
    @staticmethod
    def forward(ctx, x, weight, bias, group, sequence_parallel, fused, main_grad, defer):
        ctx.group, ctx.sequence_parallel, ctx.fused = group, sequence_parallel, fused
        ctx.main_grad, ctx.defer = main_grad, defer
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        # Under sequence parallelism all-gather x over the group: fused with the GEMM, or before it.
        if fused:
            y = gather_matmul(x, weight.t(), group, keep=False)[1]
            return y if bias is None else y + bias
        return F.linear(all_gather(x, group)[0] if sequence_parallel else x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        group, sequence_parallel = ctx.group, ctx.sequence_parallel
        need_x, need_weight, need_bias = ctx.needs_input_grad[:3]
        grad_x = grad_weight = grad_bias = x_work = grad_work = None
        need_now = need_weight and ctx.defer is None
        # 1. All-gather x over the group for wgrad, on NCCL's stream, overlapped with the dgrad GEMM.
        if need_now and sequence_parallel:
            x, x_work = all_gather(x, group, overlap=True)
        grad_TO = grad.reshape(-1, grad.shape[-1])
        # 2. dgrad, and its all-reduce or reduce-scatter, overlapped with the wgrad GEMM.
        if need_x and ctx.fused:
            grad_x = matmul_scatter(grad, weight, group)
        elif need_x:
            grad_x = (grad_TO @ weight).view(*grad.shape[:-1], weight.shape[1])
            if sequence_parallel:
                grad_x, grad_work = reduce_scatter(grad_x, group, overlap=True)
            else:
                grad_work = all_reduce_(grad_x, group, overlap=True)
        if need_bias:
            grad_bias = grad_TO.sum(0)
        # 3. wgrad, now or deferred.
        if x_work is not None:
            x_work.wait()
        if need_now:
            grad_weight = weight_grad(grad_TO, x.reshape(-1, x.shape[-1]), ctx.main_grad)
        elif need_weight:
            ctx.defer(functools.partial(_deferred, grad_TO, x, group, sequence_parallel, ctx.main_grad))
        if grad_work is not None:
            grad_work.wait()
        return grad_x, grad_weight, grad_bias, None, None, None, None, None


class _FusedRowLinear(Function):
    @staticmethod
    def forward(ctx, x, weight, group, kept, main_grad, defer):
        ctx.group, ctx.kept, ctx.main_grad, ctx.defer = group, kept, main_grad, defer
        if kept is None:
            ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        return matmul_scatter(x, weight.t(), group)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, weight = (ctx.kept or ctx).saved_tensors
        need_x, need_weight = ctx.needs_input_grad[:2]
        grad_x = grad_weight = None
        # 1. All-gather the gradient over the group, fused with dgrad if x needs one.
        if need_x:
            grad, grad_x = gather_matmul(grad, weight, ctx.group, keep=need_weight)
        else:
            grad = all_gather(grad, ctx.group)[0]
        # 2. wgrad, now or deferred.
        if need_weight:
            grad_TO, x_TI = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
            make = functools.partial(weight_grad, grad_TO, x_TI, ctx.main_grad)
            grad_weight = make() if ctx.defer is None else ctx.defer(make)
        return grad_x, grad_weight, None, None, None, None


def _deferred(
    grad_TO: torch.Tensor,
    x: torch.Tensor,
    group: dist.ProcessGroup,
    sequence_parallel: bool,
    main_grad: MainGrad,
) -> torch.Tensor | None:
    """Compute the weight gradient that `_ColumnLinear` has deferred; gathers x first."""
    x = all_gather(x, group)[0] if sequence_parallel else x
    return weight_grad(grad_TO, x.reshape(-1, x.shape[-1]), main_grad)
