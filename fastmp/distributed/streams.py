"""CUDA streams next to the current one: for shared experts, and for token exchanges."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

__all__ = ["beside", "exchange_stream", "exchanging", "is_forked", "join", "side_stream"]


@functools.cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the side stream of a GPU; autograd runs backwards on the stream of their forward."""
    return torch.cuda.Stream(device)


@functools.cache
def exchange_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream of exchanges that overlap a shared expert or another microbatch's compute.

    It has high priority: NCCL runs synchronous collectives on the current stream, and at normal priority
    their blocks start after the last wave of a GEMM that was launched before.
    """
    return torch.cuda.Stream(device, priority=-1)


def exchanging(x: torch.Tensor) -> AbstractContextManager[None]:
    """Return a context on a GPU's exchange stream: it waits for the current stream, which waits for its end.

    In a capture it forks and joins, so that each graph has both. Memory needs no `record_stream`: tensors
    allocated before are not reused ahead of the wait at the end, and tensors allocated in the context are
    reused in such a context only, after the wait at its start. On a CPU it does nothing.
    """
    return _exchanging(x.device) if x.is_cuda else nullcontext()


@contextmanager
def _exchanging(device: torch.device) -> Iterator[None]:
    current, exchanges = torch.cuda.current_stream(device), exchange_stream(device)
    if current == exchanges:  # a part of two overlapped microbatches, which looks after memory itself
        yield
        return
    exchanges.wait_stream(current)
    try:
        with torch.cuda.stream(exchanges):
            yield
    finally:
        current.wait_stream(exchanges)


def is_forked(stream: torch.cuda.Stream) -> bool:
    """Return True if `stream` takes part in the capture of the current stream."""
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()


def join(stream: torch.cuda.Stream, device: torch.device) -> None:
    """Make the current stream wait for `stream`; a capture waits for streams that take part in it alone.

    It could not wait for earlier work. At its end it joins what it has forked (`backends/cuda.py`).
    """
    if not torch.cuda.is_current_stream_capturing() or is_forked(stream):
        torch.cuda.current_stream(device).wait_stream(stream)


def beside(device: torch.device) -> tuple[torch.cuda.Stream, ...]:
    """Return the streams of a GPU that layers use next to the current one."""
    return side_stream(device), exchange_stream(device)
