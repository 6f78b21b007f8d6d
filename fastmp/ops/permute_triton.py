"""Triton kernels of permutation, permute and unpermute, and their launches.

permutation is a stable counting sort in three launches: count the experts of each block of assignments, sum
the counts over the blocks, and rank each assignment within its block. Tensors are tiled in rows of 16-byte
accesses. permute and the backward of unpermute walk assignments and scatter; unpermute walks tokens and
gathers.

Rows without an assignment must become zeros. To find them, a launch before the scatter writes each
assignment's index to its row of an uninitialised table; an entry is valid if its assignment has this row
(sparse set, Briggs and Torczon 1993).
"""

from __future__ import annotations

import math
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from fastmp.ops.core import launcher
from fastmp.ops.core._triton import MAX_EXPERTS, MAX_SIZE, cdiv, jit, limits, next_power_of_2, tl
from fastmp.ops.core.checks import overlaps
from fastmp.ops.core.rowwise import NUM_WARPS, arithmetic, as_rows, empty_like, vector_width

BLOCK_ASSIGNMENTS = 256  # of one program of permutation
STEP = 32  # of these are compared at once with the whole block
BLOCK_BLOCKS, BLOCK_EXPERTS = 256, 8  # of the sums over blocks
MARKED = 1024  # assignments of one program of `mark_kernel`
ZERO_ROWS = 64  # rows that one program checks for rows without an assignment
SLOTS = 8  # of a token are in flight at once


@jit(dynamic="index_vectors", fixed="num_experts")
def count_kernel(
    indices,  # (T, k) int32, the expert of each assignment
    counts,  # (blocks, E) int32, the result
    index_vectors, num_experts,
    INDEX_VECTOR: tl.constexpr, BLOCK: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """Count the assignments of one block to each expert."""
    num_assignments = index_vectors.to(tl.int64) * INDEX_VECTOR
    block = tl.program_id(0).to(tl.int64)
    assignments = block * BLOCK + tl.arange(0, BLOCK)
    experts = tl.load(indices + assignments, mask=assignments < num_assignments, other=-1)
    valid = (experts >= 0) & (experts < num_experts)
    bins = tl.arange(0, BINS)
    found = tl.histogram(tl.where(valid, experts, 0), BINS, mask=valid)
    tl.store(counts + block * num_experts + bins, found, mask=bins < num_experts)


@limits(num_blocks=1 << 23, num_experts=MAX_EXPERTS)
@jit(dynamic="num_blocks", fixed="num_experts")
def sum_blocks_kernel(counts, num_blocks, num_experts, BLOCK_B: tl.constexpr, BLOCK_E: tl.constexpr):
    """Turn counts (blocks, E) into inclusive prefix sums over the blocks; a program has BLOCK_E experts."""
    experts = tl.program_id(0).to(tl.int64) * BLOCK_E + tl.arange(0, BLOCK_E)
    before = tl.zeros([BLOCK_E], tl.int32)
    for start in range(0, num_blocks, BLOCK_B):
        blocks = start + tl.arange(0, BLOCK_B)
        mask = (blocks < num_blocks)[:, None] & (experts < num_experts)[None, :]
        places = counts + blocks[:, None].to(tl.int64) * num_experts + experts[None, :]
        found = tl.load(places, mask=mask, other=0)
        tl.store(places, before[None, :] + tl.cumsum(found, 0), mask=mask)
        before += tl.sum(found, 0)


@jit(dynamic="index_vectors", fixed="num_experts")
def rank_kernel(
    indices,  # (T, k) int32, the expert of each assignment
    counts,  # (blocks, E) int32, inclusive prefix sums over the blocks
    row_of,  # (T, k) int32, the result
    offsets,  # (E,) int32, where each expert's rows end
    index_vectors, num_experts,
    INDEX_VECTOR: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """Compute the rows of one block of assignments; rows are in the order (expert, token, slot)."""
    num_assignments = index_vectors.to(tl.int64) * INDEX_VECTOR
    block = tl.program_id(0).to(tl.int64)
    bins = tl.arange(0, BINS)
    here = bins < num_experts
    # 1. Where each expert's rows begin: after the rows of the experts before it.
    total = tl.load(counts + (tl.num_programs(0) - 1).to(tl.int64) * num_experts + bins, mask=here, other=0)
    ends = tl.cumsum(total, 0)
    if block == 0:
        tl.store(offsets + bins, ends, mask=here)
    # 2. Where this block's rows of each expert begin: after those of earlier blocks.
    before = tl.load(counts + (block - 1) * num_experts + bins, mask=here & (block > 0), other=0)
    first = ends - total + before
    local = tl.arange(0, BLOCK)
    assignments = block * BLOCK + local
    experts = tl.load(indices + assignments, mask=assignments < num_assignments, other=-1)
    # 3. The rank among the block's assignments to the same expert: all against all, STEP at a time.
    rank = tl.zeros([BLOCK], tl.int32)
    for start in range(0, BLOCK, STEP):
        others = (start + tl.arange(0, STEP))[:, None]
        place = block * BLOCK + others
        other = tl.load(indices + place, mask=place < num_assignments, other=-1)
        rank += tl.sum(((other == experts[None, :]) & (others < local[None, :])).to(tl.int32), 0)
    # 4. The row; -1 without an expert.
    valid = (experts >= 0) & (experts < num_experts)
    row = tl.gather(first, tl.where(valid, experts, 0), 0) + rank
    tl.store(row_of + assignments, tl.where(valid, row, -1), mask=assignments < num_assignments)


def index_vector(num_slots: int) -> int:
    """Return how many entries of (T, k) int32 tensors divide any number of tokens: up to 16 bytes."""
    return math.gcd(4, num_slots)


def launch_permutation(indices: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    row_of, offsets = empty_like(indices), indices.new_empty(num_experts)
    num_assignments = indices.numel()
    if num_assignments == 0:
        return row_of, offsets.zero_()
    indices = indices.contiguous()
    num_blocks = cdiv(num_assignments, BLOCK_ASSIGNMENTS)
    counts = indices.new_empty(num_blocks, num_experts)
    bins, vector = max(32, next_power_of_2(num_experts)), index_vector(indices.shape[-1])
    launcher.launch(
        count_kernel, num_blocks,
        (indices, counts, num_assignments // vector, num_experts),
        {"INDEX_VECTOR": vector, "BLOCK": BLOCK_ASSIGNMENTS, "BINS": bins, "num_warps": NUM_WARPS},
    )  # fmt: skip
    launcher.launch(
        sum_blocks_kernel, cdiv(num_experts, BLOCK_EXPERTS),
        (counts, num_blocks, num_experts),
        {"BLOCK_B": BLOCK_BLOCKS, "BLOCK_E": BLOCK_EXPERTS, "num_warps": NUM_WARPS},
    )  # fmt: skip
    launcher.launch(
        rank_kernel, num_blocks,
        (indices, counts, row_of, offsets, num_assignments // vector, num_experts),
        {
            "INDEX_VECTOR": vector, "BLOCK": BLOCK_ASSIGNMENTS, "STEP": STEP, "BINS": bins,
            "num_warps": NUM_WARPS,
        },
    )  # fmt: skip
    return row_of, offsets


@jit(dynamic="index_vectors num_rows")
def mark_kernel(
    row_of, assignment_of, index_vectors, num_rows, INDEX_VECTOR: tl.constexpr, BLOCK: tl.constexpr
):
    """Write the index of each assignment to its row of `assignment_of` (M,); others stay uninitialised."""
    num_assignments = index_vectors.to(tl.int64) * INDEX_VECTOR
    assignments = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    rows = tl.load(row_of + assignments, mask=assignments < num_assignments, other=-1)
    tl.store(assignment_of + rows, assignments, mask=(rows >= 0) & (rows < num_rows))


@jit
def unused_rows(rows, row_of, assignment_of, num_assignments, num_rows):
    """Mark the rows without an assignment: their entry is garbage or names one that has another row."""
    there = rows < num_rows
    assignments = tl.load(assignment_of + rows, mask=there, other=-1)
    back = tl.load(row_of + assignments, mask=(assignments >= 0) & (assignments < num_assignments), other=-1)
    return there & (back != rows)


@jit
def zero_unused(
    row_of, assignment_of, out, start, num_assignments, num_rows, num_cols,
    ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Write zeros to those of ROWS rows from `start` on that have no assignment; mostly there are none."""
    if (
        tl.max(
            unused_rows(start + tl.arange(0, ROWS), row_of, assignment_of, num_assignments, num_rows).to(
                tl.int32
            ),
            0,
        )
        > 0
    ):
        zeros = tl.zeros([BLOCK_M, BLOCK_N], out.dtype.element_ty)
        for step in range(0, ROWS, BLOCK_M):
            rows = start + step + tl.arange(0, BLOCK_M)
            unused = unused_rows(
                rows, row_of, assignment_of, num_assignments, tl.minimum(start + ROWS, num_rows)
            )
            for first in range(0, num_cols, BLOCK_N):
                cols = first + tl.arange(0, BLOCK_N)
                mask = unused[:, None] & (cols < num_cols)[None, :]
                tl.store(out + rows[:, None] * num_cols + cols[None, :], zeros, mask=mask)


@limits(num_vectors=MAX_SIZE)
@jit(dynamic="index_vectors num_rows", fixed="num_slots num_vectors x_pitch y_pitch")
def scatter_kernel(
    x,  # (T, H), rows x_pitch vectors apart
    y,  # (M, H), if WEIGHTED, rows y_pitch vectors apart
    row_of,  # (T, k) int32
    probs,  # (T, k), if WEIGHTED
    assignment_of,  # (M,) integers, from `mark_kernel`
    out,  # (M, H)
    dprobs,  # (T, k), if WEIGHTED
    index_vectors, num_slots, num_rows, num_vectors, x_pitch, y_pitch,
    WEIGHTED: tl.constexpr, COMPUTE: tl.constexpr, INDEX_VECTOR: tl.constexpr, VECTOR: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ZERO_ROWS: tl.constexpr,
):  # fmt: skip
    """Scatter the rows of x of a block of assignments to out. The last programs write rows of zeros.

    With WEIGHTED rows are multiplied by their probability, and the gradient of the probability, dprobs, is
    the dot product of the rows of x and y.
    """
    num_cols, num_assignments = num_vectors * VECTOR, index_vectors.to(tl.int64) * INDEX_VECTOR
    num_blocks = tl.cdiv(num_assignments, BLOCK_M)
    block = tl.program_id(0)
    # 1. The last programs write zeros to rows without an assignment.
    if block >= num_blocks:
        first_row = (block - num_blocks).to(tl.int64) * ZERO_ROWS
        zero_unused(
            row_of,
            assignment_of,
            out,
            first_row,
            num_assignments,
            num_rows,
            num_cols,
            ZERO_ROWS,
            BLOCK_M,
            BLOCK_N,
        )
    else:
        # 2. The destination row and the token of each assignment of this block.
        assignments = block.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        rows = tl.load(row_of + assignments, mask=assignments < num_assignments, other=-1).to(tl.int64)
        inside = (rows >= 0) & (rows < num_rows)
        tokens = assignments // num_slots
        weights = tl.zeros([BLOCK_M], COMPUTE)
        dots = tl.zeros([BLOCK_M, BLOCK_N], COMPUTE)
        if WEIGHTED:
            weights = tl.load(probs + assignments, mask=inside, other=0.0)
        # 3. Move the rows, one block of columns after another; multiply with y on the way.
        for start in range(0, num_cols, BLOCK_N):
            cols = start + tl.arange(0, BLOCK_N)
            mask = inside[:, None] & (cols < num_cols)[None, :]
            value = tl.load(x + tokens[:, None] * x_pitch * VECTOR + cols[None, :], mask=mask, other=0.0)
            if WEIGHTED:
                places = y + rows[:, None] * y_pitch * VECTOR + cols[None, :]
                other = tl.load(places, mask=mask, other=0.0, eviction_policy="evict_first")
                value = value.to(COMPUTE)
                dots += value * other.to(COMPUTE)
                value *= weights[:, None]
            tl.store(out + rows[:, None] * num_cols + cols[None, :], value, mask=mask)
        # 4. The gradient of the probabilities.
        if WEIGHTED:
            tl.store(dprobs + assignments, tl.sum(dots, 1), mask=assignments < num_assignments)


@limits(num_vectors=MAX_SIZE, num_slots=MAX_EXPERTS)
@jit(dynamic="num_tokens num_rows", fixed="num_slots num_vectors y_pitch")
def gather_kernel(
    y,  # (M, H), rows y_pitch vectors apart
    row_of,  # (T, k) int32
    probs,  # (T, k), if WEIGHTED
    residual,  # (T, H), if ADDED
    out,  # (T, H)
    num_tokens, num_slots, num_rows, num_vectors, y_pitch,
    WEIGHTED: tl.constexpr, ADDED: tl.constexpr, COMPUTE: tl.constexpr, VECTOR: tl.constexpr,
    SLOTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute a tile of out: the sum over a token's slots, SLOTS of which are loaded at once."""
    num_cols = num_vectors * VECTOR
    # 1. This program's tokens and columns.
    column_blocks = tl.cdiv(num_cols, BLOCK_N)
    pid = tl.program_id(0)
    tokens = (pid // column_blocks).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = (pid % column_blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_M, BLOCK_N], COMPUTE)
    # 2. The token's rows, weighted and added in the order of the slots.
    for first in range(0, num_slots, SLOTS):
        for step in tl.static_range(SLOTS):
            slot = first + step
            assignments = tokens * num_slots + slot
            rows = tl.load(row_of + assignments, mask=(tokens < num_tokens) & (slot < num_slots), other=-1)
            inside = (rows >= 0) & (rows < num_rows)
            mask = inside[:, None] & (cols < num_cols)[None, :]
            places = y + rows[:, None].to(tl.int64) * y_pitch * VECTOR + cols[None, :]
            value = tl.load(places, mask=mask, other=0.0, eviction_policy="evict_first").to(COMPUTE)
            if WEIGHTED:
                value *= tl.load(probs + assignments, mask=inside, other=0.0)[:, None]
            total += value
    # 3. Add the residual to the sum, rounded as if it were stored.
    mask = (tokens < num_tokens)[:, None] & (cols < num_cols)[None, :]
    places = tokens[:, None] * num_cols + cols[None, :]
    if ADDED:
        total = total.to(out.dtype.element_ty).to(COMPUTE)
        total += tl.load(residual + places, mask=mask, other=0.0).to(COMPUTE)
    tl.store(out + places, total, mask=mask)


@cache
def block_shape(num_cols: int, itemsize: int, accesses: int) -> tuple[int, int]:
    """Choose (BLOCK_M, BLOCK_N): each thread makes `accesses` 16-byte accesses, few columns are padding."""
    per_row = 32 * NUM_WARPS * 16 // itemsize
    block_n = min((2 * per_row, per_row, per_row // 2), key=lambda n: (cdiv(num_cols, n) * n, -n))
    block_n = min(block_n, accesses * per_row, max(16, next_power_of_2(num_cols)))
    return accesses * per_row // block_n, block_n


def row_tiles(num_cols: int, dtype: torch.dtype, accesses: int, *pitches: int) -> tuple[int, dict[str, Any]]:
    """Return elements a vector, and constants of a kernel that moves tiles of rows (see `block_shape`)."""
    block_m, block_n = block_shape(num_cols, dtype.itemsize, accesses)
    vector = vector_width(dtype.itemsize, num_cols, *pitches)
    return vector, {
        "COMPUTE": arithmetic(dtype), "VECTOR": vector, "BLOCK_M": block_m, "BLOCK_N": block_n,
        "num_warps": NUM_WARPS,
    }  # fmt: skip


@lru_cache(maxsize=1024)
def _plan_scatter(
    num_cols: int, dtype: torch.dtype, pitch: int, y_pitch: int, num_slots: int, weighted: bool
) -> tuple[tuple[int, ...], dict[str, Any]]:
    """Return the arguments after `num_rows`, and the constants, of `scatter_kernel`."""
    vector, constants = row_tiles(num_cols, dtype, 4, pitch, y_pitch)
    constants |= {"WEIGHTED": weighted, "INDEX_VECTOR": index_vector(num_slots), "ZERO_ROWS": ZERO_ROWS}
    return (num_cols // vector, pitch // vector, y_pitch // vector), constants


def launch_mark(row_of: Tensor, num_assignments: int, num_rows: int, vector: int) -> Tensor:
    """Launch `mark_kernel` on row_of, contiguous and not empty; return its table (M,)."""
    few = num_assignments < 1 << 31
    assignment_of = row_of.new_empty(num_rows) if few else row_of.new_empty(num_rows, dtype=torch.int64)
    launcher.launch(
        mark_kernel, cdiv(num_assignments, MARKED),
        (row_of, assignment_of, num_assignments // vector, num_rows),
        {"INDEX_VECTOR": vector, "BLOCK": MARKED},
    )  # fmt: skip
    return assignment_of


def _scatter(
    x: Tensor,
    row_of: Tensor,
    out: Tensor,
    y: Tensor | None = None,
    probs: Tensor | None = None,
    dprobs: Tensor | None = None,
) -> None:
    """Launch the kernels that write every row of a non-empty `out`."""
    (num_rows, num_cols), num_slots, num_assignments = out.shape, row_of.shape[1], row_of.numel()
    x, pitch = as_rows(x)
    y, y_pitch = (None, pitch) if y is None else as_rows(y)
    row_of, probs = row_of.contiguous(), None if probs is None else probs.contiguous()
    numbers, constants = _plan_scatter(num_cols, x.dtype, pitch, y_pitch, num_slots, y is not None)
    vector = constants["INDEX_VECTOR"]
    assignment_of = launch_mark(row_of, num_assignments, num_rows, vector)
    launcher.launch(
        scatter_kernel, cdiv(num_assignments, constants["BLOCK_M"]) + cdiv(num_rows, ZERO_ROWS),
        (
            x, y, row_of, probs, assignment_of, out, dprobs, num_assignments // vector, num_slots, num_rows,
            *numbers,
        ),
        constants,
    )  # fmt: skip


def launch(x: Tensor, row_of: Tensor, num_rows: int) -> Tensor:
    out = x.new_empty(num_rows, x.shape[1])
    if row_of.numel() == 0 or out.numel() == 0:
        return out.zero_()
    _scatter(x, row_of, out)
    return out


@lru_cache(maxsize=1024)
def _plan_gather(
    num_cols: int, dtype: torch.dtype, pitch: int, num_slots: int, weighted: bool, added: bool
) -> tuple[int, tuple[int, ...], dict[str, Any]]:
    """Return blocks of columns, the arguments after `num_rows`, and the constants, of `gather_kernel`."""
    vector, constants = row_tiles(num_cols, dtype, 2, pitch)
    constants |= {"WEIGHTED": weighted, "ADDED": added, "SLOTS": min(num_slots, SLOTS)}
    return cdiv(num_cols, constants["BLOCK_N"]), (num_cols // vector, pitch // vector), constants


def _gather(
    y: Tensor, row_of: Tensor, probs: Tensor | None, residual: Tensor | None, out: Tensor | None = None
) -> Tensor:
    """Launch the kernel that writes the contiguous `out`, or a new tensor; return it."""
    (num_tokens, num_slots), (num_rows, num_cols) = row_of.shape, y.shape
    if out is None:
        out = y.new_empty(num_tokens, num_cols)
    if out.numel() == 0 or num_slots == 0 or num_rows == 0:
        return out.zero_() if residual is None else out.copy_(residual)
    y, pitch = as_rows(y)
    column_blocks, numbers, constants = _plan_gather(
        num_cols, y.dtype, pitch, num_slots, probs is not None, residual is not None
    )
    launcher.launch(
        gather_kernel, cdiv(num_tokens, constants["BLOCK_M"]) * column_blocks,
        (
            y, row_of.contiguous(), None if probs is None else probs.contiguous(),
            None if residual is None else residual.contiguous(), out, num_tokens, num_slots, num_rows,
            *numbers,
        ),
        constants,
    )  # fmt: skip
    return out


def launch_unpermute(y: Tensor, row_of: Tensor, probs: Tensor | None) -> Tensor:
    return _gather(y, row_of, probs, None)


def launch_unpermute_add(y: Tensor, row_of: Tensor, probs: Tensor | None, residual: Tensor) -> Tensor:
    return _gather(y, row_of, probs, residual)


def launch_unpermute_into(y: Tensor, row_of: Tensor, probs: Tensor | None, out: Tensor) -> None:
    if out.is_contiguous() and not overlaps(out, y, row_of, probs):
        _gather(y, row_of, probs, None, out)
    else:
        out.copy_(launch_unpermute(y, row_of, probs))


def launch_unpermute_add_into(
    y: Tensor, row_of: Tensor, probs: Tensor | None, residual: Tensor, out: Tensor
) -> None:
    same = residual.data_ptr() == out.data_ptr() and residual.is_contiguous()
    if out.is_contiguous() and not overlaps(out, y, row_of, probs, None if same else residual):
        _gather(y, row_of, probs, residual, out)
    else:
        out.copy_(launch_unpermute_add(y, row_of, probs, residual))


def launch_unpermute_backward(
    grad: Tensor, y: Tensor, row_of: Tensor, probs: Tensor
) -> tuple[Tensor, Tensor]:
    dy, dprobs = empty_like(y), empty_like(probs)
    _ungather(grad, y, row_of, probs, dy, dprobs)
    return dy, dprobs


def launch_unpermute_backward_into(
    grad: Tensor, y: Tensor, row_of: Tensor, probs: Tensor, out: Tensor
) -> Tensor:
    apart = out.is_contiguous() and not overlaps(out, grad, y, row_of, probs)
    dy, dprobs = empty_like(y), out if apart else empty_like(probs)
    _ungather(grad, y, row_of, probs, dy, dprobs)
    if dprobs is not out:
        out.copy_(dprobs)
    return dy


def _ungather(grad: Tensor, y: Tensor, row_of: Tensor, probs: Tensor, dy: Tensor, dprobs: Tensor) -> None:
    """Launch the kernels that write the gradients of `unpermute` to dy and dprobs, both contiguous."""
    if dy.numel() == 0 or probs.numel() == 0:
        dy.zero_()
        dprobs.zero_()
    else:
        _scatter(grad, row_of, dy, y, probs, dprobs)
