"""Batched LoRA over experts: a grouped GEMM with a frozen weight, plus low-rank terms of each expert.

For rows sorted by expert, y = x w[e]^T + scale (x a[e]^T) b[e]^T. The weight w + scale b a of an expert is
never materialised, and w has no gradient. The second GEMM of the low-rank terms accumulates onto x w[e]^T: in
registers on a GPU, in place on a CPU, so no third tensor of y's size exists.

Backward, with low = scale x a^T and dlow = scale dy b, are four grouped GEMMs with R rows, columns or terms,
and dx = dy w + dlow a by the same kernel as forward.

M rows, E experts, N x K the weight of one, R the rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastmp.ops import grouped_lora_triton
from fastmp.ops.core import checks
from fastmp.ops.core.registry import (
    Differentiable,
    autocast,
    compute_dtype,
    raise_if_create_graph,
    register,
    without_autocast,
)
from fastmp.ops.grouped_mm import check_ends, check_offsets, column_sums, grouped_flops, spans
from fastmp.profiling import traced


def reference(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    low: Tensor,
    v: Tensor,
    offsets: Tensor,
    transposed: bool,
    v_transposed: bool,
) -> Tensor:
    """Return x w[e]^T + low v[e]^T + bias[e], or w[e], v[e] where they are transposed; rounded once."""
    y = x.new_empty(len(x), w.shape[2 if transposed else 1])
    dtype, end = compute_dtype(x.dtype), 0
    with without_autocast(x.device.type):
        for expert, (start, end) in enumerate(spans(offsets, len(x))):
            if start == end:
                continue
            weight = (w[expert] if transposed else w[expert].t()).to(dtype)
            factor = (v[expert] if v_transposed else v[expert].t()).to(dtype)
            h = torch.addmm(x[start:end].to(dtype) @ weight, low[start:end].to(dtype), factor)
            y[start:end] = h if bias is None else h + bias[expert]
    y[end:] = 0
    return y


def _flops(x: Any, w: Any, bias: Any, low: Any, *_: Any) -> int:
    columns = w.shape[1] * w.shape[2] // max(x.shape[1], 1)
    return grouped_flops(x, w) + 2 * x.shape[0] * low.shape[1] * columns


register(
    "grouped_mm_lora(Tensor x, Tensor w, Tensor? bias, Tensor low, Tensor v, Tensor offsets, bool transposed,"
    " bool v_transposed) -> Tensor",
    contract=(
        "x (M, K) floating; transposed ? w (E, K, N) x; no transposed ? w (E, N, K) x; bias (E, N) x; "
        "low (M, G) x; v_transposed ? v (E, G, N) x; no v_transposed ? v (E, N, G) x; offsets (#E) int32"
    ),
    reference=reference,
    fake=lambda x, w, bias, low, v, offsets, transposed, v_transposed: x.new_empty(
        x.shape[0], w.shape[2 if transposed else 1]
    ),
    triton=grouped_lora_triton.launch,
    flops=_flops,
)


def _times(scale: float, rows: Tensor) -> Tensor:
    """Multiply rows by `scale` in place; no other tensor may share their memory."""
    return rows if scale == 1 else rows.mul_(scale)


def _forward(x, w, bias, a, b, offsets, scale, transposed):
    ops = torch.ops.fastmp
    low = _times(scale, ops.grouped_mm(x, a, offsets, False))
    return ops.grouped_mm_lora(x, w, bias, low, b, offsets, transposed, False), low


def _setup(ctx, inputs, output):
    x, w, _, a, b, offsets, ctx.scale, ctx.transposed = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, w, a, b, offsets, output[1])


@traced("fastmp.grouped_lora_backward")
def _backward(ctx, grad, _):
    if grad is None:
        return (None,) * 8
    raise_if_create_graph("grouped_lora")
    ops = torch.ops.fastmp
    x, w, a, b, offsets, low = ctx.saved_tensors
    needs_x, _, needs_bias, needs_a, needs_b, *_ = ctx.needs_input_grad
    dx = dbias = da = db = None
    if needs_x or needs_a:
        dlow = _times(ctx.scale, ops.grouped_mm(grad, b, offsets, True))
    if needs_x:
        dx = ops.grouped_mm_lora(grad, w, None, dlow, a, offsets, not ctx.transposed, True)
    if needs_a:
        da = ops.grouped_mm_wgrad(dlow, x, offsets)
    if needs_b:
        db = ops.grouped_mm_wgrad(grad, low, offsets)
    if needs_bias:
        dbias = column_sums(grad, offsets)
    return dx, None, dbias, da, db, None, None, None


_grouped_lora = Differentiable("grouped_lora", _forward, _setup, _backward)


@checks.memoized
def _check(
    x: Tensor, w: Tensor, a: Tensor, b: Tensor, offsets: Tensor, bias: Tensor | None, scale: float,
    transposed: bool,
) -> None:  # fmt: skip
    name = "grouped_lora"

    def require(condition: bool, message: str, *values: Any) -> None:
        checks.require(condition, f"{name}: " + message, *values)

    checks.check_floating(name, "x", x)
    checks.check_finite(name, x.dtype, scale=scale)
    require(len(x.shape) == 2, "x must be (M, K), got shape {}", x.shape)
    require(len(w.shape) == 3, "w must be (E, N, K), got shape {}", w.shape)
    require(len(a.shape) == 3, "a must be (E, R, K), got shape {}", a.shape)
    experts, terms, columns = w.shape[0], w.shape[1 if transposed else 2], w.shape[2 if transposed else 1]
    misfit = "x {} does not fit w {}: expected {} in dimension {} of w"
    require(x.shape[1] == terms, misfit, x.shape, w.shape, x.shape[1], 1 if transposed else 2)
    checks.check_shape(name, (experts, a.shape[1], terms), to=("w", w), a=a)
    checks.check_shape(name, (experts, columns, a.shape[1]), to=("a", a), b=b)
    checks.check_shape(name, (experts, columns), to=("w", w), bias=bias)
    checks.check_same(name, x=x, w=w, a=a, b=b, bias=bias)
    check_offsets(name, offsets, w)
    checks.check_same_device(name, x=x, offsets=offsets)


@traced("fastmp.grouped_lora")
def grouped_lora(
    x: Tensor,
    w: Tensor,
    a: Tensor,
    b: Tensor,
    offsets: Tensor,
    *,
    scale: float = 1.0,
    transposed: bool = False,
    bias: Tensor | None = None,
) -> Tensor:
    """Grouped GEMM with LoRA: y[r] = w[e] @ x[r] + scale * b[e] @ (a[e] @ x[r]) + bias[e].

    Differentiable once in x, a, b and bias; w is frozen. Under autocast it runs in the autocast dtype.

    Args:
        x: (M, K) float64, float32, bfloat16 or float16, rows in the order of the experts.
        w: (E, N, K) of the same dtype and device, without requires_grad; contiguous avoids a copy.
        a: (E, R, K) of the same dtype and device: LoRA's A of each expert.
        b: (E, N, R) of the same dtype and device: LoRA's B of each expert.
        offsets: (E,) int32 on the same device: the end of each expert's rows, not decreasing, at most M. Rows
            after the last one are zeros in the result and in the gradient of x.
        scale: LoRA's alpha / R.
        transposed: w is (E, K, N), as models with transposed experts store it; a and b stay as they are.
        bias: (E, N) of the same dtype and device, or None.

    Returns:
        (M, N), contiguous, of x's dtype; sums are in float32 (float64 for float64 inputs). On a GPU the
        result is rounded once, on a CPU in 16 bits the sum without LoRA is rounded before.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit; a w that requires grad; on the CPU also
            offsets that decrease or exceed M (elsewhere they are clamped).

    Example:
        x, w = torch.randn(6, 16), torch.randn(2, 32, 16)  # 4 rows of expert 0, 2 of expert 1
        a = torch.randn(2, 8, 16, requires_grad=True)
        b = torch.zeros(2, 32, 8, requires_grad=True)
        y = grouped_lora(x, w, a, b, torch.tensor([4, 6], dtype=torch.int32), scale=2.0)  # (6, 32)
        y.sum().backward()

    Hu et al., "LoRA", 2021 (arXiv 2106.09685).
    """
    if w.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "grouped_lora: expected a frozen w, got one that requires grad; call w.requires_grad_(False)"
        )
    x, w, a, b, bias = autocast(x, w, a, b, bias)
    _check(x, w, a, b, offsets, bias, scale, transposed)
    check_ends("grouped_lora", offsets, "x", x.shape[0])
    return _grouped_lora(x, w, bias, a, b, offsets, scale, transposed)[0]
