"""Checks a `BufferPlan` for what would corrupt a result."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise

from fastmp.cuda_graphs.buffer_plan import BufferPlan, Lease, ReplayStep


def problems(plan: BufferPlan) -> Iterator[str]:
    """Return the errors of a buffer plan: a buffer held by two replays, or used by one that does not hold it.

    Nothing for what `plan` makes; for plans that were made, or changed, by others.
    """
    by_buffer: dict[int, list[Lease]] = defaultdict(list)
    for lease in plan.leases:
        by_buffer[lease.buffer].append(lease)
    for buffer, own in by_buffer.items():
        own.sort(key=lambda lease: lease.first)
        for before, after in pairwise(own):
            if after.first <= before.last:
                yield (
                    f"buffer {buffer} is still needed by {_name(plan, before.last)} when "
                    f"{_name(plan, after.first)} writes to it"
                )
    first = {(lease.buffer, lease.first): lease.last for lease in plan.leases}
    ends = _ends(plan.replays)
    for i, replay in enumerate(plan.replays):
        for buffer in replay.buffers:
            if first.get((buffer, i), -1) < ends[i]:
                yield f"buffer {buffer} is not held from {_name(plan, i)} to {_name(plan, ends[i])}"


def _ends(replays: Sequence[ReplayStep]) -> list[int]:
    """Return the last replay of the same span and microbatch, for each replay."""
    ends: dict[tuple[int, int, int], int] = {}
    for i, replay in enumerate(replays):
        ends[replay.step.microbatch, replay.step.chunk, replay.span] = i
    return [ends[replay.step.microbatch, replay.step.chunk, replay.span] for replay in replays]


def _name(plan: BufferPlan, i: int) -> str:
    replay = plan.replays[i]
    return f"the {replay.step}, span {plan.chunks[replay.step.chunk][replay.span].name!r}"
