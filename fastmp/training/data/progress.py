"""Progress of commands over documents, and their division into groups."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import TextIO, TypeVar

from fastmp.config.console import Console

__all__ = ["ProgressLine", "groups"]

T = TypeVar("T")

INTERVAL = 1.0  # seconds between two states of the line
SLOW_INTERVAL = 30.0  # where each is a line of its own, as in the log of a batch job


def groups(items: Iterable[T], limit: int, size: Callable[[T], int]) -> Iterator[list[T]]:
    """Yield consecutive items in lists, each of which ends when its sizes add up to `limit` or more."""
    group: list[T] = []
    total = 0
    for item in items:
        group.append(item)
        total += size(item)
        if total >= limit:
            yield group
            group, total = [], 0
    if group:
        yield group


class ProgressLine:
    """Finished documents and bytes, their rate and the time left, on a line of `stream`; None: silent."""

    def __init__(self, stream: TextIO | None) -> None:
        self._console, self._silent = Console(stream), stream is None
        self._line = self._console.is_terminal
        self._what, self._total, self._documents, self._bytes = "", 0, 0, 0
        self._begin = self._shown = 0.0

    def begin(self, what: str, total_bytes: int) -> None:
        """Start to count again, of `total_bytes`."""
        self.end()
        self._what, self._total, self._documents, self._bytes = what, total_bytes, 0, 0
        self._begin = self._shown = time.monotonic()

    def add(self, num_bytes: int) -> None:
        """Count a document."""
        self._documents += 1
        self._bytes += num_bytes
        now = time.monotonic()
        if not self._silent and now - self._shown >= (INTERVAL if self._line else SLOW_INTERVAL):
            self._shown = now
            self._show(now)

    def end(self) -> None:
        """Leave the line, if one was shown."""
        if self._line and self._shown > self._begin:
            self._console.write("")
        self._shown = self._begin

    def _show(self, now: float) -> None:
        rate = self._bytes / max(now - self._begin, 1e-9)
        left = (self._total - self._bytes) / rate if rate else 0.0
        text = (
            f"{self._what}: {self._documents:,} documents, {self._bytes / 1e6:,.0f} of "
            f"{self._total / 1e6:,.0f} MB, {self._documents / (now - self._begin):,.0f} documents/s, "
            f"{rate / 1e6:.1f} MB/s, {left / 60:.0f} min left"
        )
        begin, end = ("\r", "") if self._line else ("", "\n")
        self._console.write(f"{text:<100}", start=begin, end=end)
