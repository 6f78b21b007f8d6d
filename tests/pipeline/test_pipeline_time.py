"""Ranks that sleep through their steps idle as long as the simulator says, split backwards included."""

from __future__ import annotations

import threading

import pytest
import torch.distributed as dist

from benchmarks.bench_pipeline import bubble, run_asleep
from fastmp.schedule.schedule import Schedule
from fastmp.schedule.simulate import Costs, simulate
from fastmp.testing.ranks import run_ranks

pytestmark = pytest.mark.exhaustive  # wall-clock times: for a machine that does nothing else


@pytest.mark.parametrize(
    ("vpp", "schedule", "unit"),
    [
        (1, "zero_bubble", 0.03),
        (2, "1f1b", 0.04),
        (1, "1f1b", 0.02),
        (2, "zero_bubble", 0.05),
    ],
)
def test_the_bubble_is_the_simulated_one(vpp, schedule, unit):
    costs = Costs(forward=4 * unit, backward_input=5 * unit, backward_weight=3 * unit)
    expected = simulate(Schedule(4, 4, vpp, name=schedule).orders(), costs).bubble
    measured = run_ranks(bubble, 4, vpp, 4, schedule, costs)[0]
    assert 0.95 * expected <= measured <= 1.05 * expected


class Late:
    """A send that starts, and so ends, a while after it is posted: a slow link."""

    def __init__(self, seconds, post):
        self.work = None
        self.posted = threading.Event()
        self.timer = threading.Timer(seconds, self.start, (post,))
        self.timer.start()

    def start(self, post):
        self.work = post()
        self.posted.set()

    def is_completed(self):
        return self.posted.is_set() and self.work.is_completed()

    def wait(self):
        self.posted.wait()
        return self.work.wait()


def slow_link_case(rank, world, every, costs):
    send = dist.isend
    dist.isend = lambda tensor, **to: Late(costs.p2p, lambda: send(tensor, **to))
    return run_asleep(every, 2, costs)[0]


def test_messages_travel_while_ranks_compute():
    """In groups of 4 microbatches, two ranks with two chunks hide messages that take as long as a forward:
    all but two of them. Ranks that waited for their messages would take two thirds longer."""
    costs = Costs(forward=0.03, backward_input=0.03, backward_weight=0.03, p2p=0.03)
    every = Schedule(2, 8, 2, group_size=4).orders()
    expected = simulate(every, costs).makespan
    assert expected == pytest.approx(0.03 * (51 + 2))
    took = run_ranks(slow_link_case, 2, every, costs)[0]
    assert 0.99 * expected <= took <= 1.2 * expected
