"""Tensors seen as rows of their last dimension, and sums over rows: what the element-wise families share.

A backward kernel that also needs column sums takes one strip of rows a program, writes the strip's sums to a
row of fp32 partial sums, and `sum_strips` adds those rows in order: no atomics, the same result every run.
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
    """Column sums by halving: as accurate as pairwise summation, and the same on any number of threads.

    Tensor.sum adds a column in an order that depends on where the columns are split between the threads.
    While torch.compile asks for shapes alone, a number of rows that is not known has no halves.
    """
    if not isinstance(rows.shape[0], int):
        return rows.sum(0)
    while len(rows) > 1:
        half = len(rows) // 2
        sums = rows[:half] + rows[half : 2 * half]
        if len(rows) % 2:
            sums[0] += rows[-1]
        rows = sums
    return rows.sum(0)


def as_rows(x: Tensor) -> tuple[Tensor, int]:
    """Return x, and how many elements lie from one row of its last dimension to the next.

    It is a copy only where rows lie at different distances, or their elements apart. Kernels need no view of
    two dimensions, which would take longer to make than all that is asked here.
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
    """Return an empty contiguous tensor of x's shape and dtype, in half the time of `torch.empty`."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def arithmetic(dtype: torch.dtype) -> Any:
    """Return the type that kernels compute in: `compute_dtype` as they name it."""
    return tl.float64 if dtype == torch.float64 else tl.float32


def vector_width(itemsize: int, *distances: int) -> int:
    """Elements of the widest access, up to 16 bytes, of which the row length and all pitches are multiples.

    Every row is aligned to it if the first one is.
    """
    return math.gcd(16 // itemsize, *distances)


@cache
def block_shape(num_cols: int, itemsize: int) -> tuple[int, int]:
    """(BLOCK_M, BLOCK_N): each thread has four 16-byte loads in flight, and few columns are padding."""
    per_row = 32 * NUM_WARPS * 16 // itemsize
    block_n = min((per_row, per_row // 2, per_row // 4), key=lambda n: (cdiv(num_cols, n) * n, -n))
    block_n = min(block_n, max(16, next_power_of_2(num_cols)))
    return 4 * per_row // block_n, block_n


def strip_shape(num_rows: int, num_cols: int, block_m: int, block_n: int) -> tuple[int, int]:
    """(number of strips, rows a strip): whole blocks of rows, about 1024 programs (two waves on 132 SMs)."""
    wanted = max(1, _NUM_PROGRAMS // cdiv(num_cols, block_n))
    rows_per_strip = cdiv(cdiv(num_rows, wanted), block_m) * block_m
    return cdiv(num_rows, rows_per_strip), rows_per_strip


@limits(num_cols=MAX_SIZE * 16, num_strips=MAX_WALKING)
@jit
def sum_strips_kernel(partials, sums, num_strips, num_cols, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Column sums of `partials` (num_strips, num_cols), always in the same order."""
    cols = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_M, BLOCK_N], partials.dtype.element_ty)
    for start in range(0, num_strips, BLOCK_M):
        strips = start + tl.arange(0, BLOCK_M)
        mask = (strips < num_strips)[:, None] & (cols < num_cols)[None, :]
        offsets = strips[:, None].to(tl.int64) * num_cols + cols[None, :]
        total += tl.load(partials + offsets, mask=mask, other=0.0)
    tl.store(sums + cols, tl.sum(total, 0), mask=cols < num_cols)


def sum_strips(partials: Tensor, sums: Tensor) -> None:
    """Launch: sums = the rows of `partials` (num_strips, num_cols) added up, in the dtype of `sums`.

    sums: contiguous, num_cols numbers.
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
    """Return the sizes and the constants of a kernel's tiles.

    The sizes are vectors in a row, then from row to row of each tensor.
    """
    vector = vector_width(dtype.itemsize, num_cols, *pitches)
    constants = {
        "COMPUTE": arithmetic(dtype),
        "VECTOR": vector,
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "num_warps": NUM_WARPS,
    }
    return (num_cols // vector, *[pitch // vector for pitch in pitches]), constants


def _tiles(
    tensors: Sequence[Tensor], num_cols: int, blocks: Callable[[int, int], tuple[int, int]] | None
) -> tuple[Sequence[Tensor], tuple[int, ...], dict[str, Any]]:
    """Return the tensors as rows, and what `_plan` says of them."""
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
    """Launch `kernel` with one program for each tile of BLOCK_M rows and BLOCK_N columns.

    Its parameters are the tensors, the others, num_rows, num_vectors, the pitch of each tensor, and the
    numbers. num_vectors and pitches count vectors of VECTOR elements, which proves their alignment to the
    compiler.

    Args:
        tensors: (..., N), not empty, read as rows; the first has the widest dtype.
        others: passed as they are: what is not read as rows, what is written.
        blocks: (BLOCK_M, BLOCK_N) for N columns of elements of so many bytes; default `block_shape`.
        columns: N, where the first tensor's rows are longer than what a kernel computes of them.
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
    """Launch `kernel` with one program for each strip of rows and block of columns, and add up column sums.

    Its parameters are those of `launch`, with `partials` after the others and rows_per_strip after num_rows.
    `partials` has a row of sums in fp32 (fp64) for each strip; `sums` gets their sum. Both may be None.
    """
    num_cols = tensors[0].shape[-1]
    num_rows = tensors[0].numel() // num_cols
    rows, sizes, tiles = _tiles(tensors, num_cols, blocks)
    block_m, block_n = tiles["BLOCK_M"], tiles["BLOCK_N"]
    num_strips, rows_per_strip = strip_shape(num_rows, num_cols, block_m, block_n)
    partials = None
    if sums is not None:
        partials = sums.new_empty(num_strips, sums.numel(), dtype=compute_dtype(sums.dtype))
    launcher.launch(
        kernel, num_strips * cdiv(num_cols, block_n),
        (*rows, *others, partials, num_rows, rows_per_strip, *sizes, *numbers),
        {**tiles, **constants},
    )  # fmt: skip
    if partials is not None and sums is not None:
        sum_strips(partials, sums)
