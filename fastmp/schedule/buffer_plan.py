"""Plan the graphs of an order of steps, and the static buffers they read. Standard library only.

A chunk is a list of captured spans with eager code between them. A step runs the graphs of its chunk's spans,
forwards in order, backwards in reverse. A graph belongs to a lane, and all microbatches on the lane replay
it, so the number of graphs follows what is in flight, not the number of microbatches.

A graph knows addresses only, so a buffer stays untouched until the last graph that reads it has run. The
inputs of a forward are held until its backward, or until the backward of its weights where backwards are
split; so are the gradients that a backward receives. Each such hold is a lease. Two graphs share a buffer if
none of their leases overlap; `plan_errors` proves it before anything is captured.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from fastmp.schedule.lanes import Flight, assign_lanes
from fastmp.schedule.schedule import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, KINDS, Step

__all__ = [
    "BufferPlan", "Lease", "ReplayStep", "SpanSpec", "TensorSpec",
    "plan_buffers", "plan_errors",
]  # fmt: skip

_ITEMSIZES = {
    **{"float64": 8, "int64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "int16": 2},
    **{"uint8": 1, "int8": 1, "bool": 1},
}


class TensorSpec(NamedTuple):
    """The shape and dtype ("bfloat16") of a tensor; a buffer holds tensors of one spec in turn.

    strides: of a tensor that is dense in another order of dimensions; None: contiguous.
    """

    shape: tuple[int, ...]
    dtype: str
    strides: tuple[int, ...] | None = None

    @property
    def nbytes(self) -> int:
        """The size in bytes. ValueError for an unknown dtype."""
        if self.dtype not in _ITEMSIZES:
            raise ValueError(f"graphs: unknown dtype {self.dtype!r}; choose from {', '.join(_ITEMSIZES)}")
        return math.prod(self.shape) * _ITEMSIZES[self.dtype]


class SpanSpec(NamedTuple):
    """Specs of the inputs of a captured span, and of the gradients of its outputs.

    gradients: None for a span without a backward, because its layers are frozen.
    """

    name: str
    inputs: tuple[TensorSpec, ...]
    gradients: tuple[TensorSpec, ...] | None = ()


class ReplayStep(NamedTuple):
    """One replay of a graph: span number `span` of a step.

    buffers: of the inputs in a forward, of the output gradients in a backward.
    graph: the number of the graph, which is captured at its first replay in the order.
    flight: the number of the flight.
    """

    step: Step
    span: int
    buffers: tuple[int, ...]
    graph: int
    flight: int


class Lease(NamedTuple):
    """The lifetime of a value in `buffer`, from replay `first` to replay `last` inclusive."""

    buffer: int
    first: int
    last: int


@dataclass(frozen=True)
class BufferPlan:
    """The replays of one training step of a rank, in order, and the buffers that they share."""

    chunks: tuple[tuple[SpanSpec, ...], ...]
    buffers: tuple[TensorSpec, ...]
    replays: tuple[ReplayStep, ...]
    leases: tuple[Lease, ...]
    flights: tuple[Flight, ...]

    @property
    def num_graphs(self) -> int:
        return 1 + max((replay.graph for replay in self.replays), default=-1)

    @cached_property
    def num_lanes(self) -> int:
        """The most flights at once."""
        return 1 + max((flight.lane for flight in self.flights), default=-1)

    @property
    def nbytes(self) -> int:
        """The bytes of the static buffers; those of the pools inside graphs are known only after capture."""
        return sum(spec.nbytes for spec in self.buffers)

    def pool_of(self, replay: ReplayStep) -> int:
        """Return the number of the memory pool of a graph.

        Each lane has a pool, because lanes are replayed in any order. Where there are several, backwards that
        are not split share one more: they leave nothing in it from one step to the next.
        """
        num_lanes = self.num_lanes
        alone = num_lanes == 1 or replay.step.kind != BACKWARD
        return self.flights[replay.flight].lane if alone else num_lanes

    def bundles(self) -> list[set[int]]:
        """Return the graphs of each bundle, by number."""
        found: list[set[int]] = [set() for _ in range(1 + max((f.bundle for f in self.flights), default=-1))]
        for replay in self.replays:
            found[self.flights[replay.flight].bundle].add(replay.graph)
        return found

    def inputs(self, spec: TensorSpec | None = None) -> int:
        """Return the number of buffers that hold inputs of forwards, of `spec` if it is passed."""
        held = {buffer for replay in self.replays if replay.step.kind == FORWARD for buffer in replay.buffers}
        return sum(spec is None or self.buffers[buffer] == spec for buffer in held)


def plan_buffers(order: Sequence[Step], chunks: Sequence[Sequence[SpanSpec]]) -> BufferPlan:
    """Plan the graphs and buffers of one rank; `chunks` has the captured spans of each of its chunks.

    There are as many lanes as microbatches in flight, under 1F1B min(warm-up + 1, num_microbatches x vpp). A
    span has 2 graphs for each lane that its chunk is on, 3 where backwards are split. With R spans a chunk
    whose inputs have one spec, each input of a forward takes R buffers for each lane.

    Raises:
        ValueError: a backward has no forward, a forward has no backward, or a chunk is not in `chunks`; the
            message names the step.

    Example:
        >>> from fastmp.schedule import Schedule
        >>> hidden = TensorSpec((8, 2, 32), "bfloat16")
        >>> plan = plan_buffers(Schedule(1, 4).order(0), [[SpanSpec("layers", (hidden,), (hidden,))]])
        >>> plan.num_graphs, plan.inputs(), plan.nbytes
        (2, 1, 2048)
    """
    specs_of = tuple(tuple(SpanSpec(*span) for span in chunk) for chunk in chunks)
    steps = [step if isinstance(step, Step) else Step(*step) for step in order]
    _check_order(steps, len(chunks))
    flights, flight_of = assign_lanes(steps)
    graphs: dict[tuple[int, str, int, int], int] = {}  # by bundle, kind, chunk and span
    values: dict[tuple[int, int], _Value] = {}  # by graph and position
    held: dict[tuple[int, int, int], list[tuple[_Value, int]]] = defaultdict(list)  # since a replay
    replays: list[ReplayStep] = []
    # 1. Number the graphs, and find the leases of each value that a graph reads.
    for step, number in zip(steps, flight_of, strict=True):
        forward, spans, flight = step.kind == FORWARD, specs_of[step.chunk], flights[number]
        for span in range(len(spans)) if forward else reversed(range(len(spans))):
            specs = spans[span].inputs if forward else spans[span].gradients
            own = held[step.microbatch, step.chunk, span]
            now = len(replays)
            if specs is None:  # no backward; outputs may be views of inputs, whose leases go on
                now -= 1
            else:
                graph = graphs.setdefault((flight.bundle, step.kind, step.chunk, span), len(graphs))
                if step.kind == BACKWARD_WEIGHT:
                    specs = ()  # it reads the gradients of the backward of the inputs
                own += [
                    (values.setdefault((graph, i), _Value(spec, forward, flight.lane)), now)
                    for i, spec in enumerate(specs)
                ]
                replays.append(ReplayStep(step, span, (), graph, number))
            if step.kind in (BACKWARD, BACKWARD_WEIGHT):
                for value, first in own:
                    value.leases.append((first, now))
    # 2. Give each value a buffer, the same one in all replays of its graph.
    buffers = _assign_buffers(values.values())
    of_graph: dict[int, tuple[int, ...]] = defaultdict(tuple)
    for (graph, _), value in values.items():
        of_graph[graph] += (value.buffer,)
    leases = [Lease(value.buffer, *lease) for value in values.values() for lease in value.leases]
    return BufferPlan(
        specs_of,
        tuple(buffers),
        tuple(replay._replace(buffers=of_graph[replay.graph]) for replay in replays),
        tuple(sorted(leases, key=lambda lease: lease.first)),
        tuple(flights),
    )


def _check_order(steps: Sequence[Step], num_chunks: int) -> None:
    """Raise ValueError for a step out of order; the message names it."""
    in_flight: dict[tuple[int, int], str] = {}  # the last step of it
    before = {BACKWARD: FORWARD, BACKWARD_INPUT: FORWARD, BACKWARD_WEIGHT: BACKWARD_INPUT}
    done: set[tuple[int, int]] = set()
    for i, step in enumerate(steps):
        key = (step.microbatch, step.chunk)
        if not 0 <= step.chunk < num_chunks:
            raise ValueError(
                f"graphs: step {i}, {step}, is of a {step.unit} that does not exist; "
                f"the plan has {num_chunks}"
            )
        if step.kind == FORWARD and (key in in_flight or key in done):
            raise ValueError(f"graphs: step {i}, {step}, is there twice")
        if step.kind not in KINDS:
            raise ValueError(f"graphs: step {i}, {step}, has an unknown kind; there are {', '.join(KINDS)}")
        if step.kind != FORWARD and in_flight.get(key) != before[step.kind]:
            raise ValueError(f"graphs: step {i}, {step}, has no {before[step.kind]} before it")
        if step.kind in (BACKWARD, BACKWARD_WEIGHT):
            del in_flight[key]
            done.add(key)
        else:
            in_flight[key] = step.kind
    for microbatch, chunk in in_flight:
        raise ValueError(f"graphs: the backward of microbatch {microbatch} chunk {chunk} is missing")


@dataclass
class _Value:
    """A tensor that a graph reads from a buffer: an input of a forward, or an output gradient.

    leases: (first, last) of its lifetimes in a step, in order.
    """

    spec: TensorSpec
    forward: bool
    lane: int
    leases: list[tuple[int, int]] = field(default_factory=list)
    buffer: int = -1


def _assign_buffers(values: Iterable[_Value]) -> list[TensorSpec]:
    """Assign each value the lowest buffer of its kind that is free in all of its leases; return all specs.

    Inputs go lane by lane, because those of one lane are rarely free in all leases of another.
    """
    specs: list[TensorSpec] = []
    held: list[list[tuple[int, int]]] = []  # of each buffer: its leases, in order
    of_kind: dict[tuple[TensorSpec, bool], list[int]] = defaultdict(list)
    for value in sorted(values, key=lambda each: each.lane if each.forward else each.leases[0][0]):
        own = of_kind[value.spec, value.forward]
        value.buffer = next((each for each in own if not _overlap(value.leases, held[each])), len(specs))
        if value.buffer == len(specs):
            specs.append(value.spec)
            held.append([])
            own.append(value.buffer)
        held[value.buffer] = sorted(held[value.buffer] + value.leases)
    return specs


def _overlap(leases: Sequence[tuple[int, int]], held: Sequence[tuple[int, int]]) -> bool:
    """Return True if one of `leases` overlaps one of `held`, which are in order and do not overlap."""
    for first, last in leases:
        i = bisect_right(held, (last, math.inf)) - 1  # the last one that begins by then
        if i >= 0 and held[i][1] >= first:
            return True
    return False


def plan_errors(plan: BufferPlan) -> Iterator[str]:
    """Yield the errors of a plan that was changed, or not made by `plan_buffers`.

    1. Two leases of a buffer overlap.
    2. A replay reads a buffer that is not leased until the last replay of its span and microbatch.
    3. Two flights are on a lane at once.
    4. Two flights of a bundle replay other graphs, or in another order.
    5. Two replays of a graph are of other spans, or read other buffers.
    """
    by_buffer: dict[int, list[Lease]] = defaultdict(list)
    for lease in plan.leases:
        by_buffer[lease.buffer].append(lease)
    for buffer, leases in by_buffer.items():
        leases.sort(key=lambda lease: lease.first)
        for before, after in pairwise(leases):
            if after.first <= before.last:
                yield (
                    f"buffer {buffer} is still needed by {_name(plan, before.last)} when "
                    f"{_name(plan, after.first)} writes to it"
                )
    leased = {(lease.buffer, lease.first): lease.last for lease in plan.leases}
    last = {(*replay.step[1:], replay.span): i for i, replay in enumerate(plan.replays)}
    for i, replay in enumerate(plan.replays):
        end = last[*replay.step[1:], replay.span]
        for buffer in replay.buffers:
            if leased.get((buffer, i), -1) < end:
                yield f"buffer {buffer} is not held from {_name(plan, i)} to {_name(plan, end)}"
    yield from _lane_errors(plan)


def _lane_errors(plan: BufferPlan) -> Iterator[str]:
    """Yield the errors of kinds 3 to 5 of `plan_errors`."""
    of_flight: dict[int, list[int]] = defaultdict(list)
    for i, replay in enumerate(plan.replays):
        of_flight[replay.flight].append(i)
    on_lane: dict[int, int] = {}  # the last replay of the flight before
    graphs_of: dict[int, list[int]] = {}
    for number, own in of_flight.items():  # in the order of their first replays
        flight = plan.flights[number]
        before = on_lane.get(flight.lane, -1)
        if before >= own[0]:
            yield f"lane {flight.lane} still holds {_name(plan, before)} at {_name(plan, own[0])}"
        on_lane[flight.lane] = max(before, own[-1])
        graphs = [plan.replays[i].graph for i in own]
        if graphs_of.setdefault(flight.bundle, graphs) != graphs:
            yield f"bundle {flight.bundle} has its graphs in another order from {_name(plan, own[0])} on"
    first: dict[int, int] = {}
    for i, replay in enumerate(plan.replays):
        other = plan.replays[first.setdefault(replay.graph, i)]
        kind, _, chunk = replay.step
        same = kind == other.step.kind and chunk == other.step.chunk and replay.span == other.span
        if not same or replay.buffers != other.buffers:
            yield f"graph {replay.graph} serves both {_name(plan, first[replay.graph])} and {_name(plan, i)}"


def _name(plan: BufferPlan, i: int) -> str:
    replay = plan.replays[i]
    return f"the {replay.step}, span {plan.chunks[replay.step.chunk][replay.span].name!r}"
