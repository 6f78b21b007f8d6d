"""Pipeline schedules as data: the steps of each rank, in order. Standard library only.

A model is partitioned into pp * vpp stages; stage chunk * pp + rank is chunk `chunk` of rank `rank`. An order
is a tuple of `Step`s, which are simulated, drawn, and executed by ranks. Messages are implied: a forward
depends on the forward of the previous stage, a backward on the backward of the next stage, with the same
microbatch.

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
    """Call of a chunk with a microbatch.

    `kind` is "forward", "backward" (dgrad and wgrad), "backward_input" (dgrad, which the previous stage waits
    for) or "backward_weight" (wgrad, which can be deferred).
    """

    kind: str
    microbatch: int
    chunk: int

    @property
    def unit(self) -> str:
        """Word in messages for the number in `chunk`."""
        return "chunk"

    def __str__(self) -> str:
        return f"{self.kind} of microbatch {self.microbatch} {self.unit} {self.chunk}"


@dataclass(frozen=True)
class Schedule:
    """Orders in which the ranks of a pipeline run one training step.

    "1f1b" with pp 1 is a forward and its backward for each microbatch; with vpp 1 it is 1F1B with a flush
    (Narayanan et al. 2020, arXiv:2006.09503); with more chunks it is interleaved 1F1B (Narayanan et al. 2021,
    arXiv:2104.04473). "zero_bubble" splits backwards and defers wgrad to where 1F1B idles (ZB-H1 of Qi et al.
    2023, arXiv:2401.10241, here with any vpp).

    Args:
        pp: pipeline ranks.
        num_microbatches: microbatches of one step.
        vpp: chunks of the model on each rank (virtual pipeline size).
        group_size: microbatches that go through a chunk before the next chunk. None: pp. Ignored for vpp 1.
        name: one of `SCHEDULES`.
        overlap: overlap each forward between warm-up and cool-down with the backward after it, see `pairs`,
            so that all-to-alls of one hide behind compute of the other. The warm-up is longer then.
        check: raise for orders that deadlock or stall; False creates them, for a simulator to show why.

    Raises:
        ValueError: a size is not positive; an interleaved order would deadlock or stall, with group_size < pp
            or a last group of fewer than pp microbatches; or `overlap` with a schedule that splits backwards.

    Example:
        >>> first, second, *_ = Schedule(pp=2, num_microbatches=2).order(1)
        >>> print(first, second, sep=", ")
        forward of microbatch 0 chunk 0, backward of microbatch 0 chunk 0
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
        """Return the steps of pipeline rank `rank`. Raises ValueError for a rank outside the pipeline."""
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
        """Return the orders of all ranks."""
        return tuple(self.order(rank) for rank in range(self.pp))

    def warmup(self, rank: int) -> int:
        """Return the number of forwards before a rank's first forward-backward pair.

        They fill the time until the first backward arrives from the last stage. With interleaved 1F1B that
        takes two forwards for each rank on the way, one while the microbatch goes down and one while its
        gradient comes up: a rank that idled would delay the ranks after it. The same holds with `overlap`,
        for any vpp, and the first backward is overlapped with one more forward. Split backwards arrive fast
        enough for one forward a rank.
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
        """Return the positions of forwards overlapped with the next step; none without `overlap`."""
        first, every = self.warmup(rank), self.num_microbatches * self.vpp
        return range(first, 2 * every - first if self.overlap else first, 2)

    def all_pairs(self) -> tuple[range, ...]:
        """Return the pairs of all ranks, for `simulate`."""
        return tuple(self.pairs(rank) for rank in range(self.pp))

    def together(self, rank: int) -> Iterator[tuple[Step, ...]]:
        """Yield a rank's concurrent steps, in order: a step, or a forward and the backward it overlaps."""
        return together(self.order(rank), self.pairs(rank))

    def peak_in_flight(self, rank: int) -> int:
        """Return the peak number of chunk activations on a rank: forwards whose backward is not complete.

        1F1B: min(warm-up + 1, num_microbatches * vpp). Zero-bubble adds the deferred wgrad steps, as many as
        the number of the rank.
        """
        return min(self.warmup(rank) + 1 + self._delay(rank), self.num_microbatches * self.vpp)

    def table(self) -> tuple[tuple[int, int], ...]:
        """Return (microbatch, chunk) of the k-th forward, the same for every rank. The last group may be
        short.

        The k-th backward has the same microbatch, and chunk vpp - 1 - chunk.
        """
        return _table(self.num_microbatches, self.vpp, self._group_size)

    @property
    def _group_size(self) -> int:
        return self.pp if self.group_size is None else self.group_size

    @property
    def splits_backwards(self) -> bool:
        """True if dgrad and wgrad are separate steps."""
        return self.name in SPLIT_SCHEDULES

    def _delay(self, rank: int) -> int:
        """Return the number of dgrad steps by which wgrad steps of a rank are deferred.

        The lag grows with the rank, for the end of the step: the last rank runs out of other work first, and
        rank 0 has wgrad steps between the last gradients that arrive. The warm-up shrinks as the lag grows,
        so every rank holds the same number of activations.
        """
        return rank if self.splits_backwards else 0

    def _steps(self, kind: str) -> tuple[Step, ...]:
        return _steps(kind, self.num_microbatches, self.vpp, self._group_size)


def together(order: Sequence[Step], pairs: Container[int] = ()) -> Iterator[tuple[Step, ...]]:
    """Yield the steps of an order, those at positions `pairs` together with the next step."""
    i = 0
    while i < len(order):
        number = 2 if i in pairs else 1
        yield tuple(order[i : i + number])
        i += number


def with_loss(steps: Iterable[Step], last: int) -> Iterator[Step]:
    """Yield the steps of the last rank, with the loss function as one more chunk after chunk `last`.

    The backward of a loss is not split.
    """
    return followed(steps, last, last + 1, split=False)


def followed(steps: Iterable[Step], chunk: int, by: int, *, split: bool = True) -> Iterator[Step]:
    """Yield the steps of a rank, with one more chunk, `by`, that always runs after `chunk`.

    split: its backward is split where that of `chunk` is.

    Example:
        >>> print(*followed([Step("forward", 0, 0), Step("backward", 0, 0)], 0, by=1), sep=", ")
        forward of microbatch 0 chunk 0, forward of microbatch 0 chunk 1, backward of microbatch 0 chunk 1, \
backward of microbatch 0 chunk 0
    """
    for step in steps:
        own = step._replace(chunk=by)
        if step.chunk != chunk or (step.kind == BACKWARD_WEIGHT and not split):
            yield step
        elif step.kind == FORWARD:
            yield from (step, own)
        else:
            yield from (own if split else own._replace(kind=BACKWARD), step)


def integers(steps: Iterable[Step]) -> list[int]:
    """Return the steps as integers: chunk + 1 for a forward, -(chunk + 1) for a backward.

    Raises:
        ValueError: naming the step, if a backward is split.
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
    """Return the table as steps of one kind, cached for all ranks."""
    last = vpp - 1
    return tuple(
        Step(kind, microbatch, chunk if kind == FORWARD else last - chunk)
        for microbatch, chunk in _table(num_microbatches, vpp, group_size)
    )
