"""The benchmark of dispatchers times every way that there is, each of which computes what the others do."""

from __future__ import annotations

import pytest

from benchmarks.bench_dispatchers import BASE, WAYS, Shape, rows_of, run_shape, table
from fastmp.testing.ranks import run_ranks


@pytest.mark.full
def test_all_ways_are_timed():
    shape = Shape(tokens=64, hidden=16, experts=4, top_k=2, ffn=8)
    results = run_ranks(run_shape, 2, shape, 1)
    (_, absent), _ = results
    rows = rows_of(shape, [seen for seen, _ in results], "cpu")
    assert [(row.dispatcher, row.mode) for row in rows] == [way for way in WAYS if way[0] not in absent]
    assert list(absent) == ["deepep"] and "between GPUs" in absent["deepep"]
    assert all(row.ms > 0 for row in rows)
    assert [row.of_alltoall for row in rows if (row.dispatcher, row.mode) == BASE] == [1.0]
    assert len(table(rows, absent).splitlines()) == 2 + len(rows) + 1


def test_a_step_takes_as_long_as_its_slowest_rank():
    shape, other = Shape(1, 1, 1, 1, 1), ("symmetric", "eager")
    ranks = [{BASE: [4.0, 8.0, 6.0], other: [1.0, 4.0, 2.0]}, {BASE: [2.0, 8.0, 9.0], other: [2.0, 2.0, 3.0]}]
    rows = rows_of(shape, ranks, "cpu")
    assert [(row.ms, row.of_alltoall) for row in rows] == [(4.0, 1.0), (2.0, 0.5)]
