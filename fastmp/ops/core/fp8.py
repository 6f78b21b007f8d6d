"""FP8 numbers shared by the FP8 ops: formats, power-of-two scales of blocks, the cast and its inverse.

A block of numbers is stored as FP8 bytes q and one scale s = 2^e with e = ceil(log2(amax / largest)), so that
amax / s is in (largest / 2, largest]. e is read from the bits of amax, never computed by a logarithm. A block
of zeros has s = 1; one with NaN or infinity has s = NaN and NaN bytes, so that all of it dequantises to NaN.

Blocks of 128 have float32 scales, which may be subnormal. Blocks of 32 (MXFP8) have torch.float8_e8m0fnu
scales: the byte e + 127, 255 for NaN.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fastmp.ops.core import checks

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}  # both are 1.75 times a power of two
SCALE = {128: torch.float32, 32: torch.float8_e8m0fnu}  # dtype of the scales, by size of block
_LEAST = {128: -149, 32: -127}  # exponent of the smallest scale
_NAN = 0x7F  # a NaN byte of both formats


def largest_exponent(dtype: torch.dtype) -> int:
    """Return floor(log2(largest number)) of an FP8 format: 8 for e4m3, 15 for e5m2."""
    return math.frexp(LARGEST[dtype])[1] - 1


def check_block(op: str, block: int, dtype: torch.dtype = E4M3) -> None:
    """Check the size of a block and the FP8 format."""
    checks.check_choice(op, "block", block, tuple(SCALE))
    checks.check_choice(op, "dtype", dtype, tuple(LARGEST))


def check_multiple(op: str, name: str, size: int, block: int) -> None:
    """Check that the dimension `name` of `size` elements is cut into whole blocks."""
    checks.require(
        size % block == 0, "{}: {} must be a multiple of block ({}), got {}", op, name, block, size
    )


def block_of(op: str, columns: int, s: Tensor) -> int:
    """Return the size of the blocks of `columns` columns that have the scales `s` (rows, columns / block)."""
    block = {scale: block for block, scale in SCALE.items()}.get(s.dtype)
    if s.dtype == torch.float64:  # a copy of either, for comparisons
        block = columns // max(s.shape[-1], 1)
    allowed = tuple(SCALE.values())
    checks.require(block is not None, "{}: s must have one of the dtypes {}, got {}", op, allowed, s.dtype)
    assert block is not None
    fits = s.shape[-1] * block == columns
    checks.require(fits, "{}: {} columns do not fit scales {} of {}", op, columns, tuple(s.shape), s.dtype)
    return block


def exponents(amax: Tensor, block: int, dtype: torch.dtype) -> Tensor:
    """Return the exponents of the scales; amax: bits of the largest magnitudes (int32), not NaN or inf."""
    # 1. A subnormal is an integer times 2^-149: normalise it, even if the processor flushes subnormals.
    subnormal = amax < 1 << 23
    normal = torch.where(subnormal, amax.to(torch.float32).view(torch.int32), amax)
    # 2. A significand above 1.75 carries into the exponent.
    e = ((normal + 0x1FFFFF) >> 23) - 127 - largest_exponent(dtype)
    e = torch.where(subnormal, e - 149, e).clamp(min=_LEAST[block])
    return torch.where(amax == 0, 0, e)


def power_of_two(e: Tensor) -> Tensor:
    """Return 2^e in float32, for int32 e in [-149, 127]."""
    one = torch.ones_like(e)
    return torch.where(e < -126, one << (e + 149).clamp(min=0), (e + 127).clamp(min=1) << 23).view(
        torch.float32
    )


def quantize_blocks(
    x: Tensor, dims: tuple[int, ...], block: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return (q, s) of blocks along `dims` of x; s has size 1 there."""
    # 1. The largest magnitude of each block, by bits: NaN and inf are larger than all numbers.
    x = x.to(torch.float32)
    amax = (x.view(torch.int32) & 0x7FFFFFFF).amax(dims, keepdim=True)
    bad = amax >= 0x7F800000
    e = exponents(torch.where(bad, 0, amax), block, dtype)
    # 2. x / s as two multiplications, of which none overflows and the result is exact.
    half = (-e) >> 1
    scaled = x * power_of_two(half) * power_of_two(-e - half)
    # 3. torch's cast rounds to nearest even, but does not saturate.
    q = scaled.clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype).view(torch.uint8)
    q = torch.where(bad, _NAN, q).view(dtype)
    if block == 32:
        return q, torch.where(bad, 255, e + 127).to(torch.uint8).view(SCALE[32])
    return q, torch.where(bad, math.nan, power_of_two(e))


def scale_strides(num_rows: int, block: int) -> tuple[int, int]:
    """Return the strides of the scales of rows: M-major, columns a multiple of 16 bytes apart."""
    vector = 16 // SCALE[block].itemsize
    return 1, (max(num_rows, 1) + vector - 1) // vector * vector


def empty_rows(x: Tensor, shape: tuple[int, ...], block: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return new q (..., K) of `shape` and s (M, K / block) on x's device."""
    num_rows = math.prod(shape[:-1])
    s = x.new_empty_strided(
        (num_rows, shape[-1] // block), scale_strides(num_rows, block), dtype=SCALE[block]
    )
    return x.new_empty(shape, dtype=dtype), s
