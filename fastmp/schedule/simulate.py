"""Simulator of pipeline orders: deadlocks, bubble, activation memory, critical path. Standard library only.

Each rank runs its steps in order. A step starts when the rank is free and its input has arrived: the output
of the forward of the previous stage, or of the backward of the next stage, `p2p` after it ended on another
rank. Sends never block, so an order that deadlocks here deadlocks with any kind of communication.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from fastmp.schedule.stage_map import StageMap
from fastmp.schedule.steps import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    KINDS,
    Step,
    peak_held,
)

_MAX_LINKS = 8  # ranks of a deadlock that its message shows
_NEVER = -1.0
_ANY_BACKWARD, _THEN_WEIGHT = (BACKWARD, BACKWARD_INPUT), (BACKWARD_WEIGHT,)


class Event(NamedTuple):
    """Simulated step of a rank, from `start` to `end`."""

    rank: int
    step: Step
    start: float
    end: float


@dataclass(frozen=True)
class Costs:
    """Time of each kind of step for one chunk, and latency of a message between two ranks; any unit.

    A time is a number, or one per stage (pp * vpp, first to last) if they differ: by an embedding, a loss,
    unequal numbers of layers. A backward that is not split takes the time of both halves. With activation
    recomputation, add the forward to `backward_input`.

    Attributes:
        p2p: latency; neither rank is busy meanwhile.
        hidden: time that an overlapped forward and backward save, at most down to the longer of the two; a
            number, or a table by stage of the forward, then of the backward.
    """

    forward: float | Sequence[float] = 1.0
    backward_input: float | Sequence[float] = 1.0
    backward_weight: float | Sequence[float] = 1.0
    p2p: float = 0.0
    hidden: float | Sequence[Sequence[float]] = 0.0

    def saved(self, forward: int, backward: int) -> float:
        """Return what overlapping saves, by the stages of the forward and of the backward."""
        return self.hidden if isinstance(self.hidden, int | float) else self.hidden[forward][backward]

    def by_kind(self, stages: int) -> dict[str, list[float]]:
        """Return the costs of every stage. Raises ValueError for negative, infinite or missing ones."""
        rows = [[self.hidden]] if isinstance(self.hidden, int | float) else self.hidden
        for name, cost in (("p2p", self.p2p), *(("hidden", each) for row in rows for each in row)):
            if not 0 <= cost < math.inf:
                raise ValueError(f"simulate: cost {name} must be 0 or more, got {cost}")
        costs = {}
        for kind in (FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT):
            given = getattr(self, kind)
            values = [float(given)] * stages if isinstance(given, int | float) else [float(x) for x in given]
            if len(values) != stages:
                raise ValueError(f"simulate: cost {kind} has {len(values)} values for {stages} stages")
            for stage, value in enumerate(values):
                if not 0 <= value < math.inf:
                    raise ValueError(f"simulate: cost {kind} of stage {stage} must be 0 or more, got {value}")
            costs[kind] = values
        costs[BACKWARD] = [a + b for a, b in zip(costs[BACKWARD_INPUT], costs[BACKWARD_WEIGHT])]
        return costs


@dataclass(frozen=True)
class Simulation:
    """Simulated times of all steps of `orders`, and metrics derived from them."""

    orders: tuple[tuple[Step, ...], ...]
    costs: Costs
    stages: StageMap
    num_microbatches: int
    peak_activations: tuple[int, ...]  # by rank: peak number of forwards whose backward is not complete
    starts: tuple[list[float], ...] = field(repr=False)
    ends: tuple[list[float], ...] = field(repr=False)
    pairs: Sequence[Container[int]] = field(default=(), repr=False)  # as passed to `simulate`

    @property
    def vpp(self) -> int:
        """Chunks of a rank."""
        return self.stages.vpp

    @cached_property
    def makespan(self) -> float:
        """End of the last step of any rank."""
        return max((ends[-1] for ends in self.ends if ends), default=0.0)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Busy time of each rank; overlapped steps count once."""
        rows = zip(self.starts, self.ends)
        return tuple(
            sum(end - max(start, before) for start, end, before in zip(starts, ends, (0.0, *ends)))
            for starts, ends in rows
        )

    @property
    def bubble(self) -> float:
        """Pipeline bubble: idle time of all ranks until the makespan, over their busy time.

        It is (pp - 1) / (num_microbatches * vpp) for 1F1B with equal costs and free messages. The idle
        fraction of the makespan is bubble / (1 + bubble).
        """
        work = sum(self.busy)
        return (len(self.orders) * self.makespan - work) / work if work else 0.0

    def timeline(self, rank: int) -> list[Event]:
        """Return the steps of a rank with their times."""
        rows = zip(self.orders[rank], self.starts[rank], self.ends[rank])
        return [Event(rank, step, start, end) for step, start, end in rows]

    @cached_property
    def critical_path(self) -> tuple[Event, ...]:
        """Steps that determine the makespan, each started by the end of the one before.

        If the rank's previous step and a message arrive at the same time, the path stays on the rank.
        """
        rank = max(range(len(self.orders)), key=lambda r: self.ends[r][-1] if self.ends[r] else 0.0)
        i = len(self.orders[rank]) - 1
        path = []
        while i >= 0:
            step, start, end = self.orders[rank][i], self.starts[rank][i], self.ends[rank][i]
            path.append(Event(rank, step, start, end))
            if start == 0.0:
                break
            pairs = self.pairs[rank] if self.pairs else ()
            at_once = (i - 1, i) if i - 1 in pairs else (i, i + 1) if i in pairs else (i,)
            i = at_once[0]
            if i and self.ends[rank][i - 1] == start:
                i -= 1
                continue
            for j in at_once:  # inputs of either of two overlapped steps
                other, needed = _needed(rank, self.orders[rank][j], self.stages)
                found = self._ended(other, needed, start if other == rank else start - self.costs.p2p)
                if found is not None:
                    break
            assert found is not None, "nothing that a step waited for ended when it began"
            rank, i = other, found
        return tuple(reversed(path))

    def _ended(self, rank: int, needed: Step, time: float) -> int | None:
        """Return the position on `rank` of the producer of `needed`; None if it ended at another time."""
        ends, steps = self.ends[rank], self.orders[rank]
        i = bisect_left(ends, time - 1e-9 * time)
        while i < len(ends) and ends[i] <= time + 1e-9 * time:
            if steps[i][1:] == needed[1:] and _gives(steps[i].kind, needed.kind):
                return i
            i += 1
        return None


@dataclass(frozen=True)
class CheckedOrders:
    """Complete orders of all ranks, to simulate with many costs.

    overlapped: for each rank, {position of a forward overlapped with the next step: chunk of that backward}.
    """

    steps: tuple[tuple[Step, ...], ...]
    num_microbatches: int
    vpp: int
    forward_only: bool
    pairs: Sequence[Container[int]]
    overlapped: tuple[dict[int, int], ...]


def check_orders(
    orders: Sequence[Sequence[Step]], pairs: Sequence[Container[int]] = (), *, forward_only: bool = False
) -> CheckedOrders:
    """Return the orders of all ranks as `simulate` takes them; arguments and errors as there."""
    steps, num_microbatches, vpp = _checked(orders, forward_only)
    overlapped = tuple(
        _overlapped_backwards(rank, own, pairs[rank] if pairs else ()) for rank, own in enumerate(steps)
    )
    return CheckedOrders(steps, num_microbatches, vpp, forward_only, pairs, overlapped)


def simulate(
    orders: Sequence[Sequence[Step]] | CheckedOrders,
    costs: Costs | None = None,
    *,
    forward_only: bool = False,
    pairs: Sequence[Container[int]] = (),
    placement: str = "looped",
) -> Simulation:
    """Simulate the orders of all ranks.

    Args:
        orders: `orders[rank]`, complete: on every rank, every microbatch goes through every chunk once
            forward and once backward (in one step, or dgrad and then wgrad). From `check_orders`: with the
            pairs and `forward_only` given there.
        costs: None: 1 for every kind of step, messages are free.
        forward_only: the orders have forwards only, and no activations are held.
        pairs: for each rank, the positions of forwards overlapped with the backward after them, as from
            `Schedule.all_pairs`.
        placement: of the stages on the ranks, see `StageMap`.

    Raises:
        ValueError: naming rank and step, if one is malformed, or if ranks deadlock.

    Example:
        >>> from fastmp.schedule import Schedule
        >>> schedule = Schedule(pp=4, num_microbatches=8)
        >>> simulate(schedule.orders()).bubble  # (pp - 1) / num_microbatches
        0.375
    """
    if not isinstance(orders, CheckedOrders):
        orders = check_orders(orders, pairs, forward_only=forward_only)
    costs, steps, number = costs or Costs(), orders.steps, orders.num_microbatches
    stages = StageMap(len(steps), orders.vpp, placement)
    starts, ends = _times(orders, costs, stages)
    peaks = tuple(1 if orders.forward_only else peak_held(own) for own in steps)
    return Simulation(steps, costs, stages, number, peaks, starts, ends, orders.pairs)


def _times(
    checked: CheckedOrders, costs: Costs, stages: StageMap
) -> tuple[tuple[list[float], ...], tuple[list[float], ...]]:
    """Return the starts and ends of all steps.

    1. A rank runs until an input has not arrived.
    2. The rank that produces the input wakes it.

    A forward overlapped with the next step waits for the input of that one as well.
    """
    orders, num_microbatches = checked.steps, checked.num_microbatches
    pp, last = len(orders), stages.last
    own = [stages.stages(rank) for rank in range(pp)]
    rank_of = [*map(stages.rank, range(len(stages))), -1]  # a neighbour of the first or last stage is no rank
    took = costs.by_kind(len(stages))
    size = len(stages) * num_microbatches  # forwards have slots 0 .. size - 1, backwards the next ones
    done = [_NEVER] * (2 * size)
    starts: tuple[list[float], ...] = tuple([] for _ in orders)
    ends: tuple[list[float], ...] = tuple([] for _ in orders)
    waits_for, stuck_at = [-1] * pp, [0] * pp
    ready = deque(range(pp))
    while ready:
        rank = ready.popleft()
        rank_starts, rank_ends, rank_stages = starts[rank], ends[rank], own[rank]
        now = rank_ends[-1] if rank_ends else 0.0
        waits_for[rank] = -1
        steps, backwards = orders[rank], checked.overlapped[rank]
        for i in range(len(rank_ends), len(steps)):
            kind, microbatch, chunk = steps[i]
            stage = rank_stages[chunk]
            slot = stage * num_microbatches + microbatch
            if kind == FORWARD:
                needed = slot - num_microbatches if stage else -1
                source, target = rank_of[stage - 1], rank_of[stage + 1]
            elif kind == BACKWARD_WEIGHT:
                needed = slot = -1
            else:
                slot += size
                needed = slot + num_microbatches if stage < last else -1
                source, target = rank_of[stage + 1], rank_of[stage - 1]
            if needed >= 0:
                arrived = done[needed]
                if arrived < 0:
                    waits_for[rank], stuck_at[rank] = needed, i
                    break
                if source != rank:
                    arrived += costs.p2p
                if arrived > now:
                    now = arrived
            start, length = now, took[kind][stage]
            if i in backwards:
                other = rank_stages[backwards[i]]
                if other < last:
                    needed = size + (other + 1) * num_microbatches + steps[i + 1].microbatch
                    if done[needed] < 0:
                        waits_for[rank], stuck_at[rank] = needed, i + 1
                        break
                    latency = costs.p2p if rank_of[other + 1] != rank else 0.0
                    start = max(start, done[needed] + latency)
                lengths = (length, took[BACKWARD][other])
                length = max(*lengths, sum(lengths) - costs.saved(stage, other))
            elif i - 1 in backwards:
                start, length = rank_starts[-1], now - rank_starts[-1]
            rank_starts.append(start)
            now = start + length
            rank_ends.append(now)
            if slot >= 0:
                done[slot] = now
                if target >= 0 and waits_for[target] == slot:
                    ready.append(target)
    if any(len(rank_ends) < len(steps) for rank_ends, steps in zip(ends, orders)):
        raise ValueError(_deadlock(orders, stuck_at, stages))
    return starts, ends


def _overlapped_backwards(rank: int, steps: tuple[Step, ...], pairs: Container[int]) -> dict[int, int]:
    """Return {position of a forward overlapped with the next step: chunk of that backward}."""
    found = {}
    for i, step in enumerate(steps):
        if i in pairs:
            other = steps[i + 1] if i + 1 < len(steps) else None
            if step.kind != FORWARD or other is None or other.kind != BACKWARD or other[1:] == step[1:]:
                raise ValueError(
                    f"simulate: rank {rank} step {i}, {step}, cannot overlap with the next one, {other}: a "
                    "forward and the backward of another microbatch or chunk can"
                )
            found[i] = other.chunk
    return found


def _needed(rank: int, step: Step, stages: StageMap) -> tuple[int, Step]:
    """Return the (rank, step) whose output `step` of `rank` waits for."""
    stage = stages.stage(rank, step.chunk) + (-1 if step.kind == FORWARD else 1)
    kind = FORWARD if step.kind == FORWARD else BACKWARD
    return stages.rank(stage), Step(kind, step.microbatch, stages.chunk(stage))


def _gives(kind: str, needed: str) -> bool:
    """Return True if a step of `kind` produces the output `needed`, of a forward or a backward."""
    return kind == FORWARD if needed == FORWARD else kind in (BACKWARD, BACKWARD_INPUT)


def _deadlock(orders: tuple[tuple[Step, ...], ...], at: list[int], stages: StageMap) -> str:
    """Format the error for ranks that wait for each other in a cycle."""
    rank = next(r for r, order in enumerate(orders) if at[r] < len(order))
    chain: list[int] = []
    while rank not in chain:
        chain.append(rank)
        rank = _needed(rank, orders[rank][at[rank]], stages)[0]
    circle = chain[chain.index(rank) :]
    links = []
    for r in circle[:_MAX_LINKS]:
        step = orders[r][at[r]]
        other, needed = _needed(r, step, stages)
        links.append(f"rank {r} waits in step {at[r]}, {step}, for the {needed} on rank {other}")
    more = f"; and {len(circle) - _MAX_LINKS} more ranks" if len(circle) > _MAX_LINKS else ""
    return f"simulate: deadlock: {'; '.join(links)}{more}"


def _checked(
    orders: Sequence[Sequence[Step]], forward_only: bool
) -> tuple[tuple[tuple[Step, ...], ...], int, int]:
    """Return (orders of Steps, num_microbatches, vpp). Raises ValueError if they are not complete."""
    if not orders or not all(orders):
        empty = (
            f"rank {[bool(steps) for steps in orders].index(False)} has no steps" if orders else "no ranks"
        )
        raise ValueError(f"simulate: {empty}")
    known: dict[Step, Step] = {}
    first: dict[tuple[int, int], int] = {}
    checked = []
    for rank, given in enumerate(orders):
        steps = tuple(_check_step(rank, i, step, known) for i, step in enumerate(given))
        forward_at = _check_lives(rank, steps, forward_only)
        first = first or forward_at
        if forward_at.keys() != first.keys():
            missing, extra = first.keys() - forward_at.keys(), forward_at.keys() - first.keys()
            step = Step(FORWARD, *min(missing or extra))
            has, at, without = (0, first, rank) if missing else (rank, forward_at, 0)
            raise ValueError(
                f"simulate: rank {has} step {at[step[1:]]}, {step}: rank {without} does not run this "
                "microbatch through this chunk"
            )
        checked.append(steps)
    num_microbatches, vpp = (1 + max(key[i] for key in first) for i in (0, 1))
    if len(first) < num_microbatches * vpp:
        every = (Step(FORWARD, m, c) for m in range(num_microbatches) for c in range(vpp))
        raise ValueError(f"simulate: no rank has the {next(step for step in every if step[1:] not in first)}")
    return tuple(checked), num_microbatches, vpp


def _check_step(rank: int, i: int, given: Step, known: dict[Step, Step]) -> Step:
    """Return `given` as a `Step`, one object for all equal steps. Raises ValueError if it is not a step."""
    try:
        return known[given]
    except (KeyError, TypeError):  # not seen yet, or not even hashable
        step = None
    problem = "is not a Step(kind, microbatch, chunk)"
    if isinstance(given, tuple) and len(given) == 3:
        step = Step(*given)
        numbers = (("microbatch", step.microbatch), ("chunk", step.chunk))
        wrong = [name for name, number in numbers if type(number) is not int or number < 0]
        if not wrong and step.kind in KINDS:
            return known.setdefault(step, step)
        problem = f"{wrong[0]} must be an integer of 0 or more" if wrong else f"kinds are {', '.join(KINDS)}"
    raise ValueError(f"simulate: rank {rank} step {i}, {step or repr(given)}: {problem}")


def _check_lives(rank: int, steps: tuple[Step, ...], forward_only: bool) -> dict[tuple[int, int], int]:
    """Return the positions of a rank's forwards. Raises ValueError if a backward is missing."""
    forward_at: dict[tuple[int, int], int] = {}
    awaited: dict[tuple[int, int], tuple[str, ...]] = {}  # the kinds that may come next
    for i, (kind, *rest) in enumerate(steps):
        key = (rest[0], rest[1])
        problem = None
        if kind == FORWARD:
            if key in forward_at:
                problem = f"has run as step {forward_at[key]} before"
            forward_at[key] = i
            if not forward_only:
                awaited[key] = _ANY_BACKWARD
        elif forward_only:
            problem = "is not a forward"
        elif kind not in (wanted := awaited.pop(key, ())):
            problem = _out_of_turn(kind, wanted, key in forward_at)
        elif kind == BACKWARD_INPUT:
            awaited[key] = _THEN_WEIGHT
        if problem:
            raise ValueError(f"simulate: rank {rank} step {i}, {steps[i]}: {problem}")
    for key, (kind, *_) in awaited.items():
        i = forward_at[key]
        raise ValueError(f"simulate: rank {rank} step {i}, {steps[i]}: its {kind} is missing")
    return forward_at


def _out_of_turn(kind: str, wanted: tuple[str, ...], forward_ran: bool) -> str:
    if not forward_ran:
        return "its forward has not run"
    if not wanted:
        return "has run backward before"
    return f"its {BACKWARD_INPUT} has not run" if kind == BACKWARD_WEIGHT else f"its {wanted[0]} is to come"
