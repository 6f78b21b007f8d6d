"""rms_norm and layer_norm over the last dimension, fused with the preceding residual addition.

    total = x, or x + residual rounded to x's dtype, so that the result equals that of two separate ops
    n     = (total - mean) rstd,  rstd = 1 / sqrt(variance + eps)        rms_norm: mean = 0
    y     = n weight + bias

Saved are total, weight and, per row, rstd and the mean (layer_norm only). With h = grad_y weight, the
gradient of total is rstd (h - n mean(h n) - mean(h)) + grad_total, where means are over the row, mean(h) is
absent in rms_norm, and grad_total is the gradient of the residual stream. RMSNorm: Zhang and Sennrich 2019
(arXiv 1910.07467); LayerNorm: Ba, Kiros and Hinton 2016 (arXiv 1607.06450).
"""

from __future__ import annotations

import math
from typing import Literal, overload

import torch
from torch import Tensor

from fastmp.ops import quantize as quantizers
from fastmp.ops.core import checks, fp8
from fastmp.ops.core.registry import autocast, compute_dtype, register
from fastmp.ops.core.rowwise import sum_rows
from fastmp.ops.norm_triton import check_stats, launch, launch_backward, launch_quantized
from fastmp.profiling import traced

NARROW = (torch.bfloat16, torch.float16)


def _mean(rows: Tensor) -> Tensor:
    """Return the mean over the last dimension (keepdim), independent of the number of threads."""
    return sum_rows(rows.movedim(-1, 0)).unsqueeze(-1).div_(rows.shape[-1])


def reference(
    centred: bool, x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return y, total (empty without a residual), and stats (1 or 2, ...): rstd and, if `centred`, mean."""
    y, total, stats = _new_results(x, residual, centred)
    if x.numel() == 0:
        return y, total, stats.zero_()
    if residual is not None:
        x = torch.add(x, residual, out=total)
    h = x.to(stats.dtype)
    if centred:
        mean = _mean(h)
        stats[1] = mean.squeeze(-1)
        h = h - mean
    rstd = _mean(h * h).add_(eps).rsqrt_()
    stats[0] = rstd.squeeze(-1)
    h = (h * rstd).mul_(weight)
    if bias is not None:
        h.add_(bias)
    return y.copy_(h), total, stats


def _reference_quantized(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, block: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return `quantize_rows` of y, and the other results of `rms_norm`."""
    y, total, stats = reference(False, x, residual, weight, None, eps)
    return *quantizers.reference_rows(y, block, dtype), total, stats


def _fake_quantized(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, block: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _, total, stats = _new_results(x, residual, False)
    return *fp8.empty_rows(x, tuple(x.shape), block, dtype), total, stats


def reference_backward(
    centred: bool, grad: Tensor, grad_total: Tensor | None, total: Tensor, weight: Tensor, stats: Tensor,
    with_bias: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the gradients of total and, as rows of one tensor, of weight and bias."""
    check_stats(centred, total.shape, stats)
    dx, dparams = _new_gradients(total, weight, with_bias)
    if total.numel() == 0:
        return dx, dparams.zero_()
    rstd, *mean = stats.unsqueeze(-1)
    n = (total - mean[0]).mul_(rstd) if centred else total * rstd
    g = grad.to(stats.dtype)
    for i, rows in enumerate((g * n, g) if with_bias else (g * n,)):
        dparams[i] = sum_rows(rows.unsqueeze(0).flatten(0, -2))
    h = g * weight
    along, level = _mean(h * n), _mean(h) if centred else 0
    d = h.sub_(n.mul_(along)).sub_(level).mul_(rstd)
    if grad_total is not None:
        d.add_(grad_total)
    return dx.copy_(d), dparams


def _new_results(x: Tensor, residual: Tensor | None, centred: bool) -> tuple[Tensor, Tensor, Tensor]:
    stats = x.new_empty((2 if centred else 1, *x.shape[:-1]), dtype=compute_dtype(x.dtype))
    return x.new_empty(x.shape), x.new_empty(0 if residual is None else x.shape), stats


def _new_gradients(total: Tensor, weight: Tensor, with_bias: bool) -> tuple[Tensor, Tensor]:
    return total.new_empty(total.shape), weight.new_empty((2 if with_bias else 1, *weight.shape))


# Rounded operation counts.


def _flops(x: Tensor, residual: Tensor | None, bias: Tensor | None, centred: bool) -> int:
    return math.prod(x.shape) * (4 + 2 * centred + (residual is not None) + (bias is not None))


def _flops_backward(grad_total: Tensor | None, total: Tensor, centred: bool, with_bias: bool) -> int:
    return math.prod(total.shape) * (9 + 3 * centred + (grad_total is not None) + with_bias)


# The two ops differ only in mean and bias: the first argument of shared functions, `centred`, selects.

register(
    "rms_norm_backward(Tensor grad, Tensor? grad_total, Tensor total, Tensor weight, Tensor stats)"
    " -> (Tensor dx, Tensor dparams)",
    contract=(
        "total (..., N) floating; grad (..., N) total; grad_total (..., N) total; weight (N) total|float32; "
        "stats (1, ...) wide(total)"
    ),
    shard="grad grad_total total +stats -> rows sum",
    reference=lambda *arguments: reference_backward(False, *arguments),
    triton=lambda *arguments: launch_backward(False, *arguments),
    flops=lambda grad, grad_total, total, *others: _flops_backward(grad_total, total, False, False),
)
register(
    "layer_norm_backward(Tensor grad, Tensor? grad_total, Tensor total, Tensor weight, Tensor stats,"
    " bool with_bias) -> (Tensor dx, Tensor dparams)",
    contract=(
        "total (..., N) floating; grad (..., N) total; grad_total (..., N) total; weight (N) total|float32; "
        "stats (2, ...) wide(total)"
    ),
    shard="grad grad_total total +stats -> rows sum",
    reference=lambda *arguments: reference_backward(True, *arguments),
    triton=lambda *arguments: launch_backward(True, *arguments),
    flops=lambda grad, grad_total, total, *others: _flops_backward(grad_total, total, True, others[-1]),
)


_rms_norm = register(
    "rms_norm(Tensor x, Tensor? residual, Tensor weight, float eps)"
    " -> (Tensor y, Tensor total, Tensor stats)",
    contract="x (..., N) floating; residual (..., N) x; weight (N) x|float32",
    shard="x residual -> rows rows?residual +rows",
    reference=lambda x, residual, weight, eps: reference(False, x, residual, weight, None, eps),
    triton=lambda x, residual, weight, eps: launch(False, x, residual, weight, None, eps),
    flops=lambda x, residual, weight, eps: _flops(x, residual, None, False),
    autograd_formula={
        "residual": "rms_norm_backward(grad_y, grad_total?, total, weight, stats) -> x residual, [weight]",
        "": "rms_norm_backward(grad_y, None, x, weight, stats) -> x, [weight]",
    },
)
_rms_norm_quantized = register(
    "rms_norm_quantized(Tensor x, Tensor? residual, Tensor weight, float eps, int block, ScalarType dtype)"
    " -> (Tensor q, Tensor s, Tensor total, Tensor stats)",
    contract=(
        "x (..., N) floating; residual (..., N) x; weight (N) x|float32; block in 128 32; dtype in fp8; "
        "N % block == 0"
    ),
    reference=_reference_quantized,
    triton=launch_quantized,
    fake=_fake_quantized,
    flops=lambda x, residual, *others: _flops(x, residual, None, False),
)
_layer_norm = register(
    "layer_norm(Tensor x, Tensor? residual, Tensor weight, Tensor? bias, float eps)"
    " -> (Tensor y, Tensor total, Tensor stats)",
    contract="x (..., N) floating; residual (..., N) x; weight (N) x|float32; bias (N) weight",
    shard="x residual -> rows rows?residual +rows",
    reference=lambda *arguments: reference(True, *arguments),
    triton=lambda *arguments: launch(True, *arguments),
    flops=lambda x, residual, weight, bias, eps: _flops(x, residual, bias, True),
    autograd_formula={
        "residual": "layer_norm_backward(grad_y, grad_total?, total, weight, stats, has(bias))"
        " -> x residual, [weight bias]",
        "": "layer_norm_backward(grad_y, None, x, weight, stats, has(bias)) -> x, [weight bias]",
    },
)


@checks.memoized
def _check(
    op: str, x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
) -> None:
    checks.check_floating(op, "x", x)
    checks.check_number(op, eps=eps)
    checks.require(eps >= 0, "{}: eps must not be negative, got {}", op, eps)
    checks.check_same(op, x=x, residual=residual)
    if weight.dtype == torch.float32 and x.dtype in NARROW:
        checks.check_same_device(op, x=x, weight=weight)
    else:
        checks.check_same(op, x=x, weight=weight)
    checks.check_same(op, weight=weight, bias=bias)
    checks.check_shape(op, x.shape, to=("x", x), residual=residual)
    checks.check_shape(op, x.shape[-1:], to=("x", x), weight=weight, bias=bias)


def _prepare(
    op: str, x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """Apply autocast and check the arguments. Return the tensors."""
    x, residual = autocast(x, residual)
    if weight.dtype not in (x.dtype, torch.float32):
        weight, bias = autocast(weight, bias)
    _check(op, x, residual, weight, bias, eps)
    return x, residual, weight, bias


@overload
def rms_norm(
    x: Tensor, weight: Tensor, *, eps: float = 1e-6, residual: None = None, quantize: Literal[False] = False
) -> Tensor: ...


@overload
def rms_norm(
    x: Tensor, weight: Tensor, *, eps: float = 1e-6, residual: Tensor, quantize: Literal[False] = False
) -> tuple[Tensor, Tensor]: ...


@overload
def rms_norm(
    x: Tensor, weight: Tensor, *, eps: float = 1e-6, residual: Tensor | None = None, quantize: Literal[True],
    block: int = 128, dtype: torch.dtype = fp8.E4M3,
) -> tuple[Tensor, ...]: ...  # fmt: skip


@traced("fastmp.rms_norm")
def rms_norm(
    x: Tensor, weight: Tensor, *, eps: float = 1e-6, residual: Tensor | None = None, quantize: bool = False,
    block: int = 128, dtype: torch.dtype = fp8.E4M3,
) -> Tensor | tuple[Tensor, ...]:  # fmt: skip
    """Return x / sqrt(mean(x^2) + eps) * weight over the last dimension. Differentiable once in all tensors.

    Args:
        x: (..., H), float64, float32, bfloat16 or float16, any strides (last stride 1 avoids a copy).
        weight: (H,), of x's dtype, or float32 with a 16-bit x; its gradient has its dtype.
        eps: term added to the mean square.
        residual: of x's shape and dtype; if passed, s = x + residual, rounded once, is normalised.
        quantize: return in place of y the FP8 numbers and scales (q, scales) that `quantize_rows(y,
            block=block, dtype=dtype)` returns, in one kernel (a second one for rows too long for registers,
            of more than 16,384 columns); without a derivative.
        block, dtype: of the FP8 blocks, as for `quantize_rows`; H must be a multiple of `block`.

    Returns:
        y, or (y, s) with a residual: new contiguous tensors of x's shape and dtype; with `quantize`, (q,
        scales) or (q, scales, s). s is the new residual stream; the backward of the norm adds its gradient.
        Arithmetic and the weight gradient's sums are in float32 (float64 for float64 inputs) and rounded
        once. Autocast casts x and residual, not float32 weights.

    Raises:
        ValueError: shapes, dtypes or devices do not match, eps is negative, or `block` does not divide H.

    Example:

        x, residual, weight = torch.randn(4, 16), torch.randn(4, 16), torch.ones(16)
        y, residual = fastmp.ops.rms_norm(x, weight, residual=residual)
        assert torch.allclose(y, torch.nn.functional.rms_norm(residual, (16,), eps=1e-6), atol=1e-6)

    Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
    """
    x, residual, weight, _ = _prepare("rms_norm", x, residual, weight, None, eps)
    if quantize:
        fp8.check_block("rms_norm", block, dtype)
        fp8.check_multiple("rms_norm", "H", x.shape[-1], block)
        q, s, total, _ = _rms_norm_quantized(x, residual, weight, eps, block, dtype)
        return (q, s) if residual is None else (q, s, total)
    y, total, _ = _rms_norm(x, residual, weight, eps)
    return y if residual is None else (y, total)


@traced("fastmp.layer_norm")
def layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    residual: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return (x - mean) / sqrt(variance + eps) * weight + bias over the last dimension. Differentiable once.

    The variance is biased (divided by H) and computed from the centred row.

    Args:
        x, weight, residual: as in `rms_norm`.
        bias: (H,), of weight's dtype, or None.
        eps: term added to the variance.

    Returns:
        y, or (y, s) with a residual, as in `rms_norm`; the same dtypes and autocast rules apply.

    Raises:
        ValueError: as in `rms_norm`.

    Example:

        x = torch.randn(4, 16, requires_grad=True)
        weight, bias = torch.ones(16), torch.zeros(16)
        y = fastmp.ops.layer_norm(x, weight, bias)
        assert torch.allclose(y, torch.nn.functional.layer_norm(x, (16,)), atol=1e-6)

    Ba, Kiros and Hinton, "Layer Normalization", 2016.
    """
    x, residual, weight, bias = _prepare("layer_norm", x, residual, weight, bias, eps)
    y, total, _ = _layer_norm(x, residual, weight, bias, eps)
    return y if residual is None else (y, total)
