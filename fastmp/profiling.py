"""Named ranges for profilers, around every op, segment, collective and phase of training.

Ranges show in torch.profiler while that records, and in Nsight after `enable_nvtx()`. Otherwise a range takes
less than a microsecond. Compiled code has no ranges, as they would break its graph.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch.autograd import profiler

from fastmp.status import process_status

_OFF = nullcontext()
_nvtx = False


def enable_nvtx(on: bool = True) -> None:
    """Emit NVTX ranges as well, for Nsight."""
    global _nvtx
    _nvtx = on


def shows_in_nsight() -> bool:
    """Return True if NVTX ranges are emitted."""
    return _nvtx


class _Range:
    def __init__(self, name: str) -> None:
        self.name = name
        self.recorded = profiler.record_function(name)

    def __enter__(self) -> None:
        if _nvtx:
            torch.cuda.nvtx.range_push(self.name)
        self.recorded.__enter__()

    def __exit__(self, *error: object) -> None:
        self.recorded.__exit__(*error)
        if _nvtx:
            torch.cuda.nvtx.range_pop()


def region(name: str) -> AbstractContextManager:
    """Return a context that is a range for profilers with this name, e.g. "fastmp.bias_gelu"."""
    if torch.compiler.is_compiling() or not (_nvtx or profiler._is_profiler_enabled):
        return _OFF
    return _Range(name)


def phase(name: str) -> AbstractContextManager:
    """Return the range of a phase of training, such as "forward", and set it in `process_status`."""
    process_status.phase = name
    return region(f"fastmp.training.{name}")


def traced(name: str) -> Callable[[Callable], Callable]:
    """Return a decorator that makes every call of the function a range of that name."""

    def decorate(function: Callable) -> Callable:
        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            if torch.compiler.is_compiling() or not (_nvtx or profiler._is_profiler_enabled):
                return function(*args, **kwargs)
            with _Range(name):
                return function(*args, **kwargs)

        return wrapper

    return decorate
