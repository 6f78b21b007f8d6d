"""Rerun a void step: its tokens did not fit into symmetric memory, or its activations into the stash.

Only the device knows if they fit (`model.moe.symmetric_overflow = "rerun"`, `model.moe.activation_stash`), so
the host reads a count once a step, after gradients are reduced and before the update. By then only gradients
and random streams have changed. A rerun discards the gradients, restores the streams, and runs the same
microbatches eagerly with the all-to-all dispatcher, bit for bit as a run that always uses it.

Stashes grow after an overflow, so that at most 90 % of their rows have been in use: graphs that hold their
addresses are released, and captured again by the next steps.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from fastmp.cuda_graphs.manager import GraphManager
from fastmp.cuda_graphs.restore import random_states, restore_random_states
from fastmp.nn.segment import rerunning
from fastmp.training.graphing import CaptureAgreement
from fastmp.training.microbatches import Batch
from fastmp.training.step_counters import StepCounters, VoidCounts
from fastmp.training.train_step import ReducedSums, TrainStep

if TYPE_CHECKING:
    from fastmp.distributed.rng import RngTracker

__all__ = ["Rerun"]


class Rerun:
    """Rerun void steps eagerly by all-to-all.

    Args:
        graphs: those of the steps: a manager is paused during a rerun, all are captured again after a stash
            grew; None: steps run eagerly.
        agreement: of the ranks on the captures of a manager.
        rng: the random streams of layers; None: torch's default generators.

    Attributes:
        note: the line for the log about the last step, if it was rerun or its stash has grown.
    """

    def __init__(self, graphs: Any, agreement: CaptureAgreement | None, rng: RngTracker | None) -> None:
        self.manager = graphs if isinstance(graphs, GraphManager) else None
        self.graphs, self.agreement, self.rng = graphs, agreement, rng
        self.note = ""
        self._counted_eagerly = False

    def checked(
        self, work: TrainStep, run: Callable[[], ReducedSums], fetch: Callable[[int], Batch]
    ) -> ReducedSums:
        """Call `run`, a step of `work` up to its sums; rerun it on the microbatches of `fetch` if it is void.

        Waits for the device, unless no layer can make a step void.
        """
        self.note = ""
        if not work.counters.checked:
            return run()
        if self._counted_eagerly:  # graphs count gradients differently
            work.grads.recount()
            self._counted_eagerly = False
        states = random_states(self.rng)
        sums = run()
        assert sums.void is not None
        counts = VoidCounts(*sums.void.tolist())
        if counts.overflowed:
            self._grow(work.counters)
        if not counts.void:
            if self.manager is not None:
                self.manager.raise_difference()
            return sums
        self._add_reasons(counts)
        work.grads.recount()
        restore_random_states(self.rng, states)
        with rerunning(), ExitStack() as stack:
            if self.manager is not None:
                stack.enter_context(self.manager.paused())
            for layer in work.counters.layers:
                # A layer that is meant to drop tokens drops the same ones again.
                if layer.dropped_pairs is None or layer.moe.symmetric_overflow == "rerun":
                    stack.enter_context(layer.all_to_all())
            sums = work.reduce(work.backward(fetch))
        self._counted_eagerly = self.manager is not None
        return sums

    def _grow(self, counters: StepCounters) -> None:
        """Grow the stashes of all ranks; the host has just read a number, so the device is idle."""
        grown = counters.grow()
        for before, rows in grown:
            self._add_note(f"the activation stash grows from {before} to {rows} rows")
        if grown and self.graphs is not None:
            self.graphs.recapture()
            if self.agreement is not None:
                self.agreement.restart()
            self._add_note("graphs are captured again")

    def _add_reasons(self, counts: VoidCounts) -> None:
        if counts.dropped:
            self._add_note(f"{counts.dropped} (token, expert) assignments did not fit")
        if counts.overflowed:
            self._add_note(f"the activations of {counts.overflowed} forwards did not fit into the stash")
        self._add_note("the step was rerun with dispatcher alltoall")

    def _add_note(self, text: str) -> None:
        self.note += f"; {text}" if self.note else text
