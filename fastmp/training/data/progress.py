"""A progress line for commands over documents."""

from __future__ import annotations

import sys
import time
from typing import TextIO

__all__ = ["ProgressLine"]

INTERVAL = 1.0  # seconds between two states of the line
SLOW_INTERVAL = 30.0  # where each is a line of its own, as in the log of a batch job


class ProgressLine:
    """Documents and bytes that are done, their rate, and when all will be, on a line of `stream`."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._line = self._stream.isatty()
        self._what, self._total, self._documents, self._bytes = "", 0, 0, 0
        self._begin = self._shown = 0.0

    def begin(self, what: str, total_bytes: int) -> None:
        """Start to count anew, of `total_bytes`."""
        self.end()
        self._what, self._total, self._documents, self._bytes = what, total_bytes, 0, 0
        self._begin = self._shown = time.monotonic()

    def add(self, num_bytes: int) -> None:
        """Count a document."""
        self._documents += 1
        self._bytes += num_bytes
        now = time.monotonic()
        if now - self._shown >= (INTERVAL if self._line else SLOW_INTERVAL):
            self._shown = now
            self._show(now)

    def end(self) -> None:
        """Leave the line, if one was shown."""
        if self._line and self._shown > self._begin:
            print(file=self._stream)
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
        print(f"{begin}{text:<100}", end=end, file=self._stream, flush=True)
