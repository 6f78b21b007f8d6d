"""Collectives whose results are needed at the end of a layer only, not by the segment that starts them.

A segment starts the collective in the background and calls `finish_later`; whoever runs segments does so in
`finishing()`, and calls `finish_all` at the end of every layer in it. Segments that raise leave nothing to a
later layer: a capture that failed, and a recomputation, which ends a layer by an exception.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["finish_all", "finish_later", "finishing"]

_LEFT: deque[Callable[[], None]] = deque()


def finish_later(finish: Callable[[], None]) -> None:
    """Have `finish`, which waits for a collective and uses its result, called at the end of the layer."""
    _LEFT.append(finish)


def finish_all() -> None:
    """Finish what segments have left, in order."""
    while _LEFT:
        _LEFT.popleft()()


@contextmanager
def finishing() -> Iterator[None]:
    """Finish what segments leave in the block at its end; drop it if the block raises."""
    try:
        yield
        finish_all()
    finally:
        _LEFT.clear()
