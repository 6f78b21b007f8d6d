"""Tiles of the grouped products: a few classes by rows an expert, for the shapes of weights and a GPU.

They are pure functions of sizes. Counts choose a class only, so that kernels are compiled beforehand for all.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, replace
from functools import cache

from fastmp.ops.core._triton import next_power_of_2


@dataclass(frozen=True)
class Blocks:
    """Sizes of a tile: `rows` and `columns` of the result, `terms` at a time; and how a program runs."""

    rows: int
    columns: int
    terms: int
    num_warps: int
    num_stages: int

    def fitting(self, num_columns: int, num_terms: int) -> Blocks:
        """Return the same, no wider than the matrices."""
        columns = min(self.columns, max(32, next_power_of_2(num_columns)))
        return replace(self, columns=columns, terms=min(self.terms, max(16, next_power_of_2(num_terms))))

    def programs_each(self, itemsize: int, arch: int, pair: bool = False) -> int:
        """Count the programs that a multiprocessor can hold, by shared memory and 255 registers a thread.

        Triton holds a block of the operands for each stage; for `mma.sync`, which has its operands in
        registers, for one stage less. A program takes 1 KB more.
        """
        columns = 2 * self.columns if pair else self.columns
        held = self.num_stages - (self.rows < 64 or not _large(arch))
        shared = held * (self.rows + columns) * self.terms * itemsize + (1 << 10)
        return max(1, min(8 // self.num_warps, _shared_memory(arch) // shared))


def _large(arch: int) -> bool:
    """Say whether it has the shared memory of Hopper and of the Blackwell of data centres."""
    return 90 <= arch < 120


def _shared_memory(arch: int) -> int:
    """Return the bytes of shared memory of a multiprocessor."""
    return (228 if _large(arch) else 164 if arch == 80 else 100) << 10


# The most rows an expert, on average, of each class that has a tile of its own in product_blocks.
ROWS_EACH = (16, 32, 64, 127, math.inf)


@cache
def product_blocks(
    rows_each: float, num_columns: int, num_terms: int, itemsize: int, arch: int, pair: bool = False
) -> Blocks:
    """Choose the tile of a product with `rows_each` rows an expert; a `pair` has two blocks of its columns.

    Half a tile's rows are wasted for each expert, so few rows get low tiles. The widest that 255 registers a
    thread hold, 128 x 256, reads 0.6 times as much as 64 x 256 does for a product of 128 rows and more; one
    to sixteen rows are bound by reading the weights, of which much must be under way.
    """
    if itemsize != 2:  # products without tensor cores, in fp32 or fp64
        rows, num_warps = (16, 4) if rows_each <= 32 else (64, 8)
        blocks = Blocks(rows, 64, 128 // itemsize, num_warps, 2)
    elif rows_each <= 16:
        blocks = Blocks(16, 128, 128, 4, 4) if _large(arch) else Blocks(16, 128, 64, 4, 4)
    elif not _large(arch):
        blocks = Blocks(64, 128, 64, 4, 3) if rows_each <= 64 else Blocks(128, 128, 64, 8, 3)
    elif rows_each <= 64:
        blocks = Blocks(64, 128, 64, 4, 4)
    else:
        blocks = Blocks(64, 256, 64, 4, 4) if rows_each <= 127 else Blocks(128, 256, 64, 8, 4)
    return (replace(blocks, columns=blocks.columns // 2) if pair else blocks).fitting(num_columns, num_terms)


def overlaps_tiles(arch: int, form: str, gated: bool, bias_transposed: bool) -> bool:
    """Return True if a product by TMA loads the next tile while it stores this one (one flattened loop).

    The epilogue then needs shared memory of its own beside the operands in flight, and registers beside the
    accumulator. The former fits where `_large` does. On Hopper the activation of a tile of 256 columns leaves
    no registers. On Blackwell the accumulator is doubled in tensor memory, and activations need a stack.
    """
    if not _large(arch) or bias_transposed:  # with Triton 3.9, a bias of a transposed product takes a stack
        return False
    return form == "none" or (gated and arch < 100)


# The same of wgrad_blocks.
WGRAD_ROWS_EACH = (1024, math.inf)


@cache
def wgrad_blocks(rows_each: float, num_n: int, num_k: int, itemsize: int, arch: int) -> Blocks:
    """Choose the tile of a weight's gradient: its rows, its columns, and rows of the operands at a time.

    Few rows an expert are bound by adding to the gradient: there one of two programs on a multiprocessor adds
    while the other multiplies. Many are bound by multiplying, for which the widest tile reads the least.
    """
    if itemsize != 2:
        blocks = Blocks(64, 64, 128 // itemsize, 4, 2)
    elif not _large(arch):
        blocks = Blocks(128, 128, 32, 8, 3)
    else:
        blocks = Blocks(128, 128, 64, 8, 3) if rows_each <= 1024 else Blocks(128, 256, 64, 8, 3)
    return replace(blocks, rows=min(blocks.rows, max(16, next_power_of_2(num_n)))).fitting(num_k, 1 << 30)


def row_class(classes: tuple[float, ...], num_rows: int, num_experts: int) -> float:
    """Find the class, in ROWS_EACH or WGRAD_ROWS_EACH, of so many rows of so many experts."""
    return classes[bisect_left(classes, num_rows / max(num_experts, 1))]
