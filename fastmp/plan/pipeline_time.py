"""Time of a pipeline in a step: simulated, and for many microbatches continued from shorter steps."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from fastmp.schedule.schedule import Schedule
from fastmp.schedule.simulate import CheckedOrders, Costs, check_orders, simulate

LONG = 4096  # steps of all ranks, each a microbatch in a chunk, from which on a simulation is continued
_GROUPS = 8  # microbatches of a shorter step over its group size, at least


class PipelineTime(NamedTuple):
    """Seconds until the last step of any rank ends, and for which each rank works."""

    makespan: float
    busy: tuple[float, ...]

    @property
    def bubble(self) -> float:
        """Idle time of all ranks over their work."""
        work = sum(self.busy)
        return (len(self.busy) * self.makespan - work) / work if work else 0.0


@lru_cache(maxsize=64)
def pipeline_time(schedule: Schedule, costs: Costs) -> PipelineTime:
    """Return the time of `schedule`, whose `costs` are tuples.

    Beyond `LONG` steps it is that of a step of fewer microbatches, and for each group of the others the
    difference of two such steps: a pipeline repeats itself between warm-up and cool-down.
    """
    short = shorter(schedule)
    if short is schedule:
        return _simulated(schedule, costs)
    group = schedule.group_size or schedule.pp
    one = _simulated(replace(schedule, num_microbatches=short.num_microbatches - group), costs)
    two = _simulated(short, costs)
    times = (schedule.num_microbatches - short.num_microbatches) / group
    busy = tuple(after + times * (after - before) for before, after in zip(one.busy, two.busy, strict=True))
    makespan = two.makespan + times * (two.makespan - one.makespan)
    return PipelineTime(max(makespan, *busy), busy)


def shorter(schedule: Schedule) -> Schedule:
    """Return the schedule with so few microbatches that it is soon simulated, and holds as many at once."""
    group, number = schedule.group_size or schedule.pp, schedule.num_microbatches
    fewer = number % group + (_GROUPS + 1) * group
    if schedule.pp * schedule.vpp * number <= LONG or fewer >= number:
        return schedule
    return replace(schedule, num_microbatches=fewer)


@lru_cache(maxsize=64)
def orders_of(schedule: Schedule) -> CheckedOrders:
    """Return the orders of a schedule, checked, for many costs."""
    return check_orders(schedule.orders(), schedule.all_pairs())


def _simulated(schedule: Schedule, costs: Costs) -> PipelineTime:
    run = simulate(orders_of(schedule), costs, placement=schedule.placement)
    return PipelineTime(run.makespan, run.busy)
