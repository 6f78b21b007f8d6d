"""Run the device work of training steps: eagerly, or through CUDA graphs of layers, microbatches or steps.

Steps of experts that may overflow (see `rerun.py`) are read by the host between their sums and their update.
A full-iteration graph is then two graphs: one up to the sums, one of the update.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.autograd.graph import increment_version

from fastmp.config import GraphConfig
from fastmp.cuda_graphs.function_graph import FunctionGraph
from fastmp.cuda_graphs.manager import GraphManager
from fastmp.profiling import phase
from fastmp.tensor_parallel.fp8_linear import quantized_parameters
from fastmp.training.graphing import (
    CaptureAgreement,
    CheckedStepGraphs,
    checked_step,
    make_graphs,
    whole_step,
)
from fastmp.training.microbatches import Batch
from fastmp.training.rerun import Rerun
from fastmp.training.train_step import ReducedSums, StepNumbers, TrainStep

if TYPE_CHECKING:
    from fastmp.distributed.rng import RngTracker

__all__ = ["StepExecution"]


class StepExecution:
    """Run steps of `work`, eagerly or through graphs, and again where they are void.

    Args:
        config, manager: the graphs, see `Trainer`.
        rng, device: see `Trainer`.
        span_size: see `make_graphs`.

    Attributes:
        graphs: those of layers, microbatches or steps; None: all runs eagerly.
        rerun: repeats void steps, and holds the line for the log.

    Raises:
        ValueError: as `make_graphs` and `whole_step`.
    """

    def __init__(
        self,
        work: TrainStep,
        config: GraphConfig,
        manager: Callable[..., GraphManager] | None,
        *,
        rng: RngTracker | None,
        device: torch.device,
        span_size: int | None = None,
    ) -> None:
        self.work = work
        parameters, copies = work.grads.parameters, work.grads.gathered_in_fp8
        self._gathered = [(each, parameters[name]) for name, each in copies.items()]
        gathered, every = {id(p) for _, p in self._gathered}, quantized_parameters(work.runner.chunks)
        self._quantized = [param for param in every if id(param) not in gathered]
        self.graphs: GraphManager | FunctionGraph | CheckedStepGraphs | None
        self._agreement: CaptureAgreement | None = None
        if config.enabled and "full_step" in (config.scope or ()):
            make = checked_step if work.counters.checked else whole_step
            self.graphs = make(work, config, rng=rng, device=device)
        else:
            self.graphs = make_graphs(
                work.runner,
                config,
                rng=rng,
                device=device,
                group=work.groups.tp_cp_dp,
                span_size=span_size,
                manager=manager,
            )
        if isinstance(self.graphs, GraphManager):
            world = dist.group.WORLD if work.groups.grid.world_size > 1 else None
            self._agreement = CaptureAgreement(self.graphs, world)
        self.rerun = Rerun(self.graphs, self._agreement, rng)

    def run(
        self,
        fetch: Callable[[int], Batch],
        note_requests: Callable[[], None],
        before_change: Callable[[], None],
    ) -> StepNumbers:
        """Run a step; the host waits for the device only in steps that may be void.

        Args:
            fetch: (microbatch) -> its batch on the device.
            note_requests: called before the sums over ranks; puts this rank's requests into them.
            before_change: called before parameters and states of the optimizer change.
        """
        if self.graphs is None or isinstance(self.graphs, GraphManager):
            reduced = partial(self._reduced, fetch, note_requests)
            sums = self.rerun.checked(self.work, reduced, fetch)
            return self.work.update(sums, before_change)
        with phase("data"):
            batches = [fetch(number) for number in range(self.work.runner.num_microbatches)]
        if isinstance(self.graphs, FunctionGraph):
            before_change()
        self.work.optimizer.gather.wait()
        for copies, param in self._gathered:  # which a step makes at its end, not at its beginning
            copies.refresh(param)
        note_requests()
        with phase("step"):
            if isinstance(self.graphs, FunctionGraph):
                numbers = self.graphs(batches)
            else:
                reduced = partial(self.graphs.reduced, batches)
                sums = self.rerun.checked(self.work, reduced, batches.__getitem__)
                before_change()
                numbers = self.graphs.updated(sums)
            # A replay changes parameters without their version counters, by which FP8 copies know of it; not
            # those whose copies it has gathered.
            increment_version(self._quantized)
            return numbers

    def _reduced(self, fetch: Callable[[int], Batch], note_requests: Callable[[], None]) -> ReducedSums:
        """Run a step up to its sums, through the graphs of a manager if there are any."""
        if self._agreement is None:
            sums = self.work.backward(fetch)
        else:
            assert isinstance(self.graphs, GraphManager)
            if self._agreement.unsettled():
                self.work.grads.recount()  # replays tell of gradients otherwise than eager steps
            self.graphs.begin_step()
            sums = self.work.backward(fetch)
            self._agreement.end_step()
        note_requests()
        return self.work.reduce(sums)
