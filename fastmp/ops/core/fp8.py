"""FP8 numbers shared by the FP8 ops: formats, power-of-two scales of blocks, the cast and its inverse.

A block of numbers is stored as FP8 bytes q and one scale s = 2^e with e = ceil(log2(amax / largest)), so that
amax / s is in (largest / 2, largest]. e is read from the bits of amax, never computed by a logarithm. A block
of zeros has s = 1; one with NaN or infinity has s = NaN and NaN bytes, so that all of it dequantises to NaN.

Blocks of 128 have float32 scales, which may be subnormal. Blocks of 32 (MXFP8) have torch.float8_e8m0fnu
scales: the byte e + 127, 255 for NaN.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fastmp.ops.core import checks, launcher
from fastmp.ops.core._triton import INTERPRETED, jit, tl

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}  # both are 1.75 times a power of two
SCALE = {128: torch.float32, 32: torch.float8_e8m0fnu}  # dtype of the scales, by size of block
BLOCKS = {dtype: block for block, dtype in SCALE.items()}
_LEAST = {128: -149, 32: -127}  # exponent of the smallest scale
NAN = 0x7F  # a NaN byte of both formats


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
    block = BLOCKS.get(s.dtype)
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


class BlockScales(NamedTuple):
    """Scales of blocks: x / s is x * first * second, of which none overflows and the result is exact.

    bad: blocks with NaN or infinity, whose bytes are `NAN`.
    """

    first: Tensor
    second: Tensor
    bad: Tensor
    s: Tensor


def block_scales(amax: Tensor, block: int, dtype: torch.dtype) -> BlockScales:
    """Return the scales of blocks by the bits of their largest magnitudes (int32), of any shape."""
    bad = amax >= 0x7F800000  # by bits, NaN and inf are larger than all numbers
    e = exponents(torch.where(bad, 0, amax), block, dtype)
    half = (-e) >> 1
    if block == 32:
        s = torch.where(bad, 255, e + 127).to(torch.uint8).view(SCALE[32])
    else:
        s = torch.where(bad, math.nan, power_of_two(e))
    return BlockScales(power_of_two(half), power_of_two(-e - half), bad, s)


def quantize_blocks(
    x: Tensor, dims: tuple[int, ...], block: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return (q, s) of blocks along `dims` of x; s has size 1 there."""
    x = x.to(torch.float32)
    first, second, bad, s = block_scales(
        (x.view(torch.int32) & 0x7FFFFFFF).amax(dims, keepdim=True), block, dtype
    )
    # torch's cast rounds to nearest even, but does not saturate.
    q = (x * first * second).clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype).view(torch.uint8)
    return torch.where(bad, NAN, q).view(dtype), s


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


def casts_natively(tensor: Tensor) -> bool:
    """Return True if the tensor's GPU has instructions that cast to FP8; elsewhere kernels use integers."""
    if tensor.is_cuda:
        return not INTERPRETED and torch.cuda.get_device_capability(tensor.device) >= (8, 9)
    return not INTERPRETED and launcher.architecture_elsewhere >= 89


def scale_bytes(s: Tensor) -> Tensor:
    """Return scales as kernels take them: float8_e8m0fnu as uint8."""
    return s.view(torch.uint8) if s.dtype == SCALE[32] else s


@jit
def power_of_two_(e):
    """Return 2^e in float32, for int32 e in [-149, 127]."""
    # both shifts are bounded, which proves to tools/cubins that they don't overflow
    small = 1 << tl.minimum(tl.maximum(e + 149, 0), 22)
    bits = tl.where(e < -126, small, tl.minimum(tl.maximum(e + 127, 1), 254) << 23)
    return bits.to(tl.float32, bitcast=True)


@jit
def fp8_bytes(v, E5M2: tl.constexpr, NATIVE: tl.constexpr):
    """Cast float32 to FP8 bytes: to nearest even, clamped to the largest number, as torch after clamping.

    NATIVE: by the GPU's instruction, for numbers within the format's range, which have the same bytes.
    """
    if NATIVE:
        return v.to(tl.float8e5 if E5M2 else tl.float8e4nv).to(tl.uint8, bitcast=True)
    SIGNIFICAND: tl.constexpr = 2 if E5M2 else 3
    BIAS: tl.constexpr = 15 if E5M2 else 7
    SHIFT: tl.constexpr = 23 - SIGNIFICAND
    ADDED: tl.constexpr = (151 - BIAS - SIGNIFICAND) << 23
    bits = v.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # 1. Clamp; round numbers that are normal in FP8 in the integers, a carry goes into the exponent.
    a = tl.minimum(magnitude, 0x47600000 if E5M2 else 0x43E00000)
    normal = ((a + ((a >> SHIFT) & 1) + ((1 << (SHIFT - 1)) - 1)) >> SHIFT) - ((127 - BIAS) << SIGNIFICAND)
    # 2. The rest by adding a number whose last bit is the smallest number of the format.
    added = tl.full(a.shape, ADDED, tl.int32).to(tl.float32, bitcast=True)
    subnormal = (a.to(tl.float32, bitcast=True) + added).to(tl.int32, bitcast=True) - ADDED
    number = tl.where(a < (128 - BIAS) << 23, subnormal, normal)
    # 3. NaN and the sign.
    return (tl.where(magnitude > 0x7F800000, 0x7F, number) | ((bits >> 24) & 0x80)).to(tl.uint8)


@jit
def fp8_values(b, E5M2: tl.constexpr):
    """Return FP8 bytes as float32."""
    SHIFT: tl.constexpr = 21 if E5M2 else 20
    BIAS: tl.constexpr = 15 if E5M2 else 7
    bits = b.to(tl.int32)
    magnitude = (bits & 0x7F) << SHIFT
    moved = tl.full(b.shape, (254 - BIAS) << 23, tl.int32).to(tl.float32, bitcast=True)
    finite = (magnitude.to(tl.float32, bitcast=True) * moved).to(tl.int32, bitcast=True)
    number = tl.where((bits & 0x7F) >= (0x7C if E5M2 else 0x7F), magnitude | 0x7F800000, finite)
    return (number | ((bits & 0x80) << 24)).to(tl.float32, bitcast=True)


@jit
def scale_values(s):
    """Return scales, as loaded, as float32."""
    if s.dtype == tl.uint8:
        return tl.where(s == 255, float("nan"), power_of_two_(s.to(tl.int32) - 127))
    else:
        return s


@jit
def block_factors(amax, BLOCK: tl.constexpr, E5M2: tl.constexpr):
    """Return (first, second, s) of blocks: x / s is x * first * second, and s is as stored.

    amax: bits of the largest magnitudes (int32).
    """
    # 1. The exponent of the scale; a subnormal is an integer times 2^-149.
    subnormal = amax < 0x800000
    normal = tl.where(subnormal, amax.to(tl.float32).to(tl.int32, bitcast=True), amax)
    finite = amax < 0x7F800000
    e = (tl.where(finite, normal, 0) + 0x1FFFFF >> 23) - (142 if E5M2 else 135)
    e = tl.maximum(tl.where(subnormal, e - 149, e), -149 if BLOCK == 128 else -127)
    e = tl.where(finite & (amax != 0), tl.minimum(e, 127), 0)
    # 2. Two factors, of which neither overflows.
    half = (0 - e) >> 1
    first, second = power_of_two_(half), power_of_two_(0 - e - half)
    if BLOCK == 128:
        return first, second, tl.where(finite, power_of_two_(e), float("nan"))
    else:
        return first, second, tl.where(finite, e + 127, 255).to(tl.uint8)


@jit
def group_tile(
    num_rows, num_vectors,
    VECTOR: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Return columns, rows (int64), first column and columns of this program's tile of whole groups, a mask.

    Columns are counted as whole groups, which proves their alignment to the compiler.
    """
    num_cols = num_vectors * VECTOR // GROUP * GROUP
    column_blocks = tl.cdiv(num_cols, BLOCK_N)
    pid = tl.program_id(0)
    rows = (pid // column_blocks).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    first = (pid % column_blocks) * BLOCK_N
    cols = first + tl.arange(0, BLOCK_N)
    return num_cols, rows, first, cols, (rows < num_rows)[:, None] & (cols < num_cols)[None, :]


@jit
def quantize_tile(
    x,  # (M, N) in float32, N a multiple of BLOCK
    BLOCK: tl.constexpr, E5M2: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Return (q, s) of a tile of rows: bytes (M, N) and scales (M, N / BLOCK)."""
    M: tl.constexpr = x.shape[0]
    N: tl.constexpr = x.shape[1]
    blocks = tl.reshape(x, [M, N // BLOCK, BLOCK])
    amax = tl.max(blocks.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 2)
    first, second, s = block_factors(amax, BLOCK, E5M2)
    q = fp8_bytes(blocks * first[:, :, None] * second[:, :, None], E5M2, NATIVE)
    q = tl.where((amax < 0x7F800000)[:, :, None], q, 0x7F).to(tl.uint8)
    return tl.reshape(q, [M, N]), s


@jit
def store_scales(
    s,  # (num_rows, ...), M-major: columns are a multiple of 16 bytes apart
    scales,  # (BLOCK_M, groups)
    rows,  # (BLOCK_M,) int64
    first,  # the first column of the tile, in elements
    num_rows, num_cols, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store the scales of a tile."""
    VECTOR: tl.constexpr = 4 if BLOCK == 128 else 16
    groups = first // BLOCK + tl.arange(0, scales.shape[1])
    pitch = tl.cdiv(tl.cast(num_rows, tl.int64), VECTOR) * VECTOR
    inside = (rows < num_rows)[:, None] & (groups * BLOCK < num_cols)[None, :]
    tl.store(s + groups[None, :] * pitch + rows[:, None], scales, mask=inside)
