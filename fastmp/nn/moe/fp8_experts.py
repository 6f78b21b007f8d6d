"""Experts in FP8: four grouped GEMMs of quantised rows, two of them in backward, and wgrads in their dtype.

    forward    quantise X; H = X W1^T, Y = activation(H) quantised in its epilogue; output = Y W2^T
    backward   quantise dO; dY = dO W2; wgrad of W2 from the dequantised Y
               dH from H; quantise dH; dX = dH W1; wgrad of W1 from the dequantised X

X is saved in FP8; H in the dtype of the layer, since the gradient of the activation needs it. Y is computed
from H again: a memory-bound kernel, in place of a tensor for each layer and microbatch. Rows after the last
expert's are zeros.

M rows sorted by expert, L experts of this rank, H hidden, F hidden units of an expert on this rank.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from fastmp.config import ActivationSpec
from fastmp.nn.moe.dispatchers.dispatcher import no_compile
from fastmp.ops import dequantize_rows, grouped_mlp_in_fp8, grouped_mm_fp8, quantize_rows
from fastmp.ops.core.fp8 import E4M3
from fastmp.ops.core.registry import autocast
from fastmp.ops.grouped_mm import activation_backward, weight_gradient
from fastmp.ops.wgrad import MainGrad
from fastmp.tensor_parallel.fp8_linear import QuantizedWeight
from fastmp.tensor_parallel.linear import gradient_of

__all__ = ["fp8_experts"]


@no_compile
def fp8_experts(
    rows_MH: Tensor,
    offsets_L: Tensor,
    weights: tuple[Tensor, Tensor],
    fp8: tuple[QuantizedWeight, QuantizedWeight],
    activate: Callable[[Tensor], Tensor],
    spec: ActivationSpec,
) -> Tensor:
    """Return the outputs (M, H) of rows sorted by expert, as `GroupedExperts.forward` does, by FP8 GEMMs.

    Args:
        rows_MH, offsets_L: as for `GroupedExperts.forward`.
        weights, fp8: of both grouped GEMMs, and what is quantised of them.
        activate, spec: the activation between them.
    """
    (rows_MH,) = autocast(rows_MH)
    found = (gradient_of("fp8_experts", weight, weight) for weight in weights)
    leaves, main_grads, defers = zip(*found, strict=True)
    return _Fp8Experts.apply(rows_MH, *leaves, offsets_L, fp8, activate, spec, main_grads, defers)


class _Fp8Experts(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        fc1: Tensor,
        fc2: Tensor,
        offsets: Tensor,
        fp8: tuple[QuantizedWeight, QuantizedWeight],
        activate: Callable[[Tensor], Tensor],
        spec: ActivationSpec,
        main_grads: tuple[MainGrad, ...],
        defers: tuple[Any, ...],
    ) -> Tensor:
        ctx.fp8, ctx.activate, ctx.spec, ctx.dtype = fp8, activate, spec, x.dtype
        ctx.main_grads, ctx.defers = main_grads, defers
        first, second = ctx.fp8
        # 1. Quantise the rows: (M, H). Grouped GEMM and activation, quantised: (M, H) -> (M, F).
        rows = quantize_rows(x, block=first.recipe.block)
        if _gated(spec):
            *y, h = grouped_mlp_in_fp8(*rows, *first.forward, offsets, form=spec.form, out_dtype=x.dtype)
        else:
            h = grouped_mm_fp8(*rows, *first.forward, offsets, out_dtype=x.dtype)
            y = _activated(h, activate, spec, second.recipe.block)
        # 2. Grouped GEMM: (M, F) -> (M, H).
        ctx.save_for_backward(*rows, h, offsets)
        return grouped_mm_fp8(*y, *second.forward, offsets, out_dtype=x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, s, h, offsets = ctx.saved_tensors
        first, second = ctx.fp8
        need_x, need_first, need_second = ctx.needs_input_grad[:3]
        grad_x = grad_first = grad_second = None
        # 1. dgrad of the second GEMM from the quantised gradient; its wgrad, now or deferred.
        if need_second:
            y = _activated(h, ctx.activate, ctx.spec, second.recipe.block)
            grad_second = _wgrad(ctx, 1, grad, y, offsets)
        if need_x or need_first:
            dy = grouped_mm_fp8(*second.quantize_grad(grad), *second.dgrad, offsets, out_dtype=ctx.dtype)
            # 2. Backward through the activation; the same for the first GEMM.
            if ctx.spec.form is not None:
                dh = activation_backward(dy, h, ctx.spec.form, ctx.spec.num_gates > 0)
            else:
                with torch.enable_grad():
                    leaf = h.detach().requires_grad_()
                    (dh,) = torch.autograd.grad(ctx.activate(leaf), leaf, dy)
            if need_first:
                grad_first = _wgrad(ctx, 0, dh, (q, s), offsets)
            if need_x:
                grad_x = grouped_mm_fp8(*first.quantize_grad(dh), *first.dgrad, offsets, out_dtype=ctx.dtype)
        return grad_x, grad_first, grad_second, None, None, None, None, None, None


def _gated(spec: ActivationSpec) -> bool:
    """Return True for activations that the epilogue of a GEMM and a quantising kernel know."""
    return spec.form is not None and spec.num_gates > 0


def _activated(
    h: Tensor, activate: Callable[[Tensor], Tensor], spec: ActivationSpec, block: int
) -> tuple[Tensor, Tensor]:
    """Return the quantised activation of h, of gated ones in one kernel: the bytes of forward."""
    if not _gated(spec):
        return quantize_rows(activate(h), block=block)
    made: tuple[Tensor, Tensor] = torch.ops.fastmp.gated_activation_quantized(
        h, None, spec.form, None, block, E4M3
    )
    return made


def _wgrad(
    ctx: Any, number: int, grad: Tensor, rows: tuple[Tensor, Tensor], offsets: Tensor
) -> Tensor | None:
    """Compute a weight gradient from dequantised rows, or defer that."""
    main_grad = ctx.main_grads[number]
    make = partial(_wgrad_now, grad, rows, offsets, main_grad)
    defer: Callable[..., None] | None = ctx.defers[number]
    if defer is None:
        return make()
    defer(make)
    return None


def _wgrad_now(
    grad: Tensor, rows: tuple[Tensor, Tensor], offsets: Tensor, main_grad: MainGrad
) -> Tensor | None:
    return weight_gradient(grad, dequantize_rows(*rows, dtype=grad.dtype), offsets, main_grad)
