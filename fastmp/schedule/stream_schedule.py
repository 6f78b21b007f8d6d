"""Stream schedules: overlap the all-to-alls of one microbatch with the compute of another (DualPipe-style).

A microbatch's way through a chunk is a sequence of ops, forward or backward. An op computes or exchanges
rows with other ranks (an all-to-all) and depends on the op before it. The host launches the ops of two
sequences in one order, each on the stream of its kind, where ops run one after the other:

    compute stream   F attention | B experts     | F experts      | B attention
    exchange stream  B combine   | F dispatch    | B dispatch     | F combine

Such an order is data: `interleave` makes one, `simulate_streams` times it, on one rank or on several that
synchronise in every exchange.

Weight gradients depend on the input gradients of their segments and nothing depends on them: deferred, they
are ops that fill the time of an exchange of the same microbatch (Qi et al. 2023, arXiv:2401.10241). Two
overlapped microbatches with weight gradients next to exchanges: section 3.2.1 of DeepSeek-V3
(arXiv:2412.19437).

CUDA graphs hold the compute ops; `graph_order` is the order of their replays. Standard library only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, groupby
from typing import NamedTuple

from fastmp.schedule.schedule import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Step

__all__ = [
    "Launch", "OpStep", "SegmentCost", "SegmentFacts", "StreamOp", "Timeline", "backward_ops", "compute_ops",
    "forward_ops", "graph_order", "graph_orders", "interleave", "kind_of", "launch_order",
    "partition_segments", "predecessor", "sequential", "simulate_streams", "step_launches", "unit_cost",
]  # fmt: skip


_MAX_DEFERRED = 2  # ops of one sequence with deferred weight gradients: each keeps its inputs alive


class SegmentCost(NamedTuple):
    """Costs of one segment of a layer, in any unit.

    exchange: it runs on the exchange stream.
    waits: in a forward, the host waits for the segment before it, to know the sizes of what it sends.
    """

    name: str
    exchange: bool = False
    waits: bool = False
    forward: float = 1.0
    backward_input: float = 1.0
    backward_weight: float = 1.0


class StreamOp(NamedTuple):
    """Consecutive segments on one stream, `first` to `last` of a chunk, forward or backward.

    deferred: their weight gradients, which no other op waits for.
    """

    first: int
    last: int
    exchange: bool
    time: float
    waits: bool = False
    deferred: bool = False


class Launch(NamedTuple):
    """The launch of op number `op` of sequence number `sequence` by the host."""

    sequence: int
    op: int


OpSequence = Sequence[StreamOp]


def forward_ops(segments: Sequence[SegmentCost]) -> tuple[StreamOp, ...]:
    """Return the ops of a forward through the segments of a chunk.

    Example:
        >>> layer = [SegmentCost("attention"), SegmentCost("dispatch", exchange=True), SegmentCost("experts")]
        >>> [(op.first, op.exchange) for op in forward_ops(layer)]
        [(0, False), (1, True), (2, False)]
    """
    return tuple(
        StreamOp(first, last, exchange, sum(s.forward for s in costs), any(s.waits for s in costs))
        for first, last, exchange, costs in _runs(segments)
    )


def backward_ops(segments: Sequence[SegmentCost], *, defer: bool = False) -> tuple[StreamOp, ...]:
    """Return the ops of a backward, last segment first; `defer` makes weight gradients ops of their own."""
    ops = []
    for first, last, exchange, costs in reversed([*_runs(segments)]):
        inputs, weights = (sum(each) for each in zip(*((s.backward_input, s.backward_weight) for s in costs)))
        deferred = defer and not exchange
        ops.append(StreamOp(first, last, exchange, inputs if deferred else inputs + weights))
        if deferred:
            ops.append(StreamOp(first, last, exchange, weights, deferred=True))
    return tuple(ops)


def _runs(segments: Sequence[SegmentCost]) -> Iterator[tuple[int, int, bool, list[SegmentCost]]]:
    """Yield (first, last, exchange, costs) of each run of consecutive segments on one stream."""
    for exchange, run in groupby(enumerate(segments), lambda each: each[1].exchange):
        numbers, costs = zip(*run)
        yield numbers[0], numbers[-1], exchange, list(costs)


def unit_cost(segments: Sequence[SegmentCost]) -> tuple[SegmentCost, ...]:
    """Return one segment per run on one stream, each of the same cost: an op takes 1, a backward 2.

    All ranks know these costs without measuring, so their orders agree.
    """
    return tuple(
        SegmentCost(
            costs[0].name, exchange, any(s.waits for s in costs), backward_weight=0.0 if exchange else 1.0
        )
        for _, _, exchange, costs in _runs(segments)
    )


class SegmentFacts(NamedTuple):
    """Facts of a segment that the plan of a step follows from.

    name: "layer.segment".
    exchanges: it exchanges rows with other ranks, and runs on the exchange stream of overlapped microbatches.
    group: segments of two groups are never in one captured span, see `fastmp.schedule.scope.layer_groups`.
    """

    name: str
    exchanges: bool = False
    capturable: bool = True
    group: int = 0


def partition_segments(segments: Sequence[SegmentFacts]) -> list[tuple[range, SegmentCost]]:
    """Partition a chunk at the segments where exchanges begin and end.

    Returns:
        for each run of segments on one stream, their range and a unit cost. The host waits before an exchange
        that is not capturable if the segment before it is.
    """
    found, before = [], True
    for exchange, group in groupby(range(len(segments)), lambda i: segments[i].exchanges):
        places = list(group)
        first, able = segments[places[0]], segments[places[0]].capturable
        (cost,) = unit_cost([SegmentCost(first.name, exchange, exchange and before and not able)])
        found.append((range(places[0], places[-1] + 1), cost))
        before = segments[places[-1]].capturable
    return found


class OpStep(Step):
    """A step of one compute op; `chunk` holds the op's number, see `compute_ops`."""

    __slots__ = ()

    @property
    def unit(self) -> str:
        return "op"


def compute_ops(chunks: Sequence[Sequence[SegmentCost]]) -> list[tuple[int, int]]:
    """Return the (chunk, segment) of each compute op; the position in this list is the op's number."""
    return [(c, i) for c, costs in enumerate(chunks) for i, each in enumerate(costs) if not each.exchange]


def graph_order(
    steps: Iterable[Sequence[Step]], chunks: Sequence[Sequence[SegmentCost]]
) -> tuple[OpStep, ...]:
    """Return the host's launch order of compute ops, also the order of graph replays.

    Args:
        steps: concurrent steps, in order (`Schedule.together`).
        chunks: the segments of each chunk, from `partition_segments`.

    Returns:
        one step per forward; a backward is two, of inputs and of weights, one after the other unless the
        schedule splits it.
    """
    return tuple(chain.from_iterable(graph_orders(steps, chunks)))


def graph_orders(
    steps: Iterable[Sequence[Step]], chunks: Sequence[Sequence[SegmentCost]]
) -> Iterator[tuple[OpStep, ...]]:
    """Yield the part of `graph_order` of each group of concurrent steps."""
    numbers = {place: number for number, place in enumerate(compute_ops(chunks))}
    for launches in step_launches(steps, chunks):
        yield tuple(
            OpStep(kind_of(step, op), step.microbatch, numbers[step.chunk, op.first])
            for step, op in launches
            if not op.exchange
        )


def step_launches(
    steps: Iterable[Sequence[Step]], chunks: Sequence[Sequence[SegmentCost]]
) -> Iterator[list[tuple[Step, StreamOp]]]:
    """Yield the ops of each group of concurrent steps, in the host's launch order, each with its step."""
    known: dict[tuple[tuple[str, int], ...], list[tuple[int, StreamOp]]] = {}
    for group in steps:
        key = tuple((step.kind, step.chunk) for step in group)
        if key not in known:
            own = [_ops_of(kind, chunks[chunk]) for kind, chunk in key]
            known[key] = [(sequence, own[sequence][op]) for sequence, op in launch_order(*own)]
        yield [(group[sequence], op) for sequence, op in known[key]]


def kind_of(step: Step, op: StreamOp) -> str:
    """Return the kind of step that an op of `step` is: a backward of compute is of inputs or of weights."""
    if step.kind == FORWARD:
        return FORWARD
    return BACKWARD if op.exchange else BACKWARD_WEIGHT if op.deferred else BACKWARD_INPUT


def _ops_of(kind: str, segments: Sequence[SegmentCost]) -> OpSequence:
    """Return the ops of a step of this kind through a chunk."""
    if kind == FORWARD:
        return forward_ops(segments)
    ops = backward_ops(segments, defer=True)
    deferred = {BACKWARD_INPUT: (False,), BACKWARD_WEIGHT: (True,)}.get(kind, (False, True))
    return tuple(op for op in ops if op.deferred in deferred)


def launch_order(*sequences: OpSequence) -> tuple[Launch, ...]:
    """Return the order in training: a single sequence as it is, a forward and a backward interleaved."""
    if len(sequences) > 1 and all(sequences):
        return interleave(*sequences)
    return sequential(*sequences)


def predecessor(sequence: OpSequence, op: int) -> int | None:
    """Return the number of the op that op number `op` depends on; None for the first."""
    before = (i for i in range(op - 1, -1, -1) if not sequence[i].deferred)
    return next(before, None)


def interleave(*sequences: OpSequence) -> tuple[Launch, ...]:
    """Return a launch order for the ops of `sequences`, whose first inputs are available.

    The order is greedy: next comes the op that can start first. Ties are broken by

    1. ops that others depend on before deferred ones,
    2. ops that the host does not wait for,
    3. exchanges before compute,
    4. the op whose next exchange is nearest.

    If an alternating or a sequential order takes less time, that one is returned. The result depends on the
    sequences alone, so ranks agree on it without communication. At most two ops of a sequence with deferred
    weight gradients wait at a time, as they keep their inputs alive.

    Example:
        >>> layer = [SegmentCost("attention"), SegmentCost("dispatch", exchange=True, backward_weight=0.0)]
        >>> sequences = forward_ops(layer), backward_ops(layer)
        >>> [tuple(launch) for launch in interleave(*sequences)]
        [(1, 0), (0, 0), (0, 1), (1, 1)]
    """
    alternating = tuple(Launch(i, op) for i, op in _alternating([len(sequence) for sequence in sequences]))
    return min(
        (_greedy(sequences), alternating, sequential(*sequences)),
        key=lambda order: simulate_streams([order], [sequences]).makespan,
    )


def sequential(*sequences: OpSequence) -> tuple[Launch, ...]:
    """Return the order that launches one sequence after the other."""
    return tuple(
        Launch(number, op) for number, sequence in enumerate(sequences) for op in range(len(sequence))
    )


def _alternating(lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
    for op in range(max(lengths, default=0)):
        for sequence, length in enumerate(lengths):
            if op < length:
                yield sequence, op


def _greedy(sequences: Sequence[OpSequence]) -> tuple[Launch, ...]:
    waiting = [list(range(len(sequence))) for sequence in sequences]
    ends: dict[Launch, float] = {}
    free = {False: 0.0, True: 0.0}  # time at which the compute and the exchange stream are free
    host, order = 0.0, []
    nearest = [_to_exchange(sequence) for sequence in sequences]
    while any(waiting):
        # 1. Of all ops that can be launched, choose the one that can start first.
        best: tuple[tuple[float, bool, bool, bool, float, int], Launch, float] | None = None
        for launch in _candidates(sequences, waiting):
            sequence = sequences[launch.sequence]
            op, before = sequence[launch.op], predecessor(sequence, launch.op)
            inputs_at = 0.0 if before is None else ends[Launch(launch.sequence, before)]
            start = max(host, inputs_at, free[op.exchange])
            near = nearest[launch.sequence][launch.op]
            key = (start, op.deferred, op.waits, not op.exchange, near, launch.sequence)
            if best is None or key < best[0]:
                best = key, launch, inputs_at
        assert best is not None
        # 2. Launch it: its stream is busy until its end, and the host until its inputs if it waits for them.
        (start, *_), launch, inputs_at = best
        op = sequences[launch.sequence][launch.op]
        ends[launch] = free[op.exchange] = start + op.time
        host = max(host, inputs_at) if op.waits else host
        waiting[launch.sequence].remove(launch.op)
        order.append(launch)
    return tuple(order)


def _candidates(sequences: Sequence[OpSequence], waiting: Sequence[Sequence[int]]) -> list[Launch]:
    """Return the ops that can be launched next; with too many deferred, only the oldest of these."""
    found = []
    for number, (sequence, left) in enumerate(zip(sequences, waiting, strict=True)):
        ready = [Launch(number, op) for op in _ready(sequence, left)]
        if sum(sequence[launch.op].deferred for launch in ready) > _MAX_DEFERRED:
            return ready[:1]
        found += ready
    return found


def _ready(sequence: OpSequence, left: Sequence[int]) -> Iterator[int]:
    """Yield the next op, and the deferred ones before it."""
    for op in left:
        yield op
        if not sequence[op].deferred:
            return


def _to_exchange(sequence: OpSequence) -> list[float]:
    """Return the time from the start of each op to the next exchange after it."""
    found, time = [], 0.0
    for op in reversed(sequence):
        time = 0.0 if op.exchange else time + (0.0 if op.deferred else op.time)
        found.append(time)
    return found[::-1]


@dataclass(frozen=True)
class Timeline:
    """Simulated times of ops: `times[rank][i]` is (start, end) of the i-th launch in a rank's order."""

    orders: tuple[tuple[Launch, ...], ...]
    sequences: tuple[tuple[OpSequence, ...], ...]
    times: tuple[tuple[tuple[float, float], ...], ...]

    @cached_property
    def makespan(self) -> float:
        """End of the last op of any rank."""
        return max((end for times in self.times for _, end in times), default=0.0)

    def exposed(self, rank: int) -> float:
        """Return the time in which a rank's compute stream is idle."""
        times = zip(self.orders[rank], self.times[rank], strict=True)
        ops = self.sequences[rank]
        return self.makespan - sum(end - start for (s, o), (start, end) in times if not ops[s][o].exchange)


def simulate_streams(
    orders: Sequence[Sequence[Launch]], sequences: Sequence[Sequence[OpSequence]]
) -> Timeline:
    """Simulate the two streams and the host of every rank.

    An exchange starts when all ranks have reached it, and ends on all of them at the same time.

    Args:
        orders: `orders[rank]`, a permutation of that rank's ops.
        sequences: `sequences[rank]`, of the same ops on all ranks; times may differ.

    Raises:
        ValueError: naming rank and op, if one is missing, repeated or launched before its predecessor; if
            ranks have other ops; or if ranks wait for each other in a cycle.

    Example:
        >>> layer = [SegmentCost("attention"), SegmentCost("dispatch", exchange=True, backward_weight=0.0)]
        >>> sequences = forward_ops(layer * 4), backward_ops(layer * 4)
        >>> simulate_streams([sequential(*sequences)], [sequences]).makespan
        20.0
        >>> simulate_streams([interleave(*sequences)], [sequences]).makespan
        12.0
    """
    shapes = [
        [[(op.first, op.last, op.exchange, op.deferred) for op in sequence] for sequence in each]
        for each in sequences
    ]
    other = next((rank for rank, shape in enumerate(shapes) if shape != shapes[0]), None)
    if other is not None:
        raise ValueError(f"simulate_streams: ranks 0 and {other} have sequences of other ops")
    if not orders or len(orders) != len(sequences):
        raise ValueError(
            f"simulate_streams: {len(orders)} orders for the sequences of {len(sequences)} ranks"
        )
    pairs = enumerate(zip(orders, sequences, strict=True))
    ranks = [_Rank(rank, tuple(Launch(*each) for each in order), ops) for rank, (order, ops) in pairs]
    while True:
        # 1. Every rank advances to its next exchange.
        moved = [rank.advance() for rank in ranks]
        heads = [rank.exchange for rank in ranks]
        # 2. Once all ranks have reached the same exchange, it runs, as long as on the slowest rank.
        if heads[0] is not None and all(head is not None and head[0] == heads[0][0] for head in heads):
            start = max(head[1] for head in heads if head is not None)
            length = max(rank.op(heads[0][0]).time for rank in ranks)
            for rank in ranks:
                rank.exchanged(start, start + length)
        elif not any(moved):
            break
    for rank in ranks:
        if len(rank.times) < len(rank.order):
            others = ", ".join(f"rank {each.rank} {_named(each.waits_for)}" for each in ranks)
            raise ValueError(f"simulate_streams: ranks wait for each other in a cycle: {others}")
    times = tuple(tuple(rank.times[launch] for launch in rank.order) for rank in ranks)
    return Timeline(tuple(rank.order for rank in ranks), tuple(tuple(each) for each in sequences), times)


class _Rank:
    """A simulated rank: a host that launches in its order, and two streams."""

    def __init__(self, rank: int, order: tuple[Launch, ...], sequences: Sequence[OpSequence]) -> None:
        self.rank, self.order, self.sequences = rank, order, sequences
        self.times: dict[Launch, tuple[float, float]] = {}
        self.exchange: tuple[Launch, float] | None = None  # the next one that can start, and when
        self._check()
        self._launched, self._host = 0, 0.0
        self._queues: dict[bool, deque[tuple[Launch, float]]] = {False: deque(), True: deque()}
        self._free = {False: 0.0, True: 0.0}

    def op(self, launch: Launch) -> StreamOp:
        return self.sequences[launch.sequence][launch.op]

    @property
    def waits_for(self) -> Launch | None:
        return None if self.exchange is None else self.exchange[0]

    def _check(self) -> None:
        every = {Launch(s, op) for s, sequence in enumerate(self.sequences) for op in range(len(sequence))}
        seen: set[Launch] = set()
        for launch in self.order:
            if launch not in every or launch in seen:
                problem = "is there twice" if launch in seen else "does not exist"
                raise ValueError(f"simulate_streams: rank {self.rank}, {_named(launch)} {problem}")
            before = self._predecessor(launch)
            if before is not None and before not in seen:
                raise ValueError(
                    f"simulate_streams: rank {self.rank}, {_named(launch)} comes before {_named(before)}"
                )
            seen.add(launch)
        for launch in sorted(every - seen):
            raise ValueError(f"simulate_streams: rank {self.rank}, {_named(launch)} is missing")

    def _predecessor(self, launch: Launch) -> Launch | None:
        before = predecessor(self.sequences[launch.sequence], launch.op)
        return None if before is None else Launch(launch.sequence, before)

    def advance(self) -> bool:
        """Run everything up to the next exchange; return True if anything could run."""
        moved = False
        # 1. The host launches, until it has to wait for an op that has not ended.
        while self._launched < len(self.order) and self._launch(self.order[self._launched]):
            moved = True
        # 2. Each stream runs the ops whose predecessors have ended.
        for exchange, queue in self._queues.items():
            while queue and not (exchange and self.exchange):
                launch, launched_at = queue[0]
                before = self._predecessor(launch)
                if before is not None and before not in self.times:
                    break
                inputs_at = 0.0 if before is None else self.times[before][1]
                start = max(launched_at, inputs_at, self._free[exchange])
                queue.popleft()
                moved = True
                if exchange:  # needs the other ranks
                    self.exchange = launch, start
                else:
                    self.times[launch] = start, start + self.op(launch).time
                    self._free[False] = start + self.op(launch).time
        return moved

    def _launch(self, launch: Launch) -> bool:
        """Queue an op on its stream; return False if the host has to wait for an op that has not ended."""
        op, before = self.op(launch), self._predecessor(launch)
        if op.waits and before is not None:
            if before not in self.times:
                return False
            self._host = max(self._host, self.times[before][1])
        self._queues[op.exchange].append((launch, self._host))
        self._launched += 1
        return True

    def exchanged(self, start: float, end: float) -> None:
        assert self.exchange is not None
        self.times[self.exchange[0]] = start, end
        self._free[True], self.exchange = end, None


def _named(launch: Launch | None) -> str:
    return "none" if launch is None else f"op {launch.op} of sequence {launch.sequence}"
