"""The activation stash against a model, and by its rules: order of releases, the ring's end, overflow."""

from __future__ import annotations

import pytest
import torch
from stash_tools import Checked, ends, random_sequence

from fastmp.ops import OPS
from fastmp.ops.stash import (
    HEAD,
    HIGH_WATER,
    OVERFLOWED,
    TAIL,
    new_state,
    stash_pull,
    stash_push,
    stash_release,
    stash_reserve,
)


def implementation(op: str):
    return OPS[op].overload


@pytest.mark.parametrize("seed", range(40))
def test_every_entry_comes_back_as_it_was(seed):
    checked = Checked(implementation, rows=(24, 40, 57, 200)[seed % 4], tickets=7)
    random_sequence(checked, seed, steps=120, tickets=7)
    assert checked.void == int(checked.state[OVERFLOWED])


def test_small_rings_overflow_and_large_ones_do_not():
    voids = []
    for rows in (24, 7 * 12 * 4):
        checked = Checked(implementation, rows, tickets=7)
        random_sequence(checked, 3, steps=200, tickets=7)
        voids.append(checked.void)
    assert voids[0] > 0 == voids[1]


def test_last_in_first_out_takes_no_more_than_what_is_in_use():
    checked, generator = Checked(implementation, rows=20, tickets=4), torch.Generator()
    for _ in range(50):
        assert checked.store(0, 9, generator) and checked.store(1, 11, generator)
        checked.load(1)
        assert checked.store(2, 11, generator)
        checked.load(2)
        checked.load(0)
    assert checked.state[HIGH_WATER] == 20


def test_an_entry_begins_at_row_0_where_it_would_straddle_the_end():
    state = new_state(4, "cpu")
    for ticket, rows in ((0, 6), (1, 3)):
        stash_reserve(ends(rows), state, 10, ticket)
    stash_release(state, 0)
    stash_reserve(ends(5), state, 10, 2)
    assert state[8 : 8 + 3].tolist() == [-1, 6, 10] and state[OVERFLOWED] == 0
    stash_reserve(ends(2), state, 10, 3)  # rows 5 and 6, but row 6 is in use
    assert state[8 + 3] == -1 and state[OVERFLOWED] == 1
    assert state[HIGH_WATER] == 11  # with what did not fit


def test_a_ticket_in_use_makes_the_new_entry_void():
    state = new_state(2, "cpu")
    stash_reserve(ends(3), state, 10, 1)
    _, offsets = stash_reserve(ends(3), state, 10, 1)
    assert state[OVERFLOWED] == 1 and not offsets.any()
    stash_release(state, 1)
    stash_reserve(ends(10), state, 10, 0)
    assert state[OVERFLOWED] == 1 and state[8] == 0  # its rows are free again


def test_a_void_entry_writes_nothing():
    state, ring = new_state(2, "cpu"), torch.zeros(4, 2)
    entry = stash_reserve(ends(5), state, 4, 0)
    stash_push(torch.ones(6, 2), ring, *entry)
    assert not ring.any() and not stash_pull(ring, *entry, 6).any()
    assert state[HIGH_WATER] == 5
    stash_release(state, 0)
    stash_reserve(ends(4), state, 4, 1)
    assert state[OVERFLOWED] == 1 and state[HEAD] - state[TAIL] == 4


def test_no_more_entries_than_tickets():
    """Released entries below one in use keep their slot of the queue."""
    state = new_state(2, "cpu")
    for ticket in (0, 1):
        stash_reserve(ends(1), state, 100, ticket)
    stash_release(state, 0)
    stash_reserve(ends(1), state, 100, 0)
    assert state[OVERFLOWED] == 0
    stash_release(state, 1)
    stash_release(state, 0)
    assert state[HEAD] == state[TAIL]


STATE, RING, WIDE = new_state(3, "cpu"), torch.zeros(4, 6), torch.zeros(3, 6, dtype=torch.float64)
START, OFFSETS = torch.tensor(0), ends(2)
CALLS = {
    "stash_reserve: expected 0 <= ticket < T, got ticket = 3, T = 3": lambda: stash_reserve(
        OFFSETS, STATE, 4, 3
    ),
    r"stash_release: expected state \(3T\+8\) int64, got": lambda: stash_release(STATE.int(), 0),
    r"stash_reserve: expected offsets \(L\) int32": lambda: stash_reserve(OFFSETS.long(), STATE, 4, 0),
    "stash_reserve: expected 0 < size, got size = 0": lambda: stash_reserve(OFFSETS, STATE, 0, 0),
    r"stash_push: expected x \(C, W\) ring, got \(3, 5\) torch.float64 for R = 4, W = 6": lambda: stash_push(
        WIDE[:, 1:], RING, START, OFFSETS
    ),
    "stash_pull: expected contiguous ring": lambda: stash_pull(RING.t(), START, OFFSETS, 5),
    r"stash_pull: expected start \(\) int64, got \(\) torch.int32": lambda: stash_pull(
        RING, START.int(), OFFSETS, 5
    ),
    r"stash_pull: expected offsets \(L\) int32": lambda: stash_pull(RING, START, OFFSETS[0], 5),
    r"stash_push: expected x \(C, W\) ring, got \(3, 6\) torch.float64": lambda: stash_push(
        WIDE, RING, START, OFFSETS
    ),
}


@pytest.mark.parametrize("message", CALLS)
def test_mistakes(message):
    with pytest.raises(ValueError, match=message):
        CALLS[message]()
