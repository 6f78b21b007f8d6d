"""Device counters that tell if a step is void: dropped tokens, and overflows of the activation stash."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from fastmp.distributed.collectives import gather_objects
from fastmp.distributed.groups import ParallelGroups
from fastmp.nn.moe.layer import MoELayer

if TYPE_CHECKING:
    from fastmp.nn.moe.activation_stash import ActivationStash

__all__ = ["StepCounters", "VoidCounts"]

MOST_USED = 0.9  # of the rows of a stash, after it has grown


class VoidCounts(NamedTuple):
    """Sums over all ranks and the microbatches of a step.

    dropped: (token, expert) assignments that layers were not to drop (`symmetric_overflow = "rerun"`).
    overflowed: forwards whose activations did not fit into a stash.
    """

    dropped: int
    overflowed: int

    @property
    def void(self) -> bool:
        return bool(self.dropped or self.overflowed)


class StepCounters:
    """The counters of this rank's modules; all pipeline ranks construct it together.

    Attributes:
        layers: the layers with experts.
        stashes: their activation stashes, each once.
        checked: True if a layer of any rank can make a step void; the host then reads `VoidCounts`.
    """

    def __init__(self, chunks: Sequence[nn.Module], groups: ParallelGroups) -> None:
        modules = [module for chunk in chunks for module in chunk.modules()]
        self.groups = groups
        self.layers = [module for module in modules if isinstance(module, MoELayer)]
        held = [layer.stash for layer in self.layers if layer.stash is not None]
        self.stashes = list({id(stash): stash for stash in held}.values())
        self._dropped: list[Tensor] = []
        self._void: list[bool] = []  # of each counter: its layer asks for reruns
        for module in modules:
            number = getattr(module, "dropped_pairs", None)
            if isinstance(number, Tensor):
                self._dropped.append(number)
                self._void.append(isinstance(module, MoELayer) and module.moe.symmetric_overflow == "rerun")
        # A stage may have no layer with experts.
        self.checked = any(gather_objects(any(self._void) or bool(self.stashes), groups.pp))
        self._device = next(param.device for chunk in chunks for param in chunk.parameters())

    def take(self) -> Tensor:
        """Return and reset the counts of this rank, (3,) int64: all dropped assignments, and `VoidCounts`."""
        zero = torch.zeros((), dtype=torch.int64, device=self._device)
        dropped = [each.clone() for each in self._dropped]
        void = [each for each, counts in zip(dropped, self._void, strict=True) if counts]
        # a stash without a ring has no counter yet
        overflows = [each.overflowed for each in self.stashes if each.overflowed is not None]
        overflowed = [each.clone() for each in overflows]
        for counter in (*self._dropped, *overflows):
            counter.zero_()
        return torch.stack([torch.stack([zero, *each]).sum() for each in (dropped, void, overflowed)])

    def stash_use(self) -> tuple[Tensor, int] | None:
        """Return the most rows in use of this rank's stash, and all its rows; None without one."""
        stash = next(iter(self.stashes), None)
        return None if stash is None or stash.high_water is None else (stash.high_water, stash.rows)

    def grow(self) -> list[tuple[int, int]]:
        """Grow the stashes after an overflow on any rank; nothing is in flight.

        All ranks call it together. Returns (rows before, rows now) of each stash that has grown.
        """
        grown = []
        wanted = [_rows_wanted(stash) for stash in self.stashes]
        # Ranks have equally many stashes or none; all get the size of the largest.
        for group in (self.groups.tp_cp_dp, self.groups.pp):
            everyones = gather_objects(wanted, group)
            most = max(map(len, everyones))
            wanted = [max(each[i] for each in everyones if i < len(each)) for i in range(most)]
        for stash, rows in zip(self.stashes, wanted):
            if rows > stash.rows:
                grown.append((stash.rows, rows))
                stash.grow(rows)
        return grown


def _rows_wanted(stash: ActivationStash) -> int:
    """Return the size of a ring of which at most `MOST_USED` is in use, a quarter more after an overflow.

    The mark tells what the first entry would have needed that did not fit, not what all of them would.
    """
    used = 0 if stash.high_water is None else int(stash.high_water)
    least = stash.rows + stash.rows // 4 if used > stash.rows else stash.rows
    return max(math.ceil(used / MOST_USED), least)
