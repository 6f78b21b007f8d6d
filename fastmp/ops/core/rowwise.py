"""Row-wise tiling for element-wise ops: a tensor (..., N) is M rows of N columns, cut into tiles.

`launch` starts one program per tile (BLOCK_M, BLOCK_N).

`launch_with_sums` also computes column sums, such as a bias gradient, without atomics and with the same
result in every run: one program per strip of rows writes the strip's sums to a row of float32 `partials`, and
`sum_strips` adds these rows in order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from fastmp.ops.core import launcher
from fastmp.ops.core._triton import MAX_SIZE, MAX_WALKING, cdiv, jit, limits, next_power_of_2, tl
from fastmp.ops.core.registry import compute_dtype

NUM_WARPS = 4
_NUM_PROGRAMS = 1024


def sum_rows(rows: Tensor) -> Tensor:
    """Return column sums of rows (M, ...) by halving.

    As accurate as pairwise summation, and independent of the number of threads; the order in which Tensor.sum
    adds a column depends on how columns are split between threads.
    """
    if not isinstance(rows.shape[0], int):  # a symbolic size, traced for shapes only
        return rows.sum(0)
    while len(rows) > 1:
        half = len(rows) // 2
        sums = rows[:half] + rows[half : 2 * half]
        if len(rows) % 2:
            sums[0] += rows[-1]
        rows = sums
    return rows.sum(0)


def as_rows(x: Tensor) -> tuple[Tensor, int]:
    """Return x and its row pitch: the number of elements from one row of the last dimension to the next.

    Copies x only if one pitch cannot describe its rows, or if the last dimension is not contiguous. Returns
    no (M, N) view: kernels do not need it, and making it costs more than this function.
    """
    if x.is_contiguous():
        return x, x.shape[-1]
    shape, strides = x.shape, x.stride()
    dim = len(shape) - 2
    folds = dim >= 0 and strides[-1] == 1
    while folds and dim > 0:
        folds, dim = strides[dim - 1] == shape[dim] * strides[dim], dim - 1
    if folds:
        return x, strides[-2]
    rows = x.reshape(-1, shape[-1])
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    return rows, rows.stride(0)


def empty_like(x: Tensor) -> Tensor:
    """Return an empty contiguous tensor of x's shape and dtype; takes half as long as `torch.empty`."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def arithmetic(dtype: torch.dtype) -> Any:
    """Return `compute_dtype` as a Triton type."""
    return tl.float64 if dtype == torch.float64 else tl.float32


def vector_width(itemsize: int, *lengths: int) -> int:
    """Return the elements of the widest access of at most 16 bytes that divides all `lengths`.

    lengths: row length and pitches, in elements. If the first row is aligned to it, all rows are.
    """
    return math.gcd(16 // itemsize, *lengths)


@cache
def block_shape(num_cols: int, itemsize: int) -> tuple[int, int]:
    """Return (BLOCK_M, BLOCK_N) with four 16-byte loads in flight per thread and little column padding."""
    per_row = 32 * NUM_WARPS * 16 // itemsize
    block_n = min((per_row, per_row // 2, per_row // 4), key=lambda n: (cdiv(num_cols, n) * n, -n))
    block_n = min(block_n, max(16, next_power_of_2(num_cols)))
    return 4 * per_row // block_n, block_n


def strip_shape(num_rows: int, num_cols: int, block_m: int, block_n: int) -> tuple[int, int]:
    """Return (number of strips, rows per strip).

    A strip is a multiple of BLOCK_M rows; the grid has about 1024 programs, two waves on 132 SMs.
    """
    wanted = max(1, _NUM_PROGRAMS // cdiv(num_cols, block_n))
    rows_per_strip = cdiv(cdiv(num_rows, wanted), block_m) * block_m
    return cdiv(num_rows, rows_per_strip), rows_per_strip


@limits(num_cols=MAX_SIZE * 16, num_strips=MAX_WALKING)
@jit(dynamic="num_strips", fixed="num_cols")
def sum_strips_kernel(partials, sums, num_strips, num_cols, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Sum columns of `partials` (num_strips, num_cols) in a fixed order: a program per BLOCK_N columns."""
    # 1. Add blocks of BLOCK_M rows from top to bottom.
    cols = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_M, BLOCK_N], partials.dtype.element_ty)
    for start in range(0, num_strips, BLOCK_M):
        strips = start + tl.arange(0, BLOCK_M)
        mask = (strips < num_strips)[:, None] & (cols < num_cols)[None, :]
        offsets = strips[:, None].to(tl.int64) * num_cols + cols[None, :]
        total += tl.load(partials + offsets, mask=mask, other=0.0)
    # 2. Reduce the block of running sums to one row.
    tl.store(sums + cols, tl.sum(total, 0), mask=cols < num_cols)


def sum_strips(partials: Tensor, sums: Tensor) -> None:
    """Launch `sum_strips_kernel`: sums = column sums of `partials`.

    Args:
        partials: (num_strips, num_cols), contiguous, float32 or float64.
        sums: num_cols elements, contiguous, of any floating-point dtype; written.
    """
    num_strips, num_cols = partials.shape
    launcher.launch(
        sum_strips_kernel, cdiv(num_cols, 32),
        (partials, sums, num_strips, num_cols),
        {"BLOCK_M": 128, "BLOCK_N": 32, "num_warps": NUM_WARPS},
    )  # fmt: skip


@lru_cache(maxsize=1024)
def _plan(
    num_cols: int, dtype: torch.dtype, pitches: tuple[int, ...], block_m: int, block_n: int
) -> tuple[tuple[int, ...], dict[str, Any]]:
    """Return (num_vectors, pitch of each tensor in vectors) and the kernel's constants."""
    vector = vector_width(dtype.itemsize, num_cols, *pitches)
    constants = {
        "COMPUTE": arithmetic(dtype), "VECTOR": vector, "BLOCK_M": block_m, "BLOCK_N": block_n,
        "num_warps": NUM_WARPS,
    }  # fmt: skip
    return (num_cols // vector, *[pitch // vector for pitch in pitches]), constants


def _tiles(
    tensors: Sequence[Tensor], num_cols: int, blocks: Callable[[int, int], tuple[int, int]] | None
) -> tuple[Sequence[Tensor], tuple[int, ...], dict[str, Any]]:
    """Return the tensors as rows, with their `_plan`."""
    dtype = tensors[0].dtype
    rows, pitches = zip(*[as_rows(t) for t in tensors], strict=True)
    return rows, *_plan(num_cols, dtype, pitches, *(blocks or block_shape)(num_cols, dtype.itemsize))


def launch(
    kernel: Any,
    tensors: Sequence[Tensor],
    others: Sequence[Tensor | None],
    numbers: Sequence[int] = (),
    *,
    blocks: Callable[[int, int], tuple[int, int]] | None = None,
    columns: int | None = None,
    **constants: Any,
) -> None:
    """Launch `kernel` with one program per tile of BLOCK_M rows and BLOCK_N columns.

    The kernel's parameters, in order: the tensors, the others, num_rows, num_vectors, the pitch of each
    tensor, the numbers; then the constants COMPUTE, VECTOR, BLOCK_M, BLOCK_N and its own. num_vectors and
    pitches count vectors of VECTOR elements, which proves their alignment to the compiler.

    Args:
        tensors: (..., N), not empty, read as rows; the first has the widest dtype.
        others: tensors passed on unchanged: outputs, and inputs not read as rows.
        numbers: further integers.
        blocks: function of (columns, itemsize) that returns (BLOCK_M, BLOCK_N); default `block_shape`.
        columns: number of columns of a tile row, if the rows of the first tensor are longer.
        constants: further `tl.constexpr` parameters.
    """
    first = tensors[0]
    width = first.shape[-1]
    num_cols, num_rows = columns or width, first.numel() // width
    rows, sizes, tiles = _tiles(tensors, num_cols, blocks)
    programs = cdiv(num_rows, tiles["BLOCK_M"]) * cdiv(num_cols, tiles["BLOCK_N"])
    launcher.launch(kernel, programs, (*rows, *others, num_rows, *sizes, *numbers), {**tiles, **constants})


def launch_with_sums(
    kernel: Any,
    tensors: Sequence[Tensor],
    others: Sequence[Tensor | None],
    sums: Tensor | None,
    numbers: Sequence[int] = (),
    *,
    blocks: Callable[[int, int], tuple[int, int]] | None = None,
    **constants: Any,
) -> None:
    """Launch `kernel` with one program per strip of rows and block of columns, then `sum_strips`.

    The kernel's parameters are those of `launch`, with `partials` after the others and rows_per_strip after
    num_rows. `partials` (num_strips, sums.numel()) is float32 (float64). If `sums` is None, it is None, and a
    strip is one tile.
    """
    num_cols = tensors[0].shape[-1]
    num_rows = tensors[0].numel() // num_cols
    rows, sizes, tiles = _tiles(tensors, num_cols, blocks)
    block_m, block_n = tiles["BLOCK_M"], tiles["BLOCK_N"]
    # without sums a strip is one tile, for nothing is gained by walking down several
    num_strips, rows_per_strip, partials = cdiv(num_rows, block_m), block_m, None
    if sums is not None:
        num_strips, rows_per_strip = strip_shape(num_rows, num_cols, block_m, block_n)
        partials = sums.new_empty(num_strips, sums.numel(), dtype=compute_dtype(sums.dtype))
    launcher.launch(
        kernel, num_strips * cdiv(num_cols, block_n),
        (*rows, *others, partials, num_rows, rows_per_strip, *sizes, *numbers),
        {**tiles, **constants},
    )  # fmt: skip
    if partials is not None and sums is not None:
        sum_strips(partials, sums)
