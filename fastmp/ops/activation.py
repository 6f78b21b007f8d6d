"""bias_gelu: y = gelu(x + bias), and its backward with the bias gradient in the same pass.

Only x and bias are saved; the backward recomputes the activation. The tanh form is h * sigmoid(2u) with u =
sqrt(2/pi) (h + 0.044715 h^3): one exp2 and one reciprocal. The bias gradient is a column sum: each program
sums its strip of rows in float32, and a second kernel adds the strips in order, so results are reproducible.
GeLU: Hendrycks and Gimpel 2016 (arXiv 1606.08415).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fastmp.ops.core import checks
from fastmp.ops.core import rowwise as rows
from fastmp.ops.core._triton import MAX_SIZE, MAX_STRIP, jit, limits, tl
from fastmp.ops.core.registry import autocast, compute_dtype, register
from fastmp.ops.core.rowwise import sum_rows
from fastmp.profiling import traced


def _pre_activation(x: Tensor, bias: Tensor | None) -> Tensor:
    h = x.to(compute_dtype(x.dtype))
    return h if bias is None else h + bias.to(h.dtype)


# The references avoid torch's fused gelu: on a CPU it rounds differently at the borders between threads, and
# in float32 it is NaN at infinity.


def _twice_u(h: Tensor) -> Tensor:
    """Return 2u = 2 sqrt(2/pi) (h + 0.044715 h^3)."""
    return (h * h).mul_(0.071354816272600265).add_(1.5957691216057308).mul_(h)


def _cdf(h: Tensor) -> Tensor:
    """Return the standard normal distribution function."""
    return (h * math.sqrt(0.5)).erf_().mul_(0.5).add_(0.5)


def reference(x: Tensor, bias: Tensor | None, approximate: str) -> Tensor:
    """Return gelu(x + bias), rounded once."""
    h = _pre_activation(x, bias)
    y = h / _twice_u(h).neg_().exp_().add_(1) if approximate == "tanh" else _cdf(h).mul_(h)
    return y.to(x.dtype).contiguous()


def gelu_slope(h: Tensor, approximate: str) -> Tensor:
    """Return the derivative of gelu at h."""
    if approximate == "none":
        density = (h * h).mul_(-0.5).exp_().mul_(1 / math.sqrt(2 * math.pi))
        return _cdf(h).add_(density.mul_(h))
    e = _twice_u(h).abs_().neg_().exp_()
    r = (1 + e).reciprocal_()  # sigmoid(|2u|)
    e.mul_(r)
    cdf = torch.where(h > 0, r, e)
    twice_du = (h * h).mul_(0.21406444881780076).add_(1.5957691216057308)
    return cdf.add_(e.mul_(r).mul_(h).mul_(twice_du))


def reference_backward(
    grad: Tensor, x: Tensor, bias: Tensor | None, approximate: str
) -> tuple[Tensor, Tensor]:
    """Return gradients of x and bias; the second is empty without a bias."""
    h = _pre_activation(x, bias)
    dh = gelu_slope(h, approximate).mul_(grad).contiguous()
    dbias = x.new_empty(0) if bias is None else sum_rows(dh.unsqueeze(0).flatten(0, -2)).to(x.dtype)
    return dh.to(x.dtype), dbias


@jit
def gelu(h, TANH: tl.constexpr):
    """Return gelu(h), in the tanh or the exact form."""
    if TANH:
        t = h * (-2.302208198144325 - 0.1029432395800235 * h * h)  # -2u log2(e)
        return h * (1.0 / (1.0 + tl.exp2(t)))
    else:
        return h * (0.5 + 0.5 * tl.erf(h * 0.7071067811865476))


@jit
def gelu_parts(h, TANH: tl.constexpr):
    """Return (p, q) with gelu(h) = h p and gelu'(h) = p + h q."""
    if TANH:
        e = tl.exp2(-tl.abs(h) * (2.302208198144325 + 0.1029432395800235 * h * h))
        r = 1.0 / (1.0 + e)  # sigmoid(|2u|); e r^2 = sigmoid (1 - sigmoid) without cancellation
        twice_du = 1.5957691216057308 + 0.21406444881780073 * h * h
        return tl.where(h > 0, r, e * r), (e * r * r) * twice_du
    else:
        cdf = 0.5 + 0.5 * tl.erf(h * 0.7071067811865476)
        return cdf, 0.3989422804014327 * tl.exp2(-0.7213475204444817 * h * h)


@limits(num_vectors=MAX_SIZE)
@jit(dynamic="num_rows", fixed="num_vectors x_pitch")
def bias_gelu_kernel(
    x,  # (num_rows, num_cols), rows x_pitch vectors apart
    bias,  # (num_cols,) or None
    y,  # (num_rows, num_cols), contiguous
    num_rows, num_vectors, x_pitch,
    HAS_BIAS: tl.constexpr, TANH: tl.constexpr, COMPUTE: tl.constexpr, VECTOR: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute one tile (BLOCK_M, BLOCK_N) of y = gelu(x + bias).

    num_vectors and x_pitch count vectors of VECTOR elements, which proves alignment to the compiler.
    """
    # 1. Locate the tile; column blocks vary fastest, so neighbouring programs read neighbouring memory.
    num_cols = num_vectors * VECTOR
    column_blocks = tl.cdiv(num_cols, BLOCK_N)
    pid = tl.program_id(0)
    rows = (pid // column_blocks).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = (pid % column_blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (rows < num_rows)[:, None] & (cols < num_cols)[None, :]
    # 2. Load x, add the bias, apply gelu, store: every element is read and written once.
    h = tl.load(x + rows[:, None] * x_pitch * VECTOR + cols[None, :], mask=mask, other=0.0).to(COMPUTE)
    if HAS_BIAS:
        h += tl.load(bias + cols, mask=cols < num_cols, other=0.0).to(COMPUTE)[None, :]
    tl.store(y + rows[:, None] * num_vectors * VECTOR + cols[None, :], gelu(h, TANH), mask=mask)


@limits(num_vectors=MAX_SIZE, rows_per_strip=MAX_STRIP)
@jit(dynamic="num_rows rows_per_strip", fixed="num_vectors grad_pitch x_pitch")
def bias_gelu_backward_kernel(
    grad, x,  # (num_rows, num_cols), rows grad_pitch and x_pitch vectors apart
    bias,  # (num_cols,) or None
    dx,  # (num_rows, num_cols), contiguous
    partials,  # (num_strips, num_cols) in COMPUTE, or None without a bias
    num_rows, rows_per_strip, num_vectors, grad_pitch, x_pitch,
    HAS_BIAS: tl.constexpr, TANH: tl.constexpr, COMPUTE: tl.constexpr, VECTOR: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute dx of one strip of rows and BLOCK_N columns, and the strip's row of `partials`."""
    # 1. Locate the strip and the columns; the bias stays in registers.
    num_cols = num_vectors * VECTOR
    column_blocks = tl.cdiv(num_cols, BLOCK_N)
    pid = tl.program_id(0)
    strip = (pid // column_blocks).to(tl.int64)
    cols = (pid % column_blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
    shift = tl.zeros([BLOCK_N], COMPUTE)
    if HAS_BIAS:
        shift = tl.load(bias + cols, mask=cols < num_cols, other=0.0).to(COMPUTE)
    total = tl.zeros([BLOCK_M, BLOCK_N], COMPUTE)
    # 2. Walk down the strip in blocks of BLOCK_M rows: dx = grad gelu'(x + bias), stored and summed.
    for step in range(0, rows_per_strip, BLOCK_M):
        rows = strip * rows_per_strip + step + tl.arange(0, BLOCK_M)
        mask = (rows < num_rows)[:, None] & (cols < num_cols)[None, :]
        g = tl.load(grad + rows[:, None] * grad_pitch * VECTOR + cols[None, :], mask=mask, other=0.0)
        h = tl.load(x + rows[:, None] * x_pitch * VECTOR + cols[None, :], mask=mask, other=0.0)
        h = h.to(COMPUTE) + shift[None, :]
        p, q = gelu_parts(h, TANH)
        dh = g.to(COMPUTE) * (p + h * q)
        tl.store(dx + rows[:, None] * num_vectors * VECTOR + cols[None, :], dh, mask=mask)
        total += dh
    if HAS_BIAS:
        # 3. Store the strip's column sums; `sum_strips` adds the strips in order.
        tl.store(partials + strip * num_cols + cols, tl.sum(total, 0), mask=cols < num_cols)


def _constants(bias: Tensor | None, approximate: str) -> dict[str, Any]:
    return {"HAS_BIAS": bias is not None, "TANH": approximate == "tanh"}


def launch(x: Tensor, bias: Tensor | None, approximate: str) -> Tensor:
    y = rows.empty_like(x)
    if x.numel():
        bias = None if bias is None else bias.contiguous()
        rows.launch(bias_gelu_kernel, (x,), (bias, y), **_constants(bias, approximate))
    return y


def launch_backward(grad: Tensor, x: Tensor, bias: Tensor | None, approximate: str) -> tuple[Tensor, Tensor]:
    dx = rows.empty_like(x)
    dbias = x.new_empty(0 if bias is None else x.shape[-1])
    if x.numel() == 0:
        return dx, dbias.zero_()
    bias = None if bias is None else bias.contiguous()
    sums = None if bias is None else dbias
    constants = _constants(bias, approximate)
    rows.launch_with_sums(bias_gelu_backward_kernel, (grad, x), (bias, dx), sums, **constants)
    return dx, dbias


_FLOPS_PER_ELEMENT = {"tanh": (9, 18), "none": (16, 24)}  # forward, backward
register(
    "bias_gelu_backward(Tensor grad, Tensor x, Tensor? bias, str approximate) -> (Tensor, Tensor)",
    contract="x (..., N) floating; grad (..., N) x; bias (N) x; approximate in tanh none",
    shard="grad x -> rows sum",
    reference=reference_backward,
    triton=launch_backward,
    flops=lambda grad, x, bias, approximate: math.prod(x.shape) * _FLOPS_PER_ELEMENT[approximate][1],
)


_bias_gelu = register(
    "bias_gelu(Tensor x, Tensor? bias, str approximate) -> Tensor",
    contract="x (..., N) floating; bias (N) x; approximate in tanh none",
    shard="x -> rows",
    reference=reference,
    triton=launch,
    flops=lambda x, bias, approximate: math.prod(x.shape) * _FLOPS_PER_ELEMENT[approximate][0],
    autograd_formula="bias_gelu_backward(grad, x, bias, approximate) -> x, bias",
)


@checks.memoized
def _check(x: Tensor, bias: Tensor | None, approximate: str) -> None:
    checks.check_choice("bias_gelu", "approximate", approximate, ("tanh", "none"))
    checks.check_floating("bias_gelu", "x", x)
    checks.check_shape("bias_gelu", x.shape[-1:], to=("x", x), bias=bias)
    checks.check_same("bias_gelu", x=x, bias=bias)


@traced("fastmp.bias_gelu")
def bias_gelu(x: Tensor, bias: Tensor | None = None, *, approximate: str = "tanh") -> Tensor:
    """Return gelu(x + bias), fused. Differentiable once in x and bias.

    Args:
        x: (..., N), float64, float32, bfloat16 or float16, any strides (last stride 1 avoids a copy).
        bias: (N,), of x's dtype and device, or None.
        approximate: "tanh" or "none" (the exact form with erf).

    Returns:
        A new contiguous tensor of x's shape and dtype; under autocast, of the autocast dtype. Arithmetic is
        in float32 (float64 for float64 inputs) and rounded once; so is the accumulated bias gradient.

    Raises:
        ValueError: shapes, dtypes or devices do not match, or `approximate` is unknown.

    Example:

        x = torch.randn(8, 16, requires_grad=True)
        bias = torch.zeros(16, requires_grad=True)
        y = fastmp.ops.bias_gelu(x, bias)
        y.sum().backward()

    Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016.
    """
    x, bias = autocast(x, bias)
    _check(x, bias, approximate)
    return _bias_gelu(x, bias, approximate)
