"""A pipeline schedule from outside of fastmp: all forwards, then all backwards, as in GPipe."""

from __future__ import annotations

from fastmp.config.specs import SCHEDULES, ScheduleSpec
from fastmp.schedule.steps import BACKWARD, FORWARD, PipelineSizes, RankOrder, Step


def gpipe(sizes: PipelineSizes, rank: int) -> RankOrder:
    every = range(sizes.num_microbatches)
    steps = [Step(kind, microbatch, 0) for kind in (FORWARD, BACKWARD) for microbatch in every]
    return RankOrder(tuple(steps), (), len(every))


def register() -> None:
    SCHEDULES.register(ScheduleSpec("gpipe", gpipe, vpp=1, help="all forwards first"))
