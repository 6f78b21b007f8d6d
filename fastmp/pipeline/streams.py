"""The streams of a microbatch whose layers run in spans: compute, and exchanges beside another microbatch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, UntypedStorage
from torch.multiprocessing.reductions import StorageWeakRef

from fastmp.distributed.streams import exchange_stream

__all__ = ["Streams"]


class Streams:
    """The streams of a microbatch: each part runs after the previous one, on the stream for its kind.

    The allocator reuses freed memory on the stream that allocated it, while the other stream may still read
    it. `record_stream` prevents that. In a capture it would also keep the memory from being reused until the
    capture ends, and a captured step holds all microbatches: there, references are held until the allocating
    stream has waited for the part that reads them.
    """

    def __init__(self, x: Tensor) -> None:
        self._device = x.device
        self._event: torch.cuda.Event | None = None
        self._exchange = self._returns = False  # the kind of the part that runs, and whether in backward
        # Storages that are held, by the kind of the part that reads them.
        self._held: dict[bool, list[UntypedStorage]] = {False: [], True: []}
        # By part, what it took in forward: its backward reads what autograd has saved of that.
        self._taken: dict[int, list[StorageWeakRef]] = {}

    def on(self, part: int, exchange: bool, tensors: Sequence[Tensor]) -> AbstractContextManager[None]:
        """Return a context on the stream of a part that reads `tensors`; a null context on a CPU."""
        return self._on(part, exchange, tensors) if self._device.type == "cuda" else nullcontext()

    @contextmanager
    def _on(self, part: int, exchange: bool, tensors: Sequence[Tensor]) -> Iterator[None]:
        current = torch.cuda.current_stream(self._device)
        stream = exchange_stream(self._device) if exchange else current
        # 1. Wait for the previous part, and release what parts on the other stream have read. Deferred wgrad
        #    GEMMs read later than the compute part that defers them: their inputs are held to the end.
        if self._event is None:
            stream.wait_stream(current)
        else:
            stream.wait_event(self._event)
        self._exchange = exchange
        if not (exchange and self._returns):
            self._held[not exchange].clear()
        # 2. Run on the stream.
        with torch.cuda.stream(stream):
            self.lend(tensors)
            if self._returns:
                saved = (UntypedStorage._new_with_weak_ptr(ref.cdata) for ref in self._taken.pop(part, ()))
                self._held[exchange] += [storage for storage in saved if storage is not None]
            elif torch.cuda.is_current_stream_capturing():
                self._taken[part] = [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]
            yield
        self._event = stream.record_event()

    def lend(self, tensors: Sequence[Tensor]) -> None:
        """Keep the memory of tensors until the running part is done with them; some may be on the host."""
        if self._device.type != "cuda":
            return
        if torch.cuda.is_current_stream_capturing():
            self._held[self._exchange] += [tensor.untyped_storage() for tensor in tensors]
            return
        for tensor in tensors:
            if tensor.is_cuda:
                tensor.record_stream(torch.cuda.current_stream(self._device))

    def join(self, tensors: Sequence[Tensor]) -> None:
        """Return `tensors` to the current stream after the forward."""
        self._exchange, self._returns = False, True
        if self._event is not None:
            torch.cuda.current_stream(self._device).wait_event(self._event)
            self.lend(tensors)
            self._event = None

    def end(self) -> None:
        """Release all tensors, once both streams have waited for each other."""
        if any(self._held.values()):
            current, exchanges = torch.cuda.current_stream(self._device), exchange_stream(self._device)
            exchanges.wait_stream(current)
            current.wait_stream(exchanges)
            for storages in self._held.values():
                storages.clear()
