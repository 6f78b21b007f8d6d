"""Triton kernels of permutation, permute and unpermute, and their launches.

permutation takes three launches: counts of each expert in blocks of pairs, their sums over the blocks so far,
and the rank of each pair among those of its block. Tensors are tiled in rows of 16-byte accesses: permute and
the backward of unpermute walk pairs and scatter, unpermute walks tokens and gathers. Who scatters must know
the rows without a pair, which are zeros: a launch before writes each pair's number to its row, over memory
that nothing has cleared, and a number there counts if its pair has this row (Briggs and Torczon 1993).
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

BLOCK_PAIRS = 256  # of one program of permutation
STEP = 32  # of them are compared at once with all others
BLOCK_BLOCKS, BLOCK_EXPERTS = 256, 8  # of the sums over blocks
MARKED = 1024  # pairs of one program that writes their numbers to their rows
ZERO_ROWS = 64  # rows that one program looks through for those that nothing maps to
SLOTS = 8  # of a token are in flight at once


@jit
def count_kernel(
    indices, counts, pair_vectors, num_experts,
    PAIR_VECTOR: tl.constexpr, BLOCK: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """Count, in counts (blocks, experts), the pairs of each block that go to each expert."""
    num_pairs = pair_vectors.to(tl.int64) * PAIR_VECTOR
    block = tl.program_id(0).to(tl.int64)
    pairs = block * BLOCK + tl.arange(0, BLOCK)
    experts = tl.load(indices + pairs, mask=pairs < num_pairs, other=-1)
    valid = (experts >= 0) & (experts < num_experts)
    bins = tl.arange(0, BINS)
    found = tl.histogram(tl.where(valid, experts, 0), BINS, mask=valid)
    tl.store(counts + block * num_experts + bins, found, mask=bins < num_experts)


@limits(num_blocks=1 << 23, num_experts=MAX_EXPERTS)
@jit
def sum_blocks_kernel(counts, num_blocks, num_experts, BLOCK_B: tl.constexpr, BLOCK_E: tl.constexpr):
    """Add to each count those of the blocks before it."""
    experts = tl.program_id(0).to(tl.int64) * BLOCK_E + tl.arange(0, BLOCK_E)
    before = tl.zeros([BLOCK_E], tl.int32)
    for start in range(0, num_blocks, BLOCK_B):
        blocks = start + tl.arange(0, BLOCK_B)
        mask = (blocks < num_blocks)[:, None] & (experts < num_experts)[None, :]
        places = counts + blocks[:, None].to(tl.int64) * num_experts + experts[None, :]
        found = tl.load(places, mask=mask, other=0)
        tl.store(places, before[None, :] + tl.cumsum(found, 0), mask=mask)
        before += tl.sum(found, 0)


@jit
def rank_kernel(
    indices, counts, row_of, offsets, pair_vectors, num_experts,
    PAIR_VECTOR: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """Number the row of each pair: after earlier experts, earlier blocks and earlier pairs of its block."""
    num_pairs = pair_vectors.to(tl.int64) * PAIR_VECTOR
    block = tl.program_id(0).to(tl.int64)
    bins = tl.arange(0, BINS)
    here = bins < num_experts
    # Where each expert's rows begin: after those of the experts before (offsets: where they end),
    total = tl.load(counts + (tl.num_programs(0) - 1).to(tl.int64) * num_experts + bins, mask=here, other=0)
    ends = tl.cumsum(total, 0)
    if block == 0:
        tl.store(offsets + bins, ends, mask=here)
    # and, for this block, after those that blocks before have of that expert.
    before = tl.load(counts + (block - 1) * num_experts + bins, mask=here & (block > 0), other=0)
    first = ends - total + before
    local = tl.arange(0, BLOCK)
    pairs = block * BLOCK + local
    experts = tl.load(indices + pairs, mask=pairs < num_pairs, other=-1)
    # Then after the earlier pairs of the block with the same expert: all with all, STEP at a time.
    rank = tl.zeros([BLOCK], tl.int32)
    for start in range(0, BLOCK, STEP):
        others = (start + tl.arange(0, STEP))[:, None]
        place = block * BLOCK + others
        other = tl.load(indices + place, mask=place < num_pairs, other=-1)
        rank += tl.sum(((other == experts[None, :]) & (others < local[None, :])).to(tl.int32), 0)
    valid = (experts >= 0) & (experts < num_experts)
    row = tl.gather(first, tl.where(valid, experts, 0), 0) + rank
    tl.store(row_of + pairs, tl.where(valid, row, -1), mask=pairs < num_pairs)


def pair_vector(num_slots: int) -> int:
    """Neighbouring pairs (T, k) that are read at once, up to 16 bytes, whatever the number of tokens is."""
    return math.gcd(4, num_slots)


def launch_permutation(indices: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    row_of, offsets = empty_like(indices), indices.new_empty(num_experts)
    num_pairs = indices.numel()
    if num_pairs == 0:
        return row_of, offsets.zero_()
    indices = indices.contiguous()
    num_blocks = cdiv(num_pairs, BLOCK_PAIRS)
    counts = indices.new_empty(num_blocks, num_experts)
    bins, vector = max(32, next_power_of_2(num_experts)), pair_vector(indices.shape[-1])
    launcher.launch(
        count_kernel, num_blocks,
        (indices, counts, num_pairs // vector, num_experts),
        {"PAIR_VECTOR": vector, "BLOCK": BLOCK_PAIRS, "BINS": bins, "num_warps": NUM_WARPS},
    )  # fmt: skip
    launcher.launch(
        sum_blocks_kernel, cdiv(num_experts, BLOCK_EXPERTS),
        (counts, num_blocks, num_experts),
        {"BLOCK_B": BLOCK_BLOCKS, "BLOCK_E": BLOCK_EXPERTS, "num_warps": NUM_WARPS},
    )  # fmt: skip
    launcher.launch(
        rank_kernel, num_blocks,
        (indices, counts, row_of, offsets, num_pairs // vector, num_experts),
        {"PAIR_VECTOR": vector, "BLOCK": BLOCK_PAIRS, "STEP": STEP, "BINS": bins, "num_warps": NUM_WARPS},
    )  # fmt: skip
    return row_of, offsets


@jit
def mark_kernel(row_of, pair_of, pair_vectors, num_rows, PAIR_VECTOR: tl.constexpr, BLOCK: tl.constexpr):
    """Write the number of each pair to its row of `pair_of`; rows without a pair keep what was there."""
    num_pairs = pair_vectors.to(tl.int64) * PAIR_VECTOR
    pairs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    rows = tl.load(row_of + pairs, mask=pairs < num_pairs, other=-1)
    tl.store(pair_of + rows, pairs, mask=(rows >= 0) & (rows < num_rows))


@jit
def _unused(rows, row_of, pair_of, num_pairs, num_rows):
    """Return which of `rows` have no pair: no pair that has this row is numbered there, but maybe another."""
    there = rows < num_rows
    pairs = tl.load(pair_of + rows, mask=there, other=-1)
    back = tl.load(row_of + pairs, mask=(pairs >= 0) & (pairs < num_pairs), other=-1)
    return there & (back != rows)


@jit
def zero_unused(
    row_of, pair_of, out, start, num_pairs, num_rows, num_cols,
    ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Write zeros to those of ROWS rows from `start` on that have no pair; mostly there are none."""
    if tl.max(_unused(start + tl.arange(0, ROWS), row_of, pair_of, num_pairs, num_rows).to(tl.int32), 0) > 0:
        zeros = tl.zeros([BLOCK_M, BLOCK_N], out.dtype.element_ty)
        for step in range(0, ROWS, BLOCK_M):
            rows = start + step + tl.arange(0, BLOCK_M)
            unused = _unused(rows, row_of, pair_of, num_pairs, tl.minimum(start + ROWS, num_rows))
            for first in range(0, num_cols, BLOCK_N):
                cols = first + tl.arange(0, BLOCK_N)
                mask = unused[:, None] & (cols < num_cols)[None, :]
                tl.store(out + rows[:, None] * num_cols + cols[None, :], zeros, mask=mask)


@limits(num_vectors=MAX_SIZE)
@jit
def scatter_kernel(
    x, y, row_of, probs, pair_of, out, dprobs, pair_vectors, num_slots, num_rows, num_vectors, x_pitch,
    y_pitch,
    WEIGHTED: tl.constexpr, COMPUTE: tl.constexpr, PAIR_VECTOR: tl.constexpr, VECTOR: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ZERO_ROWS: tl.constexpr,
):  # fmt: skip
    """Write the rows of out for a block of pairs. A row of out is the pair's row of x.

    Where WEIGHTED, that row is multiplied by the pair's probability, and the gradient of the probability,
    dprobs, is the dot product of the pair's rows of x and y. The last programs write rows of zeros.
    """
    num_cols, num_pairs = num_vectors * VECTOR, pair_vectors.to(tl.int64) * PAIR_VECTOR
    num_blocks = tl.cdiv(num_pairs, BLOCK_M)
    block = tl.program_id(0)
    # The last programs write zeros to rows without a pair.
    if block >= num_blocks:
        first_row = (block - num_blocks).to(tl.int64) * ZERO_ROWS
        zero_unused(
            row_of, pair_of, out, first_row, num_pairs, num_rows, num_cols, ZERO_ROWS, BLOCK_M, BLOCK_N
        )
    else:
        # The row each pair of this block goes to, and the token it comes from.
        pairs = block.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        rows = tl.load(row_of + pairs, mask=pairs < num_pairs, other=-1).to(tl.int64)
        inside = (rows >= 0) & (rows < num_rows)
        tokens = pairs // num_slots
        weights = tl.zeros([BLOCK_M], COMPUTE)
        dots = tl.zeros([BLOCK_M, BLOCK_N], COMPUTE)
        if WEIGHTED:
            weights = tl.load(probs + pairs, mask=inside, other=0.0)
        # Move the rows, column block by column block; the products with y on the way.
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
        if WEIGHTED:
            tl.store(dprobs + pairs, tl.sum(dots, 1), mask=pairs < num_pairs)


@limits(num_vectors=MAX_SIZE, num_slots=MAX_EXPERTS)
@jit
def gather_kernel(
    y, row_of, probs, residual, out, num_tokens, num_slots, num_rows, num_vectors, y_pitch,
    WEIGHTED: tl.constexpr, ADDED: tl.constexpr, COMPUTE: tl.constexpr, VECTOR: tl.constexpr,
    SLOTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute a tile of out: sums over the slots, SLOTS of which are loaded at once."""
    num_cols = num_vectors * VECTOR
    column_blocks = tl.cdiv(num_cols, BLOCK_N)
    pid = tl.program_id(0)
    tokens = (pid // column_blocks).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = (pid % column_blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_M, BLOCK_N], COMPUTE)
    # The token's rows of all slots, weighted and added in the order of the slots.
    for first in range(0, num_slots, SLOTS):
        for step in tl.static_range(SLOTS):
            slot = first + step
            pairs = tokens * num_slots + slot
            rows = tl.load(row_of + pairs, mask=(tokens < num_tokens) & (slot < num_slots), other=-1)
            inside = (rows >= 0) & (rows < num_rows)
            mask = inside[:, None] & (cols < num_cols)[None, :]
            places = y + rows[:, None].to(tl.int64) * y_pitch * VECTOR + cols[None, :]
            value = tl.load(places, mask=mask, other=0.0, eviction_policy="evict_first").to(COMPUTE)
            if WEIGHTED:
                value *= tl.load(probs + pairs, mask=inside, other=0.0)[:, None]
            total += value
    mask = (tokens < num_tokens)[:, None] & (cols < num_cols)[None, :]
    places = tokens[:, None] * num_cols + cols[None, :]
    if ADDED:  # to the sum as it would be stored
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


@lru_cache(maxsize=1024)
def _plan_scatter(
    num_cols: int, dtype: torch.dtype, pitch: int, y_pitch: int, num_slots: int, weighted: bool
) -> tuple[tuple[int, ...], dict[str, Any]]:
    """Return the numbers behind num_rows and the constants of `scatter_kernel`."""
    block_m, block_n = block_shape(num_cols, dtype.itemsize, 4)
    vector = vector_width(dtype.itemsize, num_cols, pitch, y_pitch)
    constants = {
        "WEIGHTED": weighted,
        "COMPUTE": arithmetic(dtype),
        "PAIR_VECTOR": pair_vector(num_slots),
        "VECTOR": vector,
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "ZERO_ROWS": ZERO_ROWS,
        "num_warps": NUM_WARPS,
    }
    return (num_cols // vector, pitch // vector, y_pitch // vector), constants


def _scatter(
    x: Tensor,
    row_of: Tensor,
    out: Tensor,
    y: Tensor | None = None,
    probs: Tensor | None = None,
    dprobs: Tensor | None = None,
) -> None:
    """Launch the kernels that write all rows of out, which has at least one."""
    (num_rows, num_cols), num_slots, num_pairs = out.shape, row_of.shape[1], row_of.numel()
    x, pitch = as_rows(x)
    y, y_pitch = (None, pitch) if y is None else as_rows(y)
    row_of, probs = row_of.contiguous(), None if probs is None else probs.contiguous()
    numbers, constants = _plan_scatter(num_cols, x.dtype, pitch, y_pitch, num_slots, y is not None)
    vector = constants["PAIR_VECTOR"]
    pair_vectors = num_pairs // vector
    few = num_pairs < 1 << 31
    pair_of = row_of.new_empty(num_rows) if few else row_of.new_empty(num_rows, dtype=torch.int64)
    launcher.launch(
        mark_kernel, cdiv(num_pairs, MARKED),
        (row_of, pair_of, pair_vectors, num_rows),
        {"PAIR_VECTOR": vector, "BLOCK": MARKED},
    )  # fmt: skip
    launcher.launch(
        scatter_kernel, cdiv(num_pairs, constants["BLOCK_M"]) + cdiv(num_rows, ZERO_ROWS),
        (x, y, row_of, probs, pair_of, out, dprobs, pair_vectors, num_slots, num_rows, *numbers),
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
    """Return blocks of columns, the numbers behind num_rows and the constants of `gather_kernel`."""
    block_m, block_n = block_shape(num_cols, dtype.itemsize, 2)
    vector = vector_width(dtype.itemsize, num_cols, pitch)
    constants = {
        "WEIGHTED": weighted,
        "ADDED": added,
        "COMPUTE": arithmetic(dtype),
        "VECTOR": vector,
        "SLOTS": min(num_slots, SLOTS),
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "num_warps": NUM_WARPS,
    }
    return cdiv(num_cols, block_n), (num_cols // vector, pitch // vector), constants


def _gather(y: Tensor, row_of: Tensor, probs: Tensor | None, residual: Tensor | None, out: Tensor) -> None:
    """Launch the kernel that writes out, which is contiguous."""
    (num_tokens, num_slots), (num_rows, num_cols) = row_of.shape, y.shape
    if out.numel() == 0 or num_slots == 0 or num_rows == 0:
        out.zero_() if residual is None else out.copy_(residual)
        return
    y, pitch = as_rows(y)
    given = row_of.contiguous(), *(None if t is None else t.contiguous() for t in (probs, residual))
    column_blocks, numbers, constants = _plan_gather(
        num_cols, y.dtype, pitch, num_slots, probs is not None, residual is not None
    )
    launcher.launch(
        gather_kernel, cdiv(num_tokens, constants["BLOCK_M"]) * column_blocks,
        (y, *given, out, num_tokens, num_slots, num_rows, *numbers),
        constants,
    )  # fmt: skip


def launch_unpermute(y: Tensor, row_of: Tensor, probs: Tensor | None) -> Tensor:
    out = y.new_empty(row_of.shape[0], y.shape[1])
    _gather(y, row_of, probs, None, out)
    return out


def launch_unpermute_add(y: Tensor, row_of: Tensor, probs: Tensor | None, residual: Tensor) -> Tensor:
    out = y.new_empty(residual.shape)
    _gather(y, row_of, probs, residual, out)
    return out


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
    dprobs = empty_like(probs)
    return launch_unpermute_backward_into(grad, y, row_of, probs, dprobs), dprobs


def launch_unpermute_backward_into(
    grad: Tensor, y: Tensor, row_of: Tensor, probs: Tensor, out: Tensor
) -> Tensor:
    apart = out.is_contiguous() and not overlaps(out, grad, y, row_of, probs)
    dy, dprobs = empty_like(y), out if apart else empty_like(probs)
    if dy.numel() == 0 or probs.numel() == 0:
        out.zero_()
        return dy.zero_()
    _scatter(grad, row_of, dy, y, probs, dprobs)
    if dprobs is not out:
        out.copy_(dprobs)
    return dy
