"""Deferred completion of asynchronous collectives, until the end of the layer that starts them.

1. A segment starts an asynchronous collective and calls `finish_later`.
2. Code that runs segments does so inside `finishing()`, and calls `finish_all` at the end of every layer.
3. If a segment raises, its pending work is dropped, so that it does not leak into a later layer: a failed
   capture, and activation recomputation, which ends a layer with an exception.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

__all__ = ["finish_all", "finish_later", "finishing"]

_PENDING: deque[Callable[[], None]] = deque()


def finish_later(finish: Callable[[], None]) -> None:
    """Call `finish`, which waits for a collective and uses its result, at the end of the layer."""
    _PENDING.append(finish)


def finish_all() -> None:
    """Finish pending collectives, in order."""
    while _PENDING:
        _PENDING.popleft()()


class finishing:
    """Context that finishes pending collectives at the end of the block; drops them if the block raises.

    A class, since a generator would cost a replay of a CUDA graph a microsecond of the host's time.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(self, failure: type[BaseException] | None, *_: object) -> None:
        try:
            if failure is None:
                finish_all()
        finally:
            _PENDING.clear()
