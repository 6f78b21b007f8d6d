"""The kernels of the activation stash in Triton's interpreter, also with late stores, and far into a ring."""

from __future__ import annotations

import pytest
import torch
from every_op_tools import sparse
from marks import full
from stash_tools import CAPACITY, Checked, ends, random_sequence

from fastmp.ops import OPS
from fastmp.ops.stash import new_state

pytestmark = pytest.mark.interpret


def implementation(op: str):
    return OPS[op].implementations["triton"]


@pytest.mark.parametrize("seed", [0, 1, 2, 3, *full(range(4, 24))])
def test_every_entry_comes_back_as_it_was(seed):
    from tools.interleave import interleaved

    checked = Checked(implementation, rows=(24, 57, 40, 200)[seed % 4], tickets=6)
    with interleaved(seed, late=seed % 2 == 0):
        random_sequence(checked, seed, steps=40, tickets=6)


@pytest.mark.parametrize("elements", (1 << 31, *full([1 << 35])), ids=("2^31", "2^35"))
def test_the_last_rows_of_a_large_ring(elements):
    """Positions beyond 2^31, and rows more than 2^31 elements from the first."""
    width = 1024
    size = elements // width + 64
    ring, state = sparse(size * width, torch.float16).view(size, width), new_state(2, "cpu")
    state[:4] = torch.tensor([size * 5 - 9, size * 5 - 11, 0, 1])  # one entry of another ticket
    state[8 + 1] = size * 5 - 11
    state[8 + 2], state[8 + 2 * 2] = 1, size * 5 - 11
    x = torch.arange(CAPACITY * width, dtype=torch.float16).view(CAPACITY, width)
    start, offsets = implementation("stash_reserve")(ends(9), state, size, 0)
    assert state[8] == size * 5 - 9 and start == size - 9 and torch.equal(offsets, ends(9))
    implementation("stash_push")(x, ring, start, offsets)
    assert torch.equal(ring[-9:], x[:9])
    pulled = implementation("stash_pull")(ring, start, offsets, CAPACITY)
    assert torch.equal(pulled[:9], x[:9]) and not pulled[9:].any()
