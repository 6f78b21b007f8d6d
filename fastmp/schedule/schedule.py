"""Pipeline schedules as data: the steps of each rank, in order. Standard library only.

A model is partitioned into pp * vpp stages; `StageMap` says which of them are the chunks of a rank. An order
is a tuple of `Step`s, which are simulated, drawn, and executed by ranks. Messages are implied: a forward
depends on the forward of the previous stage, a backward on the backward of the next stage, with the same
microbatch.

`ScheduleSpec.make` makes the order of a rank: 1F1B and zero bubble are in `fastmp.schedule.interleaved`,
DualPipeV in `fastmp.schedule.dualpipe`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import InitVar, dataclass, field
from functools import lru_cache
from typing import Any

from fastmp.config.specs import SCHEDULES, ScheduleSpec, load
from fastmp.schedule.interleaved import table
from fastmp.schedule.stage_map import StageMap
from fastmp.schedule.steps import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    KINDS,
    PipelineSizes,
    RankOrder,
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

    "1f1b" with pp 1 is a forward and its backward for each microbatch; with vpp 1 it is 1F1B with a flush;
    with more chunks it is interleaved 1F1B. "zero_bubble" splits backwards and defers wgrad to where 1F1B
    idles (see `fastmp.schedule.interleaved`). "dualpipe_v" has two chunks a rank, on a V, and always a
    forward and a backward that can overlap (see `fastmp.schedule.dualpipe`).

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
        return self._of(rank).steps

    def orders(self) -> tuple[tuple[Step, ...], ...]:
        """Return the orders of all ranks."""
        return tuple(self.order(rank) for rank in range(self.pp))

    def warmup(self, rank: int) -> int:
        """Return the number of forwards before a rank's first forward-backward pair."""
        return self._of(rank).warmup

    def pairs(self, rank: int) -> Sequence[int]:
        """Return the positions of forwards overlapped with the next step; none without `overlap`."""
        return self._of(rank).pairs if self.overlap else ()

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
        return peak_held(self.order(rank))

    def table(self) -> tuple[tuple[int, int], ...]:
        """Return (microbatch, chunk) of the k-th forward of 1F1B and zero bubble, see `interleaved.table`."""
        return table(self.num_microbatches, self.vpp, self._group_size)

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

    def _of(self, rank: int) -> RankOrder:
        if not isinstance(rank, int) or isinstance(rank, bool) or not 0 <= rank < self.pp:
            raise ValueError(f"Schedule: rank must be in [0, {self.pp}), the pipeline ranks, got {rank!r}")
        sizes = PipelineSizes(self.pp, self.num_microbatches, self.vpp, self._group_size, self.overlap)
        return _made(self._spec.make, sizes, rank)


@lru_cache(maxsize=128)
def _made(make: str | Callable[..., Any], sizes: PipelineSizes, rank: int) -> RankOrder:
    made: RankOrder = load(make)(sizes, rank)
    return made
