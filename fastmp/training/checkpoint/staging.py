"""A copy of what is being saved, in memory of the host that is kept from save to save."""

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
    """Copies a state for a thread that writes it, while another thread goes on.

    That one calls `begin`, and `wait` before it changes a tensor; the thread that writes calls `copy`, and
    `end` when it is done. From a GPU, copies go to pinned memory, on a stream of their own. What lies on the
    host is not copied where the other thread does `nothing` meanwhile.
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
        """Note that the tensors have the values to be copied once the work queued so far is done."""
        self._state, self._copies, self._copied, self._nothing = state, None, {}, nothing
        self._staged.clear()
        devices = {tensor.device for tensor in self._tensors() if tensor.is_cuda}
        self._ready = {device: torch.cuda.Event() for device in devices}
        for device, event in self._ready.items():
            event.record(torch.cuda.current_stream(device))

    def copy(self) -> dict[str, ShardedTensorRef]:
        """The state in contiguous tensors on the CPU; the same ones when a save is tried again."""
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
        """Wait until the tensors may change: on a GPU its stream waits, and not the host.

        Return False where `seconds` are over before that.
        """
        if not self._staged.wait(seconds):
            return False
        for device, event in self._copied.items():
            torch.cuda.current_stream(device).wait_event(event)
        return True

    @property
    def is_busy(self) -> bool:
        """Whether the copy has not been made yet."""
        return not self._staged.is_set()

    def end(self) -> None:
        """Let go of the state, whether it was copied or not; the memory stays."""
        self._state, self._copies = {}, None
        self._staged.set()

    def close(self) -> None:
        """Let go of the memory, too."""
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
        """Get a new buffer, pinned for a GPU: by CUDA itself, as torch's own would be rounded up a lot."""
        if self._pinned:
            torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(self._buffer.data_ptr()))
        self._buffer, self._pinned = torch.empty(size, dtype=torch.uint8), bool(size and self._ready)
        if self._pinned:
            with torch.cuda.device(next(iter(self._ready))):  # a new thread is at the first one
                status = torch.cuda.cudart().cudaHostRegister(self._buffer.data_ptr(), size, 0)
            torch.cuda.check_error(status)
