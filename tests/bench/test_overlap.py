"""The benchmark of overlap: known times of compute and communication give a known hidden share."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from marks import full

from fastmp.testing import run_ranks


def served(rank, world):
    """Two collectives of a group in the background, then one that is waited for at once."""
    from benchmarks.slow_link import Link, common_seconds

    with Link(rate=1e6).installed() as link:
        x, y = torch.full((2, 10_000), 1.0 + rank)
        works = [dist.all_reduce(each, async_op=True) for each in (x, y)]
        both = [work.wait() for work in works]
        exposed = common_seconds(link.transfers, link.waits)
        link.at_once = True
        dist.all_reduce(x, async_op=True)
        waits = len(link.waits)
    dist.all_reduce(x)
    return x[0].item() + y[0].item(), both, link.transfers, exposed, waits


def test_a_slow_link_serves_one_collective_after_the_other():
    for x, both, transfers, exposed, waits in run_ranks(served, 2):
        assert x == 15 and both == [True, True] and len(transfers) == waits == 3
        assert all(each.end - each.start >= 0.04 and each.kind == "all-reduce" for each in transfers)
        assert all(a.end <= b.start for a, b in pairwise(transfers))
        assert exposed == pytest.approx(sum(each.end - each.start for each in transfers[:2]), rel=0.1)


def small_case():
    """Four layers without tables: 12 ms forward, 24 ms backward; a reduce-scatter of a layer takes 12 ms."""
    from benchmarks.asleep import Times
    from benchmarks.bench_overlap import Case

    times = Times(0.012, 0.012, 0.012)
    return Case("small", microbatches=1, proportion=0.5, times=times, num_layers=4, table=0.0)


def test_known_times_give_the_hidden_share():
    """Buckets are an MLP and the attention above it: 1.9 at the end, less what attention hides of the others.

    Of reduce-scatters of 4 layers 0.69 are exposed, of all-gathers, half as long, as many: 83% hide.
    """
    from benchmarks import bench_overlap

    row = bench_overlap.measure(small_case(), 2)
    assert row.hidden == pytest.approx(0.83, abs=0.08)
    assert row.communication_ms == pytest.approx(48 + 24, rel=0.2)
    kinds = [kind for kind, _, _ in row.trace[0]]
    assert kinds.count("reduce-scatter") == 5 and {"forward", "backward", "all-gather"} <= set(kinds)


@pytest.mark.parametrize("graphs", [False, *full([True])])
def test_overlap_that_is_broken_is_seen(graphs, tmp_path):
    """Reduce-scatters that begin behind backward are exposed, and hide nothing: only gathers do."""
    from benchmarks import bench_overlap

    case = replace(small_case(), overlap=False)
    if graphs:  # one graph holds all layers
        case = replace(small_case(), graphs=replace(bench_overlap.IN_GRAPHS, scope=("full",)))
    row = bench_overlap.measure(case, 1)
    assert row.hidden < (0.05 if graphs else 0.4)
    rows = json.loads(json.dumps([asdict(replace(row, name="eager"))]))
    bench_overlap.draw_rows(rows, tmp_path / "steps.svg")
    assert "all-gather of a bucket" in (tmp_path / "steps.svg").read_text()
