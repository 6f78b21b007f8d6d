"""Why a run ends before its last step: a signal, or gradients that are not finite step after step."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from fastmp.train.checkpoint import communication_device

__all__ = ["SkippedSteps", "StopSignals", "first_not_finite"]

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
    """The number of steps in a row, up to the last one, whose gradient norm was not finite.

    The count stays on the device. It is read after every step on a CPU; elsewhere every `limit` steps, so
    that the host does not wait for each step. The norm has the same bits on all ranks, and so has the count.

    limit: how many such steps end the run; 0: any number is let pass.
    """

    def __init__(self, limit: int, device: torch.device) -> None:
        self.limit = limit
        self._count = torch.zeros((), dtype=torch.int64, device=device)

    def add(self, grad_norm: Tensor) -> None:
        """Count the step whose gradient norm this is."""
        if self.limit:
            self._count.add_(1).mul_(~torch.isfinite(grad_norm))

    def too_many(self, step: int) -> int:
        """The number after step `step`, if it has reached the limit and is read after this step; else 0."""
        if not self.limit or (self._count.device.type != "cpu" and step % self.limit):
            return 0
        count = int(self._count)
        return count if count >= self.limit else 0


def first_not_finite(parameters: Mapping[str, Parameter], world_size: int) -> str:
    """Say on which rank, and for which parameter, a gradient is not finite first; all ranks call it.

    parameters: the parameters of this rank in the order of the model, with main gradients that have not been
        reduced over ranks.
    """
    own = next((name for name, p in parameters.items() if not torch.isfinite(p.main_grad).all()), None)
    if own is not None and not torch.isfinite(parameters[own]).all():
        own = f"{own}, whose values are not finite"
    everyones: list[Any] = [own]
    if world_size > 1:
        everyones = [None] * world_size
        dist.all_gather_object(everyones, own)
    found = next(((rank, name) for rank, name in enumerate(everyones) if name is not None), None)
    if found is None:
        return "run once more, every rank's own gradients are finite"
    return f"the first parameter with such a gradient is {found[1]} on rank {found[0]}"
