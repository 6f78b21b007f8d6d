"""block_rows: where the rows of blocks go that lie one behind the other, each block to a place of its own.

What arrives from other ranks is sorted by source, then by expert; experts want it by expert. How many rows a
block has is known on the device. One launch gives every row its place: a program looks up the blocks of its
rows by halving, in a table that is a few kilobytes.
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
    """Add to each row how far its block, the last one that starts there or before, is moved.

    Rows before the first block count as rows of that block.
    """
    rows = torch.arange(num_rows, dtype=torch.int32, device=starts.device)
    block = torch.searchsorted(starts, rows, right=True, out_int32=True) - 1
    block = block.clamp_(min=0)
    place = places.index_select(0, block)
    moved = place + rows - starts.index_select(0, block)
    return moved.where(place >= 0, -1).unsqueeze(1)


@jit
def block_rows_kernel(
    starts, places, row_of, num_rows, num_blocks, HALVINGS: tl.constexpr, BLOCK: tl.constexpr
):
    """Find for each row the block with starts[block] <= row < starts[block + 1], and where that moves it."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    low = tl.zeros([BLOCK], tl.int32)
    high = low + num_blocks
    for _ in range(HALVINGS):
        middle = (low + high) // 2
        begun = tl.load(starts + middle) <= rows
        low = tl.where(begun, middle, low)
        high = tl.where(begun, high, middle)
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
    reference=reference,
    fake=lambda starts, places, num_rows: starts.new_empty(num_rows, 1),
    triton=launch,
)


@traced("fastmp.block_rows")
def block_rows(starts: Tensor, places: Tensor, num_rows: int) -> Tensor:
    """Number the places of rows that move in blocks, for `permute` and `unpermute`.

    Args:
        starts: (N,) int32, the first row of each block, ascending from 0; a block ends where the next one
            starts, the last one at `num_rows`. Blocks may be empty.
        places: (N,) int32, where the first row of each block goes; below 0: its rows go nowhere.
        num_rows: of all blocks.

    Returns:
        row_of (num_rows, 1) int32, the place of each row or -1. The host does not wait for the device.

    Raises:
        ValueError: starts or places are no int32 vectors of one length, without a block there are rows, or
            int32 cannot number them.
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
