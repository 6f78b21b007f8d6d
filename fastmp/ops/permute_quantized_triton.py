"""Triton kernel of permute with FP8 rows, and its launch.

A program reads a tile of tokens once, quantises it, and writes it to the rows of every slot. Tokens that are
FP8 already keep their numbers and scales.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastmp.ops import quantize as quantizers
from fastmp.ops.core import fp8, launcher
from fastmp.ops.core._triton import MAX_EXPERTS, MAX_SIZE, cdiv, jit, limits, tl
from fastmp.ops.core.fp8 import group_tile, quantize_tile, store_scales
from fastmp.ops.core.rowwise import NUM_WARPS, as_rows, vector_width
from fastmp.ops.permute_triton import ZERO_ROWS, index_vector, launch_mark, unused_rows, zero_unused


@limits(num_vectors=MAX_SIZE, num_slots=MAX_EXPERTS)
@jit(dynamic="num_tokens num_rows", fixed="num_slots num_vectors x_pitch scale_row scale_pitch")
def permute_quantized_kernel(
    x,  # (T, H), rows x_pitch vectors apart; bytes if GIVEN
    scales,  # (T, H / GROUP), any strides, if GIVEN
    row_of,  # (T, k) int32
    assignment_of,  # (M,) integers, from `mark_kernel`
    q,  # (M, H) bytes
    s,  # (M, H / GROUP), M-major
    num_tokens, num_slots, num_rows, num_vectors, x_pitch, scale_row, scale_pitch,
    GIVEN: tl.constexpr, GROUP: tl.constexpr, E5M2: tl.constexpr, NATIVE: tl.constexpr, VECTOR: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ZERO_ROWS: tl.constexpr,
):  # fmt: skip
    """Write one tile (BLOCK_M, BLOCK_N) of tokens to their rows. The last programs write rows of zeros."""
    # 1. Locate the tile, which holds whole groups.
    num_cols, tokens, first, cols, mask = group_tile(num_tokens, num_vectors, VECTOR, GROUP, BLOCK_M, BLOCK_N)
    wide_tokens = tl.cast(num_tokens, tl.int64)
    num_tiles = tl.cdiv(wide_tokens, BLOCK_M) * tl.cdiv(num_cols, BLOCK_N)
    pid = tl.program_id(0)
    if pid >= num_tiles:
        # 2. Rows without an assignment: zeros, whose scales are one.
        start = (pid - num_tiles) * ZERO_ROWS
        num_assignments = wide_tokens * num_slots
        zero_unused(
            row_of, assignment_of, q, start, num_assignments, num_rows, num_cols, ZERO_ROWS, BLOCK_M, BLOCK_N
        )
        rows = start + tl.arange(0, ZERO_ROWS)
        rows = tl.where(unused_rows(rows, row_of, assignment_of, num_assignments, num_rows), rows, num_rows)
        ones = tl.full([ZERO_ROWS, 1], 1 if GROUP == 128 else 127, s.dtype.element_ty)
        for column in range(0, num_cols, GROUP):
            store_scales(s, ones, rows, column, num_rows, num_cols, GROUP)
    else:
        # 3. Load the tile once; quantise it, or load its scales.
        values = tl.load(x + tokens[:, None] * x_pitch * VECTOR + cols[None, :], mask=mask, other=0)
        if GIVEN:
            groups = (first // GROUP + tl.arange(0, BLOCK_N // GROUP)).to(tl.int64)
            live = (tokens < num_tokens)[:, None] & (groups * GROUP < num_cols)[None, :]
            tile_scales = tl.load(
                scales + tokens[:, None] * scale_row + groups[None, :] * scale_pitch, mask=live, other=0
            )
        else:
            values, tile_scales = quantize_tile(values.to(tl.float32), GROUP, E5M2, NATIVE)
        # 4. Store it to the row of each slot; dropped assignments count as rows beyond the last.
        for slot in range(0, num_slots):
            rows = tl.load(row_of + tokens * num_slots + slot, mask=tokens < num_tokens, other=-1).to(
                tl.int64
            )
            inside = (rows >= 0) & (rows < num_rows)
            tl.store(q + rows[:, None] * num_cols + cols[None, :], values, mask=inside[:, None] & mask)
            rows = tl.where(inside, rows, num_rows)
            store_scales(s, tile_scales, rows, first, num_rows, num_cols, GROUP)


def launch_quantized(
    x: Tensor, scales: Tensor | None, row_of: Tensor, num_rows: int, block: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    num_tokens, num_cols = x.shape
    fp8.check_multiple("permute_quantized", "H", num_cols, block)
    q, s = fp8.empty_rows(x, (num_rows, num_cols), block, dtype)
    bytes_of_q, stored = q.view(torch.uint8), fp8.scale_bytes(s)
    if q.numel() == 0 or row_of.numel() == 0:
        bytes_of_q.zero_(), stored.fill_(1 if block == 128 else 127)
        return q, s
    row_of = row_of.contiguous()
    given, pitch = as_rows(x if scales is None else x.view(torch.uint8))
    vector = vector_width(given.element_size(), num_cols, pitch)
    block_m, block_n = quantizers.block_shape(num_cols, given.element_size())
    tiles = cdiv(num_tokens, block_m) * cdiv(num_cols, block_n)
    strides, num_slots = (0, 0) if scales is None else scales.stride(), row_of.shape[1]
    marked = launch_mark(row_of, row_of.numel(), num_rows, index_vector(num_slots))
    launcher.launch(
        permute_quantized_kernel, tiles + cdiv(num_rows, ZERO_ROWS),
        (given, None if scales is None else fp8.scale_bytes(scales), row_of, marked,
         bytes_of_q, stored, num_tokens, num_slots, num_rows, num_cols // vector, pitch // vector,
         *strides),
        {"GIVEN": scales is not None, "GROUP": block, "E5M2": dtype != fp8.E4M3,
         "NATIVE": fp8.casts_natively(x), "VECTOR": vector, "BLOCK_M": block_m, "BLOCK_N": block_n,
         "ZERO_ROWS": ZERO_ROWS, "num_warps": NUM_WARPS},
    )  # fmt: skip
    return q, s
