"""Tile configurations of the grouped GEMMs: a few classes by rows per expert, for weight shapes and a GPU.

Pure functions of sizes. The number of rows selects a class only, so all kernels can be compiled beforehand.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch

from fastmp.ops.core._triton import next_power_of_2


@dataclass(frozen=True)
class TileConfig:
    """Tile of a GEMM: block_m x block_n of the result, block_k terms a step; and the launch of a program."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int

    def clamped(self, num_columns: int, num_terms: int) -> TileConfig:
        """Return the same tile, no wider than the matrices."""
        block_n = min(self.block_n, max(32, next_power_of_2(num_columns)))
        return replace(self, block_n=block_n, block_k=min(self.block_k, max(16, next_power_of_2(num_terms))))

    def programs_per_sm(self, itemsize: int, arch: int, gated: bool = False) -> int:
        """Return the occupancy: programs per multiprocessor, by shared memory and 255 registers a thread.

        Triton holds a block of the operands for each stage; for `mma.sync`, which has its operands in
        registers, for one stage less. A program takes 1 KB more.
        """
        columns = 2 * self.block_n if gated else self.block_n
        held = self.num_stages - (self.block_m < 64 or not _has_large_smem(arch))
        smem = held * (self.block_m + columns) * self.block_k * itemsize + (1 << 10)
        return max(1, min(8 // self.num_warps, _shared_memory(arch) // smem))


def _has_large_smem(arch: int) -> bool:
    """Return True for Hopper and data-centre Blackwell, with 228 KB of shared memory."""
    return 90 <= arch < 120


def _shared_memory(arch: int) -> int:
    """Return the bytes of shared memory of a multiprocessor."""
    return (228 if _has_large_smem(arch) else 164 if arch == 80 else 100) << 10


# Upper bounds of rows per expert, on average, of the classes that have a tile of their own in gemm_tiles.
ROW_CLASSES = (16, 32, 64, 127, math.inf)


@cache
def gemm_tiles(
    rows_per_expert: float, num_columns: int, num_terms: int, itemsize: int, arch: int, gated: bool = False
) -> TileConfig:
    """Choose the tile of a grouped GEMM with so many rows per expert; a gated one has two column blocks.

    Half a tile's rows are wasted for each expert, so few rows get low tiles. The widest that 255 registers a
    thread hold, 128 x 256, reads 0.6 times as much as 64 x 256 does for a GEMM of 128 rows and more; one
    to sixteen rows are bound by reading the weights, of which many loads must be in flight.
    """
    if itemsize != 2:  # fp32 and fp64, without tensor cores
        block_m, num_warps = (16, 4) if rows_per_expert <= 32 else (64, 8)
        tile = TileConfig(block_m, 64, 128 // itemsize, num_warps, 2)
    elif rows_per_expert <= 16:
        tile = TileConfig(16, 128, 128 if _has_large_smem(arch) else 64, 4, 4)
    elif not _has_large_smem(arch):
        tile = TileConfig(64, 128, 64, 4, 3) if rows_per_expert <= 64 else TileConfig(128, 128, 64, 8, 3)
    elif rows_per_expert <= 64:
        tile = TileConfig(64, 128, 64, 4, 4)
    else:
        tile = TileConfig(64, 256, 64, 4, 4) if rows_per_expert <= 127 else TileConfig(128, 256, 64, 8, 4)
    return (replace(tile, block_n=tile.block_n // 2) if gated else tile).clamped(num_columns, num_terms)


@cache
def fp8_tiles(rows_per_expert: float, num_columns: int, block: int, gated: bool = False) -> TileConfig:
    """Choose the tile of a grouped FP8 GEMM; a gated one has two column blocks.

    A tile lies in one block of columns, whose scale is then one number, and a step in one block of terms.
    With blocks of 128 the sum of a step needs registers next to the accumulator: 128 columns fill them.
    Tensor cores that apply scales of 32 terms have 128 rows.
    """
    if block == 128 and gated:
        tile = TileConfig(64, 128, 128, 8, 4)
    elif block == 128 and rows_per_expert <= 64:
        tile = TileConfig(64, 128, 128, 4, 4)
    else:
        tile = TileConfig(128, 128, 128, 8, 3 if gated else 4)
    return tile.clamped(num_columns, 1 << 30) if block == 32 else tile


def overlaps_tiles(arch: int, form: str, gated: bool, bias_transposed: bool) -> bool:
    """Return True if a GEMM by TMA loads the next tile while it stores this one (one flattened loop).

    The epilogue then needs its own shared memory next to the operands in flight, and registers next to the
    accumulator. The former fits on architectures with large shared memory. On Hopper the activation of a tile
    of 256 columns leaves no registers. On Blackwell the accumulator is doubled in tensor memory, and
    activations spill to a stack.
    """
    if not _has_large_smem(arch) or bias_transposed:  # Triton 3.9 spills a bias of a transposed GEMM
        return False
    return form == "none" or (gated and arch < 100)


@cache
def wgrad_tiles(num_n: int, num_k: int, itemsize: int, arch: int) -> TileConfig:
    """Choose the tile of a grouped wgrad: num_n x num_k per expert, whose terms are the expert's rows.

    The widest tile reads the least. Three stages leave room for a tile that the TMA unit stores.
    """
    if itemsize != 2:
        tile = TileConfig(64, 64, 128 // itemsize, 4, 2)
    else:
        tile = TileConfig(128, 256, 64, 8, 3) if _has_large_smem(arch) else TileConfig(128, 128, 32, 8, 3)
    tile = replace(tile, block_m=min(tile.block_m, max(16, next_power_of_2(num_n))))
    return tile.clamped(num_k, 1 << 30)


def row_class(num_rows: int, num_experts: int) -> float:
    """Return the class of ROW_CLASSES for so many rows of so many experts."""
    return ROW_CLASSES[bisect_left(ROW_CLASSES, num_rows / (num_experts or 1))]


# Fewest rows per expert, on average, from which CUTLASS computes what `prefers_cutlass` names.
_CUTLASS_ROWS = 128


def prefers_cutlass(num_rows: int, num_experts: int, n: int, k: int, dtype: torch.dtype, arch: int) -> bool:
    """Return True if CUDA C++ should compute a GEMM with an activation, or add a wgrad to a gradient.

    On an H200 CUTLASS's kernel with a gated activation took 0.58 of Triton's time for 2,048 rows an expert,
    0.68 for 2,048 narrow ones and 0.88 for 256; adding a wgrad in fp32 took 0.84 to 1.03. Both are for bf16
    and fp16, with rows of a multiple of 16 bytes. Other grouped GEMMs were as fast in Triton. Since then no
    tensor map is rewritten at each expert, which is not measured.
    """
    aligned = dtype in (torch.bfloat16, torch.float16) and n % 8 == 0 and k % 8 == 0
    return arch == 90 and aligned and num_rows >= _CUTLASS_ROWS * num_experts


# Tiles of 128 x 256 that every GEMM of a loop must have: about two for each multiprocessor of an H200.
_TILES_OF_A_LOOP = 256


def grouped_mm_choice(sizes: Sequence[int], n: int, k: int, dtype: torch.dtype, arch: int) -> str:
    """Choose between one grouped kernel ("grouped") and a loop of one torch GEMM per expert ("loop").

    A loop launches a kernel for each expert, so every GEMM must fill the GPU: it is for few large experts.
    In float32 and float64, which the Triton kernels do without tensor cores, torch's kernel is faster. In 16
    bits one grouped kernel took 0.95 to 1.01 of a loop's time on an H200, so Hopper and later never loop;
    GPUs before it are not measured, and loop. On a CPU grouped_mm is a loop by itself.

    Args:
        sizes: rows of each expert.
        n, k: of the weights (E, n, k); their order does not matter.
        arch: compute capability as one number (90 is 9.0), 0 for a CPU.

    Example:
        grouped_mm_choice([8192] * 8, 14336, 4096, torch.bfloat16, arch=80)  # "loop": few large experts
        grouped_mm_choice([512] * 128, 1536, 4096, torch.bfloat16, arch=80)  # "grouped"
    """
    there = [size for size in sizes if size > 0]
    if not there or arch == 0 or (arch >= 90 and dtype.itemsize == 2):
        return "grouped"
    tiles = -(-min(there) // 128) * min(-(-n // 256), -(-k // 256))
    return "loop" if tiles >= _TILES_OF_A_LOOP else "grouped"
