"""quantize_rows, dequantize_rows and quantize_weight: FP8 numbers with one power-of-two scale a block.

Activations have a scale for each row and block of K, weights one for each square block, so that the weight
and its transpose, which both GEMM directions read with K contiguous, are the same numbers. Scales are powers
of two: a block loses only the significand bits that FP8 lacks, and q * s is exact in BF16.
Blocks of 128: DeepSeek-AI 2024 (arXiv 2412.19437); blocks of 32: Rouhani et al. 2023 (arXiv 2310.10537).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fastmp.ops.core import checks, fp8, launcher
from fastmp.ops.core import rowwise as rows
from fastmp.ops.core._triton import MAX_SIZE, cdiv, jit, limits, next_power_of_2, tl
from fastmp.ops.core.fp8 import (
    E4M3,
    block_factors,
    fp8_bytes,
    fp8_values,
    group_tile,
    quantize_tile,
    scale_values,
    store_scales,
)
from fastmp.ops.core.registry import compute_dtype, register
from fastmp.profiling import traced


def _check_rows(x: Tensor, block: int, dtype: torch.dtype) -> None:
    fp8.check_block("quantize_rows", block, dtype)
    checks.check_floating("quantize_rows", "x", x)
    fp8.check_multiple("quantize_rows", "K", x.shape[-1], block)


def reference_rows(x: Tensor, block: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return q (..., K) and its scales (M, K / block)."""
    _check_rows(x, block, dtype)
    q, s = fp8.empty_rows(x, tuple(x.shape), block, dtype)
    blocks = x.reshape(len(s), x.shape[-1] // block, block)
    values, scales = fp8.quantize_blocks(blocks, (-1,), block, dtype)
    return q.copy_(values.reshape(q.shape)), s.copy_(scales.squeeze(-1))


def _check_dequantize(q: Tensor, s: Tensor, dtype: torch.dtype) -> int:
    checks.check_choice("dequantize_rows", "dtype", dtype, checks.FLOATING)
    block = fp8.block_of("dequantize_rows", q.shape[-1], s)
    checks.check_shape("dequantize_rows", (math.prod(q.shape[:-1]), q.shape[-1] // block), to=("q", q), s=s)
    return block


def reference_dequantize(q: Tensor, s: Tensor, dtype: torch.dtype) -> Tensor:
    """Return q * s, computed in float32 (float64 for float64) and rounded once."""
    block = _check_dequantize(q, s, dtype)
    wide = compute_dtype(dtype)
    blocks = q.to(wide).reshape(len(s), s.shape[1], block)
    return (blocks * s.to(wide).unsqueeze(-1)).to(dtype).reshape(q.shape).contiguous()


def _check_weight(w: Tensor, block: int) -> None:
    fp8.check_block("quantize_weight", block)
    checks.check_floating("quantize_weight", "w", w)
    checks.require(w.dim() in (2, 3), "quantize_weight: w must be (N, K) or (L, N, K), got shape {}", w.shape)
    for name, size in zip("NK", w.shape[-2:], strict=True):
        fp8.check_multiple("quantize_weight", name, size, block)


def reference_weight(w: Tensor, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return q (..., N, K), its transpose and the scales (..., N / block, K / block)."""
    _check_weight(w, block)
    rows, columns = w.shape[-2:]
    blocks = w.reshape(*w.shape[:-2], rows // block, block, columns // block, block)
    q, s = fp8.quantize_blocks(blocks, (-3, -1), block, E4M3)
    q = q.reshape(w.shape).contiguous()
    return q, q.transpose(-1, -2).contiguous(), s.squeeze(-1).squeeze(-2).contiguous()


def _fake_weight(w: Tensor, block: int) -> tuple[Tensor, Tensor, Tensor]:
    *lead, rows, columns = w.shape
    q, q_t = (w.new_empty(*lead, *shape, dtype=E4M3) for shape in ((rows, columns), (columns, rows)))
    return q, q_t, w.new_empty(*lead, rows // block, columns // block, dtype=fp8.SCALE[block])


@limits(num_vectors=MAX_SIZE)
@jit(dynamic="num_rows", fixed="num_vectors x_pitch")
def quantize_rows_kernel(
    x,  # (num_rows, num_cols), rows x_pitch vectors apart
    q,  # (num_rows, num_cols) bytes, contiguous
    s,  # (num_rows, num_cols / GROUP), M-major
    num_rows, num_vectors, x_pitch,
    GROUP: tl.constexpr, E5M2: tl.constexpr, NATIVE: tl.constexpr, COMPUTE: tl.constexpr,
    VECTOR: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Quantise one tile (BLOCK_M, BLOCK_N) of whole blocks."""
    # 1. Locate the tile.
    num_cols, rows, first, cols, mask = group_tile(num_rows, num_vectors, VECTOR, GROUP, BLOCK_M, BLOCK_N)
    # 2. Load, quantise, store.
    v = tl.load(x + rows[:, None] * x_pitch * VECTOR + cols[None, :], mask=mask, other=0.0)
    values, scales = quantize_tile(v.to(tl.float32), GROUP, E5M2, NATIVE)
    tl.store(q + rows[:, None] * num_cols + cols[None, :], values, mask=mask)
    store_scales(s, scales, rows, first, num_rows, num_cols, GROUP)


@limits(num_vectors=MAX_SIZE)
@jit(dynamic="num_rows s_pitch", fixed="num_vectors q_pitch s_row")
def dequantize_rows_kernel(
    q,  # (num_rows, num_cols) bytes, rows q_pitch vectors apart
    s,  # (num_rows, num_cols / GROUP), any strides
    x,  # (num_rows, num_cols), contiguous
    num_rows, num_vectors, q_pitch, s_row, s_pitch,
    GROUP: tl.constexpr, E5M2: tl.constexpr, COMPUTE: tl.constexpr, VECTOR: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute one tile (BLOCK_M, BLOCK_N) of x = q * s."""
    # 1. Locate the tile, load bytes and scales.
    num_cols, rows, first, cols, mask = group_tile(num_rows, num_vectors, VECTOR, GROUP, BLOCK_M, BLOCK_N)
    groups = (first // GROUP + tl.arange(0, BLOCK_N // GROUP)).to(tl.int64)
    live = rows < num_rows
    b = tl.load(q + rows[:, None] * q_pitch * VECTOR + cols[None, :], mask=mask, other=0)
    at = rows[:, None] * s_row + groups[None, :] * s_pitch
    scales = scale_values(tl.load(s + at, mask=live[:, None] & (groups * GROUP < num_cols)[None, :], other=0))
    # 2. Multiply block by block, store.
    values = tl.reshape(fp8_values(b, E5M2), [BLOCK_M, BLOCK_N // GROUP, GROUP])
    product = values.to(COMPUTE) * scales.to(COMPUTE)[:, :, None]
    tl.store(x + rows[:, None] * num_cols + cols[None, :], tl.reshape(product, [BLOCK_M, BLOCK_N]), mask=mask)


@limits(row_blocks=MAX_SIZE // 128, col_blocks=MAX_SIZE // 128)
@jit(fixed="row_blocks col_blocks w_pitch")
def quantize_weight_kernel(
    w,  # (matrices, num_rows, num_cols), rows w_pitch vectors apart
    q,  # (matrices, num_rows, num_cols) bytes, contiguous
    q_t,  # (matrices, num_cols, num_rows) bytes, contiguous
    s,  # (matrices, row_blocks, col_blocks), contiguous
    row_blocks, col_blocks, w_pitch,
    GROUP: tl.constexpr, NATIVE: tl.constexpr, VECTOR: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Quantise one tile (BLOCK_M, BLOCK_N) of square blocks, and transpose it."""
    # 1. Locate the tile and load it.
    num_rows, num_cols = row_blocks * GROUP, col_blocks * GROUP
    tiles_down, tiles_across = tl.cdiv(num_rows, BLOCK_M), tl.cdiv(num_cols, BLOCK_N)
    pid = tl.program_id(0)
    matrix = (pid // tiles_across // tiles_down).to(tl.int64)
    first_row = pid // tiles_across % tiles_down * BLOCK_M
    first_col = pid % tiles_across * BLOCK_N
    rows, cols = first_row + tl.arange(0, BLOCK_M), first_col + tl.arange(0, BLOCK_N)
    mask = (rows < num_rows)[:, None] & (cols < num_cols)[None, :]
    row_of = matrix * num_rows + rows
    v = tl.load(w + row_of[:, None] * w_pitch * VECTOR + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    # 2. One scale for each square block.
    DOWN: tl.constexpr = BLOCK_M // GROUP
    ACROSS: tl.constexpr = BLOCK_N // GROUP
    blocks = tl.reshape(v, [DOWN, GROUP, ACROSS, GROUP])
    amax = tl.max(tl.max(blocks.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 3), 1)
    first, second, scales = block_factors(amax, GROUP, False)
    down, across = first_row // GROUP + tl.arange(0, DOWN), first_col // GROUP + tl.arange(0, ACROSS)
    at = (matrix * row_blocks + down)[:, None] * col_blocks + across[None, :]
    tl.store(s + at, scales, mask=(down < row_blocks)[:, None] & (across < col_blocks)[None, :])
    # 3. Cast; store the tile and its transpose.
    scaled = blocks * first[:, None, :, None] * second[:, None, :, None]
    values = tl.where((amax < 0x7F800000)[:, None, :, None], fp8_bytes(scaled, False, NATIVE), 0x7F)
    values = tl.reshape(values.to(tl.uint8), [BLOCK_M, BLOCK_N])
    tl.store(q + row_of[:, None] * num_cols + cols[None, :], values, mask=mask)
    col_of = matrix * num_cols + cols
    tl.store(q_t + col_of[:, None] * num_rows + rows[None, :], tl.trans(values), mask=tl.trans(mask))


def block_shape(num_cols: int, itemsize: int) -> tuple[int, int]:
    """Return (BLOCK_M, BLOCK_N): 8 KB of the wide numbers, four 16-byte loads in flight per thread."""
    block_n = min(128, next_power_of_2(num_cols))
    return 8192 // itemsize // block_n, block_n


def launch_rows(x: Tensor, block: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    _check_rows(x, block, dtype)
    q, s = fp8.empty_rows(x, tuple(x.shape), block, dtype)
    if x.numel():
        rows.launch(
            quantize_rows_kernel, (x,), (q.view(torch.uint8), fp8.scale_bytes(s)), blocks=block_shape,
            GROUP=block, E5M2=dtype != E4M3, NATIVE=fp8.casts_natively(x),
        )  # fmt: skip
    return q, s


def launch_dequantize(q: Tensor, s: Tensor, dtype: torch.dtype) -> Tensor:
    block = _check_dequantize(q, s, dtype)
    x = q.new_empty(q.shape, dtype=dtype)
    if not x.numel():
        return x
    num_cols = q.shape[-1]
    block_m, block_n = block_shape(num_cols, dtype.itemsize)
    given, pitch = rows.as_rows(q.view(torch.uint8))
    vector = rows.vector_width(1, num_cols, pitch)
    launcher.launch(
        dequantize_rows_kernel, cdiv(len(s), block_m) * cdiv(num_cols, block_n),
        (given, fp8.scale_bytes(s), x, len(s), num_cols // vector, pitch // vector, *s.stride()),
        {"GROUP": block, "E5M2": q.dtype != E4M3, "COMPUTE": rows.arithmetic(dtype), "VECTOR": vector,
         "BLOCK_M": block_m, "BLOCK_N": block_n, "num_warps": rows.NUM_WARPS},
    )  # fmt: skip
    return x


TILE = 128  # rows and columns of a program's part of a weight


def launch_weight(w: Tensor, block: int) -> tuple[Tensor, Tensor, Tensor]:
    _check_weight(w, block)
    q, q_t, s = _fake_weight(w, block)
    if w.numel():
        num_rows, num_cols = w.shape[-2:]
        given, pitch = rows.as_rows(w)
        vector = rows.vector_width(w.element_size(), num_cols, pitch)
        tiles = w.numel() // (num_rows * num_cols) * cdiv(num_rows, TILE) * cdiv(num_cols, TILE)
        launcher.launch(
            quantize_weight_kernel, tiles,
            (given, q.view(torch.uint8), q_t.view(torch.uint8), fp8.scale_bytes(s), num_rows // block,
             num_cols // block, pitch // vector),
            {"GROUP": block, "NATIVE": fp8.casts_natively(w), "VECTOR": vector, "BLOCK_M": TILE,
             "BLOCK_N": TILE, "num_warps": 8},
        )  # fmt: skip
    return q, q_t, s


_quantize_rows = register(
    "quantize_rows(Tensor x, int block, ScalarType dtype) -> (Tensor, Tensor)",
    contract="x (..., K) floating; block in 128 32; dtype in fp8; K % block == 0",
    reference=reference_rows,
    triton=launch_rows,
    fake=lambda x, block, dtype: fp8.empty_rows(x, tuple(x.shape), block, dtype),
)
_dequantize_rows = register(
    "dequantize_rows(Tensor q, Tensor s, ScalarType dtype) -> Tensor",
    contract="q (..., K) fp8; B of s; s (M, K/B) any; dtype in floating",
    reference=reference_dequantize,
    triton=launch_dequantize,
    fake=lambda q, s, dtype: q.new_empty(q.shape, dtype=dtype),
)
_quantize_weight = register(
    "quantize_weight(Tensor w, int block) -> (Tensor, Tensor, Tensor)",
    contract="w (..., N, K) floating; 2 <= dims <= 3; block in 128 32; N % block == 0; K % block == 0",
    reference=reference_weight,
    triton=launch_weight,
    fake=_fake_weight,
)
_checked_rows, _checked_weight = checks.memoized(_check_rows), checks.memoized(_check_weight)
_checked_dequantize = checks.memoized(_check_dequantize)


@traced("fastmp.quantize_rows")
def quantize_rows(x: Tensor, *, block: int = 128, dtype: torch.dtype = E4M3) -> tuple[Tensor, Tensor]:
    """Return x in FP8 with one power-of-two scale for each row and block of columns.

    Args:
        x: (..., K), float64, float32, bfloat16 or float16, any strides (last stride 1 avoids a copy); float64
            is rounded to float32 first. The rows are M, the product of the leading dimensions.
        block: columns that share a scale, 128 or 32 (MXFP8); K must be a multiple.
        dtype: torch.float8_e4m3fn or torch.float8_e5m2 (wider range, for upstream gradients).

    Returns:
        (q, s): q (..., K) contiguous, of `dtype`, rounded to nearest even; s (M, K / block), float32 for
        block 128 and float8_e8m0fnu for block 32, M-major: strides (1, M rounded up to 16 bytes). x is about
        q * s. A block with NaN or infinity has s = NaN.

    Raises:
        ValueError: K is not a multiple of `block`, or a dtype or `block` is not supported.

    Example:

        x = torch.randn(8, 256, dtype=torch.bfloat16)
        q, s = fastmp.ops.quantize_rows(x)
        assert q.dtype == torch.float8_e4m3fn and s.shape == (8, 2)

    DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024.
    """
    _checked_rows(x, block, dtype)
    return _quantize_rows(x, block, dtype)


@traced("fastmp.dequantize_rows")
def dequantize_rows(q: Tensor, s: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return q * s in `dtype`: exact in bfloat16, float32 and float64 for what `quantize_rows` returned.

    Args:
        q: (..., K), float8_e4m3fn or float8_e5m2, any strides.
        s: (M, K / block), float32 (block 128) or float8_e8m0fnu (block 32), any strides; M is the product of
            q's leading dimensions.
        dtype: float64, float32, bfloat16 or float16.

    Returns:
        A new contiguous tensor (..., K) of `dtype`.

    Raises:
        ValueError: shapes or dtypes do not match.

    Example:

        x = torch.randn(8, 256, dtype=torch.bfloat16)
        q, s = fastmp.ops.quantize_rows(x)
        y = fastmp.ops.dequantize_rows(q, s)
        assert (x - y).abs().max() <= x.abs().max() / 16
    """
    checks.check_choice("dequantize_rows", "q.dtype", q.dtype, tuple(fp8.LARGEST))
    _checked_dequantize(q, s, dtype)
    checks.check_same_device("dequantize_rows", q=q, s=s)
    return _dequantize_rows(q, s, dtype)


@traced("fastmp.quantize_weight")
def quantize_weight(w: Tensor, *, block: int = 128) -> tuple[Tensor, Tensor, Tensor]:
    """Return a weight in FP8 (e4m3) with one power-of-two scale for each square block, and its transpose.

    Args:
        w: (N, K), or (L, N, K) for L experts; float64, float32, bfloat16 or float16, any strides.
        block: rows and columns that share a scale, 128 or 32; N and K must be multiples.

    Returns:
        (q, q_t, s): q like w and q_t (..., K, N), contiguous float8_e4m3fn, the same numbers; s (..., N /
        block, K / block) contiguous, float32 for block 128 and float8_e8m0fnu for block 32. The scales of q_t
        are the view s.transpose(-1, -2).

    Raises:
        ValueError: N or K is not a multiple of `block`, or a dtype, the shape or `block` is not supported.

    Example:

        w = torch.randn(256, 128)
        q, q_t, s = fastmp.ops.quantize_weight(w)
        assert q_t.shape == (128, 256) and s.shape == (2, 1)

    DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024.
    """
    _checked_weight(w, block)
    return _quantize_weight(w, block)
