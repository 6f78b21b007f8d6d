"""Pipeline schedules as data: the steps of each rank, in order. Standard library only.

A model is cut into pp * vpp stages; stage chunk * pp + rank is chunk `chunk` of rank `rank`. An order is a
tuple of `Step`s, which are simulated, drawn, and executed by ranks. Messages are not listed, since they
follow: a forward needs the forward of the stage before, a backward the backward of the stage behind, with the
same microbatch.

All schedules walk one table of (microbatch, chunk): `group_size` microbatches through one chunk, then through
the next. Backwards walk the same table with the chunks reversed.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import InitVar, dataclass, field
from functools import lru_cache
from typing import NamedTuple

from fastmp.config.training import SCHEDULES

FORWARD, BACKWARD = "forward", "backward"
BACKWARD_INPUT, BACKWARD_WEIGHT = "backward_input", "backward_weight"
KINDS = (FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)
SPLIT_SCHEDULES = ("zero_bubble",)  # a backward is two steps, of inputs and of weights


class Step(NamedTuple):
    """One call of one chunk with one microbatch.

    `kind` is "forward", "backward" (of inputs and weights at once), "backward_input" (what the stage before
    waits for) or "backward_weight" (what can be deferred). `unit` is the word for what `chunk` numbers.
    """

    kind: str
    microbatch: int
    chunk: int

    @property
    def unit(self) -> str:
        return "chunk"

    def __str__(self) -> str:
        return f"{self.kind} of microbatch {self.microbatch} {self.unit} {self.chunk}"


@dataclass(frozen=True)
class Schedule:
    """The orders in which the ranks of a pipeline run one training step.

    pp: pipeline ranks.
    num_microbatches: microbatches of one step.
    vpp: chunks of the model on each rank.
    group_size: microbatches that go through a chunk before the next chunk; None: pp. Ignored where vpp is 1.
    name: one of `SCHEDULES`.
    overlap: whether each forward between warm-up and end runs beside the backward that follows it, see
        `pairs`, so that what one of them exchanges hides behind what the other computes. The warm-up is
        longer then: no backward needs the forward beside it, nor keeps its neighbours waiting.

    "1f1b" with pp 1 is a forward and its backward for each microbatch; with vpp 1 it is 1F1B with a flush
    (Narayanan et al. 2020, arXiv:2006.09503); with more chunks it is interleaved 1F1B (Narayanan et al. 2021,
    arXiv:2104.04473). "zero_bubble" splits backwards and defers those of weights to where 1F1B idles (ZB-H1
    of Qi et al. 2023, arXiv:2401.10241, here with any vpp).

    ValueError if a size is not positive, or if an interleaved order would deadlock or stall: group_size < pp,
    or a last group of fewer than pp microbatches; and for `overlap` of a schedule that splits backwards. With
    `check=False` orders that wait are made all the same, for a simulator to show why.
    """

    pp: int
    num_microbatches: int
    vpp: int = 1
    group_size: int | None = None
    name: str = "1f1b"
    overlap: bool = False
    check: InitVar[bool] = field(default=True, kw_only=True)

    def __post_init__(self, check: bool) -> None:
        sizes = {"pp": self.pp, "num_microbatches": self.num_microbatches, "vpp": self.vpp}
        if self.group_size is not None:
            sizes["group_size"] = self.group_size
        for name, size in sizes.items():
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"Schedule: {name} must be a positive integer, got {size!r}")
        if self.name not in SCHEDULES:
            raise ValueError(f"Schedule: unknown schedule {self.name!r}; choose from {', '.join(SCHEDULES)}")
        if self.overlap and self.splits_backwards:
            raise ValueError(
                f"Schedule: overlap is of 1f1b, got {self.name!r}, whose backwards are two steps each"
            )
        if check and self.vpp > 1:
            self._check_groups()

    def _check_groups(self) -> None:
        group_size, last = self._group_size, self.num_microbatches % self._group_size
        if group_size < self.pp:
            raise ValueError(
                f"Schedule: group_size {group_size} is less than pp {self.pp}: with vpp {self.vpp} the ranks "
                f"would wait for each other; use {self.pp} or more"
            )
        if 0 < last < self.pp:
            raise ValueError(
                f"Schedule: num_microbatches {self.num_microbatches} leaves a last group of {last} for "
                f"group_size {group_size}, fewer than pp {self.pp}: with vpp {self.vpp} the ranks would wait "
                f"for each other; use a multiple of {group_size} or another group_size"
            )

    def order(self, rank: int) -> tuple[Step, ...]:
        """The steps of pipeline rank `rank`. ValueError for a rank outside the pipeline, here and below."""
        forwards, first = self._steps(FORWARD), self.warmup(rank)
        both, rest = len(forwards) - first, forwards[first:]
        if not self.splits_backwards:
            backwards = self._steps(BACKWARD)
            steady = [step for pair in zip(rest, backwards) for step in pair]
            return (*forwards[:first], *steady, *backwards[both:])
        inputs, weights = self._steps(BACKWARD_INPUT), self._steps(BACKWARD_WEIGHT)
        delay = self._delay(rank)
        out = list(forwards[:first])
        for i, step in enumerate(inputs):
            if i < both:
                out.append(rest[i])
            out.append(step)
            if i >= delay:
                out.append(weights[i - delay])
        return (*out, *weights[max(len(weights) - delay, 0) :])

    def orders(self) -> tuple[tuple[Step, ...], ...]:
        """The orders of all ranks."""
        return tuple(self.order(rank) for rank in range(self.pp))

    def warmup(self, rank: int) -> int:
        """The number of forwards before a rank's first forward-backward pair.

        They fill the time until the first backward comes up from the last stage. With interleaved 1F1B that
        takes two forwards for each rank on the way, one while the microbatch goes down and one while its
        gradient comes up: a rank that idled would keep those behind it waiting. So it does with `overlap`,
        whatever vpp is, and the first backward runs beside one forward more. Where backwards of inputs are
        steps of their own, they come up fast enough for one forward a rank.
        """
        if not isinstance(rank, int) or isinstance(rank, bool) or not 0 <= rank < self.pp:
            raise ValueError(f"Schedule: rank must be in [0, {self.pp}), the pipeline ranks, got {rank!r}")
        behind = self.pp - 1 - rank
        if self.vpp > 1 and self.splits_backwards:
            behind += (self.vpp - 1) * min(self._group_size, self.num_microbatches)
        elif self.vpp > 1 or self.overlap:
            behind += behind + (self.vpp - 1) * self._group_size + self.overlap
        return min(behind, self.num_microbatches * self.vpp)

    def pairs(self, rank: int) -> range:
        """The places in a rank's order of forwards that run beside the next step; none without `overlap`."""
        first, every = self.warmup(rank), self.num_microbatches * self.vpp
        return range(first, 2 * every - first if self.overlap else first, 2)

    def all_pairs(self) -> tuple[range, ...]:
        """The pairs of all ranks, as `simulate` takes them."""
        return tuple(self.pairs(rank) for rank in range(self.pp))

    def together(self, rank: int) -> Iterator[tuple[Step, ...]]:
        """Yield what a rank runs at once, in order: a step, or a forward and the backward beside it."""
        return together(self.order(rank), self.pairs(rank))

    def peak_in_flight(self, rank: int) -> int:
        """The most chunk activations that a rank holds: forwards whose backward is not complete.

        1F1B: min(warm-up + 1, num_microbatches * vpp). Zero-bubble: the deferred backwards of weights, as
        many as the number of the rank, come on top.
        """
        return min(self.warmup(rank) + 1 + self._delay(rank), self.num_microbatches * self.vpp)

    def table(self) -> tuple[tuple[int, int], ...]:
        """(microbatch, chunk) of the k-th forward, the same for every rank. The last group may be short.

        The k-th backward has the same microbatch, and chunk vpp - 1 - chunk.
        """
        return _table(self.num_microbatches, self.vpp, self._group_size)

    @property
    def _group_size(self) -> int:
        return self.pp if self.group_size is None else self.group_size

    @property
    def splits_backwards(self) -> bool:
        """Whether backwards of inputs and of weights are steps of their own."""
        return self.name in SPLIT_SCHEDULES

    def _delay(self, rank: int) -> int:
        """The number of backwards of inputs by which a rank's backwards of weights lag behind.

        The lag grows with the rank, for the end of the step: the last rank runs out of other work first, and
        rank 0 has backwards of weights between the last gradients that come up to it. The warm-up shrinks as
        the lag grows, so every rank holds the same number of activations.
        """
        return rank if self.splits_backwards else 0

    def _steps(self, kind: str) -> tuple[Step, ...]:
        return _steps(kind, self.num_microbatches, self.vpp, self._group_size)


def together(order: Sequence[Step], pairs: Container[int] = ()) -> Iterator[tuple[Step, ...]]:
    """Yield the steps of an order, with those at the places `pairs` the steps behind them."""
    i = 0
    while i < len(order):
        number = 2 if i in pairs else 1
        yield tuple(order[i : i + number])
        i += number


def with_loss(steps: Iterable[Step], last: int) -> Iterator[Step]:
    """The steps of the last rank, with the loss function as one more chunk behind chunk `last`, its last one.

    The backward of a loss is not split: the gradients of its weights come with those of its inputs.
    """
    for step in steps:
        if step.chunk != last or step.kind == BACKWARD_WEIGHT:
            yield step
        elif step.kind == FORWARD:
            yield from (step, Step(FORWARD, step.microbatch, last + 1))
        else:
            yield from (Step(BACKWARD, step.microbatch, last + 1), step)


def integers(steps: Iterable[Step]) -> list[int]:
    """The steps as numbers: chunk + 1 for a forward, -(chunk + 1) for a backward.

    ValueError naming the step if a backward is split.
    """
    numbers = []
    for i, (kind, microbatch, chunk) in enumerate(steps):
        if kind not in (FORWARD, BACKWARD):
            step = Step(kind, microbatch, chunk)
            raise ValueError(f"schedule: step {i}, {step}, has no integer: only whole backwards have one")
        numbers.append(chunk + 1 if kind == FORWARD else -(chunk + 1))
    return numbers


@lru_cache(maxsize=32)
def _table(num_microbatches: int, vpp: int, group_size: int) -> tuple[tuple[int, int], ...]:
    return tuple(
        (microbatch, chunk)
        for first in range(0, num_microbatches, group_size)
        for chunk in range(vpp)
        for microbatch in range(first, min(first + group_size, num_microbatches))
    )


@lru_cache(maxsize=32)
def _steps(kind: str, num_microbatches: int, vpp: int, group_size: int) -> tuple[Step, ...]:
    """The table as steps of one kind, made once for all ranks."""
    last = vpp - 1
    return tuple(
        Step(kind, microbatch, chunk if kind == FORWARD else last - chunk)
        for microbatch, chunk in _table(num_microbatches, vpp, group_size)
    )
