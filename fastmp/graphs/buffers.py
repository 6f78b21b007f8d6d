"""What an order of steps asks of CUDA graphs: which, and over which static buffers. Standard library only.

A chunk is a list of captured runs with eager code between them. A step runs the graphs of its chunk's runs,
forwards in order, backwards in reverse. A graph knows addresses only, so what it reads stays untouched until
the last graph that needs it has run: the inputs of a forward until its backward (until the backward of its
weights where those are split), the gradients it receives until the same. Each such hold is a lease of a
buffer; a buffer that nobody holds goes to the next one who asks for its shape and dtype. So memory follows
what is in flight, not the number of microbatches.

Where nothing is in flight, what follows may be what came before with other microbatches: then it is replayed,
not captured again.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from fastmp.parallel.schedule import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, KINDS, Step

_ITEMSIZES = {
    **{"float64": 8, "int64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "int16": 2},
    **{"uint8": 1, "int8": 1, "bool": 1},
}


class TensorSpec(NamedTuple):
    """A tensor by shape and dtype ("bfloat16"): a buffer holds one after the other of the same spec.

    strides: of one that is dense, but not in the order of its dimensions; None: contiguous.
    """

    shape: tuple[int, ...]
    dtype: str
    strides: tuple[int, ...] | None = None

    @property
    def nbytes(self) -> int:
        """ValueError for a dtype that is not known here."""
        if self.dtype not in _ITEMSIZES:
            raise ValueError(f"graphs: unknown dtype {self.dtype!r}; choose from {', '.join(_ITEMSIZES)}")
        return math.prod(self.shape) * _ITEMSIZES[self.dtype]


class RunSpec(NamedTuple):
    """A captured run: what it takes, and the outputs that receive gradients, which have their specs.

    gradients: None where it has no backward, as layers that are frozen.
    """

    name: str
    inputs: tuple[TensorSpec, ...]
    gradients: tuple[TensorSpec, ...] | None = ()


class Replay(NamedTuple):
    """One graph at work: run `run` of a step. `buffers` are inputs in a forward, gradients in a backward.

    `graph` is the number of the graph; its first replay in the order is where it is captured.
    """

    step: Step
    run: int
    buffers: tuple[int, ...]
    graph: int


class Lease(NamedTuple):
    """Replays `first` to `last`, both included, need what is in the buffer."""

    buffer: int
    first: int
    last: int


@dataclass(frozen=True)
class BufferPlan:
    """The replays of one training step of a rank, in order, and the buffers that they share."""

    chunks: tuple[tuple[RunSpec, ...], ...]
    buffers: tuple[TensorSpec, ...]
    replays: tuple[Replay, ...]
    leases: tuple[Lease, ...]
    ends: tuple[int, ...]  # how many replays are over each time that nothing is in flight

    @property
    def num_graphs(self) -> int:
        return 1 + max((replay.graph for replay in self.replays), default=-1)

    @property
    def nbytes(self) -> int:
        """Of the static buffers; what graphs hold inside is known when they are captured."""
        return sum(spec.nbytes for spec in self.buffers)

    def rounds(self) -> Iterator[range]:
        """The replays, cut wherever nothing is in flight. Two rounds have all graphs in common, or none."""
        for start, end in pairwise((0, *self.ends)):
            if start < end:
                yield range(start, end)

    def inputs(self, spec: TensorSpec | None = None) -> int:
        """How many buffers hold inputs of forwards, of all specs or of one."""
        held = {buffer for replay in self.replays if replay.step.kind == FORWARD for buffer in replay.buffers}
        return sum(spec is None or self.buffers[buffer] == spec for buffer in held)


def plan_buffers(order: Sequence[Step], chunks: Sequence[Sequence[RunSpec]]) -> BufferPlan:
    """Graphs and buffers for the steps of one rank; `chunks` has the captured runs of each of its chunks.

    With R runs a chunk whose inputs are alike, the forwards' inputs are peak in flight x R buffers for each
    input: min(warm-up + 1, num_microbatches x vpp) x R under 1F1B. There are 2 graphs for each run where a
    forward is followed by its backward, 2 x num_microbatches where they overlap; 3 where backwards are split.

    ValueError naming the step where a backward has no forward, or one is left without, and for a chunk that
    `chunks` does not have.
    """
    own_chunks = tuple(tuple(RunSpec(*run) for run in chunk) for chunk in chunks)
    pool, replays, leases, ends = _Pool(), list[Replay](), list[Lease](), list[int]()
    captured: dict[tuple[Step, ...], int] = {}  # the first graph of a round
    for steps in _rounds([Step(*step) for step in order], len(chunks)):
        graph = captured.setdefault(_renumbered(steps), 1 + max((r.graph for r in replays), default=-1))
        held: dict[tuple[int, int, int], list[Lease]] = defaultdict(list)  # until now
        for step in steps:
            forward, runs = step.kind == FORWARD, own_chunks[step.chunk]
            for run in range(len(runs)) if forward else reversed(range(len(runs))):
                specs = runs[run].inputs if forward else runs[run].gradients
                leases_of = held[step.microbatch, step.chunk, run]
                now = len(replays)
                if specs is None:  # outputs may be views of inputs: they are held for what has a backward
                    now -= 1
                else:
                    if step.kind == BACKWARD_WEIGHT:
                        specs = ()  # what the backward of the inputs got
                    own = tuple(pool.take(spec, forward) for spec in specs)
                    leases_of += [Lease(buffer, now, now) for buffer in own]
                    replays.append(Replay(step, run, own, graph))
                    graph += 1
                if step.kind in (BACKWARD, BACKWARD_WEIGHT):
                    for lease in leases_of:
                        leases.append(lease._replace(last=now))
                        pool.give_back(lease.buffer)
        ends.append(len(replays))
    return BufferPlan(own_chunks, tuple(pool.specs), tuple(replays), tuple(leases), tuple(ends))


def _rounds(steps: Sequence[Step], num_chunks: int) -> Iterator[list[Step]]:
    """The order cut wherever nothing is in flight; ValueError naming a step that cannot be there."""
    in_flight: dict[tuple[int, int], str] = {}  # the last step of it
    before = {BACKWARD: FORWARD, BACKWARD_INPUT: FORWARD, BACKWARD_WEIGHT: BACKWARD_INPUT}
    done: set[tuple[int, int]] = set()
    own: list[Step] = []
    for i, step in enumerate(steps):
        key = (step.microbatch, step.chunk)
        if not 0 <= step.chunk < num_chunks:
            raise ValueError(f"graphs: step {i}, {step}, is of a chunk that is not there; {num_chunks} are")
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
    """The steps with microbatches numbered as they come: equal for rounds that can share graphs."""
    numbers: dict[int, int] = {}
    return tuple(s._replace(microbatch=numbers.setdefault(s.microbatch, len(numbers))) for s in steps)


class _Pool:
    """Buffers by number. Those of inputs and of gradients are apart: few are needed of the latter.

    Who asks gets the first that is free, so that equal rounds get equal buffers.
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
