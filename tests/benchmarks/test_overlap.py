"""The benchmark of overlap: known times of compute and communication give a known hidden share."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist

from benchmarks import bench_overlap
from benchmarks.asleep import Times
from benchmarks.bench_overlap import IN_GRAPHS, Case, run_case
from benchmarks.slow_link import Link, common_seconds
from fastmp.testing.ranks import run_ranks


def served(rank, world):
    """Two collectives of a group in the background, then one that is waited for at once."""
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


def small_case(**options):
    """Four layers without tables, 30 ms forward, 60 ms backward; a reduce-scatter of a layer takes 30 ms."""
    small = Case(
        "eager", microbatches=1, proportion=0.5, times=Times(0.03, 0.03, 0.03), num_layers=4, table=0.0
    )
    return replace(small, **options)


def overlapped(case):
    """The hidden share in the better one of two steps, and the trace of the first stage in the last one."""
    results = run_ranks(run_case, case.world, case, 2, ("overlapped",))
    shares = [
        1 - min(each.exposed for each in step) / min(each.communication for each in step)
        for step in zip(*(seen["overlapped"] for _, seen, _ in results), strict=True)
    ]
    return max(shares), results[0][2]


@pytest.mark.full
@pytest.mark.parametrize(("graphs", "hidden"), [(True, 0.70), (False, 0.83)])
def test_known_times_give_the_hidden_share(graphs, hidden, tmp_path):
    """Buckets are an MLP with the attention of the next layer, and the attention of the first one.

    In units of a layer of four: of reduce-scatters 0.19 are exposed for the first attention, and 0.5 of the
    bucket before, which began a quarter of a backward earlier. In graphs, where both begin behind the replay
    of the first layer, 1.19. Of all-gathers it is the same share.
    """
    found, trace = overlapped(small_case(**({"graphs": bench_overlap.IN_GRAPHS} if graphs else {})))
    assert found == pytest.approx(hidden, abs=0.12)
    kinds = [kind for kind, _, _ in trace]
    assert kinds.count("reduce-scatter") == 5 and {"forward", "backward", "all-gather"} <= set(kinds)
    bench_overlap.draw_rows([{"name": "eager", "trace": [trace]}], tmp_path / "steps.svg")
    assert "all-gather of a bucket" in (tmp_path / "steps.svg").read_text()


@pytest.mark.full
@pytest.mark.parametrize("graphs", [False, True])
def test_overlap_that_is_broken_is_seen(graphs):
    """Reduce-scatters that begin behind backward are exposed; in a graph of all layers gathers are, too."""
    if graphs:
        case = small_case(graphs=replace(IN_GRAPHS, scope=("full",)))
    else:
        case = small_case(overlap=False)
    assert overlapped(case)[0] == pytest.approx(0.0 if graphs else 0.28, abs=0.12)


@pytest.mark.full
def test_a_chunk_is_sent_while_others_still_work():
    _, trace = overlapped(small_case(pp=2, vpp=2, microbatches=2, num_layers=8))
    first = min(end for kind, _, end in trace if kind == "reduce-scatter")
    behind = sum(kind == "backward" and start > first for kind, start, _ in trace)
    assert behind >= 4, "backwards of the other chunk, of two layers, begin behind the first bucket"
