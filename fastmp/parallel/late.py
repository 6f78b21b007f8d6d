"""Collectives whose results are needed at the end of a layer only, not by the segment that starts them.

A segment starts the collective in the background and calls `finish_later`; whoever runs segments calls
`finish_all` at the end of a layer, and where segments end that a graph holds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

__all__ = ["finish_all", "finish_later"]

_LEFT: deque[Callable[[], None]] = deque()


def finish_later(finish: Callable[[], None]) -> None:
    """Have `finish`, which waits for a collective and uses its result, called at the end of the layer."""
    _LEFT.append(finish)


def finish_all() -> None:
    """Finish what segments have left, in order."""
    while _LEFT:
        _LEFT.popleft()()
