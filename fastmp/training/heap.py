"""The C heap of a process that trains on a CPU."""

from __future__ import annotations

import contextlib
import ctypes

__all__ = ["LARGE_BLOCK", "map_large_blocks"]

LARGE_BLOCK = 1 << 20
_M_MMAP_THRESHOLD = -3  # malloc.h


def map_large_blocks() -> None:
    """Make the C library map each block of `LARGE_BLOCK` bytes or more by itself, and unmap it when freed.

    glibc begins so, but raises that limit to 32 MiB as such blocks are freed. Then activations lie on the
    heap, small blocks that stay between them fragment it, and it grows by about 1 MB a step without end.
    Fresh pages cost about 6 % of the time of a step of configs/gpt-small.toml. Other C libraries are left
    alone.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").mallopt(_M_MMAP_THRESHOLD, LARGE_BLOCK)
