"""Why a run ends before its last step: a signal, or gradients that are not finite step after step."""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fastmp.parallel.grads import GradBuffer
from fastmp.train.checkpoint import communication_device

__all__ = ["SkippedSteps", "StopSignals"]

SAME_PRESS = (
    2.0  # seconds in which a launcher may pass on a Ctrl-C that the terminal has sent to all processes
)


class StopSignals:
    """Ctrl-C and SIGTERM as a request to stop after the current step, on which all ranks agree.

    Inside a `with` block the first signal is a request, and the first rank says so on stderr; the second one
    raises KeyboardInterrupt. Called by all ranks after a step, the object says whether any of them has been
    asked to stop. That is one all-reduce of 8 bytes between the hosts; no device is waited for.

    rank, world_size: this process in the default process group. In a job of several ranks, signals within
        `SAME_PRESS` seconds are one: torchrun passes on what its ranks have got from the terminal, too.

    `number` is the signal that all ranks have agreed to stop for, 0 until then.
    """

    def __init__(self, rank: int = 0, world_size: int = 1) -> None:
        self.number = 0
        self._rank, self._distributed = rank, world_size > 1
        self._received, self._when = 0, 0.0
        self._handlers: dict[int, Any] = {}

    def __call__(self) -> bool:
        number = torch.tensor(self._received)
        if self._distributed:
            number = number.to(communication_device())
            dist.all_reduce(number, dist.ReduceOp.MAX)
        self.number = int(number)
        return self.number != 0

    def __enter__(self) -> StopSignals:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._handlers[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self._received:
            self._received, self._when = number, now
            if self._rank == 0:  # not by print: the signal may have come in the middle of one
                name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
                os.write(2, f"\n{name}: stopping after this step; once more stops at once\n".encode())
        elif not self._distributed or now - self._when > SAME_PRESS:
            raise KeyboardInterrupt


class SkippedSteps:
    """What the host learns of steps whose gradient was not finite: which, why, and how many in a row.

    A step leaves a few numbers on the device. The host reads them one step later, when the next step is
    queued, so the device never waits; on a CPU at once. All ranks read the same steps, and where one was
    skipped, they find out together whose gradient it was.

    grads: the gradients of the trainer. world_size: ranks in the default process group. wait: called before
        parameters are looked at.

    `in_a_row` counts the skipped steps up to the last one that was read.
    """

    def __init__(self, grads: GradBuffer, world_size: int, wait: Callable[[], None] = lambda: None) -> None:
        self._grads, self._world_size, self._wait = grads, world_size, wait
        self._unread: deque[tuple[int, _HostCopy]] = deque(maxlen=2)
        self.in_a_row = 0

    def add(self, step: int, skipped: Tensor, counts: Tensor | None = None) -> None:
        """Note a step after its reductions.

        skipped: 0-dim bool tensor, the same on all ranks. counts: likewise, whether a skipped step counts in
        `in_a_row`; None: it does.
        """
        counted = skipped if counts is None else skipped & counts
        numbers = [torch.stack((skipped, counted)).long(), self._grads.first_not_finite(skipped)]
        self._unread.append((step, _HostCopy(torch.cat(numbers))))

    def read(self, *, all_steps: bool = False) -> list[str]:
        """Read the steps that are due, or all; a line for each that was skipped. Every rank calls it."""
        lines = []
        while self._unread and (all_steps or len(self._unread) > self._unread[0][1].steps_late):
            step, copy = self._unread.popleft()
            skipped, counted, *places = copy.read()
            self.in_a_row = self.in_a_row + 1 if counted else 0
            if skipped:
                lines.append(f"step {step}: skipped: {self._cause(places)}")
        return lines

    def _cause(self, places: list[int]) -> str:
        """Say whose gradient was not finite; all ranks call it."""
        self._wait()
        parameters = self._grads.parameters
        wrong = next((name for name, param in parameters.items() if not torch.isfinite(param).all()), None)
        own = wrong, self._grads.culprit(places)
        everyones: list[Any] = [own]
        if self._world_size > 1:
            everyones = [None] * self._world_size
            dist.all_gather_object(everyones, own)
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
        return "the norm of the gradient is not finite, though every number in it is"


class _HostCopy:
    """Numbers of the device, copied to the host while it goes on.

    `steps_late`: after how many further steps they are read, so that nothing is waited for.
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
