"""Reasons to end a run before its last step: signals, a time limit, non-finite gradients."""

from __future__ import annotations

import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fastmp.config.console import write_from_handler
from fastmp.distributed.collectives import gather_objects
from fastmp.optim.grad_buffers import GradBuffer

__all__ = ["REASONS", "SkippedSteps", "StopRequests"]

# Seconds in which a launcher may pass on a signal that the terminal, or Slurm, has sent to all processes.
SAME_PRESS = 2.0
REASONS = ("Ctrl-C", "SIGUSR1", "SIGTERM", "time limit")  # where ranks have several, the last one counts


class StopRequests:
    """Requests to stop training, by a signal or a time limit; `Trainer.train` makes all ranks follow.

    Inside a `with` block the first Ctrl-C, SIGTERM or SIGUSR1 (sent by Slurm ahead of its time limit) is a
    request, and rank 0 reports it on stderr. A second Ctrl-C or SIGTERM ends the process at once, by
    KeyboardInterrupt or by SystemExit with the signal's shell status. Outside the main thread (as in Ray
    Train) signals are not handled: Python allows it in the main thread only.

    Args:
        rank, world_size: of the default process group. With several ranks, signals within `SAME_PRESS`
            seconds count once: torchrun forwards a signal that its ranks also received from the terminal.
        deadline: the value of `time.monotonic()` at the time limit; None: no limit.

    Attributes:
        reason: the reason that all ranks have stopped for, one of `REASONS`; "" until then.
    """

    def __init__(self, rank: int = 0, world_size: int = 1, deadline: float | None = None) -> None:
        self.reason = ""
        self._rank, self._distributed, self._deadline = rank, world_size > 1, deadline
        self._received, self._when = 0, 0.0
        self._handlers: dict[int, Any] = {}

    def wanted(self) -> str:
        """Return what this rank has been asked to stop for, one of `REASONS`; "" for nothing."""
        if self._deadline is not None and time.monotonic() >= self._deadline:
            return "time limit"
        return _name(self._received) if self._received else ""

    def __enter__(self) -> StopRequests:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
                self._handlers[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self._received:
            self._received, self._when = number, now
            if self._rank == 0:
                write_from_handler(
                    f"\n{_name(number)}: saving the step, then stopping; Ctrl-C or SIGTERM stops at once\n"
                )
        elif number != signal.SIGUSR1 and (not self._distributed or now - self._when > SAME_PRESS):
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            raise SystemExit(128 + number)


def _name(number: int) -> str:
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


class SkippedSteps:
    """The flags of every step: skipped for a non-finite gradient, and requests to stop.

    The host reads the flags of a step from a GPU once the next step is queued, so the device never waits; on
    a CPU at once. All ranks read the same steps, and together find the non-finite gradient of a skipped one.

    Args:
        grads: the gradients of the trainer.
        world_size: the number of ranks in the default process group.
        wait: called before parameters are read.

    Attributes:
        in_a_row: the number of consecutive skipped steps up to the last one read.
        stop_reason: the reason a rank was asked to stop for by then, one of `REASONS`; "" for none.
    """

    def __init__(self, grads: GradBuffer, world_size: int, wait: Callable[[], None] = lambda: None) -> None:
        self._grads, self._world_size, self._wait = grads, world_size, wait
        self._unread: deque[tuple[int, _HostCopy]] = deque(maxlen=2)
        self.in_a_row, self.stop_reason = 0, ""

    def add(self, step: int, skipped: Tensor, counts: Tensor | None, requests: Tensor) -> None:
        """Record a step after its reductions; all tensors are equal on all ranks.

        Args:
            skipped: () bool.
            counts: () bool, True if a skipped step counts in `in_a_row`; None: it does.
            requests: (len(REASONS),), positive for the reasons that ranks have been asked to stop for.
        """
        counted = skipped if counts is None else skipped & counts
        flags = torch.cat((torch.stack((skipped, counted)), requests > 0)).long()
        numbers = [flags, self._grads.first_not_finite(skipped)]
        self._unread.append((step, _HostCopy(torch.cat(numbers))))

    def read(self, *, all_steps: bool = False) -> list[str]:
        """Read the steps that are due, or all; return a line for each skipped one. Every rank calls it."""
        lines = []
        while self._unread and (all_steps or len(self._unread) > self._unread[0][1].steps_late):
            step, copy = self._unread.popleft()
            skipped, counted, *rest = copy.read()
            asked, places = rest[: len(REASONS)], rest[len(REASONS) :]
            self.stop_reason = next((REASONS[i] for i in reversed(range(len(asked))) if asked[i]), "")
            self.in_a_row = self.in_a_row + 1 if counted else 0
            if skipped:
                lines.append(f"step {step}: skipped: {self._cause(places)}")
        return lines

    def _cause(self, places: list[int]) -> str:
        """Return whose gradient was not finite; all ranks call it (an all-gather of objects)."""
        self._wait()
        parameters = self._grads.parameters
        wrong = next((name for name, param in parameters.items() if not torch.isfinite(param).all()), None)
        own = wrong, self._grads.first_nonfinite_param(places)
        everyones = gather_objects(own, dist.group.WORLD if self._world_size > 1 else None)
        for rank, (name, _) in enumerate(everyones):
            if name is not None:
                return f"the values of {name} on rank {rank} are not finite"
        found = [(rank, *each) for rank, (_, each) in enumerate(everyones) if each is not None]
        for rank, name, certain in found:
            if certain:
                return f"the gradient of {name} on rank {rank} is not finite"
        if found:
            rank, name, _ = found[0]
            cause = f" on rank {rank}" if self._grads.shard else ", summed over ranks,"
            return f"the gradient of {name}{cause} is not finite"
        return "the gradient norm overflowed to inf; all gradients are finite"


class _HostCopy:
    """Numbers that are copied from the device without waiting.

    steps_late: the number of further steps after which they are read.
    """

    def __init__(self, numbers: Tensor) -> None:
        self._numbers, self._done = numbers, None
        self.steps_late = int(numbers.device.type == "cuda")
        if self.steps_late:
            self._numbers = torch.empty_like(numbers, device="cpu", pin_memory=True)
            self._numbers.copy_(numbers, non_blocking=True)
            self._done = torch.cuda.Event()
            self._done.record()

    _done: torch.cuda.Event | None

    def read(self) -> list[int]:
        if self._done is not None:
            self._done.synchronize()
        return self._numbers.tolist()
