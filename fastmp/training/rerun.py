"""Rerun a step whose tokens did not fit into symmetric memory (`model.moe.symmetric_overflow`).

Only the device knows if they fit, so the host reads a counter once a step, after the backward of the last
microbatch. By then only gradients and random streams have changed. A rerun discards the gradients, restores
the streams, and runs the same microbatches eagerly with the all-to-all dispatcher, bit for
bit as a run that always uses it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING

from fastmp.cuda_graphs.manager import GraphManager
from fastmp.cuda_graphs.restore import random_states, restore_random_states
from fastmp.distributed.collectives import gather_objects, sum_over_
from fastmp.nn.moe.layer import MoELayer
from fastmp.training.microbatches import Batch, Sums
from fastmp.training.train_step import TrainStep

if TYPE_CHECKING:
    from fastmp.distributed.rng import RngTracker

__all__ = ["Rerun"]


class Rerun:
    """Rerun the steps of `work` in which a layer has dropped (token, expert) assignments.

    All ranks construct it together.

    Args:
        graphs: the graph manager, which is paused during a rerun.
        rng: the random streams of layers; None: torch's default generators.

    Attributes:
        wanted: True if a layer of any stage asks for reruns; only then call `checked`.
        note: the line for the log about the last step that was rerun.

    Raises:
        ValueError: a whole step is one graph, which no host can interrupt.
    """

    def __init__(self, work: TrainStep, graphs: object, rng: RngTracker | None) -> None:
        modules = [module for chunk in work.runner.chunks for module in chunk.modules()]
        layers = [module for module in modules if isinstance(module, MoELayer)]
        self.layers = [layer for layer in layers if layer.moe.symmetric_overflow == "rerun"]
        self.work, self.rng, self.note, self._counted_eagerly = work, rng, "", False
        self.graphs = graphs if isinstance(graphs, GraphManager) else None
        # A stage may have no layer with experts.
        self.wanted = any(gather_objects(bool(self.layers), work.groups.pp))
        if self.wanted and graphs is not None and self.graphs is None:
            raise ValueError(
                'Trainer: symmetric_overflow "rerun" looks at each step from the host, which graphs of scope '
                '"full_step" leave out: use "drop", or another scope'
            )

    def checked(self, run: Callable[[], Sums], fetch: Callable[[int], Batch]) -> Sums:
        """Call `run`, forward and backward of a step; rerun it by all-to-all if assignments were dropped."""
        if self._counted_eagerly:  # graphs count gradients differently
            self.work.grads.recount()
            self._counted_eagerly = False
        states = random_states(self.rng)
        sums, groups = run(), self.work.groups
        dropped = sum_over_(self.work.take_dropped(), groups.tp_cp_dp, groups.pp)
        if not (number := int(dropped)):
            return sums
        self.note = f"{number} pairs of a token and an expert did not fit: run again by all-to-all"
        grads = self.work.grads
        grads.reduce()  # wait for buckets that were sent; their values are not used
        grads.recount()
        restore_random_states(self.rng, states)
        with ExitStack() as stack:
            if self.graphs is not None:
                stack.enter_context(self.graphs.paused())
            for layer in self.layers:
                stack.enter_context(layer.all_to_all())
            sums = self.work.backward(fetch)
        self._counted_eagerly = self.graphs is not None
        return sums
