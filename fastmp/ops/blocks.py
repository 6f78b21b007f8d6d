"""block_rows: destination of every row when consecutive blocks of rows are moved.

Expert parallelism receives tokens sorted by source rank, then by expert; experts need them sorted by expert.
Block sizes are known on the device only. One launch computes all destinations: each program finds the blocks
of its rows by binary search in the table of block starts, a few kilobytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastmp.ops.core import checks, launcher
from fastmp.ops.core._triton import cdiv, jit, tl
from fastmp.ops.core.registry import register
from fastmp.ops.core.rowwise import NUM_WARPS
from fastmp.profiling import traced

BLOCK = 512  # rows of one program


def reference(starts: Tensor, places: Tensor, num_rows: int) -> Tensor:
    """Return for each row: destination of its block + offset within the block.

    The block of a row is the last one that starts at or before it; rows before the first block belong to it.
    """
    rows = torch.arange(num_rows, dtype=torch.int32, device=starts.device)
    block = torch.searchsorted(starts, rows, right=True, out_int32=True) - 1
    block = block.clamp_(min=0)
    place = places.index_select(0, block)
    moved = place + rows - starts.index_select(0, block)
    return moved.where(place >= 0, -1).unsqueeze(1)


@jit(dynamic="num_rows num_blocks")
def block_rows_kernel(
    starts, places, row_of, num_rows, num_blocks, HALVINGS: tl.constexpr, BLOCK: tl.constexpr
):
    """Compute the destinations of BLOCK rows."""
    # 1. Binary search: the last block with starts[block] <= row, for all rows at once.
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    low = tl.zeros([BLOCK], tl.int32)
    high = low + num_blocks
    for _ in range(HALVINGS):
        middle = (low + high) // 2
        begun = tl.load(starts + middle) <= rows
        low = tl.where(begun, middle, low)
        high = tl.where(begun, high, middle)
    # 2. Destination of the block plus the offset within it; -1 for dropped blocks.
    place = tl.load(places + low)
    moved = place + rows - tl.load(starts + low)
    tl.store(row_of + rows, tl.where(place >= 0, moved, -1).to(tl.int32), mask=rows < num_rows)


def launch(starts: Tensor, places: Tensor, num_rows: int) -> Tensor:
    row_of, num_blocks = starts.new_empty(num_rows, 1), len(starts)
    if num_rows:
        launcher.launch(
            block_rows_kernel, cdiv(num_rows, BLOCK),
            (starts.contiguous(), places.contiguous(), row_of, num_rows, num_blocks),
            {"HALVINGS": num_blocks.bit_length(), "BLOCK": BLOCK, "num_warps": NUM_WARPS},
        )  # fmt: skip
    return row_of


_block_rows = register(
    "block_rows(Tensor starts, Tensor places, SymInt num_rows) -> Tensor",
    contract="starts (N) int32; places (N) int32; 0 <= num_rows <= 2147483647; num_rows <= N * num_rows",
    reference=reference,
    fake=lambda starts, places, num_rows: starts.new_empty(num_rows, 1),
    triton=launch,
)


@traced("fastmp.block_rows")
def block_rows(starts: Tensor, places: Tensor, num_rows: int) -> Tensor:
    """Return the destination of every row when blocks of rows are moved, for `permute` and `unpermute`.

    Args:
        starts: (N,) int32, first row of each block, ascending from 0; a block ends where the next one starts,
            the last one at `num_rows`. Blocks may be empty.
        places: (N,) int32, destination of the first row of each block; negative: the block is dropped.
        num_rows: number of rows of all blocks.

    Returns:
        row_of (num_rows, 1) int32: the destination of each row, or -1. No host-device synchronisation.

    Raises:
        ValueError: starts and places are not int32 vectors of one length, num_rows exceeds int32, or there
            are rows but no block.

    Example:

        starts = torch.tensor([0, 2], dtype=torch.int32)  # rows 0-1, rows 2-4
        places = torch.tensor([3, 0], dtype=torch.int32)  # swap the two blocks
        row_of = fastmp.ops.block_rows(starts, places, num_rows=5)
        assert row_of.flatten().tolist() == [3, 4, 0, 1, 2]
    """
    for name, tensor in (("starts", starts), ("places", places)):
        if tensor.dtype != torch.int32 or tensor.dim() != 1:
            raise ValueError(
                f"block_rows: {name} must be an int32 vector, got {tensor.dtype} {tuple(tensor.shape)}"
            )
    checks.check_shape("block_rows", starts.shape, to=("starts", starts), places=places)
    checks.check_same_device("block_rows", starts=starts, places=places)
    countable = num_rows >= 0 and num_rows < 1 << 31
    checks.require(countable, "block_rows: num_rows must be from 0 to 2147483647, got {}", num_rows)
    some = starts.shape[0] > 0
    checks.require(some or num_rows == 0, "block_rows: there are {} rows, but no block", num_rows)
    return _block_rows(starts, places, num_rows)
