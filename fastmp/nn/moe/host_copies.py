"""Copies of small tensors to the host that a graph can make: it starts them, and eager code waits for them.

A capture cannot wait, and a replay calls no Python. So a copy is two things, a tensor in pinned memory and an
event behind the copy, which a graph holds as two nodes. Eager code has the tensor, by whose address the event
is found. The event is external: inside a capture an ordinary one would only order the work of the graph.

Why an event and not a number in that memory which the host watches: a wait for an event ends with an error
where the device fails, and lets go of the interpreter's lock. Nobody has to reset it, so a copy for which
nobody waits, as in a recomputation, does no harm. The launch of a graph records its events anew, and a wait
is for the last record.

Memory of a copy inside a graph is the graph's for as long as it lives. Torch 2.10 allocates no pinned memory
in a capture: what captures take is laid aside before.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

__all__ = ["HostCopies"]


class HostCopies:
    """Copies of tensors of one shape and dtype to the host, each with memory of its own.

    start(tensor) -> the copy, which eager code gives to `wait`, in the same step and before the next replay
        of the graph that makes it. From a CPU it is a copy as well, which a recorded graph makes again.
    wait(copy) -> its values, in the memory of the copy.
    """

    def __init__(self) -> None:
        self._events: dict[int, torch.cuda.Event] = {}  # by the address of the copy
        self._aside: list[Tensor] = []  # pinned memory for captures

    def start(self, tensor: Tensor) -> Tensor:
        if not tensor.is_cuda:
            return torch.empty_like(tensor).copy_(tensor)
        if not torch.cuda.is_current_stream_capturing():
            copy = _pinned(tensor)
        elif self._aside:
            copy = self._aside.pop()
        else:
            return tensor  # `wait` copies it
        copy.copy_(tensor, non_blocking=True)
        event = self._events[copy.data_ptr()] = torch.cuda.Event(external=True)
        event.record(torch.cuda.current_stream(tensor.device))
        return copy

    def wait(self, copy: Tensor) -> np.ndarray:
        if copy.is_cuda:
            copy = self.start(copy)
        event = self._events.get(copy.data_ptr())
        if event is not None:
            event.synchronize()
            if not self._aside:
                self._aside.append(_pinned(copy))
        return copy.cpu().numpy()  # of a meta tensor, whoever makes up what hosts read gives the values


def _pinned(like: Tensor) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)
