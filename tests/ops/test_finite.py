"""first_not_finite: the index, whoever serves it, and nothing read where none is wanted."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastmp.ops import OPS, first_not_finite
from fastmp.ops.finite import BLOCK, NUM_PROGRAMS

BACKENDS = [None, "reference", pytest.param("triton", marks=pytest.mark.interpret)]


def search(x, wanted, backend):
    call = first_not_finite if backend is None else OPS["first_not_finite"].implementations[backend]
    return call(x, torch.tensor(wanted)).item()


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 3 * BLOCK),
    st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.sampled_from([math.nan, math.inf, -math.inf]))),
    st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
)
def test_the_first_of_any(backend, size, bad, dtype):
    x = torch.full((size,), torch.finfo(dtype).max, dtype=dtype)
    places = [int(where * size) for where, _ in bad] if size else []
    for place, (_, value) in zip(places, bad):
        x[place] = value
    assert search(x, True, backend) == min(places, default=size)
    assert search(x, False, backend) == size


@pytest.mark.interpret
def test_programs_walk_over_what_is_behind_their_first_block(monkeypatch):
    """Two programs for five blocks; the second one finds what comes later, and the first what counts."""
    monkeypatch.setattr("fastmp.ops.finite.NUM_PROGRAMS", 2)
    x = torch.zeros(5 * BLOCK - 7)
    x[3 * BLOCK + 1] = x[2 * BLOCK + 5] = math.nan
    assert search(x, True, "triton") == 2 * BLOCK + 5
    x[2 * BLOCK + 5] = 0
    assert search(x, True, "triton") == 3 * BLOCK + 1
    assert NUM_PROGRAMS == 1056


@pytest.mark.parametrize(
    ("x", "wanted", "message"),
    [
        (torch.zeros(2, 2), torch.tensor(True), r"contiguous vector of floats, got \(2, 2\) torch.float32"),
        (torch.zeros(4)[::2], torch.tensor(True), r"contiguous vector of floats, got \(2,\)"),
        (torch.zeros(4, dtype=torch.int32), torch.tensor(True), "vector of floats, got .* torch.int32"),
        (torch.zeros(4), torch.tensor(1), r"wanted must be one bool, got \(\) torch.int64"),
        (torch.zeros(4), torch.tensor([True, False]), r"wanted must be one bool, got \(2,\) torch.bool"),
        (torch.zeros(4), torch.tensor(True, device="meta"), "x is on cpu but wanted is on meta"),
    ],
)
def test_wrong_arguments(x, wanted, message):
    with pytest.raises(ValueError, match=f"first_not_finite: .*{message}"):
        first_not_finite(x, wanted)
