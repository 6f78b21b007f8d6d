"""The C heap of a process that trains on a CPU."""

from __future__ import annotations

import contextlib
import ctypes

__all__ = ["LARGE_BLOCK", "map_large_blocks"]

LARGE_BLOCK = 1 << 20
_M_MMAP_THRESHOLD = -3  # malloc.h


def map_large_blocks() -> None:
    """Allocate blocks of `LARGE_BLOCK` bytes or more with mmap, and unmap them when freed.

    glibc starts with this threshold but raises it, up to 32 MiB, when such blocks are freed. Activations then
    live on the heap, small allocations between them fragment it, and it grows by about 1 MB a step without
    limit. Fresh pages cost about 6 % of the step time of configs/gpt-small.toml. Other C libraries are not
    changed.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").mallopt(_M_MMAP_THRESHOLD, LARGE_BLOCK)
