"""Pipeline schedules as data: the steps of each rank, in order. Standard library only.

A model is cut into pp * vpp stages; stage chunk * pp + rank is chunk `chunk` of rank `rank`. An order is a
tuple of `Step`s: the same values are simulated, drawn, and run by ranks. What crosses ranks is not listed,
since it follows: with the same microbatch, the forward of a stage needs that of the stage before, its
backward that of the stage behind.

All schedules walk one table of (microbatch, chunk): `group_size` microbatches through one chunk, then through
the next. Backwards walk the same table with the chunks reversed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple

FORWARD, BACKWARD = "forward", "backward"
BACKWARD_INPUT, BACKWARD_WEIGHT = "backward_input", "backward_weight"
KINDS = (FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)
SCHEDULES = ("1f1b", "zero_bubble")


class Step(NamedTuple):
    """One call of one chunk with one microbatch.

    `kind` is "forward", "backward" (of inputs and weights at once), "backward_input" (what the stage before
    waits for) or "backward_weight" (what can be deferred).
    """

    kind: str
    microbatch: int
    chunk: int

    def __str__(self) -> str:
        return f"{self.kind} of microbatch {self.microbatch} chunk {self.chunk}"


def order(
    rank: int,
    pp: int,
    num_microbatches: int,
    vpp: int = 1,
    group_size: int | None = None,
    schedule: str = "1f1b",
) -> tuple[Step, ...]:
    """What pipeline rank `rank` of `pp` does in one training step with `num_microbatches` microbatches.

    "1f1b" with pp 1 is a forward and its backward for each microbatch; with vpp 1 it is 1F1B with a flush
    (Narayanan et al. 2020, arXiv:2006.09503); with vpp chunks a rank it is interleaved 1F1B (Narayanan et al.
    2021, arXiv:2104.04473), which passes `group_size` microbatches (None: pp) through a chunk before it turns
    to the next. "zero_bubble" splits backwards and puts those of weights off to where 1F1B idles (ZB-H1 of
    Qi et al. 2023, arXiv:2401.10241, here with any vpp).

    ValueError if a size is not positive, or if an interleaved order would deadlock or stall: group_size < pp,
    or a last group of fewer than pp microbatches.
    """
    group_size = _check(pp, num_microbatches, vpp, group_size, schedule)
    _check_rank(rank, pp)
    return build(rank, pp, num_microbatches, vpp, group_size, schedule)


def orders(
    pp: int, num_microbatches: int, vpp: int = 1, group_size: int | None = None, schedule: str = "1f1b"
) -> tuple[tuple[Step, ...], ...]:
    """The orders of all ranks; arguments and errors as in `order`."""
    group_size = _check(pp, num_microbatches, vpp, group_size, schedule)
    return tuple(build(rank, pp, num_microbatches, vpp, group_size, schedule) for rank in range(pp))


def warmup(
    rank: int,
    pp: int,
    num_microbatches: int,
    vpp: int = 1,
    group_size: int | None = None,
    schedule: str = "1f1b",
) -> int:
    """How many forwards a rank runs before its first forward-backward pair; arguments as in `order`."""
    group_size = _check(pp, num_microbatches, vpp, group_size, schedule)
    _check_rank(rank, pp)
    return _warmup(rank, pp, num_microbatches, vpp, group_size, schedule)


def peak_in_flight(
    rank: int,
    pp: int,
    num_microbatches: int,
    vpp: int = 1,
    group_size: int | None = None,
    schedule: str = "1f1b",
) -> int:
    """How many chunk activations a rank holds at most: forwards that are not wholly backwarded.

    1F1B: min(warm-up + 1, num_microbatches * vpp). Zero-bubble: deferred backwards of weights come on top,
    as many as the number of the rank. Arguments and errors as in `order`.
    """
    group_size = _check(pp, num_microbatches, vpp, group_size, schedule)
    _check_rank(rank, pp)
    deferred = _delay(rank, schedule)
    return min(
        _warmup(rank, pp, num_microbatches, vpp, group_size, schedule) + 1 + deferred, num_microbatches * vpp
    )


def table(num_microbatches: int, vpp: int = 1, group_size: int = 1) -> tuple[tuple[int, int], ...]:
    """(microbatch, chunk) of the k-th forward, the same for every rank. The last group may be short.

    The k-th backward has the same microbatch, and chunk vpp - 1 - chunk.
    """
    return tuple(
        (microbatch, chunk)
        for first in range(0, num_microbatches, group_size)
        for chunk in range(vpp)
        for microbatch in range(first, min(first + group_size, num_microbatches))
    )


def with_loss(steps: Iterable[Step], last: int) -> Iterator[Step]:
    """The steps of the last rank, with the loss function as one more chunk behind chunk `last`, its last one.

    The backward of a loss is not split: what its weights get belongs to the backward of the inputs.
    """
    for step in steps:
        if step.chunk != last or step.kind == BACKWARD_WEIGHT:
            yield step
        elif step.kind == FORWARD:
            yield from (step, Step(FORWARD, step.microbatch, last + 1))
        else:
            yield from (Step(BACKWARD, step.microbatch, last + 1), step)


def integers(steps: Iterable[Step]) -> list[int]:
    """chunk + 1 for a forward, -(chunk + 1) for a backward; ValueError naming the step if one is split."""
    numbers = []
    for i, (kind, microbatch, chunk) in enumerate(steps):
        if kind not in (FORWARD, BACKWARD):
            step = Step(kind, microbatch, chunk)
            raise ValueError(f"schedule: step {i}, {step}, has no integer: only whole backwards have one")
        numbers.append(chunk + 1 if kind == FORWARD else -(chunk + 1))
    return numbers


def build(
    rank: int, pp: int, num_microbatches: int, vpp: int, group_size: int, schedule: str
) -> tuple[Step, ...]:
    """`order` without its checks: also the orders that it refuses, for a simulator to show why."""
    split = schedule == "zero_bubble"
    forwards = _steps(FORWARD, num_microbatches, vpp, group_size)
    first = _warmup(rank, pp, num_microbatches, vpp, group_size, schedule)
    both, rest = len(forwards) - first, forwards[first:]
    if not split:
        backwards = _steps(BACKWARD, num_microbatches, vpp, group_size)
        steady = [step for pair in zip(rest, backwards) for step in pair]
        return (*forwards[:first], *steady, *backwards[both:])
    inputs = _steps(BACKWARD_INPUT, num_microbatches, vpp, group_size)
    weights = _steps(BACKWARD_WEIGHT, num_microbatches, vpp, group_size)
    delay = _delay(rank, schedule)
    out = list(forwards[:first])
    for i, step in enumerate(inputs):
        if i < both:
            out.append(rest[i])
        out.append(step)
        if i >= delay:
            out.append(weights[i - delay])
    return (*out, *weights[max(len(weights) - delay, 0) :])


@lru_cache(maxsize=32)
def _steps(kind: str, num_microbatches: int, vpp: int, group_size: int) -> tuple[Step, ...]:
    """The table as steps of one kind, made once for all ranks."""
    last = vpp - 1
    return tuple(
        Step(kind, microbatch, chunk if kind == FORWARD else last - chunk)
        for microbatch, chunk in table(num_microbatches, vpp, group_size)
    )


def _warmup(rank: int, pp: int, num_microbatches: int, vpp: int, group_size: int, schedule: str) -> int:
    """Until the first backward has come up from the last stage.

    Interleaved 1F1B, two a rank: each rank on the way takes a forward and a backward's time until the first
    backward comes up, and a rank that idled meanwhile would keep those behind it waiting. Backwards of inputs
    alone are fast enough for one a rank.
    """
    behind = pp - 1 - rank
    if vpp > 1 and schedule == "zero_bubble":
        behind += (vpp - 1) * min(group_size, num_microbatches)
    elif vpp > 1:
        behind += behind + (vpp - 1) * group_size
    return min(behind, num_microbatches * vpp)


def _delay(rank: int, schedule: str) -> int:
    """By how many backwards of inputs a rank's backwards of weights lag.

    Rank by rank more, for the end: the last rank runs out of other work first, rank 0 has weights to do in
    between the last backwards that come up to it. With the warm-up, which is rank by rank less, every rank
    holds as much.
    """
    return rank if schedule == "zero_bubble" else 0


def _check(pp: int, num_microbatches: int, vpp: int, group_size: int | None, schedule: str) -> int:
    """The group size, or ValueError."""
    sizes = {"pp": pp, "num_microbatches": num_microbatches, "vpp": vpp}
    for name, size in (sizes if group_size is None else {**sizes, "group_size": group_size}).items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"schedule: {name} must be a positive integer, got {size!r}")
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule: unknown schedule {schedule!r}; choose from {', '.join(SCHEDULES)}")
    group_size = pp if group_size is None else group_size
    if vpp == 1:
        return group_size
    if group_size < pp:
        raise ValueError(
            f"schedule: group_size {group_size} is less than pp {pp}: with vpp {vpp} the ranks would wait "
            f"for each other; use {pp} or more"
        )
    if 0 < num_microbatches % group_size < pp:
        raise ValueError(
            f"schedule: num_microbatches {num_microbatches} leaves a last group of "
            f"{num_microbatches % group_size} for group_size {group_size}, fewer than pp {pp}: with vpp "
            f"{vpp} the ranks would wait for each other; use a multiple of {group_size} or another group_size"
        )
    return group_size


def _check_rank(rank: int, pp: int) -> None:
    if not isinstance(rank, int) or isinstance(rank, bool) or not 0 <= rank < pp:
        raise ValueError(f"schedule: rank must be in [0, {pp}), the pipeline ranks, got {rank!r}")
