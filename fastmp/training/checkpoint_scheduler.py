"""Checkpoints of a training run: when to save, the lines of the log, and resuming."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from fastmp.config import CheckpointConfig
from fastmp.config.console import to_stderr
from fastmp.distributed.groups import ParallelGroups
from fastmp.distributed.rng import RngTracker
from fastmp.optim.grad_buffers import GradBuffer
from fastmp.optim.loss_scaler import LossScaler
from fastmp.optim.optimizer import Optimizer
from fastmp.profiling import phase
from fastmp.training.checkpoint.checkpointer import Checkpointer, Loaded, described
from fastmp.training.checkpoint.state import TrainingState

if TYPE_CHECKING:
    from fastmp.training.metrics import TrainLog

__all__ = ["CheckpointScheduler", "paused"]


class CheckpointScheduler:
    """Save and load the checkpoints of a trainer in `directory`; all ranks call every method together.

    chunks, grads, optimizer, groups, scaler, rng, device: of the trainer. after: see `Checkpointer`.
    """

    def __init__(
        self,
        directory: Path,
        config: CheckpointConfig,
        chunks: Sequence[nn.Module],
        grads: GradBuffer,
        optimizer: Optimizer,
        *,
        groups: ParallelGroups,
        scaler: LossScaler | None,
        rng: RngTracker | None,
        device: torch.device,
        placement: str,
        after: Callable[[Path, int], str] | None,
    ) -> None:
        self.config, self._optimizer, self._device = config, optimizer, device
        self.checkpointer = Checkpointer(
            directory,
            groups=groups,
            keep=config.keep,
            keep_every=config.keep_every,
            keep_hours=config.keep_hours,
            after=after,
            attempts=config.attempts,
            waiting=lambda: self._note(self._log),
            **described(getattr(chunks[0], "config", None)),
        )
        self.state = TrainingState(
            chunks,
            grads,
            optimizer,
            groups=groups,
            scaler=scaler,
            rng=rng,
            device=device,
            placement=placement,
        )
        self._log: TrainLog | None = None  # that of the last call
        self._begun = -1  # the step of the last save, finished or not
        self._is_first = groups.rank == 0

    def save(self, step: int) -> Path:
        """Write a checkpoint of the state after `step` steps, and wait for it; return its directory."""
        with phase("save"):
            self._begin(step, alone=True)
            path = self.checkpointer.wait()
        assert path is not None
        return path

    def before_change(self) -> None:
        """Wait until parameters and optimizer state may change."""
        if self.checkpointer.is_staging:
            with phase("save"):
                self.checkpointer.wait_staged()
        self.checkpointer.wait_staged()  # a GPU's stream

    def after_step(self, step: int, log: TrainLog | None) -> None:
        """Start a save if one is due, and log the outcome of earlier saves."""
        self._log = log
        if self.config.interval and step % self.config.interval == 0:
            if self.config.asynchronous:
                with phase("save"):
                    self._begin(step, alone=False)
            else:
                with paused(log, self._device), phase("save"):
                    self._begin(step, alone=True)
                    self.checkpointer.settle()
        self._note(log)

    def end(self, step: int, log: TrainLog | None, *, save: bool) -> None:
        """Wait for the last save; with `save`, save this step, too. Raises OSError if that fails."""
        self._log = log
        with paused(log, self._device), phase("save"):
            self.checkpointer.settle()
            try:
                if save and (self._begun != step or self.checkpointer.failed):
                    self._begin(step, alone=True)
                    self.checkpointer.wait()
                self.checkpointer.wait_following()
            finally:
                self._note(log)

    def load(self, path: str | Path | None) -> Loaded | None:
        """Load the latest checkpoint, or the one at `path`, saved with any layout; None if there is none.

        Random streams continue if the layout is the one that saved them, and restart otherwise.
        """
        self._optimizer.gather.wait()
        state, random = self.state.to_load()
        loaded = self.checkpointer.load(state, optional=frozenset(random), path=path)
        if loaded is not None:
            as_saved = loaded.layout == self.checkpointer.layout and not loaded.missing
            self.state.loaded(random, loaded.step, as_saved=as_saved)
            self._begun = loaded.step if path is None else -1
        return loaded

    def _begin(self, step: int, *, alone: bool) -> None:
        self._optimizer.gather.wait()
        self.checkpointer.start_save(step, self.state.to_save(), {}, alone=alone)
        self._begun = step

    def _note(self, log: TrainLog | None) -> None:
        for note in self.checkpointer.notes():
            if log is not None:
                log.note(note.text)
            elif note.failed and self._is_first:
                to_stderr(f"warning: {note.text}")


def paused(log: TrainLog | None, device: torch.device) -> AbstractContextManager[None]:
    """Return a context that stops the clock of the log, after the steps queued so far are done."""
    if log is None:
        return nullcontext()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return log.paused()
