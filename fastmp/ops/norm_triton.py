"""Triton kernels of rms_norm and layer_norm, and their launches.

- Forward: one program per block of rows, which stay in registers, so each element is read once.
- Backward: persistent programs walk over blocks of rows, with the next block prefetched to shared memory.
  Each sums its part of the weight and bias gradients; `sum_strips` adds the programs' sums in order.
- `norm_quantized_kernel`: the forward of rms_norm with its result in FP8.
- The "wide" kernels walk over blocks of columns, for rows too long for registers.

`total` is the normalised tensor, x or x + residual; `stats` holds rstd of all rows, then their means.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from fastmp.ops import quantize
from fastmp.ops.core import fp8, launcher
from fastmp.ops.core._triton import (
    MAX_COUNT,
    MAX_SIZE,
    MAX_WALKING,
    cdiv,
    check_count,
    jit,
    limits,
    next_power_of_2,
    tl,
)
from fastmp.ops.core.fp8 import quantize_tile, store_scales
from fastmp.ops.core.registry import compute_dtype
from fastmp.ops.core.rowwise import arithmetic, as_rows, empty_like, sum_strips, vector_width

# (BLOCK_M, BLOCK_N, warps) of the wide kernels. Backward, (2048, 12288) in bf16 took 73 us (RMS) and 94 us
# (layer norm) on an H200, still without barriers, and 129 and 194 us with blocks of (4, 2048, 16).
WIDE_BLOCK, WIDE_BACKWARD_BLOCK = (1, 4096, 8), (2, 4096, 16)
_MULTIPROCESSORS = 132  # of an H200; a grid that depends on the shape alone gives equal results on all GPUs


@jit
def load_rows(data, rows, cols, pitch, mask, VECTOR: tl.constexpr, COMPUTE: tl.constexpr):
    """Load a tile of rows; `pitch` counts vectors of VECTOR elements, which proves their alignment."""
    return tl.load(data + rows[:, None] * pitch * VECTOR + cols[None, :], mask=mask, other=0.0).to(COMPUTE)


@jit
def normalized_tile(
    x, residual, weight, total, stats, rows, cols, num_rows, num_cols, x_pitch, residual_pitch,
    EPS: tl.constexpr, CENTRED: tl.constexpr, HAS_RESIDUAL: tl.constexpr, COMPUTE: tl.constexpr,
    VECTOR: tl.constexpr,
):  # fmt: skip
    """Normalise whole rows and scale them; store total and stats. Return the tile in COMPUTE and its mask."""
    there, here = rows < num_rows, cols < num_cols
    mask = there[:, None] & here[None, :]
    # a. total = x + residual, rounded before it is normalised: the next layer adds to the rounded value.
    h = load_rows(x, rows, cols, x_pitch, mask, VECTOR, COMPUTE)
    if HAS_RESIDUAL:
        h += load_rows(residual, rows, cols, residual_pitch, mask, VECTOR, COMPUTE)
        rounded = h.to(total.dtype.element_ty)
        tl.store(total + rows[:, None] * num_cols + cols[None, :], rounded, mask=mask)
        h = rounded.to(COMPUTE)
    # b. Statistics, with the rows in registers: the mean, then the variance of the centred row.
    w = tl.load(weight + cols, mask=here, other=0.0)
    if CENTRED:
        mean = tl.sum(h, 1) / num_cols
        tl.store(stats + num_rows + rows, mean, mask=there)
        h = tl.where(here[None, :], h - mean[:, None], 0.0)
    rstd = tl.rsqrt(tl.sum(h * h, 1) / num_cols + EPS)
    tl.store(stats + rows, rstd, mask=there)
    return h * rstd[:, None] * w.to(COMPUTE)[None, :], mask


@limits(num_vectors=MAX_SIZE)
@jit(dynamic="num_rows", fixed="num_vectors x_pitch residual_pitch")
def norm_kernel(
    x, residual,  # (num_rows, num_cols), rows x_pitch and residual_pitch vectors apart; residual or None
    weight, bias,  # (num_cols,); bias or None
    y, total,  # (num_rows, num_cols), contiguous; total is written only with a residual
    stats,  # (2, num_rows): rstd, then mean if CENTRED
    num_rows, num_vectors, x_pitch, residual_pitch,
    EPS: tl.constexpr, CENTRED: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_BIAS: tl.constexpr,
    COMPUTE: tl.constexpr, VECTOR: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute y, total and stats of BLOCK_M rows; BLOCK_N covers a whole row."""
    # 1. Locate the rows, normalise and scale them.
    num_cols = num_vectors * VECTOR
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_N)
    h, mask = normalized_tile(
        x, residual, weight, total, stats, rows, cols, num_rows, num_cols, x_pitch, residual_pitch,
        EPS, CENTRED, HAS_RESIDUAL, COMPUTE, VECTOR,
    )  # fmt: skip
    # 2. Shift and store.
    if HAS_BIAS:
        h += tl.load(bias + cols, mask=cols < num_cols, other=0.0).to(COMPUTE)[None, :]
    tl.store(y + rows[:, None] * num_cols + cols[None, :], h, mask=mask)


@limits(num_vectors=MAX_SIZE)
@jit(dynamic="num_rows", fixed="num_vectors x_pitch residual_pitch")
def norm_quantized_kernel(
    x, residual,  # (num_rows, num_cols), rows x_pitch and residual_pitch vectors apart; residual or None
    weight,  # (num_cols,)
    q,  # (num_rows, num_cols) bytes, contiguous
    s,  # (num_rows, num_cols / GROUP), M-major
    total,  # (num_rows, num_cols), contiguous, written only with a residual
    stats,  # (1, num_rows): rstd
    num_rows, num_vectors, x_pitch, residual_pitch,
    EPS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, GROUP: tl.constexpr, E5M2: tl.constexpr,
    NATIVE: tl.constexpr, COMPUTE: tl.constexpr, VECTOR: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute rms_norm of BLOCK_M rows in FP8, total and stats; BLOCK_N covers a whole row."""
    # 1. Locate the rows, which are whole groups; normalise and scale them.
    num_cols = num_vectors * VECTOR // GROUP * GROUP
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_N)
    h, mask = normalized_tile(
        x, residual, weight, total, stats, rows, cols, num_rows, num_cols, x_pitch, residual_pitch,
        EPS, False, HAS_RESIDUAL, COMPUTE, VECTOR,
    )  # fmt: skip
    # 2. Round as the unquantised op does; quantise and store.
    h = tl.where(mask, h.to(x.dtype.element_ty), 0.0).to(tl.float32)
    values, scales = quantize_tile(h, GROUP, E5M2, NATIVE)
    tl.store(q + rows[:, None] * num_cols + cols[None, :], values, mask=mask)
    store_scales(s, scales, rows, 0, num_rows, num_cols, GROUP)


@limits(num_vectors=MAX_SIZE)
@jit(dynamic="num_rows", fixed="num_vectors total_pitch")
def norm_wide_kernel(
    total,  # (num_rows, num_cols), rows total_pitch vectors apart
    weight, bias,  # (num_cols,); bias or None
    y,  # (num_rows, num_cols), contiguous
    stats,  # (2, num_rows): rstd, then mean if CENTRED
    num_rows, num_vectors, total_pitch,
    EPS: tl.constexpr, CENTRED: tl.constexpr, HAS_BIAS: tl.constexpr, COMPUTE: tl.constexpr,
    VECTOR: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute y and stats of one row in three passes; the first reads memory, the others the caches."""
    num_cols = num_vectors * VECTOR
    row = tl.program_id(0).to(tl.int64)
    total += row * total_pitch * VECTOR
    y += row * num_vectors * VECTOR
    # 1. First pass: the mean.
    mean = tl.zeros([], COMPUTE)
    if CENTRED:
        sums = tl.zeros([BLOCK_N], COMPUTE)
        for start in range(0, num_cols, BLOCK_N):
            cols = start + tl.arange(0, BLOCK_N)
            sums += tl.load(total + cols, mask=cols < num_cols, other=0.0).to(COMPUTE)
        mean = tl.sum(sums, 0) / num_cols
        tl.store(stats + num_rows + row, mean)
    # 2. Second pass: the variance of the centred row.
    squares = tl.zeros([BLOCK_N], COMPUTE)
    for start in range(0, num_cols, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        h = tl.load(total + cols, mask=cols < num_cols, other=0.0).to(COMPUTE)
        h = tl.where(cols < num_cols, h - mean, 0.0)
        squares += h * h
    rstd = tl.rsqrt(tl.sum(squares, 0) / num_cols + EPS)
    # 3. Third pass: scale, shift and store.
    tl.store(stats + row, rstd)
    for start in range(0, num_cols, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        here = cols < num_cols
        h = (tl.load(total + cols, mask=here, other=0.0).to(COMPUTE) - mean) * rstd
        h = h * tl.load(weight + cols, mask=here, other=0.0).to(COMPUTE)
        if HAS_BIAS:
            h += tl.load(bias + cols, mask=here, other=0.0).to(COMPUTE)
        tl.store(y + cols, h, mask=here)


@limits(num_vectors=MAX_SIZE, num_rows=MAX_COUNT, programs=MAX_WALKING)
@jit(dynamic="num_rows", fixed="num_vectors grad_pitch grad_total_pitch total_pitch")
def norm_backward_kernel(
    grad, grad_total, total,  # (num_rows, num_cols), rows *_pitch vectors apart; grad_total or None
    weight,  # (num_cols,)
    stats,  # (2, num_rows): rstd, then mean if CENTRED
    dx,  # (num_rows, num_cols), contiguous
    partials,  # (num_programs, 2, num_cols) in COMPUTE: dweight, then dbias if HAS_BIAS
    num_rows, num_vectors, grad_pitch, grad_total_pitch, total_pitch,
    CENTRED: tl.constexpr, HAS_GRAD_TOTAL: tl.constexpr, HAS_BIAS: tl.constexpr, COMPUTE: tl.constexpr,
    VECTOR: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Compute dx of every num_programs-th block of rows, and this program's row of `partials`."""
    # 1. The weight and the sums of the parameter gradients stay in registers over all blocks.
    num_cols = num_vectors * VECTOR
    pid = tl.program_id(0)
    cols = tl.arange(0, BLOCK_N)
    here = cols < num_cols
    w = tl.load(weight + cols, mask=here, other=0.0).to(COMPUTE)[None, :]
    dweight = tl.zeros([BLOCK_M, BLOCK_N], COMPUTE)
    dbias = tl.zeros([BLOCK_M, BLOCK_N], COMPUTE)
    for block in tl.range(pid, tl.cdiv(num_rows, BLOCK_M), tl.num_programs(0), num_stages=NUM_STAGES):
        rows = (block * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
        there = rows < num_rows
        mask = here[None, :] if BLOCK_M == 1 else there[:, None] & here[None, :]
        # 2. Recompute the normalised rows from the statistics.
        g = load_rows(grad, rows, cols, grad_pitch, mask, VECTOR, COMPUTE)
        h = load_rows(total, rows, cols, total_pitch, mask, VECTOR, COMPUTE)
        rstd = tl.load(stats + rows, mask=there, other=0.0)[:, None]
        if CENTRED:
            h -= tl.load(stats + num_rows + rows, mask=there, other=0.0)[:, None]
        h *= rstd
        dweight += g * h
        if HAS_BIAS:
            dbias += g
        # 3. dx = rstd (g w - h mean(g w h) - mean(g w)) + grad_total.
        g *= w
        d = g - h * (tl.sum(g * h, 1) / num_cols)[:, None]
        if CENTRED:
            d -= (tl.sum(g, 1) / num_cols)[:, None]
        d *= rstd
        if HAS_GRAD_TOTAL:
            d += load_rows(grad_total, rows, cols, grad_total_pitch, mask, VECTOR, COMPUTE)
        tl.store(dx + rows[:, None] * num_vectors * VECTOR + cols[None, :], d, mask=mask)
    # 4. Store this program's sums of the parameter gradients; `sum_strips` adds the programs in order.
    partials += pid.to(tl.int64) * num_cols * (2 if HAS_BIAS else 1) + cols
    tl.store(partials, tl.sum(dweight, 0), mask=here)
    if HAS_BIAS:
        tl.store(partials + num_cols, tl.sum(dbias, 0), mask=here)


@limits(num_vectors=MAX_SIZE, num_rows=MAX_COUNT, programs=MAX_WALKING)
@jit(dynamic="num_rows", fixed="num_vectors grad_pitch grad_total_pitch total_pitch")
def norm_backward_wide_kernel(
    grad, grad_total, total,  # (num_rows, num_cols), rows *_pitch vectors apart; grad_total or None
    weight,  # (num_cols,)
    stats,  # (2, num_rows): rstd, then mean if CENTRED
    dx,  # (num_rows, num_cols), contiguous
    partials,  # (num_programs, 2, num_cols) in COMPUTE: dweight, then dbias if HAS_BIAS
    num_rows, num_vectors, grad_pitch, grad_total_pitch, total_pitch,
    CENTRED: tl.constexpr, HAS_GRAD_TOTAL: tl.constexpr, HAS_BIAS: tl.constexpr, COMPUTE: tl.constexpr,
    VECTOR: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """As `norm_backward_kernel` for rows of any length.

    grad and total are read twice, the second time from a cache. The sums of the parameter gradients live in
    `partials`, which each block of rows reads and writes once.
    """
    num_cols = num_vectors * VECTOR
    pid = tl.program_id(0)
    partials += pid.to(tl.int64) * num_cols * (2 if HAS_BIAS else 1)
    for block in range(pid, tl.cdiv(num_rows, BLOCK_M), tl.num_programs(0)):
        rows = (block * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
        there = rows < num_rows
        rstd = tl.load(stats + rows, mask=there, other=0.0)[:, None]
        mean = tl.zeros([BLOCK_M, 1], COMPUTE)
        if CENTRED:
            mean = tl.load(stats + num_rows + rows, mask=there, other=0.0)[:, None]
        # 1. First pass over the columns: mean(g w h) and mean(g w) of each row.
        along = tl.zeros([BLOCK_M, BLOCK_N], COMPUTE)
        level = tl.zeros([BLOCK_M, BLOCK_N], COMPUTE)
        for start in tl.range(0, num_cols, BLOCK_N, num_stages=NUM_STAGES):
            cols = start + tl.arange(0, BLOCK_N)
            here = cols < num_cols
            mask = there[:, None] & here[None, :]
            g = load_rows(grad, rows, cols, grad_pitch, mask, VECTOR, COMPUTE)
            h = (load_rows(total, rows, cols, total_pitch, mask, VECTOR, COMPUTE) - mean) * rstd
            g *= tl.load(weight + cols, mask=here, other=0.0).to(COMPUTE)[None, :]
            along += g * h
            level += g
        # 2. Second pass, grad and total from a cache: update the sums of the parameter gradients, store dx.
        along_row = (tl.sum(along, 1) / num_cols)[:, None]
        level_row = tl.zeros([BLOCK_M, 1], COMPUTE)
        if CENTRED:
            level_row = (tl.sum(level, 1) / num_cols)[:, None]
        tl.debug_barrier()  # partial sums may be loaded by other threads than those that stored them
        for start in range(0, num_cols, BLOCK_N):
            cols = start + tl.arange(0, BLOCK_N)
            here = cols < num_cols
            mask = there[:, None] & here[None, :]
            g = load_rows(grad, rows, cols, grad_pitch, mask, VECTOR, COMPUTE)
            h = (load_rows(total, rows, cols, total_pitch, mask, VECTOR, COMPUTE) - mean) * rstd
            later = here & (block != pid)  # the first block has nothing to add to
            sums = tl.sum(g * h, 0) + tl.load(partials + cols, mask=later, other=0.0)
            if HAS_BIAS:
                more = tl.sum(g, 0) + tl.load(partials + num_cols + cols, mask=later, other=0.0)
            tl.debug_barrier()
            tl.store(partials + cols, sums, mask=here)
            if HAS_BIAS:
                tl.store(partials + num_cols + cols, more, mask=here)
            g *= tl.load(weight + cols, mask=here, other=0.0).to(COMPUTE)[None, :]
            d = (g - h * along_row - level_row) * rstd
            if HAS_GRAD_TOTAL:
                d += load_rows(grad_total, rows, cols, grad_total_pitch, mask, VECTOR, COMPUTE)
            tl.store(dx + rows[:, None] * num_vectors * VECTOR + cols[None, :], d, mask=mask)


@cache
def block_shape(num_cols: int, itemsize: int, centred: bool) -> tuple[int, int, int] | None:
    """Return (BLOCK_M, BLOCK_N, num_warps) with whole rows in a block, or None if rows are too long.

    A thread has four 16-byte loads in flight. Rows of more than 8192 columns leave room for one program of
    layer_norm on a multiprocessor: (2048, 12288) in bf16 took 52 us on an H200, and 34 us with the wide
    kernel; two programs of rms_norm took 30 us.
    """
    longest = 4096 if itemsize == 8 else 8192 if centred else 16384
    return _whole_rows(num_cols, 64 // itemsize, 4, longest)


@cache
def backward_block_shape(num_cols: int, itemsize: int) -> tuple[int, int, int] | None:
    """Return `block_shape` of the backward.

    A thread has half as many loads per tensor, for it also holds partial sums: 128 registers per thread,
    16 warps per multiprocessor.
    """
    return _whole_rows(num_cols, 16 if itemsize < 8 else 8, 8, 8192 if itemsize == 2 else 4096)


def _whole_rows(
    num_cols: int, per_thread: int, least_warps: int, longest: int
) -> tuple[int, int, int] | None:
    block_n = max(16, next_power_of_2(num_cols))
    if block_n > longest:
        return None
    num_warps = min(16, max(least_warps, block_n // (32 * per_thread)))
    return min(64, max(1, 32 * num_warps * per_thread // block_n)), block_n, num_warps


def num_programs(num_rows: int, block_m: int, num_warps: int) -> int:
    """Return the grid of the backward: as many programs as 132 multiprocessors run with 16 warps each."""
    blocks, most = cdiv(num_rows, block_m), _MULTIPROCESSORS * 16 // num_warps
    return blocks if blocks < most else most  # faster than `min`


def num_stages(itemsize: int) -> int:
    """Return the pipeline stages of the backward: at most 96 KiB of shared memory per multiprocessor."""
    return 3 if itemsize == 2 else 2


def launch(
    centred: bool, x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return y, total (empty without a residual) and stats (2 or 1, *x.shape[:-1])."""
    shape, num_cols, itemsize = x.shape, x.shape[-1], x.element_size()
    y, total = empty_like(x), x.new_empty(0) if residual is None else empty_like(x)
    stats = x.new_empty(2 if centred else 1, *shape[:-1], dtype=compute_dtype(x.dtype))
    if x.numel() == 0:
        return y, total, stats.zero_()
    num_rows, block = x.numel() // num_cols, block_shape(num_cols, itemsize, centred)
    if block is None and residual is not None:
        torch.add(x, residual, out=total)
        x, residual = total, None
    x, pitch = as_rows(x)
    residual, residual_pitch = (None, 0) if residual is None else as_rows(residual)
    vector = vector_width(itemsize, num_cols, pitch, residual_pitch)
    constants = {
        "EPS": eps, "CENTRED": centred, "HAS_BIAS": bias is not None, "COMPUTE": arithmetic(x.dtype),
        "VECTOR": vector,
    }  # fmt: skip
    parameters = weight.contiguous(), None if bias is None else bias.contiguous()
    sizes = num_rows, num_cols // vector, pitch // vector
    block_m, block_n, num_warps = block or WIDE_BLOCK
    if block is None:
        launcher.launch(
            norm_wide_kernel, num_rows,
            (x, *parameters, y, stats, *sizes),
            {**constants, "BLOCK_N": block_n, "num_warps": num_warps},
        )  # fmt: skip
        return y, total, stats
    launcher.launch(
        norm_kernel, cdiv(num_rows, block_m),
        (x, residual, *parameters, y, total, stats, *sizes, residual_pitch // vector),
        {
            "HAS_RESIDUAL": residual is not None, **constants, "BLOCK_M": block_m, "BLOCK_N": block_n,
            "num_warps": num_warps,
        },
    )  # fmt: skip
    return y, total, stats


def launch_quantized(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, block: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return q, s, total (empty without a residual) and stats (1, *x.shape[:-1]) of rms_norm in FP8."""
    num_cols, itemsize = x.shape[-1], x.element_size()
    fp8.check_multiple("rms_norm_quantized", "H", num_cols, block)
    tile = block_shape(num_cols, itemsize, False)
    if tile is None:  # rows too long for registers
        y, total, stats = launch(False, x, residual, weight, None, eps)
        return *quantize.launch_rows(y, block, dtype), total, stats
    q, s = fp8.empty_rows(x, tuple(x.shape), block, dtype)
    total = x.new_empty(0) if residual is None else empty_like(x)
    stats = x.new_empty(1, *x.shape[:-1], dtype=compute_dtype(x.dtype))
    if x.numel() == 0:
        return q, s, total, stats.zero_()
    x, pitch = as_rows(x)
    residual, residual_pitch = (None, 0) if residual is None else as_rows(residual)
    vector = vector_width(itemsize, num_cols, pitch, residual_pitch)
    block_m, block_n, num_warps = tile
    launcher.launch(
        norm_quantized_kernel, cdiv(len(s), block_m),
        (x, residual, weight.contiguous(), q.view(torch.uint8), fp8.scale_bytes(s), total, stats, len(s),
         num_cols // vector, pitch // vector, residual_pitch // vector),
        {
            "EPS": eps, "HAS_RESIDUAL": residual is not None, "GROUP": block, "E5M2": dtype != fp8.E4M3,
            "NATIVE": fp8.casts_natively(x), "COMPUTE": arithmetic(x.dtype), "VECTOR": vector,
            "BLOCK_M": block_m, "BLOCK_N": block_n, "num_warps": num_warps,
        },
    )  # fmt: skip
    return q, s, total, stats


def check_stats(centred: bool, shape: torch.Size, stats: Tensor) -> None:
    """Check that `stats` of a backward has the shape its forward returns; shape: of the forward's input."""
    rows = 2 if centred else 1
    if (*stats.shape, shape[-1]) != (rows, *shape):  # faster than slicing `shape`
        op = "layer_norm_backward" if centred else "rms_norm_backward"
        expected = rows, *shape[:-1]
        raise ValueError(f"{op}: expected stats of shape {expected}, got {tuple(stats.shape)}")


def launch_backward(
    centred: bool, grad: Tensor, grad_total: Tensor | None, total: Tensor, weight: Tensor, stats: Tensor,
    with_bias: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the gradients of total and, as rows of one tensor, of weight and bias."""
    shape, itemsize, elements = total.shape, total.element_size(), total.numel()
    check_stats(centred, shape, stats)
    num_cols = shape[-1]
    dx, dparams = empty_like(total), weight.new_empty(2 if with_bias else 1, num_cols)
    if elements == 0:
        return dx, dparams.zero_()
    num_rows = elements // num_cols
    check_count("norm", "rows", num_rows)
    (grad, grad_pitch), (total, pitch) = as_rows(grad), as_rows(total)
    grad_total, grad_total_pitch = (None, 0) if grad_total is None else as_rows(grad_total)
    vector = vector_width(itemsize, num_cols, grad_pitch, pitch, grad_total_pitch)
    block = backward_block_shape(num_cols, itemsize)
    kernel = norm_backward_wide_kernel if block is None else norm_backward_kernel
    block_m, block_n, num_warps = block or WIDE_BACKWARD_BLOCK
    programs = num_programs(num_rows, block_m, num_warps)
    partials = stats.new_empty(programs, dparams.numel())
    launcher.launch(
        kernel, programs,
        (
            grad, grad_total, total, weight.contiguous(), stats, dx, partials, num_rows, num_cols // vector,
            grad_pitch // vector, grad_total_pitch // vector, pitch // vector,
        ),
        {
            "CENTRED": centred, "HAS_GRAD_TOTAL": grad_total is not None, "HAS_BIAS": with_bias,
            "COMPUTE": arithmetic(total.dtype), "VECTOR": vector, "BLOCK_M": block_m, "BLOCK_N": block_n,
            "NUM_STAGES": num_stages(itemsize), "num_warps": num_warps,
        },
    )  # fmt: skip
    sum_strips(partials, dparams)
    return dx, dparams
