"""Triton kernels of the token exchange over symmetric memory, and their launches; see `exchange`.

A peer's buffer lies `peer_offsets` bytes, a multiple of 16, from this rank's own. Added to the address of an
element of the own buffer, that gives the peer's element with the same alignment, so rows move in 16-byte
accesses. The half in use follows from the epoch of the latest exchange, which the barrier alone advances.

The barrier is one program. It stores the new epoch into its slot of every rank's signal pad (release, at
system scope), which makes the writes of earlier launches visible, and polls its own signal pad (acquire)
until all ranks have stored theirs. After `timeout_ms` milliseconds it traps, and the next CUDA call of the
host fails. Triton's interpreter has no clock, so interpreted barriers have no timeout.

Put walks assignments, as `permute_triton.scatter_kernel` does; get walks tokens, as `gather_kernel` does.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fastmp.ops.core import launcher
from fastmp.ops.core._triton import (
    INTERPRETED,
    MAX_EXPERTS,
    MAX_SIZE,
    cdiv,
    jit,
    limits,
    next_power_of_2,
    tl,
)
from fastmp.ops.core.rowwise import NUM_WARPS, as_rows, empty_like, vector_width
from fastmp.ops.permute_triton import BLOCK_ASSIGNMENTS, SLOTS, index_vector, row_tiles

COPIED = 4  # 16-byte accesses of a thread that copies rows


@jit
def _elements(peer_offsets, INT4: tl.constexpr):
    """Convert offsets from bytes to elements, INT4 of which have 16 bytes."""
    return (peer_offsets >> 4) * INT4


@jit
def _barrier(epochs, peer_offsets, rank, num_ranks, timeout_ms, RANKS: tl.constexpr, TIMED: tl.constexpr):
    """Signal all ranks, wait for all of them, and advance the epoch."""
    ranks = tl.arange(0, RANKS)
    others = ranks < num_ranks
    # 1. The epoch of this exchange: one more than the latest.
    epoch = tl.load(epochs + num_ranks) + 1
    # 2. Signal: store the epoch into this rank's slot at every rank.
    theirs = epochs + rank + _elements(tl.load(peer_offsets + ranks, mask=others, other=0), 4)
    zeros = tl.zeros([RANKS], tl.int32)
    tl.atomic_xchg(theirs, zeros + epoch, mask=others, sem="release", scope="sys")
    if TIMED:
        deadline = tl.extra.cuda.globaltimer() + timeout_ms.to(tl.int64) * 1000000
    # 3. Wait: poll the own signal pad until no rank is behind. Differences may wrap.
    behind = 1
    while behind > 0:
        reached = tl.atomic_add(epochs + ranks, zeros, mask=others, sem="acquire", scope="sys")
        behind = tl.max((others & (reached - epoch < 0)).to(tl.int32), 0)
        if TIMED:
            # Threads read their own clocks: nothing below may make them wait for each other.
            if (behind > 0) & (tl.extra.cuda.globaltimer() > deadline):
                tl.inline_asm_elementwise(
                    "trap; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
                )
    # 4. The exchange is now the latest one.
    tl.store(epochs + num_ranks, epoch)


@jit(dynamic="rank timeout_ms", fixed="num_ranks")
def barrier_kernel(
    epochs,  # (R + 1,) int32: the epoch of each rank, and this rank's latest
    peer_offsets,  # (D, P) int64, bytes
    rank, num_ranks, timeout_ms, RANKS: tl.constexpr, TIMED: tl.constexpr,
):  # fmt: skip
    """Wait for all other ranks."""
    _barrier(epochs, peer_offsets, rank, num_ranks, timeout_ms, RANKS, TIMED)


@limits(num_ranks=MAX_EXPERTS, rank=MAX_EXPERTS, width=MAX_EXPERTS)
@jit(dynamic="rank timeout_ms", fixed="num_ranks width")
def counts_kernel(
    own,  # (E,) int32
    epochs,  # (R + 1,) int32
    counts,  # (2, R, E) int32, symmetric
    peer_offsets,  # (D, P) int64, bytes
    matrix,  # (R, E) int32, the result
    rank, num_ranks, width, timeout_ms,
    RANKS: tl.constexpr, TIMED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """All-gather a row of counts into `matrix`; one program."""
    # 1. Put this rank's row (E,) into every rank's matrix, in the half of the next epoch.
    half = counts + ((tl.load(epochs + num_ranks) + 1) & 1) * num_ranks * width
    for start in range(0, width, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        value = tl.load(own + cols, mask=cols < width)
        for other in range(0, num_ranks):
            theirs = half + rank * width + _elements(tl.load(peer_offsets + other), 4)
            tl.store(theirs + cols, value, mask=cols < width)
    # 2. All threads have written before one thread signals, and read only after it has waited.
    tl.debug_barrier()
    _barrier(epochs, peer_offsets, rank, num_ranks, timeout_ms, RANKS, TIMED)
    tl.debug_barrier()
    # 3. Copy the matrix out of the symmetric buffer.
    for start in range(0, num_ranks * width, BLOCK):
        places = start + tl.arange(0, BLOCK)
        mask = places < num_ranks * width
        tl.store(matrix + places, tl.load(half + places, mask=mask), mask=mask)


@jit
def _expert_rows(ends, experts, mask):
    """Return where the rows of experts begin, and how many there are, from where each expert's rows end."""
    begins = tl.load(ends + experts - 1, mask=mask & (experts > 0), other=0)
    return begins, tl.load(ends + experts, mask=mask, other=0) - begins


@limits(
    num_ranks=MAX_EXPERTS,
    rank=MAX_EXPERTS,
    num_peers=MAX_EXPERTS,
    num_local=MAX_EXPERTS,
    num_experts=MAX_EXPERTS,
)
@jit(dynamic="index_vectors rank", fixed="num_ranks num_peers num_local capacity")
def places_kernel(
    row_of,  # (T, k) int32, the row of each assignment on this rank
    indices,  # (T, k) int32, the expert of each assignment
    matrix,  # (R, E) int32, where each expert's rows end on each rank
    where,  # (T, k) int32, the result
    offsets,  # (E/P,) int32, where the rows of this rank's experts end
    dropped,  # () int32
    index_vectors, rank, num_ranks, num_peers, num_local, capacity,
    INDEX_VECTOR: tl.constexpr, BLOCK: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """Map a block of assignments to rows at their receivers. Every program reads the whole matrix."""
    num_experts = num_peers * num_local
    num_assignments = index_vectors.to(tl.int64) * INDEX_VECTOR
    bins = tl.arange(0, BINS)
    here = bins < num_experts
    # 1. Rows of each expert: of all ranks, of the ranks before this one, and of this rank.
    own_begins, own = _expert_rows(matrix + rank * num_experts, bins, here)
    total, before = tl.zeros([BINS], tl.int32), tl.zeros([BINS], tl.int32)
    for source in range(0, num_ranks):
        _, counts = _expert_rows(matrix + source * num_experts, bins, here)
        total += counts
        before += tl.where(source < rank, counts, 0)
    # 2. Where an expert's rows begin at its rank, whose first expert has row 0; and this rank's among them.
    begins = tl.cumsum(total, 0) - total
    begins -= tl.gather(begins, bins // num_local * num_local, 0)
    first = begins + before
    # 3. The first program stores the ends of this rank's own experts, and counts what the capacity drops.
    if tl.program_id(0) == 0:
        mine = here & (bins // num_local == rank % num_peers)
        ends = tl.minimum(tl.maximum(begins + total, 0), capacity)
        tl.store(offsets + bins % num_local, ends, mask=mine)
        beyond = tl.minimum(tl.maximum(first + own - capacity, 0), own)
        tl.store(dropped, tl.sum(tl.where(here, beyond, 0), 0))
    # 4. Shift each assignment's row by its expert's; beyond the capacity it is dropped (-1).
    moved = first - own_begins
    assignments = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = assignments < num_assignments
    experts = tl.load(indices + assignments, mask=mask, other=-1)
    rows = tl.load(row_of + assignments, mask=mask, other=-1)
    valid = (rows >= 0) & (experts >= 0) & (experts < num_experts)
    experts = tl.where(valid, experts, 0)
    rows += tl.gather(moved, experts, 0)
    kept = valid & (rows >= 0) & (rows < capacity)
    tl.store(where + assignments, tl.where(kept, experts // num_local * capacity + rows, -1), mask=mask)


@jit
def _place(numbers, half, capacity, pitch):
    """Return where the rows named p C + row begin in the own buffer, in elements."""
    return (half.to(tl.int64) * capacity + numbers % capacity) * pitch


@limits(num_vectors=MAX_SIZE, row_pitch=MAX_SIZE, num_places=(1 << 31) - 1)
@jit(dynamic="index_vectors", fixed="num_slots num_ranks num_peers capacity num_vectors x_pitch row_pitch")
def put_kernel(
    x,  # (T, W), rows x_pitch vectors apart
    where,  # (T, k) int32: p C + row, or -1
    probs,  # (T, k), if WEIGHTED
    y,  # (T, k, W), if DOT
    epochs,  # (R + 1,) int32
    rows,  # (2, C, H), symmetric
    peer_offsets,  # (D, P) int64, bytes
    dprobs,  # (T, k), if DOT
    index_vectors, num_slots, num_ranks, num_peers, capacity, num_vectors, x_pitch, row_pitch,
    COPIES: tl.constexpr, WEIGHTED: tl.constexpr, DOT: tl.constexpr, COMPUTE: tl.constexpr,
    INDEX_VECTOR: tl.constexpr, VECTOR: tl.constexpr, INT4: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Put the rows of a block of assignments into the buffers of the COPIES ranks of each expert.

    With WEIGHTED rows of x are multiplied by their probability; with DOT the gradient of the probability,
    dprobs, is the dot product of the rows of x and y.
    """
    num_cols, num_assignments = num_vectors * VECTOR, index_vectors.to(tl.int64) * INDEX_VECTOR
    # 1. The destination rows of BLOCK_M assignments; dropped ones are masked.
    assignments = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    numbers = tl.load(where + assignments, mask=assignments < num_assignments, other=-1)
    num_places = num_peers * capacity
    inside = (numbers >= 0) & (numbers < num_places)
    numbers = tl.where(inside, numbers, 0)
    # 2. Their addresses: the same place in this rank's buffer (next epoch's half), plus the peer's offset.
    first = _place(numbers, (tl.load(epochs + num_ranks) + 1) & 1, capacity, row_pitch * VECTOR)
    table = peer_offsets + numbers // capacity
    nearest = first + _elements(tl.load(table, mask=inside, other=0), INT4)
    tokens = assignments // num_slots
    weights = tl.zeros([BLOCK_M], COMPUTE)
    dots = tl.zeros([BLOCK_M, BLOCK_N], COMPUTE)
    if WEIGHTED:
        weights = tl.load(probs + assignments, mask=inside, other=0.0)
    # 3. Move the rows, one block of columns after another.
    for start in range(0, num_cols, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        mask = inside[:, None] & (cols < num_cols)[None, :]
        value = tl.load(x + tokens[:, None] * x_pitch * VECTOR + cols[None, :], mask=mask, other=0.0)
        if WEIGHTED:
            value = value.to(COMPUTE)
            if DOT:
                places = y + assignments[:, None] * num_cols + cols[None, :]
                other = tl.load(places, mask=mask, other=0.0, eviction_policy="evict_first")
                dots += value * other.to(COMPUTE)
            value *= weights[:, None]
        tl.store(rows + nearest[:, None] + cols[None, :], value, mask=mask)
        for copy in tl.static_range(1, COPIES):
            further = first + _elements(tl.load(table + copy * num_peers, mask=inside, other=0), INT4)
            tl.store(rows + further[:, None] + cols[None, :], value, mask=mask)
    # 4. The gradient of the probabilities.
    if DOT:
        tl.store(dprobs + assignments, tl.sum(dots, 1), mask=assignments < num_assignments)


@limits(num_vectors=MAX_SIZE, num_slots=MAX_EXPERTS, num_places=(1 << 31) - 1)
@jit(dynamic="num_tokens", fixed="num_slots num_ranks num_peers capacity num_vectors")
def get_kernel(
    rows,  # (2, C, H), symmetric
    epochs,  # (R + 1,) int32
    peer_offsets,  # (D, P) int64, bytes
    where,  # (T, k) int32: p C + row, or -1
    probs,  # (T, k), if WEIGHTED
    out,  # (T, H)
    y,  # (T, k, H), if KEEP
    num_tokens, num_slots, num_ranks, num_peers, capacity, num_vectors,
    COPIES: tl.constexpr, WEIGHTED: tl.constexpr, KEEP: tl.constexpr, COMPUTE: tl.constexpr,
    VECTOR: tl.constexpr, INT4: tl.constexpr, SLOTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute a tile of out: the sum over a token's slots, SLOTS of which are loaded at once."""
    num_cols = num_vectors * VECTOR
    # 1. This program's tokens and columns, and the half of the latest exchange.
    column_blocks = tl.cdiv(num_cols, BLOCK_N)
    pid = tl.program_id(0)
    tokens = (pid // column_blocks).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = (pid % column_blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
    half = tl.load(epochs + num_ranks) & 1
    num_places = num_peers * capacity
    total = tl.zeros([BLOCK_M, BLOCK_N], COMPUTE)
    for begin in range(0, num_slots, SLOTS):
        for step in tl.static_range(SLOTS):
            # 2. The row of each token's assignment, at the peer.
            slot = begin + step
            assignments = tokens * num_slots + slot
            there = (tokens < num_tokens) & (slot < num_slots)
            numbers = tl.load(where + assignments, mask=there, other=-1)
            inside = (numbers >= 0) & (numbers < num_places)
            numbers = tl.where(inside, numbers, 0)
            mask = inside[:, None] & (cols < num_cols)[None, :]
            first = _place(numbers, half, capacity, num_cols)
            table = peer_offsets + numbers // capacity
            place = first + _elements(tl.load(table, mask=inside, other=0), INT4)
            value = tl.load(rows + place[:, None] + cols[None, :], mask=mask, other=0.0)
            # 3. Sum over the COPIES ranks that hold parts of the expert; rounded as if it were stored.
            if COPIES > 1:
                whole = value.to(COMPUTE)
                for copy in tl.static_range(1, COPIES):
                    place = first + _elements(tl.load(table + copy * num_peers, mask=inside, other=0), INT4)
                    part = tl.load(rows + place[:, None] + cols[None, :], mask=mask, other=0.0)
                    whole += part.to(COMPUTE)
                value = whole.to(rows.dtype.element_ty)
            if KEEP:
                mask = there[:, None] & (cols < num_cols)[None, :]
                tl.store(y + assignments[:, None] * num_cols + cols[None, :], value, mask=mask)
            # 4. Weigh, and add in the order of the slots.
            value = value.to(COMPUTE)
            if WEIGHTED:
                value *= tl.load(probs + assignments, mask=inside, other=0.0)[:, None]
            total += value
    mask = (tokens < num_tokens)[:, None] & (cols < num_cols)[None, :]
    tl.store(out + tokens[:, None] * num_cols + cols[None, :], total, mask=mask)


@limits(num_vectors=MAX_SIZE, row_pitch=MAX_SIZE, num_local=MAX_EXPERTS)
@jit(fixed="num_local num_ranks capacity num_vectors row_pitch")
def copy_kernel(
    source,  # (2, C, H) if TAKE, else (C, H)
    offsets,  # (E/P,) int32, the last of which is the number of rows
    epochs,  # (R + 1,) int32
    out,  # (C, W) if TAKE, else (2, C, H)
    num_local, num_ranks, capacity, num_vectors, row_pitch,
    TAKE: tl.constexpr, NARROW: tl.constexpr, VECTOR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy rows out of the half of the latest exchange, and zeros after them, or into the next half.

    Only rows that are taken may be NARROW: W of H elements, row_pitch vectors apart.
    """
    num_cols = num_vectors * VECTOR
    filled = tl.minimum(tl.maximum(tl.load(offsets + num_local - 1), 0), capacity).to(tl.int64) * num_cols
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    size = tl.cast(capacity, tl.int64) * num_cols
    epoch = tl.load(epochs + num_ranks).to(tl.int64)
    if NARROW:
        vectors = tl.program_id(0).to(tl.int64) * (BLOCK // VECTOR) + tl.arange(0, BLOCK // VECTOR)
        gaps = vectors // num_vectors * (row_pitch - num_vectors)
        begins = (epoch & 1) * capacity * row_pitch + vectors + gaps
        within = tl.arange(0, VECTOR)[None, :]
        places = vectors[:, None] * VECTOR + within
        value = tl.load(source + begins[:, None] * VECTOR + within, mask=places < filled, other=0.0)
        tl.store(out + places, value, mask=places < size)
    elif TAKE:
        value = tl.load(source + (epoch & 1) * size + places, mask=places < filled, other=0.0)
        tl.store(out + places, value, mask=places < size)
    else:
        value = tl.load(source + places, mask=places < filled)
        tl.store(out + ((epoch + 1) & 1) * size + places, value, mask=places < filled)


def _milliseconds(timeout: float) -> int:
    """Convert a timeout in seconds to int32 milliseconds, 24 days at most."""
    return math.ceil(min(timeout * 1000, (1 << 31) - 1))


def launch_barrier(epochs: Tensor, peer_offsets: Tensor, rank: int, timeout: float) -> None:
    num_ranks = peer_offsets.numel()
    launcher.launch(
        barrier_kernel, 1,
        (epochs, peer_offsets, rank, num_ranks, _milliseconds(timeout)),
        {"RANKS": max(32, next_power_of_2(num_ranks)), "TIMED": not INTERPRETED, "num_warps": 1},
    )  # fmt: skip


def launch_counts(
    own: Tensor, epochs: Tensor, counts: Tensor, peer_offsets: Tensor, rank: int, timeout: float
) -> Tensor:
    matrix, num_ranks = counts.new_empty(counts.shape[1:]), peer_offsets.numel()
    launcher.launch(
        counts_kernel, 1,
        (
            own.contiguous(), epochs, counts, peer_offsets, matrix, rank, num_ranks, own.numel(),
            _milliseconds(timeout),
        ),
        {
            "RANKS": max(32 * NUM_WARPS, next_power_of_2(num_ranks)), "TIMED": not INTERPRETED, "BLOCK": 1024,
            "num_warps": NUM_WARPS,
        },
    )  # fmt: skip
    return matrix


def launch_places(
    row_of: Tensor, indices: Tensor, matrix: Tensor, rank: int, peers: int, capacity: int
) -> tuple[Tensor, Tensor, Tensor]:
    num_ranks, num_experts = matrix.shape
    num_local, vector = num_experts // peers, index_vector(row_of.shape[1])
    where, offsets, dropped = empty_like(row_of), row_of.new_empty(num_local), row_of.new_empty(())
    launcher.launch(
        places_kernel, max(1, cdiv(row_of.numel(), BLOCK_ASSIGNMENTS)),
        (
            row_of.contiguous(), indices.contiguous(), matrix.contiguous(), where, offsets, dropped,
            row_of.numel() // vector, rank, num_ranks, peers, num_local, capacity,
        ),
        {
            "INDEX_VECTOR": vector, "BLOCK": BLOCK_ASSIGNMENTS, "BINS": max(32, next_power_of_2(num_experts)),
            "num_warps": NUM_WARPS,
        },
    )  # fmt: skip
    return where, offsets, dropped


@lru_cache(maxsize=1024)
def _plan_put(
    num_cols: int,
    dtype: torch.dtype,
    pitch: int,
    row_pitch: int,
    num_slots: int,
    copies: int,
    weighted: bool,
    dot: bool,
) -> tuple[tuple[int, ...], dict[str, Any]]:
    """Return the arguments after `capacity`, and the constants, of `put_kernel`."""
    vector, constants = row_tiles(num_cols, dtype, 4, pitch, row_pitch)
    constants |= {
        "COPIES": copies, "WEIGHTED": weighted, "DOT": dot, "INDEX_VECTOR": index_vector(num_slots),
        "INT4": 16 // dtype.itemsize,
    }  # fmt: skip
    return (num_cols // vector, pitch // vector, row_pitch // vector), constants


def launch_put(
    x: Tensor,
    where: Tensor,
    probs: Tensor | None,
    y: Tensor | None,
    epochs: Tensor,
    rows: Tensor,
    peer_offsets: Tensor,
) -> Tensor:
    weighted, dot = probs is not None, y is not None
    dtype = torch.float32 if probs is None else probs.dtype
    dprobs = where.new_empty(where.shape if dot else (0,), dtype=dtype)
    (copies, peers), num_slots = peer_offsets.shape, where.shape[1]
    if where.numel() == 0 or x.shape[1] == 0:
        return dprobs.zero_()
    x, pitch = as_rows(x)
    numbers, constants = _plan_put(
        x.shape[-1], x.dtype, pitch, rows.shape[2], num_slots, copies, weighted, dot
    )
    launcher.launch(
        put_kernel, cdiv(where.numel(), constants["BLOCK_M"]),
        (
            x, where.contiguous(), None if probs is None else probs.contiguous(),
            None if y is None else y.contiguous(), epochs, rows, peer_offsets, dprobs if dot else None,
            where.numel() // constants["INDEX_VECTOR"], num_slots, copies * peers, peers, rows.shape[1],
            *numbers,
        ),
        constants,
    )  # fmt: skip
    return dprobs


@lru_cache(maxsize=1024)
def _plan_get(
    num_cols: int, dtype: torch.dtype, num_slots: int, copies: int, weighted: bool, keep: bool
) -> tuple[int, int, dict[str, Any]]:
    """Return blocks of columns, vectors of a row and the constants of `get_kernel`."""
    vector, constants = row_tiles(num_cols, dtype, 2)
    constants |= {
        "COPIES": copies, "WEIGHTED": weighted, "KEEP": keep, "INT4": 16 // dtype.itemsize,
        "SLOTS": min(num_slots, SLOTS),
    }  # fmt: skip
    return cdiv(num_cols, constants["BLOCK_N"]), num_cols // vector, constants


def launch_get(
    rows: Tensor, epochs: Tensor, peer_offsets: Tensor, where: Tensor, probs: Tensor | None, keep: bool
) -> tuple[Tensor, Tensor]:
    (num_tokens, num_slots), (_, capacity, num_cols) = where.shape, rows.shape
    copies, peers = peer_offsets.shape
    out = rows.new_empty(num_tokens, num_cols)
    y = rows.new_empty((num_tokens, num_slots, num_cols) if keep else (0,))
    if out.numel() == 0 or num_slots == 0:
        return out.zero_(), y
    column_blocks, vectors, constants = _plan_get(
        num_cols, rows.dtype, num_slots, copies, probs is not None, keep
    )
    launcher.launch(
        get_kernel, cdiv(num_tokens, constants["BLOCK_M"]) * column_blocks,
        (
            rows, epochs, peer_offsets, where.contiguous(),
            None if probs is None else probs.contiguous(), out, y if keep else None, num_tokens, num_slots,
            copies * peers, peers, capacity, vectors,
        ),
        constants,
    )  # fmt: skip
    return out, y


def _copy(take: bool, source: Tensor, offsets: Tensor, epochs: Tensor, out: Tensor, num_cols: int) -> None:
    _, capacity, pitch = (source if take else out).shape
    if capacity * num_cols == 0:
        return
    vector = vector_width(out.element_size(), num_cols, pitch)
    block = COPIED * 32 * NUM_WARPS * 16 // out.element_size()
    sizes = offsets.numel(), epochs.numel() - 1, capacity, num_cols // vector, pitch // vector
    launcher.launch(
        copy_kernel, cdiv(capacity * num_cols, block),
        (source, offsets.contiguous(), epochs, out, *sizes),
        {
            "TAKE": take, "NARROW": num_cols < pitch, "VECTOR": vector, "BLOCK": block,
            "num_warps": NUM_WARPS,
        },
    )  # fmt: skip


def launch_take(rows: Tensor, epochs: Tensor, offsets: Tensor, width: int) -> Tensor:
    out = rows.new_empty(rows.shape[1], width)
    _copy(True, rows, offsets, epochs, out, width)
    return out


def launch_give(given: Tensor, offsets: Tensor, epochs: Tensor, rows: Tensor) -> None:
    _copy(False, given.contiguous(), offsets, epochs, rows, rows.shape[2])
