"""Pipeline schedules as data: the steps of each rank, in order. Standard library only.

A model is partitioned into pp * vpp stages; `StageMap` says which of them are the chunks of a rank. An order
is a tuple of `Step`s, which are simulated, drawn, and executed by ranks. Messages are implied: a forward
depends on the forward of the previous stage, a backward on the backward of the next stage, with the same
microbatch.

1F1B and zero bubble walk one table of (microbatch, chunk): `group_size` microbatches through one chunk, then
through the next. Backwards walk the same table with the chunks reversed. DualPipeV has orders of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import InitVar, dataclass, field
from functools import lru_cache

from fastmp.config.specs import SCHEDULES, ScheduleSpec
from fastmp.pipeline.dualpipe import RankOrder, dualpipe_v
from fastmp.pipeline.stage_map import StageMap
from fastmp.pipeline.steps import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    KINDS,
    Step,
    followed,
    integers,
    peak_held,
    together,
    with_loss,
)

__all__ = [
    "BACKWARD", "BACKWARD_INPUT", "BACKWARD_WEIGHT", "FORWARD", "KINDS", "SCHEDULES", "Schedule", "Step",
    "followed", "integers", "together", "with_loss",
]  # fmt: skip


@dataclass(frozen=True)
class Schedule:
    """Orders in which the ranks of a pipeline run one training step.

    "1f1b" with pp 1 is a forward and its backward for each microbatch; with vpp 1 it is 1F1B with a flush
    (Narayanan et al. 2020, arXiv:2006.09503); with more chunks it is interleaved 1F1B (Narayanan et al. 2021,
    arXiv:2104.04473). "zero_bubble" splits backwards and defers wgrad to where 1F1B idles (ZB-H1 of Qi et al.
    2023, arXiv:2401.10241, here with any vpp). "dualpipe_v" has two chunks a rank, on a V, and always a
    forward and a backward that can overlap (see `fastmp.pipeline.dualpipe`).

    Args:
        pp: pipeline ranks.
        num_microbatches: microbatches of one step.
        vpp: chunks of the model on each rank (virtual pipeline size).
        group_size: microbatches that go through a chunk before the next chunk. None: pp. Ignored for vpp 1;
            "dualpipe_v" has no groups.
        name: one of `SCHEDULES`.
        overlap: overlap each forward between warm-up and cool-down with the backward after it, see `pairs`,
            so that all-to-alls of one hide behind compute of the other. The warm-up of "1f1b" is longer then.
        check: raise for orders that deadlock or stall; False creates them, for a simulator to show why.

    Raises:
        ValueError: a size is not positive; an interleaved order would deadlock or stall, with group_size < pp
            or a last group of fewer than pp microbatches; `overlap` with a schedule that splits all
            backwards; or "dualpipe_v" with another vpp than 2, or a group_size.

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
        if self.overlap and not self._spec.overlaps:
            able = " and ".join(spec.name for spec in SCHEDULES.values() if spec.overlaps)
            raise ValueError(
                f"Schedule: overlap is of {able}, got {self.name!r}, whose backwards are two steps each"
            )
        if self._spec.vpp is not None:
            self._check_fixed(self._spec.vpp)
        elif check and self.vpp > 1:
            self._check_groups()

    def _check_fixed(self, vpp: int) -> None:
        if self.vpp != vpp:
            raise ValueError(f"Schedule: {self.name} needs vpp {vpp}, got {self.vpp}; use --vpp {vpp}")
        if self.group_size is not None:
            raise ValueError(
                f"Schedule: {self.name} has no microbatch groups, got group_size {self.group_size}; leave it "
                "out"
            )

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
        if (own := self._dualpipe(rank)) is not None:
            return own.steps
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
        enough for one forward a rank. With DualPipeV it takes as many stages as there are.
        """
        self._check_rank(rank)
        if self.name == "dualpipe_v":
            down, up = 2 * self.pp - 1 - rank, rank + 1
            return min(down, self.num_microbatches) + min(up, self.num_microbatches)
        behind = self.pp - 1 - rank
        if self.vpp > 1 and self.splits_backwards:
            behind += (self.vpp - 1) * min(self._group_size, self.num_microbatches)
        elif self.vpp > 1 or self.overlap:
            behind += behind + (self.vpp - 1) * self._group_size + self.overlap
        return min(behind, self.num_microbatches * self.vpp)

    def pairs(self, rank: int) -> Sequence[int]:
        """Return the positions of forwards overlapped with the next step; none without `overlap`."""
        if (own := self._dualpipe(rank)) is not None:
            return own.pairs if self.overlap else ()
        first, every = self.warmup(rank), self.num_microbatches * self.vpp
        return range(first, 2 * every - first if self.overlap else first, 2)

    def all_pairs(self) -> tuple[Sequence[int], ...]:
        """Return the pairs of all ranks, for `simulate`."""
        return tuple(self.pairs(rank) for rank in range(self.pp))

    def together(self, rank: int) -> Iterator[tuple[Step, ...]]:
        """Yield a rank's concurrent steps, in order: a step, or a forward and the backward it overlaps."""
        return together(self.order(rank), self.pairs(rank))

    def peak_in_flight(self, rank: int) -> int:
        """Return the peak number of chunk activations on a rank: forwards whose backward is not complete.

        1F1B: min(warm-up + 1, num_microbatches * vpp). Zero-bubble adds the deferred wgrad steps, as many as
        the number of the rank. DualPipeV: 2 pp + 1 on every rank, from 2 pp microbatches on.
        """
        if (own := self._dualpipe(rank)) is not None:
            return peak_held(own.steps)
        return min(self.warmup(rank) + 1 + self._delay(rank), self.num_microbatches * self.vpp)

    def table(self) -> tuple[tuple[int, int], ...]:
        """Return (microbatch, chunk) of the k-th forward, the same for every rank. The last group may be
        short.

        The k-th backward has the same microbatch, and chunk vpp - 1 - chunk. Not of "dualpipe_v".
        """
        return _table(self.num_microbatches, self.vpp, self._group_size)

    @property
    def _group_size(self) -> int:
        return self.pp if self.group_size is None else self.group_size

    @property
    def stages(self) -> StageMap:
        """Placement of the stages on the ranks."""
        return StageMap(self.pp, self.vpp, self.placement)

    @property
    def placement(self) -> str:
        """Kind of the placement, as `simulate` and `Pipeline` take it."""
        return self._spec.placement

    @property
    def splits_backwards(self) -> bool:
        """True if dgrad and wgrad are separate steps, of all backwards or of some."""
        return self._spec.splits

    @property
    def _spec(self) -> ScheduleSpec:
        return SCHEDULES[self.name]

    def _check_rank(self, rank: int) -> None:
        if not isinstance(rank, int) or isinstance(rank, bool) or not 0 <= rank < self.pp:
            raise ValueError(f"Schedule: rank must be in [0, {self.pp}), the pipeline ranks, got {rank!r}")

    def _dualpipe(self, rank: int) -> RankOrder | None:
        """Return the order of a rank of DualPipeV, None for the other schedules."""
        if self.name != "dualpipe_v":
            return None
        self._check_rank(rank)
        return dualpipe_v(self.pp, self.num_microbatches, rank)

    def _delay(self, rank: int) -> int:
        """Return the number of dgrad steps by which wgrad steps of a rank are deferred.

        The lag grows with the rank, for the end of the step: the last rank runs out of other work first, and
        rank 0 has wgrad steps between the last gradients that arrive. The warm-up shrinks as the lag grows,
        so every rank holds the same number of activations.
        """
        return rank if self.splits_backwards else 0

    def _steps(self, kind: str) -> tuple[Step, ...]:
        return _steps(kind, self.num_microbatches, self.vpp, self._group_size)


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
