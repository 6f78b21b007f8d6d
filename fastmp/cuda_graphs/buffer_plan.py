"""Plan the graphs of an order of steps, and the static buffers they read. Standard library only.

A chunk is a list of captured spans with eager code between them. A step runs the graphs of its chunk's spans,
forwards in order, backwards in reverse. A graph knows addresses only, so a buffer stays untouched until the
last graph that reads it has run. The inputs of a forward are held until its backward, or until the backward
of its weights where backwards are split; so are the gradients that a backward receives. Each such hold is a
lease. A buffer that nobody holds goes to the next lease of its shape and dtype, so memory follows what is in
flight, not the number of microbatches.

The steps between two times when nothing is in flight are a round. A round that repeats an earlier one with
other microbatches replays its graphs.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from fastmp.pipeline.schedule import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, KINDS, Step

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
    """

    step: Step
    span: int
    buffers: tuple[int, ...]
    graph: int


class Lease(NamedTuple):
    """The lifetime of a value in `buffer`, from replay `first` to replay `last` inclusive."""

    buffer: int
    first: int
    last: int


@dataclass(frozen=True)
class BufferPlan:
    """The replays of one training step of a rank, in order, and the buffers that they share.

    ends: the number of finished replays at each point where nothing is in flight.
    """

    chunks: tuple[tuple[SpanSpec, ...], ...]
    buffers: tuple[TensorSpec, ...]
    replays: tuple[ReplayStep, ...]
    leases: tuple[Lease, ...]
    ends: tuple[int, ...]

    @property
    def num_graphs(self) -> int:
        return 1 + max((replay.graph for replay in self.replays), default=-1)

    @property
    def nbytes(self) -> int:
        """The bytes of the static buffers; the pool inside graphs is known only after capture."""
        return sum(spec.nbytes for spec in self.buffers)

    def rounds(self) -> Iterator[range]:
        """Yield the replays of each round. Two rounds have all graphs in common, or none."""
        for start, end in pairwise((0, *self.ends)):
            if start < end:
                yield range(start, end)

    def inputs(self, spec: TensorSpec | None = None) -> int:
        """Return the number of buffers that hold inputs of forwards, of `spec` if it is passed."""
        held = {buffer for replay in self.replays if replay.step.kind == FORWARD for buffer in replay.buffers}
        return sum(spec is None or self.buffers[buffer] == spec for buffer in held)


def plan_buffers(order: Sequence[Step], chunks: Sequence[Sequence[SpanSpec]]) -> BufferPlan:
    """Plan the graphs and buffers of one rank; `chunks` has the captured spans of each of its chunks.

    With R spans a chunk whose inputs have one spec, each input of a forward takes R buffers for each
    microbatch in flight: min(warm-up + 1, num_microbatches x vpp) x R under 1F1B. A span has 2 graphs where
    each forward is followed by its backward, 2 x num_microbatches where microbatches overlap; 3 in place of 2
    where backwards are split.

    Raises:
        ValueError: a backward has no forward, a forward has no backward, or a chunk is not in `chunks`; the
            message names the step.

    Example:
        >>> from fastmp.pipeline import Schedule
        >>> hidden = TensorSpec((8, 2, 32), "bfloat16")
        >>> plan = plan_buffers(Schedule(1, 4).order(0), [[SpanSpec("layers", (hidden,), (hidden,))]])
        >>> plan.num_graphs, plan.inputs(), plan.nbytes
        (2, 1, 2048)
    """
    specs_of = tuple(tuple(SpanSpec(*span) for span in chunk) for chunk in chunks)
    pool, replays, leases, ends = _Pool(), list[ReplayStep](), list[Lease](), list[int]()
    captured: dict[tuple[Step, ...], int] = {}  # the first graph of a round
    every = [step if isinstance(step, Step) else Step(*step) for step in order]
    for steps in _rounds(every, len(chunks)):
        graph = captured.setdefault(_renumbered(steps), 1 + max((r.graph for r in replays), default=-1))
        held: dict[tuple[int, int, int], list[Lease]] = defaultdict(list)  # until now
        for step in steps:
            forward, spans = step.kind == FORWARD, specs_of[step.chunk]
            for span in range(len(spans)) if forward else reversed(range(len(spans))):
                specs = spans[span].inputs if forward else spans[span].gradients
                leases_of = held[step.microbatch, step.chunk, span]
                now = len(replays)
                if specs is None:  # no backward; outputs may be views of inputs, whose leases go on
                    now -= 1
                else:
                    if step.kind == BACKWARD_WEIGHT:
                        specs = ()  # it reads the gradients of the backward of the inputs
                    own = tuple(pool.take(spec, forward) for spec in specs)
                    leases_of += [Lease(buffer, now, now) for buffer in own]
                    replays.append(ReplayStep(step, span, own, graph))
                    graph += 1
                if step.kind in (BACKWARD, BACKWARD_WEIGHT):
                    for lease in leases_of:
                        leases.append(lease._replace(last=now))
                        pool.give_back(lease.buffer)
        ends.append(len(replays))
    return BufferPlan(specs_of, tuple(pool.specs), tuple(replays), tuple(leases), tuple(ends))


def _rounds(steps: Sequence[Step], num_chunks: int) -> Iterator[list[Step]]:
    """Split the order wherever nothing is in flight. ValueError names a step that is out of order."""
    in_flight: dict[tuple[int, int], str] = {}  # the last step of it
    before = {BACKWARD: FORWARD, BACKWARD_INPUT: FORWARD, BACKWARD_WEIGHT: BACKWARD_INPUT}
    done: set[tuple[int, int]] = set()
    own: list[Step] = []
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
        own.append(step)
        if step.kind in (BACKWARD, BACKWARD_WEIGHT):
            del in_flight[key]
            done.add(key)
        else:
            in_flight[key] = step.kind
        if not in_flight:
            yield own
            own = []
    for microbatch, chunk in in_flight:
        raise ValueError(f"graphs: the backward of microbatch {microbatch} chunk {chunk} is missing")


def _renumbered(steps: Sequence[Step]) -> tuple[Step, ...]:
    """Renumber microbatches by first appearance: rounds with shared graphs then compare equal."""
    numbers: dict[int, int] = {}
    return tuple(s._replace(microbatch=numbers.setdefault(s.microbatch, len(numbers))) for s in steps)


class _Pool:
    """Allocates buffers by number, inputs and gradients separately.

    It returns the lowest free number, so that equal rounds get equal buffers.
    """

    def __init__(self) -> None:
        self.specs: list[TensorSpec] = []
        self._kinds: list[tuple[TensorSpec, bool]] = []
        self._free: dict[tuple[TensorSpec, bool], list[int]] = defaultdict(list)  # heaps

    def take(self, spec: TensorSpec, forward: bool) -> int:
        free = self._free[spec, forward]
        if free:
            return heapq.heappop(free)
        self.specs.append(spec)
        self._kinds.append((spec, forward))
        return len(self.specs) - 1

    def give_back(self, buffer: int) -> None:
        heapq.heappush(self._free[self._kinds[buffer]], buffer)
