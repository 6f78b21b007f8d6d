"""Two microbatches at once: one exchanges rows while the other computes. Standard library only.

A microbatch on its way through a chunk is a chain of parts, forward or backward. A part computes, or it
exchanges rows with other ranks; it needs the part before it. A host starts the parts of two chains in one
order, each on the stream for its kind, where parts run one after the other. Such an order is data:
`interleave` makes one, `play` times it, on one rank or on several that meet in every exchange.

Gradients of weights need the part behind which they come, and nothing needs them: deferred, they are parts
that fill the time in which an exchange of the same microbatch is on its way (Qi et al. 2023,
arXiv:2401.10241). Two microbatches at once, with gradients of weights beside exchanges: section 3.2.1 of
DeepSeek-V3 (arXiv:2412.19437).

Graphs hold what computes. The order in which they are replayed follows from an order of steps: `graph_order`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

from fastmp.pipeline.schedule import BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Step

__all__ = [
    "Part", "PartStep", "Played", "Section", "Turn", "backward_parts", "computing", "cut_segments",
    "forward_parts", "graph_order", "in_sequence", "interleave", "needed", "nominal", "order_of", "play",
]  # fmt: skip


_MAX_DEFERRED = 2  # parts of a chain whose gradients of weights wait: each holds its inputs for them


class Section(NamedTuple):
    """A segment of a layer as an order sees it, with the times that it takes; any unit.

    exchange: it is on the stream of exchanges. waits: the host waits for the segment before it, for the sizes
    of what it sends; in a backward they are known.
    """

    name: str
    exchange: bool = False
    waits: bool = False
    forward: float = 1.0
    backward_input: float = 1.0
    backward_weight: float = 1.0


class Part(NamedTuple):
    """Segments that follow each other on one stream, `first` to `last` of a chunk, forward or backward.

    deferred: the gradients of their weights, for which no other part waits.
    """

    first: int
    last: int
    exchange: bool
    time: float
    waits: bool = False
    deferred: bool = False


class Turn(NamedTuple):
    """The start of a part: number `part` of chain `chain`."""

    chain: int
    part: int


Chain = Sequence[Part]


def forward_parts(sections: Sequence[Section]) -> tuple[Part, ...]:
    """The parts of a forward through the segments of a chunk."""
    return tuple(
        Part(first, last, exchange, sum(s.forward for s in own), any(s.waits for s in own))
        for first, last, exchange, own in _runs(sections)
    )


def backward_parts(sections: Sequence[Section], *, defer: bool = False) -> tuple[Part, ...]:
    """The parts of a backward through them, last segment first; with `defer`, weights have their own."""
    parts = []
    for first, last, exchange, own in reversed([*_runs(sections)]):
        inputs, weights = (sum(each) for each in zip(*((s.backward_input, s.backward_weight) for s in own)))
        deferred = defer and not exchange
        parts.append(Part(first, last, exchange, inputs if deferred else inputs + weights))
        if deferred:
            parts.append(Part(first, last, exchange, weights, deferred=True))
    return tuple(parts)


def _runs(sections: Sequence[Section]) -> Iterator[tuple[int, int, bool, list[Section]]]:
    for exchange, run in groupby(enumerate(sections), lambda each: each[1].exchange):
        numbers, own = zip(*run)
        yield numbers[0], numbers[-1], exchange, list(own)


def nominal(sections: Sequence[Section]) -> tuple[Section, ...]:
    """The runs of segments on one stream, each with the same time, which all ranks know without measuring.

    A part takes 1, a backward with weights 2.
    """
    return tuple(
        Section(own[0].name, exchange, any(s.waits for s in own), backward_weight=0.0 if exchange else 1.0)
        for _, _, exchange, own in _runs(sections)
    )


def cut_segments(segments: Sequence[tuple[str, bool, bool]]) -> list[tuple[range, Section]]:
    """Cut a chunk where its segments begin or cease to exchange: places of segments, and a nominal section.

    segments: (name, whether it exchanges, whether a graph could hold it). The host waits where an exchange
    begins that a graph could not hold, behind a segment that it could.
    """
    found, before = [], True
    for exchange, group in groupby(range(len(segments)), lambda i: segments[i][1]):
        own = list(group)
        (name, _, able), (*_, last_able) = segments[own[0]], segments[own[-1]]
        (section,) = nominal([Section(name, exchange, exchange and before and not able)])
        found.append((range(own[0], own[-1] + 1), section))
        before = last_able
    return found


class PartStep(Step):
    """A step of one part, whose number stands in place of a chunk's; see `computing`."""

    __slots__ = ()

    @property
    def unit(self) -> str:
        return "part"


def computing(chunks: Sequence[Sequence[Section]]) -> list[tuple[int, int]]:
    """The (chunk, section) of each section that computes; its place here is the number of the part."""
    return [(c, i) for c, own in enumerate(chunks) for i, each in enumerate(own) if not each.exchange]


def graph_order(steps: Iterable[Sequence[Step]], chunks: Sequence[Sequence[Section]]) -> tuple[PartStep, ...]:
    """The order in which a host starts the parts that compute, of which graphs are replayed.

    steps: what runs at once, in order (`Schedule.together`). chunks: the sections of each, from
    `cut_segments`. A backward is two steps, of inputs and of weights.
    """
    numbers = {place: number for number, place in enumerate(computing(chunks))}
    found = []
    for group in steps:
        chains = [
            forward_parts(own) if step.kind == FORWARD else backward_parts(own, defer=True)
            for step, own in ((step, chunks[step.chunk]) for step in group)
        ]
        for chain, number in order_of(*chains):
            step, part = group[chain], chains[chain][number]
            if not part.exchange:
                kind = BACKWARD_WEIGHT if part.deferred else BACKWARD_INPUT
                kind = FORWARD if step.kind == FORWARD else kind
                found.append(PartStep(kind, step.microbatch, numbers[step.chunk, part.first]))
    return tuple(found)


def order_of(*chains: Chain) -> tuple[Turn, ...]:
    """The order in training: of a chain alone as it is, of a forward and a backward as `interleave` says."""
    return interleave(*chains) if len(chains) > 1 and all(chains) else in_sequence(*chains)


def needed(chain: Chain, part: int) -> int | None:
    """The number of the part that part number `part` needs; None for the first."""
    before = (i for i in range(part - 1, -1, -1) if not chain[i].deferred)
    return next(before, None)


def interleave(*chains: Chain) -> tuple[Turn, ...]:
    """An order in which a host starts the parts of `chains`, which have their first inputs.

    Next comes what can begin first; of several such parts, one on which others wait, and for which the host
    does not; of these an exchange, then one whose next exchange is nearest. Where this takes longer than an
    order by turns, or one chain after the other, that is returned. The same chains always give the same
    order, so that ranks agree on it without a word. Of a chain, the deferred gradients of at most two parts
    wait: what they need takes memory.
    """
    by_turns = tuple(Turn(i, part) for i, part in _by_turns([len(chain) for chain in chains]))
    return min(
        (_greedy(chains), by_turns, in_sequence(*chains)), key=lambda order: play([order], [chains]).makespan
    )


def in_sequence(*chains: Chain) -> tuple[Turn, ...]:
    """The order of chains one after the other."""
    return tuple(Turn(number, part) for number, chain in enumerate(chains) for part in range(len(chain)))


def _by_turns(lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
    for part in range(max(lengths, default=0)):
        for chain, length in enumerate(lengths):
            if part < length:
                yield chain, part


def _greedy(chains: Sequence[Chain]) -> tuple[Turn, ...]:
    waiting = [list(range(len(chain))) for chain in chains]
    ends: dict[Turn, float] = {}
    free = {False: 0.0, True: 0.0}
    host, order = 0.0, []
    nearest = [_to_exchange(chain) for chain in chains]
    while any(waiting):
        best: tuple[tuple[float, bool, bool, bool, float, int], Turn, float] | None = None
        for turn in _candidates(chains, waiting):
            own, before = chains[turn.chain][turn.part], needed(chains[turn.chain], turn.part)
            given = 0.0 if before is None else ends[Turn(turn.chain, before)]
            start = max(host, given, free[own.exchange])
            near = nearest[turn.chain][turn.part]
            key = (start, own.deferred, own.waits, not own.exchange, near, turn.chain)
            if best is None or key < best[0]:
                best = key, turn, given
        assert best is not None
        (start, *_), turn, given = best
        own = chains[turn.chain][turn.part]
        ends[turn] = free[own.exchange] = start + own.time
        host = max(host, given) if own.waits else host
        waiting[turn.chain].remove(turn.part)
        order.append(turn)
    return tuple(order)


def _candidates(chains: Sequence[Chain], waiting: Sequence[Sequence[int]]) -> list[Turn]:
    """What can be started next; only the oldest gradients of weights where too many wait."""
    found = []
    for number, (chain, left) in enumerate(zip(chains, waiting, strict=True)):
        own = [Turn(number, part) for part in _ready(chain, left)]
        if sum(chain[turn.part].deferred for turn in own) > _MAX_DEFERRED:
            return own[:1]
        found += own
    return found


def _ready(chain: Chain, left: Sequence[int]) -> Iterator[int]:
    """The next part, and those deferred that come before it."""
    for part in left:
        yield part
        if not chain[part].deferred:
            return


def _to_exchange(chain: Chain) -> list[float]:
    """The time from the start of each part to the next exchange behind it."""
    found, time = [], 0.0
    for part in reversed(chain):
        time = 0.0 if part.exchange else time + (0.0 if part.deferred else part.time)
        found.append(time)
    return found[::-1]


@dataclass(frozen=True)
class Played:
    """The times of parts: (start, end) of `turns[rank][i]`, the i-th turn of a rank's order."""

    orders: tuple[tuple[Turn, ...], ...]
    chains: tuple[tuple[Chain, ...], ...]
    turns: tuple[tuple[tuple[float, float], ...], ...]

    @cached_property
    def makespan(self) -> float:
        """The time at which the last rank is done."""
        return max((end for own in self.turns for _, end in own), default=0.0)

    def exposed(self, rank: int) -> float:
        """The time in which a rank computes nothing."""
        times = zip(self.orders[rank], self.turns[rank], strict=True)
        own = self.chains[rank]
        return self.makespan - sum(end - start for (c, p), (start, end) in times if not own[c][p].exchange)


def play(orders: Sequence[Sequence[Turn]], chains: Sequence[Sequence[Chain]]) -> Played:
    """Time the orders of ranks, `orders[rank]`, of which each has its own `chains[rank]`.

    An exchange begins when all ranks have come to it, and ends everywhere at once. ValueError naming rank and
    part where one is missing, there twice, or comes before what it needs, where ranks differ in their chains,
    and where ranks wait for each other for ever.
    """
    shapes = [[[(p.first, p.last, p.exchange, p.deferred) for p in chain] for chain in own] for own in chains]
    other = next((rank for rank, shape in enumerate(shapes) if shape != shapes[0]), None)
    if other is not None:
        raise ValueError(f"overlap: ranks 0 and {other} have chains of other parts")
    if not orders or len(orders) != len(chains):
        raise ValueError(f"overlap: {len(orders)} orders for the chains of {len(chains)} ranks")
    given = enumerate(zip(orders, chains, strict=True))
    ranks = [_Rank(rank, tuple(Turn(*turn) for turn in order), own) for rank, (order, own) in given]
    while True:
        moved = [rank.advance() for rank in ranks]
        heads = [rank.exchange for rank in ranks]
        if heads[0] is not None and all(head is not None and head[0] == heads[0][0] for head in heads):
            start = max(head[1] for head in heads if head is not None)
            length = max(rank.part(heads[0][0]).time for rank in ranks)
            for rank in ranks:
                rank.exchanged(start, start + length)
        elif not any(moved):
            break
    for rank in ranks:
        if len(rank.times) < len(rank.order):
            others = ", ".join(f"rank {each.rank} {_named(each.waits_for)}" for each in ranks)
            raise ValueError(f"overlap: ranks wait for each other for ever: {others}")
    timed = tuple(tuple(rank.times[turn] for turn in rank.order) for rank in ranks)
    return Played(tuple(rank.order for rank in ranks), tuple(tuple(own) for own in chains), timed)


class _Rank:
    """A rank that plays its order: a host, and two streams."""

    def __init__(self, rank: int, order: tuple[Turn, ...], chains: Sequence[Chain]) -> None:
        self.rank, self.order, self.chains = rank, order, chains
        self.times: dict[Turn, tuple[float, float]] = {}
        self.exchange: tuple[Turn, float] | None = None  # the next one, once it could begin, and when
        self._check()
        self._started, self._host = 0, 0.0
        self._queues: dict[bool, deque[tuple[Turn, float]]] = {False: deque(), True: deque()}
        self._free = {False: 0.0, True: 0.0}

    def part(self, turn: Turn) -> Part:
        return self.chains[turn.chain][turn.part]

    @property
    def waits_for(self) -> Turn | None:
        return None if self.exchange is None else self.exchange[0]

    def _check(self) -> None:
        every = {Turn(c, p) for c, chain in enumerate(self.chains) for p in range(len(chain))}
        seen: set[Turn] = set()
        for turn in self.order:
            if turn not in every or turn in seen:
                problem = "is there twice" if turn in seen else "does not exist"
                raise ValueError(f"overlap: rank {self.rank}, {_named(turn)} {problem}")
            before = self._needed(turn)
            if before is not None and before not in seen:
                raise ValueError(f"overlap: rank {self.rank}, {_named(turn)} comes before {_named(before)}")
            seen.add(turn)
        for turn in sorted(every - seen):
            raise ValueError(f"overlap: rank {self.rank}, {_named(turn)} is missing")

    def _needed(self, turn: Turn) -> Turn | None:
        before = needed(self.chains[turn.chain], turn.part)
        return None if before is None else Turn(turn.chain, before)

    def advance(self) -> bool:
        """Start what can start, but exchanges, for which other ranks are needed; whether anything could."""
        moved = False
        while self._started < len(self.order) and self._start(self.order[self._started]):
            moved = True
        for exchange, queue in self._queues.items():
            while queue and not (exchange and self.exchange):
                turn, issued = queue[0]
                before = self._needed(turn)
                if before is not None and before not in self.times:
                    break
                given = 0.0 if before is None else self.times[before][1]
                start = max(issued, given, self._free[exchange])
                queue.popleft()
                moved = True
                if exchange:
                    self.exchange = turn, start
                else:
                    self.times[turn] = start, start + self.part(turn).time
                    self._free[False] = start + self.part(turn).time
        return moved

    def _start(self, turn: Turn) -> bool:
        """Put a part on its stream; False where the host has to wait for one that has not ended."""
        part, before = self.part(turn), self._needed(turn)
        if part.waits and before is not None:
            if before not in self.times:
                return False
            self._host = max(self._host, self.times[before][1])
        self._queues[part.exchange].append((turn, self._host))
        self._started += 1
        return True

    def exchanged(self, start: float, end: float) -> None:
        assert self.exchange is not None
        self.times[self.exchange[0]] = start, end
        self._free[True], self.exchange = end, None


def _named(turn: Turn | None) -> str:
    return "none" if turn is None else f"part {turn.part} of chain {turn.chain}"
