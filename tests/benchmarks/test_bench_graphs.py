"""The benchmark of graphs times what they leave to the host, of which there is less than without them."""

from __future__ import annotations

import pytest

from benchmarks.bench_graphs import host_times_without_gradients
from benchmarks.graphs_over_ranks import DISPATCHERS, layers_over_ranks, sizes_on_the_host


def row(line):
    """The name of a line of a table, and its numbers."""
    name, *numbers = line.strip().split("  ")
    return name, [float(number) for number in numbers if number]


@pytest.mark.full
def test_layers_over_ranks():
    lines = [*layers_over_ranks("cpu", steps=2)]
    rows = [row(line) for line in (*lines[1:3], *lines[4:])]
    assert [name for name, _ in rows] == [*DISPATCHERS, *DISPATCHERS]
    (_, alltoall), (_, symmetric), *at_once = rows
    assert all(0 < ours < theirs for ours, theirs in zip(symmetric, alltoall, strict=True))
    assert all(0 < time for _, times in at_once for time in times)  # ranks wait for each other in both
    lines = [*layers_over_ranks("cuda")]
    assert [line.split(maxsplit=1)[1] for line in (*lines[1:3], *lines[4:])] == ["not measured"] * 4


def test_sizes_on_the_host():
    (line,) = sizes_on_the_host(rounds=2)
    assert line.startswith("all sizes of an all-to-all in us, 8 ranks, 64 experts: ")
    assert float(line.rpartition(" ")[2]) > 0


def test_evaluations_and_generation():
    lines = [*host_times_without_gradients(rounds=2)]
    for title, eager, graph in (lines[:3], lines[3:]):
        assert title.endswith(("the same model", "two rows"))
        (name, (own,)), (other, (least,)) = row(eager), row(graph)
        assert (name, other) == ("eager", "one graph") and 0 <= least < own
