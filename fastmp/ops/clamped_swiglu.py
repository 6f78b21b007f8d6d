"""clamped_swiglu: y = (up + 1) * gate * sigmoid(alpha * gate) with gate and up clamped, and its backward.

The activation of GPT-OSS. gate and up are interleaved in x, columns 2i and 2i + 1, as in its weights. gate is
clamped to at most `limit`, up to [-limit, limit]; clamped values have zero gradient. Only x is saved.
GPT-OSS: OpenAI 2025 (arXiv 2508.10925).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fastmp.ops.core import checks
from fastmp.ops.core import rowwise as rows
from fastmp.ops.core._triton import MAX_SIZE, jit, limits, tl
from fastmp.ops.core.registry import autocast, compute_dtype, register
from fastmp.profiling import traced


def _pairs(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return gate and up, not clamped, in the dtype of the arithmetic."""
    wide = x.to(compute_dtype(x.dtype))
    return wide[..., ::2], wide[..., 1::2]


def _check_limit(limit: float) -> None:
    if not limit > 0:
        raise ValueError(f"clamped_swiglu: limit must be positive, got {limit}")


def reference(x: Tensor, alpha: float, limit: float) -> Tensor:
    """Return (up + 1) * gate * sigmoid(alpha * gate) of clamped gate and up, rounded once."""
    _check_limit(limit)
    gate, up = _pairs(x)
    gate = gate.clamp(max=limit)
    return ((up.clamp(-limit, limit) + 1) * gate * (alpha * gate).sigmoid()).to(x.dtype).contiguous()


def reference_backward(grad: Tensor, x: Tensor, alpha: float, limit: float) -> Tensor:
    """Return the gradient of x."""
    _check_limit(limit)
    gate, up = _pairs(x)
    capped = gate.clamp(max=limit)
    s = (alpha * capped).sigmoid()
    slope = s + capped * (s * (-alpha * capped).sigmoid()) * alpha
    dgate = torch.where(gate <= limit, grad * (up.clamp(-limit, limit) + 1) * slope, 0.0)
    dup = torch.where(up.abs() <= limit, grad * capped * s, 0.0)
    return torch.stack((dgate, dup), -1).flatten(-2).to(x.dtype)


@jit
def _tile(num_rows, num_cols, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return rows, columns of y, columns of x, and the masks of y and x of a program's tile."""
    column_blocks = tl.cdiv(num_cols, BLOCK_N)
    pid = tl.program_id(0)
    rows = ((pid // column_blocks).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    first = (pid % column_blocks) * BLOCK_N
    cols = first + tl.arange(0, BLOCK_N)[None, :]
    both = 2 * first + tl.arange(0, 2 * BLOCK_N)[None, :]
    live = rows < num_rows
    return rows, cols, both, live & (cols < num_cols), live & (both < 2 * num_cols)


@jit
def _clamp(pairs, LIMIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Split interleaved pairs. Return gate, up, and both clamped; NaN stays NaN."""
    gate, up = tl.split(tl.reshape(pairs, [BLOCK_M, BLOCK_N, 2]))
    capped = tl.where(gate > LIMIT, LIMIT, gate)
    return gate, up, capped, tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))


@limits(num_vectors=MAX_SIZE)
@jit(dynamic="num_rows", fixed="num_vectors x_pitch")
def clamped_swiglu_kernel(
    x,  # (num_rows, 2 num_cols), rows x_pitch vectors apart
    y,  # (num_rows, num_cols), contiguous
    num_rows, num_vectors, x_pitch,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr, COMPUTE: tl.constexpr, VECTOR: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute one tile (BLOCK_M, BLOCK_N) of y; sizes and pitches count vectors of VECTOR elements."""
    # 1. Locate the tile: BLOCK_N pairs of each row.
    num_cols = num_vectors * VECTOR
    rows, cols, both, stored, inside = _tile(num_rows, num_cols, BLOCK_M, BLOCK_N)
    # 2. Load and clamp the pairs.
    pairs = tl.load(x + rows * x_pitch * VECTOR + both, mask=inside, other=0.0)
    _, _, gate, up = _clamp(pairs.to(COMPUTE), LIMIT, BLOCK_M, BLOCK_N)
    # 3. sigmoid(alpha gate), combine and store.
    s = 1.0 / (1.0 + tl.exp2((-1.4426950408889634 * ALPHA) * gate))
    tl.store(y + rows * num_cols + cols, (up + 1.0) * (gate * s), mask=stored)


@limits(num_vectors=MAX_SIZE)
@jit(dynamic="num_rows", fixed="num_vectors grad_pitch x_pitch")
def clamped_swiglu_backward_kernel(
    grad,  # (num_rows, num_cols), rows grad_pitch vectors apart
    x,  # (num_rows, 2 num_cols), rows x_pitch vectors apart
    dx,  # (num_rows, 2 num_cols), contiguous
    num_rows, num_vectors, grad_pitch, x_pitch,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr, COMPUTE: tl.constexpr, VECTOR: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute one tile (BLOCK_M, 2 BLOCK_N) of dx; sizes and pitches as in the forward."""
    # 1. Locate the tile, load x and grad, clamp.
    num_cols = num_vectors * VECTOR
    rows, cols, both, stored, inside = _tile(num_rows, num_cols, BLOCK_M, BLOCK_N)
    pairs = tl.load(x + rows * x_pitch * VECTOR + both, mask=inside, other=0.0).to(COMPUTE)
    g = tl.load(grad + rows * grad_pitch * VECTOR + cols, mask=stored, other=0.0).to(COMPUTE)
    gate, up, capped, bounded = _clamp(pairs, LIMIT, BLOCK_M, BLOCK_N)
    # 2. The sigmoid and its derivative from one exponential, without cancellation: e = exp(-|alpha gate|).
    e = tl.exp2(-1.4426950408889634 * tl.abs(ALPHA * capped))
    r = 1.0 / (1.0 + e)
    s = tl.where(ALPHA * capped > 0, r, e * r)
    # 3. Gradients, zero where gate or up was clamped; interleave and store.
    dgate = tl.where(gate <= LIMIT, g * ((bounded + 1.0) * (s + capped * (e * r * r) * ALPHA)), 0.0)
    dup = tl.where(tl.abs(up) <= LIMIT, g * (capped * s), 0.0)
    both_grads = tl.reshape(tl.join(dgate, dup), [BLOCK_M, 2 * BLOCK_N])
    tl.store(dx + rows * (2 * num_cols) + both, both_grads, mask=inside)


def block_shape(num_cols: int, itemsize: int) -> tuple[int, int]:
    """Return (BLOCK_M, BLOCK_N), counted in pairs: half the rows of `rowwise` load as much."""
    block_m, block_n = rows.block_shape(num_cols, itemsize)
    return block_m // 2, block_n


def launch(x: Tensor, alpha: float, limit: float) -> Tensor:
    _check_limit(limit)
    y = x.new_empty(*x.shape[:-1], x.shape[-1] // 2)
    if y.numel():
        rows.launch(
            clamped_swiglu_kernel, (x,), (y,), columns=y.shape[-1], blocks=block_shape, ALPHA=alpha,
            LIMIT=limit,
        )  # fmt: skip
    return y


def launch_backward(grad: Tensor, x: Tensor, alpha: float, limit: float) -> Tensor:
    _check_limit(limit)
    dx = rows.empty_like(x)
    if dx.numel():
        rows.launch(
            clamped_swiglu_backward_kernel, (grad, x), (dx,), blocks=block_shape, ALPHA=alpha, LIMIT=limit
        )
    return dx


register(
    "clamped_swiglu_backward(Tensor grad, Tensor x, float alpha, float limit) -> Tensor",
    contract="x (..., 2N) floating; grad (..., N) x; 0 < limit",
    shard="grad x -> rows",
    reference=reference_backward,
    triton=launch_backward,
    flops=lambda grad, x, alpha, limit: math.prod(grad.shape) * 22,
)
_clamped_swiglu = register(
    "clamped_swiglu(Tensor x, float alpha, float limit) -> Tensor",
    contract="x (..., 2N) floating; 0 < limit",
    shard="x -> rows",
    reference=reference,
    triton=launch,
    flops=lambda x, alpha, limit: math.prod(x.shape) // 2 * 12,
    autograd_formula="clamped_swiglu_backward(grad, x, alpha, limit) -> x",
)


@checks.memoized
def _check(x: Tensor) -> None:
    checks.check_floating("clamped_swiglu", "x", x)
    odd = "clamped_swiglu: x must end in a dimension of even size, got shape {}"
    checks.require(x.shape[-1] % 2 == 0, odd, x.shape)


@traced("fastmp.clamped_swiglu")
def clamped_swiglu(x: Tensor, *, alpha: float = 1.702, limit: float = 7.0) -> Tensor:
    """Return (up + 1) * gate * sigmoid(alpha * gate) with clamped gate and up. Differentiable once.

    Args:
        x: (..., 2F), float64, float32, bfloat16 or float16, any strides (last stride 1 avoids a copy); gate
            in columns 2i, up in columns 2i + 1.
        alpha: slope of the sigmoid; 1.702 in GPT-OSS.
        limit: gate is clamped to at most `limit`, up to [-limit, limit]; positive, 7 in GPT-OSS.

    Returns:
        A new contiguous tensor (..., F) of x's dtype; under autocast, of the autocast dtype. Arithmetic is in
        float32 (float64 for float64 x) and rounded once. A clamped value has zero gradient; at the bound
        itself the gradient passes.

    Raises:
        ValueError: the last dimension is odd, the dtype is not supported, or `limit` is not positive.

    Example:

        x = torch.randn(8, 2 * 16, requires_grad=True)
        y = fastmp.ops.clamped_swiglu(x)
        assert y.shape == (8, 16)
        y.sum().backward()

    OpenAI, "gpt-oss-120b & gpt-oss-20b Model Card", 2025.
    """
    (x,) = autocast(x)
    _check(x)
    _check_limit(limit)
    return _clamped_swiglu(x, float(alpha), float(limit))
