"""Staging: a copy of the state being saved, in host memory that is reused from save to save."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fastmp.training.checkpoint.storage import ShardedTensorRef

__all__ = ["Staging"]

_ALIGNMENT = 64  # bytes


class Staging:
    """Copy a state in a writer thread while the training thread continues.

    The training thread calls `begin`, and `wait` before it changes a tensor. The writer thread calls `copy`,
    and `end` when the save is over. From a GPU, copies go to pinned memory on a stream of their own. Tensors
    on the host are not copied if the training thread does `nothing` meanwhile.
    """

    def __init__(self) -> None:
        self._state: Mapping[str, ShardedTensorRef] = {}
        self._copies: dict[str, ShardedTensorRef] | None = None
        self._nothing = False
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._pinned = False
        self._staged = threading.Event()
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._ready: dict[torch.device, torch.cuda.Event] = {}  # when the tensors have their values
        self._copied: dict[torch.device, torch.cuda.Event] = {}

    def begin(self, state: Mapping[str, ShardedTensorRef], *, nothing: bool = False) -> None:
        """Record, on the current stream of each device, that the tensors have the values to copy."""
        self._state, self._copies, self._copied, self._nothing = state, None, {}, nothing
        self._staged.clear()
        devices = {tensor.device for tensor in self._tensors() if tensor.is_cuda}
        self._ready = {device: torch.cuda.Event() for device in devices}
        for device, event in self._ready.items():
            event.record(torch.cuda.current_stream(device))

    def copy(self) -> dict[str, ShardedTensorRef]:
        """Return the state in contiguous CPU tensors; the same ones at every attempt of a save."""
        if self._copies is not None:
            return self._copies
        tensors = self._tensors()
        if self._nothing and not self._ready:
            copies = [tensor.contiguous() for tensor in tensors]
        else:
            copies = self._room_for(tensors)
            for device, ready in self._ready.items():
                self._stream(device).wait_event(ready)
            for copy, tensor in zip(copies, tensors, strict=True):
                if tensor.is_cuda:
                    with torch.cuda.stream(self._stream(tensor.device)):
                        copy.copy_(tensor, non_blocking=True)
                else:
                    copy.copy_(tensor)
            for device in self._ready:
                self._copied[device] = torch.cuda.Event()
                self._copied[device].record(self._stream(device))
        self._staged.set()
        for event in self._copied.values():
            event.synchronize()
        left = iter(copies)
        self._copies = {
            name: replace(ref, shards=[(at, next(left)) for at, _ in ref.shards])
            for name, ref in self._state.items()
        }
        return self._copies

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until the tensors may change; on a GPU its current stream waits, not the host.

        Return False if that takes longer than `seconds`.
        """
        if not self._staged.wait(seconds):
            return False
        for device, event in self._copied.items():
            torch.cuda.current_stream(device).wait_event(event)
        return True

    @property
    def is_busy(self) -> bool:
        """True until the copies are queued."""
        return not self._staged.is_set()

    def end(self) -> None:
        """Release the state, copied or not; the memory stays."""
        self._state, self._copies = {}, None
        self._staged.set()

    def close(self) -> None:
        """Release the memory."""
        self._allocate(0)

    def _tensors(self) -> list[Tensor]:
        return [tensor for ref in self._state.values() for _, tensor in ref.shards]

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]

    def _room_for(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        ends, end = list[int](), 0
        for tensor in tensors:
            end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
            ends.append(end)
        if self._buffer.numel() < end:
            self._allocate(end)
        views = []
        for start, tensor in zip([0, *ends], tensors):
            memory = self._buffer[start : start + tensor.nbytes]
            views.append(memory.view(tensor.dtype).view(tensor.shape))
        return views

    def _allocate(self, size: int) -> None:
        """Allocate a buffer, pinned for a GPU with cudaHostRegister: torch's allocator rounds sizes up."""
        if self._pinned:
            torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(self._buffer.data_ptr()))
        self._buffer, self._pinned = torch.empty(size, dtype=torch.uint8), bool(size and self._ready)
        if self._pinned:
            with torch.cuda.device(next(iter(self._ready))):  # a new thread is at the first one
                status = torch.cuda.cudart().cudaHostRegister(self._buffer.data_ptr(), size, 0)
            torch.cuda.check_error(status)
