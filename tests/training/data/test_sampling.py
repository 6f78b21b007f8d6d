"""The order of samples: a permutation, the same from C++ as from its definition, readable from any place."""

from __future__ import annotations

import json
from collections import Counter
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fastmp
from fastmp.training.data import sampling
from fastmp.training.data.sampling import epoch_key, mix, permute, reference_sample_starts, sample_starts

seeds = st.integers(-(1 << 63), (1 << 64) - 1)


def test_splitmix64_known_values():
    """The first outputs of the published generator for seed 1234567."""
    state, got = 1234567, []
    for _ in range(3):
        got.append(mix(state))
        state = (state + 0x9E3779B97F4A7C15) & ((1 << 64) - 1)
    assert got == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@given(size=st.integers(1, 3000), key=st.integers(0, (1 << 64) - 1))
def test_permute_is_a_permutation(size, key):
    assert np.array_equal(np.sort(permute(np.arange(size), size, key)), np.arange(size))


@given(size=st.integers(1 << 40, 1 << 60), key=st.integers(0, (1 << 64) - 1))
def test_permute_of_an_enormous_range_stays_in_it(size, key):
    image = permute(np.array([0, 1, size // 2, size - 1]), size, key)
    assert ((image >= 0) & (image < size)).all() and len(set(image.tolist())) == 4


def test_every_order_of_four_is_equally_likely():
    """Chi-square over the 24 orders: 23 degrees of freedom, 60 is beyond the 1 - 4e-5 quantile."""
    counts = Counter(tuple(permute(np.arange(4), 4, epoch_key(1, e)).tolist()) for e in range(4800))
    assert set(counts) == set(permutations(range(4)))
    assert sum((n - 200) ** 2 / 200 for n in counts.values()) < 60


def test_neighbours_do_not_stay_neighbours():
    """The next sample lies anywhere: at a distance of n/3 in the mean, unrelated from epoch to epoch."""
    size = 1009
    image = np.stack([permute(np.arange(size), size, epoch_key(7, epoch)) for epoch in range(20)])
    assert abs(np.abs(np.diff(image, axis=1)).mean() / (size / 3) - 1) < 0.03
    assert abs(np.corrcoef(image)[np.triu_indices(20, 1)]).max() < 0.15


@given(
    seed=seeds,
    first=st.integers(0, 1 << 40),
    count=st.integers(0, 60),
    num_tokens=st.integers(2, 5000) | st.integers(1 << 31, 1 << 45),
    data=st.data(),
)
def test_cpp_equals_the_definition_bitwise(seed, first, count, num_tokens, data):
    if sampling.HOST is None:
        pytest.skip(f"fastmp._host is not built: {_build_report()}")
    seq_len = data.draw(st.integers(1, min(num_tokens - 1, 5000)))
    expected = reference_sample_starts(seed, first, count, num_tokens, seq_len)
    got = sample_starts(seed, first, count, num_tokens, seq_len)
    assert got.dtype == expected.dtype == np.int64 and np.array_equal(got, expected)


def test_cpp_serves_where_it_was_built():
    assert (sampling.HOST is not None) == (_build_report() == "built")


def _build_report() -> str:
    path = Path(fastmp.__file__).parent / "_build.json"
    return json.loads(path.read_text())["host"] if path.exists() else "no compiled parts"


def test_the_order_does_not_change_from_release_to_release():
    """A run continued with a newer version sees the samples it would have seen."""
    assert reference_sample_starts(1234, 0, 6, 1000, 64).tolist() == GOLDEN
    assert sample_starts(1234, 0, 6, 1000, 64).tolist() == GOLDEN


GOLDEN = [346, 154, 218, 602, 90, 794]


@given(seed=seeds, num_tokens=st.integers(2, 400), data=st.data())
def test_an_epoch_visits_each_sample_once(seed, num_tokens, data):
    seq_len = data.draw(st.integers(1, num_tokens - 1))
    size = num_tokens // seq_len
    for epoch in range(3):
        starts = sample_starts(seed, epoch * size, size, num_tokens, seq_len)
        covered = (starts[:, None] + np.arange(seq_len)) % num_tokens
        assert len(np.unique(covered)) == size * seq_len  # no token is a context twice


@given(seed=seeds, first=st.integers(0, 1000), count=st.integers(0, 50))
def test_any_part_of_the_order_can_be_had_alone(seed, first, count):
    whole = sample_starts(seed, 0, first + count, 777, 10)
    assert np.array_equal(sample_starts(seed, first, count, 777, 10), whole[first:])


def test_seeds_and_epochs_differ():
    a, b = sample_starts(1, 0, 200, 20_000, 100), sample_starts(2, 0, 200, 20_000, 100)
    epoch = sample_starts(1, 200, 200, 20_000, 100)
    assert (a != b).any() and (a != epoch).any()
    assert a[0] % 100 != epoch[0] % 100  # the cuts between samples move, too


@pytest.mark.parametrize(
    "arguments", [(0, 0, 1, 10, 10), (0, 0, 1, 10, 0), (0, -1, 1, 10, 2), (0, 0, -1, 10, 2)]
)
def test_bad_arguments(arguments):
    for function in (
        sample_starts,
        reference_sample_starts,
        *([sampling.HOST.sample_starts] if sampling.HOST else []),
    ):
        with pytest.raises(ValueError, match="sample_starts"):
            function(*arguments)
