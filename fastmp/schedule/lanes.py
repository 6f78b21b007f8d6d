"""Assign the microbatches of a step to lanes, in which they are in flight. Standard library only.

A lane is occupied from the first forward of a microbatch to its last backward, and is free for the next one
then. Its graphs and their memory serve all of its microbatches, so both follow what is in flight:

    lane 0   F0 ......... B0 F3 ......... B3
    lane 1      F1 .......... B1 F4 ......... B4
    lane 2         F2 ........... B2 F5 ......... B5
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from fastmp.schedule.schedule import FORWARD, Step

__all__ = ["Flight", "assign_lanes"]

_Form = tuple[tuple[str, int], ...]  # (kind, chunk) of each step of a flight


class Flight(NamedTuple):
    """A microbatch in flight through chunks whose forwards follow each other.

    bundle: the graphs that it replays. They are captured together, by the first flight of the bundle, and
        serve flights on the same lane whose steps have the same order.
    """

    microbatch: int
    lane: int
    bundle: int


def assign_lanes(steps: Sequence[Step]) -> tuple[list[Flight], list[int]]:
    """Return the flights of `steps`, and for each step the number of its flight.

    There are as many lanes as flights at once. A flight takes a free lane that has graphs for it, or else one
    with graphs of its chunks, or else the lowest.

    Example:
        >>> from fastmp.schedule import Schedule
        >>> [flight.lane for flight in assign_lanes(Schedule(pp=3, num_microbatches=6).order(0))[0]]
        [0, 1, 2, 0, 1, 2]
    """
    first_chunk = _joined(steps)
    keys = [(step.microbatch, first_chunk[step.chunk]) for step in steps]
    steps_of: dict[tuple[int, int], list[int]] = defaultdict(list)
    for i, key in enumerate(keys):
        steps_of[key].append(i)
    numbers: dict[tuple[int, int], int] = {}
    flights, bundles = list[Flight](), dict[tuple[int, _Form], int]()
    forms, free = list[dict[_Form, int]](), set[int]()  # of each lane: {form: first chunk}
    for i, key in enumerate(keys):
        if key not in numbers:
            form = tuple((steps[at].kind, steps[at].chunk) for at in steps_of[key])
            lane = min(
                free,
                key=lambda lane: (form not in forms[lane], key[1] not in forms[lane].values(), lane),
                default=len(forms),
            )
            if lane == len(forms):
                forms.append({})
            forms[lane][form] = key[1]
            free.discard(lane)
            numbers[key] = len(flights)
            flights.append(Flight(key[0], lane, bundles.setdefault((lane, form), len(bundles))))
        if i == steps_of[key][-1]:
            free.add(flights[numbers[key]].lane)
    return flights, [numbers[key] for key in keys]


def _joined(steps: Sequence[Step]) -> dict[int, int]:
    """Return {chunk: the first of its flight}.

    A chunk joins the one before it if each of its forwards directly follows that one's, leaving out
    backwards: a loss behind the last chunk, or the parts of a chunk with EP communication overlap.
    """
    before: dict[int, set[int | None]] = defaultdict(set)
    last: Step | None = None
    for step in steps:
        if step.kind == FORWARD:
            follows = last is not None and last.microbatch == step.microbatch
            before[step.chunk].add(last.chunk if follows and last is not None else None)
            last = step
    first: dict[int, int] = {}
    for chunk, (other, *more) in before.items():  # in the order of their first forwards
        first[chunk] = chunk if other is None or more else first[other]
    return first
