"""Device-to-host copies of small tensors that a CUDA graph starts and eager code waits for.

A capture cannot wait, and a replay calls no Python. So a copy consists of a tensor in pinned memory and an
event recorded after the copy, two nodes of a graph. Eager code gets the tensor and finds the event by its
address. The event is external: inside a capture an ordinary event would only order the work of the graph.

An event serves better than a flag in that memory that the host polls: waiting for it raises if the device
fails, and releases the GIL. It needs no reset, so a copy without a waiter, as in a recomputation, does no
harm. Each launch of a graph records its events again, and a wait is for the last record.

The memory of a copy in a graph belongs to the graph. Torch 2.10 allocates no pinned memory during capture, so
eager waits allocate it ahead.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

__all__ = ["HostCopies"]


class HostCopies:
    """Copies to the host of tensors of one shape and dtype, each in its own memory.

    start(tensor) -> the copy; eager code passes it to `wait` in the same step, before the next replay of its
        graph. A CPU tensor is copied as well, so that a recorded graph repeats the copy.
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
        return copy.cpu().numpy()  # of a meta tensor, a dispatch mode supplies the values


def _pinned(like: Tensor) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)
