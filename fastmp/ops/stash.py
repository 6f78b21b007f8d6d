"""Activation stash: a ring buffer for the activations of experts, allocated on the device.

With worst-case receive buffers only the device knows how many of C rows are real. These alone are kept: an
entry is the rows of one layer and microbatch, contiguous in each tensor (R, w) of the ring. Its ticket, a
number of the host, names it in a captured graph; where it lies is in `state`, which two ops read and write.

    stash_reserve   allocate an entry of offsets[-1] rows: its first row, and the offsets of what is kept
    stash_push      copy the real rows of a tensor (C, w) into the entry
    stash_pull      copy them back into a new tensor (C, w), with zeros after them
    stash_release   free the entry

Positions count rows from the beginning of the ring and never wrap: position p is row p mod R. New entries are
allocated at the head. An entry does not straddle the end of the ring: it begins at row 0 instead. The tail is
the position of the oldest entry in use; head - tail never exceeds R, so no entry in use is overwritten,
whatever the order of releases. Released entries at the head are given back at once, those at the tail as soon
as all older ones are released; an empty ring begins at row 0 again.

An entry that does not fit is void: its offsets are zeros, so that experts compute no row, and the overflow
counter tells that the results of the step are void, too.

C rows of capacity, w columns, T tickets, L experts of the rank.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastmp.ops.core import checks, launcher
from fastmp.ops.core._triton import (
    MAX_COUNT,
    MAX_EXPERTS,
    MAX_SIZE,
    cdiv,
    jit,
    limits,
    next_power_of_2,
    tl,
)
from fastmp.ops.core.registry import register
from fastmp.ops.core.rowwise import NUM_WARPS, as_rows, vector_width
from fastmp.profiling import traced

# `state` int64 (8 + 3 T,): these numbers; then the position of each ticket's entry (-1: void or free); then
# the queue of entries from the tail to the head, used cyclically: their tickets, and their positions.
HEAD, TAIL, OLDEST, NEXT, OVERFLOWED, HIGH_WATER = range(6)
TABLES = tl.constexpr(8) if tl is not None else 8
NUM_TABLES = 3
COPIED = 4  # 16-byte accesses of a thread that copies rows


def state_size(tickets: int) -> int:
    """Return the elements of `state` for entries of `tickets` tickets."""
    return 8 + NUM_TABLES * tickets


class _State:
    """The tables of a state on a CPU, as lists that are written back by `store`."""

    def __init__(self, state: Tensor) -> None:
        self.state, self.numbers = state, state[:8].tolist()
        self.positions, self.queued, self.places = state[8:].view(NUM_TABLES, -1)

    def store(self) -> None:
        self.state[:8] = torch.tensor(self.numbers)

    def is_free(self, slot: int) -> bool:
        """Return True if the entry in a slot of the queue is released."""
        slot %= len(self.queued)
        return int(self.positions[self.queued[slot]]) != int(self.places[slot])


def reference_reserve(offsets: Tensor, state: Tensor, size: int, ticket: int) -> tuple[Tensor, Tensor]:
    """Allocate an entry at the head, in plain torch."""
    own, count = _State(state), max(int(offsets[-1]), 0)
    head, tail, oldest, following, overflowed, high_water = own.numbers[:6]
    # 1. An empty ring starts again; an entry does not straddle the end.
    if oldest == following:
        head = tail = 0
    straddles = head % size + count > size
    position = head + -head % size if straddles else head
    # 2. Without room for it, or if the ticket's entry is still in use, it is void.
    used, queue_size = position + count - tail, len(own.queued)
    fits = used <= size and following - oldest < queue_size and int(own.positions[ticket]) < 0
    own.positions[ticket] = position if fits else -1
    if fits:
        own.queued[following % queue_size], own.places[following % queue_size] = ticket, position
        head, following = position + count, following + 1
    # 3. The high-water mark includes what did not fit.
    own.numbers[:6] = head, tail, oldest, following, overflowed + (not fits), max(high_water, used)
    own.store()
    return state.new_tensor(position % size if fits else 0), offsets.clone() if fits else offsets * 0


def kept_rows(op: str, ring: Tensor, start: Tensor, offsets: Tensor, capacity: int) -> slice:
    """Return the rows of an entry in the ring, at most `capacity`, whose place the host reads: on a CPU."""
    first, count = int(start), min(max(int(offsets[-1]), 0), capacity)
    outside = "{}: expected rows inside the ring of {}, got {} from row {}"
    checks.require(0 <= first <= len(ring) - count, outside, op, len(ring), count, first)
    return slice(first, first + count)


def reference_push(x: Tensor, ring: Tensor, start: Tensor, offsets: Tensor) -> None:
    """Copy the real rows of x into the entry, in plain torch."""
    rows = kept_rows("stash_push", ring, start, offsets, len(x))
    ring[rows] = x[: rows.stop - rows.start]


def reference_pull(ring: Tensor, start: Tensor, offsets: Tensor, capacity: int) -> Tensor:
    """Copy the rows of the entry out, and zeros after them, in plain torch."""
    rows = kept_rows("stash_pull", ring, start, offsets, capacity)
    out = ring.new_zeros(capacity, ring.shape[1])
    out[: rows.stop - rows.start] = ring[rows]
    return out


def reference_release(state: Tensor, ticket: int) -> None:
    """Free the entry, and move the head and the tail over free entries, in plain torch."""
    own = _State(state)
    head, tail, oldest, following = own.numbers[:4]
    own.positions[ticket] = -1
    # 1. From the head, in reverse order of allocation.
    while oldest < following and own.is_free(following - 1):
        following -= 1
        head = int(own.places[following % len(own.places)])
    # 2. From the tail, in order of allocation.
    while oldest < following and own.is_free(oldest):
        oldest += 1
        tail = head if oldest == following else int(own.places[oldest % len(own.places)])
    own.numbers[:4] = head, tail, oldest, following
    own.store()


@limits(ticket=MAX_SIZE, tickets=MAX_SIZE, num_local=MAX_EXPERTS)
@jit(dynamic="ticket", fixed="size num_local tickets")
def reserve_kernel(
    offsets,  # (L,) int32, the last of which is the number of rows
    state,  # (8 + 3 T,) int64
    start,  # () int64, the first row of the entry
    kept,  # (L,) int32, the offsets, or zeros
    size, num_local, ticket, tickets,
    HEAD: tl.constexpr, TAIL: tl.constexpr, OLDEST: tl.constexpr, NEXT: tl.constexpr,
    OVERFLOWED: tl.constexpr, HIGH_WATER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Allocate an entry at the head; one program."""
    positions = state + TABLES
    count = tl.maximum(tl.load(offsets + num_local - 1), 0).to(tl.int64)
    rows = tl.cast(size, tl.int64)
    # 1. An empty ring starts again; an entry does not straddle the end.
    oldest, following = tl.load(state + OLDEST), tl.load(state + NEXT)
    empty = oldest == following
    head = tl.where(empty, 0, tl.load(state + HEAD))
    tail = tl.where(empty, 0, tl.load(state + TAIL))
    position = tl.where(head % rows + count > rows, head + (rows - head % rows) % rows, head)
    # 2. Without room for it, or if the ticket's entry is still in use, it is void.
    used = position + count - tail
    fits = (used <= rows) & (following - oldest < tickets) & (tl.load(positions + ticket) < 0)
    overflowed = tl.load(state + OVERFLOWED) + tl.where(fits, 0, 1)
    high_water = tl.maximum(tl.load(state + HIGH_WATER), used)
    tl.debug_barrier()  # all threads have read what one of them overwrites
    tl.store(positions + ticket, tl.where(fits, position, -1))
    if fits:
        slot = following % tickets
        tl.store(positions + tickets + slot, tl.cast(ticket, tl.int64))
        tl.store(positions + 2 * tickets + slot, position)
        head = position + count
        following += 1
    # 3. The high-water mark includes what did not fit.
    tl.store(state + HEAD, head)
    tl.store(state + TAIL, tail)
    tl.store(state + NEXT, following)
    tl.store(state + OVERFLOWED, overflowed)
    tl.store(state + HIGH_WATER, high_water)
    # 4. What the experts compute with: no rows of a void entry.
    tl.store(start, tl.where(fits, position % rows, 0))
    experts = tl.arange(0, BLOCK)
    mask = experts < num_local
    tl.store(kept + experts, tl.where(fits, tl.load(offsets + experts, mask=mask), 0), mask=mask)


@jit
def _is_free(positions, tickets, slot, released):
    """Return True if the entry in a slot of the queue is free, or that of the ticket `released`."""
    ticket = tl.load(positions + tickets + slot % tickets)
    place = tl.load(positions + 2 * tickets + slot % tickets)
    return (ticket == released) | (tl.load(positions + ticket) != place)


@limits(ticket=MAX_SIZE, tickets=MAX_SIZE)
@jit(dynamic="ticket", fixed="tickets")
def release_kernel(
    state,  # (8 + 3 T,) int64
    ticket, tickets,
    HEAD: tl.constexpr, TAIL: tl.constexpr, OLDEST: tl.constexpr, NEXT: tl.constexpr,
):  # fmt: skip
    """Free an entry, and move the head and the tail over free entries; one program."""
    positions = state + TABLES
    head, tail = tl.load(state + HEAD), tl.load(state + TAIL)
    oldest, following = tl.load(state + OLDEST), tl.load(state + NEXT)
    # 1. From the head, in reverse order of allocation.
    free = oldest < following
    if free:
        free = _is_free(positions, tickets, following - 1, ticket)
    while free:
        following -= 1
        head = tl.load(positions + 2 * tickets + following % tickets)
        free = oldest < following
        if free:
            free = _is_free(positions, tickets, following - 1, ticket)
    # 2. From the tail, in order of allocation.
    free = oldest < following
    if free:
        free = _is_free(positions, tickets, oldest, ticket)
    while free:
        oldest += 1
        tail = head
        free = oldest < following
        if free:
            tail = tl.load(positions + 2 * tickets + oldest % tickets)
            free = _is_free(positions, tickets, oldest, ticket)
    # 3. All threads have read what one of them overwrites.
    tl.debug_barrier()
    tl.store(positions + ticket, tl.cast(-1, tl.int64))
    tl.store(state + HEAD, head)
    tl.store(state + TAIL, tail)
    tl.store(state + OLDEST, oldest)
    tl.store(state + NEXT, following)


@limits(capacity=MAX_COUNT, num_local=MAX_EXPERTS, num_vectors=MAX_SIZE)
@jit(fixed="capacity num_local num_vectors pitch")
def copy_kernel(
    outside,  # (C, w), rows pitch vectors apart
    ring,  # (R, w)
    start,  # () int64, the first row of the entry
    offsets,  # (L,) int32, the last of which is the number of rows
    capacity, num_local, num_vectors, pitch,
    PUSH: tl.constexpr, VECTOR: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Copy rows into an entry, or out of it with zeros after them."""
    num_cols = num_vectors * VECTOR
    first, count = tl.load(start), tl.maximum(tl.load(offsets + num_local - 1), 0)
    blocks = tl.cdiv(num_cols, BLOCK_N)
    block = tl.program_id(0)
    rows = (block // blocks).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = block % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (rows < capacity)[:, None] & (cols < num_cols)[None, :]
    real = inside & (rows < count)[:, None]
    place = outside + rows[:, None] * pitch * VECTOR + cols[None, :]
    kept = ring + (first + rows)[:, None] * num_cols + cols[None, :]
    if PUSH:
        tl.store(kept, tl.load(place, mask=real), mask=real)
    else:
        tl.store(place, tl.load(kept, mask=real, other=0.0), mask=inside)


_PLACES = {"HEAD": HEAD, "TAIL": TAIL, "OLDEST": OLDEST, "NEXT": NEXT}


def launch_reserve(offsets: Tensor, state: Tensor, size: int, ticket: int) -> tuple[Tensor, Tensor]:
    start, kept = state.new_empty(()), torch.empty_like(offsets, memory_format=torch.contiguous_format)
    launcher.launch(
        reserve_kernel, 1,
        (offsets.contiguous(), state, start, kept, size, offsets.numel(), ticket, _tickets(state)),
        _PLACES | {
            "OVERFLOWED": OVERFLOWED, "HIGH_WATER": HIGH_WATER, "BLOCK": next_power_of_2(offsets.numel()),
            "num_warps": 1,
        },
    )  # fmt: skip
    return start, kept


def launch_release(state: Tensor, ticket: int) -> None:
    launcher.launch(release_kernel, 1, (state, ticket, _tickets(state)), _PLACES | {"num_warps": 1})


def _copy(push: bool, outside: Tensor, ring: Tensor, start: Tensor, offsets: Tensor) -> None:
    outside, pitch = as_rows(outside)
    capacity, width = outside.shape
    if capacity * width == 0:
        return
    vector = vector_width(ring.element_size(), width, pitch)
    block_n = min(1024, next_power_of_2(width))
    block_m = max(1, COPIED * 32 * NUM_WARPS * vector // block_n)
    launcher.launch(
        copy_kernel, cdiv(capacity, block_m) * cdiv(width, block_n),
        (
            outside, ring, start, offsets.contiguous(), capacity, offsets.numel(), width // vector,
            pitch // vector,
        ),
        {"PUSH": push, "VECTOR": vector, "BLOCK_M": block_m, "BLOCK_N": block_n, "num_warps": NUM_WARPS},
    )  # fmt: skip


def launch_push(x: Tensor, ring: Tensor, start: Tensor, offsets: Tensor) -> None:
    _copy(True, x, ring, start, offsets)


def launch_pull(ring: Tensor, start: Tensor, offsets: Tensor, capacity: int) -> Tensor:
    out = ring.new_empty(capacity, ring.shape[1])
    _copy(False, out, ring, start, offsets)
    return out


def _tickets(state: Tensor) -> int:
    return (state.shape[0] - 8) // NUM_TABLES


_reserve = register(
    "stash_reserve(Tensor offsets, Tensor(a!) state, int size, int ticket) -> (Tensor, Tensor)",
    contract="offsets (L) int32; 0 < L; state (3T+8) int64; state contiguous; 0 < size; 0 <= ticket < T",
    reference=reference_reserve,
    triton=launch_reserve,
    guards_launch=True,
    fake=lambda offsets, state, *rest: (state.new_empty(()), offsets.new_empty(offsets.shape)),
)
_push = register(
    "stash_push(Tensor x, Tensor(a!) ring, Tensor start, Tensor offsets) -> ()",
    contract=(
        "ring (R, W) floating; ring contiguous; 0 < R; x (C, W) ring; start () int64; offsets (L) int32; "
        "0 < L"
    ),
    reference=reference_push,
    triton=launch_push,
    guards_launch=True,
    fake=lambda *arguments: None,
    traffic=lambda x, *rest: 2 * x.numel() * x.element_size(),
)
_pull = register(
    "stash_pull(Tensor ring, Tensor start, Tensor offsets, int capacity) -> Tensor",
    contract=(
        "ring (R, W) floating; ring contiguous; 0 < R; start () int64; offsets (L) int32; 0 < L; "
        "0 <= capacity <= 2147483647"
    ),
    reference=reference_pull,
    triton=launch_pull,
    guards_launch=True,
    fake=lambda ring, start, offsets, capacity: ring.new_empty(capacity, ring.shape[1]),
    traffic=lambda ring, start, offsets, capacity: 2 * capacity * ring.shape[1] * ring.element_size(),
)
_release = register(
    "stash_release(Tensor(a!) state, int ticket) -> ()",
    contract="state (3T+8) int64; state contiguous; 0 <= ticket < T",
    reference=reference_release,
    triton=launch_release,
    guards_launch=True,
    fake=lambda *arguments: None,
)


@traced("fastmp.stash_reserve")
def stash_reserve(offsets: Tensor, state: Tensor, size: int, ticket: int) -> tuple[Tensor, Tensor]:
    """Allocate the entry of `ticket`, of as many rows as the last offset says, without the host.

    Args:
        offsets: (L,) int32, where each expert's rows end.
        state: (8 + 3 T,) int64, as `new_state` makes it; written to.
        size: rows of the ring.
        ticket: below T; one whose entry is still in use loses it, and the new one is void.

    Returns:
        start () int64, the entry's first row in the ring; and the offsets (L,) int32, zeros if it is void.

    Raises:
        ValueError: shapes, dtypes or devices do not fit.
    """
    return _reserve(offsets, state, size, ticket)


@traced("fastmp.stash_push")
def stash_push(x: Tensor, ring: Tensor, start: Tensor, offsets: Tensor) -> None:
    """Copy the first offsets[-1] rows of x into an entry.

    Args:
        x: (C, w) of the ring's dtype, any strides (last stride 1 avoids a copy).
        ring: (R, w) contiguous; written to.
        start, offsets: from `stash_reserve`.

    Raises:
        ValueError: shapes, dtypes or devices do not fit.
    """
    _push(x, ring, start, offsets)


@traced("fastmp.stash_pull")
def stash_pull(ring: Tensor, start: Tensor, offsets: Tensor, capacity: int) -> Tensor:
    """Copy an entry out of the ring.

    Args:
        ring, start, offsets: as for `stash_push`.
        capacity: rows of the result.

    Returns:
        (capacity, w): the rows of the entry, then zeros.

    Raises:
        ValueError: shapes, dtypes or devices do not fit.
    """
    return _pull(ring, start, offsets, capacity)


@traced("fastmp.stash_release")
def stash_release(state: Tensor, ticket: int) -> None:
    """Free the entry of `ticket`; a void or free one stays as it is.

    Raises:
        ValueError: as `stash_reserve`.
    """
    _release(state, ticket)


def new_state(tickets: int, device: torch.device | str) -> Tensor:
    """Return the state of an empty ring: (8 + 3 T,) int64.

    Example:
        state, ring = new_state(4, "cpu"), torch.empty(100, 16)
        offsets = torch.tensor([3, 5], dtype=torch.int32)
        start, kept = stash_reserve(offsets, state, len(ring), ticket=0)
        stash_push(torch.ones(8, 16), ring, start, kept)  # 5 rows
        rows = stash_pull(ring, start, kept, capacity=8)
        stash_release(state, ticket=0)
    """
    state = torch.zeros(state_size(tickets), dtype=torch.int64, device=device)
    state[8 : 8 + tickets] = -1
    return state
