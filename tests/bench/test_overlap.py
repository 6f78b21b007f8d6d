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


@pytest.mark.parametrize(("graphs", "hidden"), [(False, 0.83), (True, 0.70)])
def test_known_times_give_the_hidden_share(graphs, hidden):
    """Buckets are an MLP with the attention of the next layer, and the attention of the first one.

    In units of a layer of four: of reduce-scatters 0.19 are exposed for the first attention, and 0.5 of the
    bucket before, which began a quarter of a backward earlier. In graphs, where both begin behind the replay
    of the first layer, 1.19. Of all-gathers it is the same share.
    """
    from benchmarks import bench_overlap

    case = small_case()
    row = bench_overlap.measure(replace(case, graphs=bench_overlap.IN_GRAPHS) if graphs else case, 2)
    assert row.hidden == pytest.approx(hidden, abs=0.08)
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


@pytest.mark.full
def test_a_chunk_is_sent_while_others_still_work():
    from benchmarks import bench_overlap

    case = replace(small_case(), pp=2, vpp=2, microbatches=2, num_layers=8)
    first, _ = bench_overlap.measure(case, 1).trace
    spans = {
        kind: [(a, b) for each, a, b in first if each == kind] for kind in ("reduce-scatter", "backward")
    }
    done = [b for _, b in spans["reduce-scatter"]]
    later = [sum(a > end for a, _ in spans["backward"]) for end in done]
    assert later[0] >= 4, "backwards of the other chunk, in two layers, begin behind the first bucket"
