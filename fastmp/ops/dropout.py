"""bias_dropout_add: y = residual + dropout(x + bias), and its backward; the mask is never stored.

Element i, in row-major order of x's shape, is dropped if its random 32-bit word is below p 2^32. The word is
number i % 4 of the Philox-4x32-10 output for counter i / 4 under a 64-bit seed (Salmon et al. 2011), so the
mask depends only on seed, p and shape: not on layout, block sizes, threads, dtype or backend. The backward
computes the words again; it saves only the seed, one element on x's device, and moves 4 bytes per element in
bfloat16.
"""

from __future__ import annotations

import math
import struct
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fastmp.ops.core import checks
from fastmp.ops.core import rowwise as rows
from fastmp.ops.core._triton import MAX_SIZE, MAX_STRIP, cdiv, jit, limits, tl
from fastmp.ops.core.philox import four_words, philox, word_of
from fastmp.ops.core.registry import autocast, compute_dtype, register
from fastmp.ops.core.rowwise import sum_rows
from fastmp.profiling import traced


def _threshold(p: float) -> int:
    """Return the bound below which words are dropped: 0 at p = 0, 2^32 at p = 1 only."""
    return 1 << 32 if p == 1 else min(round(p * 2**32), 2**32 - 1)


def keep_mask(shape: tuple[int, ...], p: float, seed: Tensor) -> Tensor:
    """Return the bool mask of elements that are kept; defines the mask of all backends."""
    size = math.prod(shape)
    counters = torch.arange(cdiv(size, 4), device=seed.device)
    words = philox(seed.reshape(()), counters).flatten()[:size]
    return (words >= _threshold(p)).reshape(shape)


def _scale(p: float) -> float:
    return 1.0 / (1.0 - p) if p < 1 else 0.0


def reference(x: Tensor, bias: Tensor | None, residual: Tensor, p: float, seed: Tensor | None) -> Tensor:
    """Return residual + dropout(x + bias) in the residual's dtype, rounded once."""
    h = x.to(compute_dtype(x.dtype))
    h = h if bias is None else h + bias.to(h.dtype)
    if seed is not None:
        h = torch.where(keep_mask(x.shape, p, seed), h * _scale(p), 0)
    return (h + residual.to(h.dtype)).to(residual.dtype).contiguous()


def reference_into(*arguments: Any) -> None:
    """Write the result of `reference` to the last argument."""
    arguments[-1].copy_(reference(*arguments[:-1]))


def reference_backward(
    grad: Tensor, p: float, seed: Tensor, dtype: torch.dtype, with_bias: bool
) -> tuple[Tensor, Tensor]:
    """Return gradients of x and bias in `dtype`; the second is empty without a bias."""
    dh = torch.where(keep_mask(grad.shape, p, seed), grad.to(compute_dtype(grad.dtype)) * _scale(p), 0)
    dbias = sum_rows(dh.unsqueeze(0).flatten(0, -2)) if with_bias else dh.new_empty(0)
    return dh.to(dtype).contiguous(), dbias.to(dtype)


@jit
def _words(seed, rows, first_col, num_cols, VECTOR: tl.constexpr, WHOLE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the random words (rows, BLOCK_N) of a tile; rows (int64) start at column `first_col`.

    WHOLE: the row length is a multiple of four, so the four elements of a counter lie in one row. Words are
    then joined in the order in which a thread loads its elements, eight or four at a time; in any other order
    Triton would exchange them through shared memory.
    """
    if WHOLE and VECTOR == 8:
        groups = first_col // 4 + 2 * tl.arange(0, BLOCK_N // 8)
        counters = rows[:, None] * (num_cols // 4) + groups[None, :]
        a0, a1, a2, a3 = four_words(seed, counters)
        b0, b1, b2, b3 = four_words(seed, counters + 1)
        even = tl.join(tl.join(a0, b0), tl.join(a2, b2))
        odd = tl.join(tl.join(a1, b1), tl.join(a3, b3))
        return tl.join(even, odd).reshape(rows.shape[0], BLOCK_N)
    elif WHOLE:
        groups = first_col // 4 + tl.arange(0, BLOCK_N // 4)
        a0, a1, a2, a3 = four_words(seed, rows[:, None] * (num_cols // 4) + groups[None, :])
        return tl.join(tl.join(a0, a2), tl.join(a1, a3)).reshape(rows.shape[0], BLOCK_N)
    else:
        index = rows[:, None] * num_cols + (first_col + tl.arange(0, BLOCK_N))[None, :]
        return word_of(seed, index)


@jit
def _dropout(h, words, threshold, scale):
    """Return h scaled, and 0 where the word is below the threshold (encoded by `_mask_constants`)."""
    factor = scale.to(tl.float64, bitcast=True).to(h.dtype)
    return tl.where(words >= threshold.to(tl.uint32), h * factor, 0.0)


@limits(num_vectors=MAX_SIZE)
@jit(dynamic="num_rows", fixed="num_vectors residual_pitch x_pitch threshold scale")
def bias_dropout_add_kernel(
    residual, x,  # (num_rows, num_cols), rows residual_pitch and x_pitch vectors apart
    bias,  # (num_cols,) or None
    y,  # (num_rows, num_cols), contiguous
    seed,  # one int64, or None without dropout
    num_rows, num_vectors, residual_pitch, x_pitch, threshold, scale,
    HAS_BIAS: tl.constexpr, DROPS: tl.constexpr, COMPUTE: tl.constexpr, VECTOR: tl.constexpr,
    WHOLE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute one tile (BLOCK_M, BLOCK_N) of y = residual + dropout(x + bias).

    num_vectors and pitches count vectors of VECTOR elements, which proves alignment to the compiler.
    """
    # 1. Locate the tile.
    num_cols = num_vectors * VECTOR
    column_blocks = tl.cdiv(num_cols, BLOCK_N)
    pid = tl.program_id(0)
    rows = (pid // column_blocks).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    first_col = (pid % column_blocks) * BLOCK_N
    cols = first_col + tl.arange(0, BLOCK_N)
    mask = (rows < num_rows)[:, None] & (cols < num_cols)[None, :]
    # 2. Load x, the residual and the bias.
    h = tl.load(x + rows[:, None] * x_pitch * VECTOR + cols[None, :], mask=mask, other=0.0).to(COMPUTE)
    r = tl.load(residual + rows[:, None] * residual_pitch * VECTOR + cols[None, :], mask=mask, other=0.0)
    if HAS_BIAS:
        h += tl.load(bias + cols, mask=cols < num_cols, other=0.0).to(COMPUTE)[None, :]
    # 3. Drop by Philox words of the elements' indices, add the residual, store.
    if DROPS:
        words = _words(tl.load(seed), rows, first_col, num_cols, VECTOR, WHOLE, BLOCK_N)
        h = _dropout(h, words, threshold, scale)
    tl.store(y + rows[:, None] * num_vectors * VECTOR + cols[None, :], h + r.to(COMPUTE), mask=mask)


@limits(num_vectors=MAX_SIZE, rows_per_strip=MAX_STRIP)
@jit(dynamic="num_rows rows_per_strip", fixed="num_vectors grad_pitch threshold scale")
def bias_dropout_add_backward_kernel(
    grad,  # (num_rows, num_cols), rows grad_pitch vectors apart
    dx,  # (num_rows, num_cols), contiguous
    seed,  # one int64
    partials,  # (num_strips, num_cols) in COMPUTE, or None without a bias
    num_rows, rows_per_strip, num_vectors, grad_pitch, threshold, scale,
    HAS_BIAS: tl.constexpr, COMPUTE: tl.constexpr, VECTOR: tl.constexpr, WHOLE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute dx of one strip of rows and BLOCK_N columns, and the strip's row of `partials`."""
    # 1. Locate the strip and the columns.
    num_cols = num_vectors * VECTOR
    column_blocks = tl.cdiv(num_cols, BLOCK_N)
    pid = tl.program_id(0)
    strip = (pid // column_blocks).to(tl.int64)
    first_col = (pid % column_blocks) * BLOCK_N
    cols = first_col + tl.arange(0, BLOCK_N)
    key = tl.load(seed)
    total = tl.zeros([BLOCK_M, BLOCK_N], COMPUTE)
    # 2. Walk down the strip: dx = grad under the mask of the forward, stored and summed.
    for step in range(0, rows_per_strip, BLOCK_M):
        rows = strip * rows_per_strip + step + tl.arange(0, BLOCK_M)
        mask = (rows < num_rows)[:, None] & (cols < num_cols)[None, :]
        g = tl.load(grad + rows[:, None] * grad_pitch * VECTOR + cols[None, :], mask=mask, other=0.0)
        words = _words(key, rows, first_col, num_cols, VECTOR, WHOLE, BLOCK_N)
        dh = _dropout(g.to(COMPUTE), words, threshold, scale)
        tl.store(dx + rows[:, None] * num_vectors * VECTOR + cols[None, :], dh, mask=mask)
        total += dh
    if HAS_BIAS:
        # 3. Store the strip's column sums; `sum_strips` adds the strips in order.
        tl.store(partials + strip * num_cols + cols, tl.sum(total, 0), mask=cols < num_cols)


@lru_cache(maxsize=64)
def _mask_constants(p: float) -> tuple[int, int]:
    """Return threshold and scale as int64 kernel arguments, so that one kernel serves every p.

    The threshold has bit 32 added, so that it is never an int32. The scale is the bits of a float64, since
    the launcher would pass a float as float32.
    """
    (scale,) = struct.unpack("q", struct.pack("d", _scale(p)))
    return (1 << 32) | _threshold(p), scale


def block_shape(num_cols: int, itemsize: int) -> tuple[int, int]:
    """Return (BLOCK_M, BLOCK_N): a quarter of the rows if their length is no multiple of four.

    Each element then needs its own Philox call: four times the work and registers.
    """
    block_m, block_n = rows.block_shape(num_cols, itemsize)
    return block_m if num_cols % 4 == 0 else max(1, block_m // 4), block_n


def summing_block_shape(num_cols: int, itemsize: int) -> tuple[int, int]:
    """Return `block_shape` with half of the rows: registers hold the sums of columns, too."""
    block_m, block_n = block_shape(num_cols, itemsize)
    return max(1, block_m // 2), block_n


def launch(x: Tensor, bias: Tensor | None, residual: Tensor, p: float, seed: Tensor | None) -> Tensor:
    y = rows.empty_like(residual)
    launch_into(x, bias, residual, p, seed, y)
    return y


def launch_into(x: Tensor, bias: Tensor | None, residual: Tensor, p: float, seed: Tensor | None, y: Tensor):
    if x.numel() == 0 or (seed is not None and p == 1):
        y.copy_(residual)
        return
    if not y.is_contiguous():
        y.copy_(launch(x, bias, residual, p, seed))
        return
    rows.launch(
        bias_dropout_add_kernel, (residual, x), (None if bias is None else bias.contiguous(), y, seed),
        _mask_constants(p), blocks=block_shape, HAS_BIAS=bias is not None, DROPS=seed is not None,
        WHOLE=x.shape[-1] % 4 == 0,
    )  # fmt: skip


def launch_backward(
    grad: Tensor, p: float, seed: Tensor, dtype: torch.dtype, with_bias: bool
) -> tuple[Tensor, Tensor]:
    dx = grad.new_empty(size=grad.shape, dtype=dtype)
    dbias = grad.new_empty(grad.shape[-1] if with_bias else 0, dtype=dtype)
    if grad.numel() == 0 or p == 1:
        return dx.zero_(), dbias.zero_()
    rows.launch_with_sums(
        bias_dropout_add_backward_kernel, (grad,), (dx, seed), dbias if with_bias else None,
        _mask_constants(p), blocks=summing_block_shape if with_bias else block_shape, HAS_BIAS=with_bias,
        WHOLE=grad.shape[-1] % 4 == 0,
    )  # fmt: skip
    return dx, dbias


def _flops(x: Tensor, bias: Tensor | None, residual: Tensor, p: float, seed: Tensor | None) -> int:
    """Count two additions and the scale; integer operations of the mask do not count."""
    return math.prod(x.shape) * (1 + (bias is not None) + (seed is not None))


register(
    "bias_dropout_add_backward(Tensor grad, float p, Tensor seed, ScalarType dtype, bool with_bias)"
    " -> (Tensor, Tensor)",
    contract="grad (..., N) dtype|wide(dtype); 0 <= p <= 1; seed (#1) int64; dtype in floating",
    shard="-> whole whole",
    reference=reference_backward,
    triton=launch_backward,
    flops=lambda grad, p, seed, dtype, with_bias: math.prod(grad.shape) * (1 + with_bias),
)


_bias_dropout_add = register(
    "bias_dropout_add(Tensor x, Tensor? bias, Tensor residual, float p, Tensor? seed) -> Tensor",
    contract="x (..., N) floating; residual (..., N) x|wide(x); bias (N) x; 0 <= p <= 1; seed (#1) int64",
    shard="x residual !seed -> rows",
    reference=reference,
    triton=launch,
    flops=_flops,
    autograd_formula={
        "seed": "bias_dropout_add_backward(grad, p, seed, dtype(x), has(bias)) -> x, bias; grad -> residual",
        "": "grad -> residual x bias",  # two additions
    },
)
_bias_dropout_add_into = register(
    "bias_dropout_add_into(Tensor x, Tensor? bias, Tensor residual, float p, Tensor? seed, Tensor(a!) out)"
    " -> ()",
    contract=(
        "x (..., N) floating; residual (..., N) x|wide(x); bias (N) x; 0 <= p <= 1; seed (#1) int64; "
        "out (..., N) residual"
    ),
    overwrites="out",
    reference=reference_into,
    triton=launch_into,
    flops=lambda *arguments: _flops(*arguments[:-1]),
    autograd_formula={
        "seed": "bias_dropout_add_backward(grad_out, p, seed, dtype(x), has(bias)) -> x, bias; "
        "grad_out -> residual",
        "": "grad_out -> residual x bias",
    },
)


@checks.memoized
def _check(x: Tensor, bias: Tensor | None, residual: Tensor, p: float, seed: Tensor | None) -> None:
    op = "bias_dropout_add"
    checks.require(0 <= p <= 1, "{}: p must lie between 0 and 1, got {}", op, p)
    checks.check_floating(op, "x", x)
    checks.check_shape(op, x.shape, to=("x", x), residual=residual)
    checks.check_shape(op, x.shape[-1:], to=("x", x), bias=bias)
    if residual.dtype != torch.float32 or x.dtype.itemsize != 2:
        checks.check_same(op, x=x, residual=residual)
    checks.check_same(op, x=x, bias=bias)
    if seed is not None and (seed.dtype != torch.int64 or seed.numel() != 1):
        shape = tuple(seed.shape)
        raise ValueError(f"{op}: seed must be one int64 number, got {seed.dtype} of shape {shape}")
    checks.check_same_device(op, x=x, residual=residual, seed=seed)


def _check_out(out: Tensor, residual: Tensor) -> None:
    got, expected = (f"{tuple(t.shape)}, {t.dtype} on {t.device}" for t in (out, residual))
    if got != expected or out.requires_grad:
        needs = f"requires_grad={out.requires_grad}"
        raise ValueError(
            f"bias_dropout_add: out is {got}, {needs}, but must be {expected}, without a gradient"
        )


@traced("fastmp.bias_dropout_add")
def bias_dropout_add(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    *,
    p: float,
    training: bool = True,
    seed: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return residual + dropout(x + bias), fused. Differentiable once in x, bias and residual.

    Each element of x + bias is zeroed with probability p, NaN and infinity included, else divided by 1 - p.
    Arithmetic is in float32 (float64 for float64 inputs) and rounded once. Autocast casts x and bias, not the
    residual.

    Args:
        x: (..., N), float64, float32, bfloat16 or float16, any strides (last stride 1 avoids a copy).
        bias: (N,) of x's dtype and device, or None.
        residual: of x's shape, and of its dtype or float32.
        p: dropout probability, exact to 2^-32.
        training: False means p = 0: two additions in one pass.
        seed: one int64 on x's device that determines the mask. Default: drawn from torch's default generator
            of that device, so that torch.manual_seed, `RngTracker.fork` and activation recomputation
            reproduce the mask. Neither read nor drawn if p is 0. DTensors require one, equal on all ranks.
        out: tensor of x's shape and the residual's dtype to write to, without a gradient. If autograd
            records, it must not be a view: pass out.detach().

    Returns:
        `out`, or a new contiguous tensor of x's shape and the residual's dtype.

    Raises:
        ValueError: shapes, dtypes or devices do not match, or p is not in [0, 1].

    Example:

        x, residual = torch.randn(8, 16, requires_grad=True), torch.randn(8, 16)
        seed = torch.tensor(1234)
        y = fastmp.ops.bias_dropout_add(x, None, residual, p=0.1, seed=seed)
        assert torch.equal(y, fastmp.ops.bias_dropout_add(x, None, residual, p=0.1, seed=seed))

    Srivastava et al., "Dropout", 2014; Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011.
    """
    x, bias = autocast(x, bias)
    _check(x, bias, residual, p, seed)
    if not training or p == 0:
        p, seed = 0.0, None
    elif seed is None:
        local = not checks.is_dtensor(x)  # ranks of a DTensor would draw different seeds
        checks.require(local, "bias_dropout_add: x is a DTensor of shape {}: give it a seed", x.shape)
        seed = torch.randint(-(1 << 63), (1 << 63) - 1, (), device=x.device)
    if out is None:
        return _bias_dropout_add(x, bias, residual, float(p), seed)
    _check_out(out, residual)
    _bias_dropout_add_into(x, bias, residual, float(p), seed, out)
    return out
