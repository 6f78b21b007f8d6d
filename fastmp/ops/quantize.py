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

from fastmp.ops.core import checks, fp8
from fastmp.ops.core.fp8 import E4M3
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
    return q.copy_(values.view(q.shape)), s.copy_(scales.squeeze(-1))


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
    return (blocks * s.to(wide).unsqueeze(-1)).to(dtype).view(q.shape)


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
    q = q.view(w.shape)
    return q, q.transpose(-1, -2).contiguous(), s.squeeze(-1).squeeze(-2).contiguous()


def _fake_weight(w: Tensor, block: int) -> tuple[Tensor, Tensor, Tensor]:
    *lead, rows, columns = w.shape
    q, q_t = (w.new_empty(*lead, *shape, dtype=E4M3) for shape in ((rows, columns), (columns, rows)))
    return q, q_t, w.new_empty(*lead, rows // block, columns // block, dtype=fp8.SCALE[block])


_quantize_rows = register(
    "quantize_rows(Tensor x, int block, ScalarType dtype) -> (Tensor, Tensor)",
    reference=reference_rows,
    fake=lambda x, block, dtype: fp8.empty_rows(x, tuple(x.shape), block, dtype),
)
_dequantize_rows = register(
    "dequantize_rows(Tensor q, Tensor s, ScalarType dtype) -> Tensor",
    reference=reference_dequantize,
    fake=lambda q, s, dtype: q.new_empty(q.shape, dtype=dtype),
)
_quantize_weight = register(
    "quantize_weight(Tensor w, int block) -> (Tensor, Tensor, Tensor)",
    reference=reference_weight,
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
