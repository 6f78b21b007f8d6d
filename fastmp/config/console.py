"""Text for people: log lines, progress, notes and errors. Standard library only.

A line that cannot be written, to a full disk or to a reader that has left, is lost, and the work continues.
The output that a command is run for, such as an estimate or generated text, is printed with `print` instead:
a failure to write it ends the command.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import sys
from typing import TextIO

__all__ = [
    "Console",
    "flush_output",
    "flush_quietly",
    "open_streams",
    "printable",
    "to_stderr",
    "to_stdout",
    "write_from_handler",
]

# Control characters except tab and newline, overrides of the writing direction, halves of surrogate pairs.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_lost: set[str] = set()  # streams on which lines have been lost, by their names in sys


def printable(text: str) -> str:
    r"""Return `text` with an escape in place of each character that controls a terminal.

    >>> print(printable("a\x1b[31mb"))
    a\x1b[31mb
    """
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class Console:
    """A stream of text for people; writing to it never raises. None: nothing is shown."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream

    @property
    def is_terminal(self) -> bool:
        """True if the last line can be rewritten."""
        return self._stream is not None and not self._stream.closed and self._stream.isatty()

    def write(self, text: str, *, start: str = "", end: str = "\n") -> None:
        """Write `text` and flush; characters that cannot be encoded or printed are escaped.

        start, end: written as they are, to move the cursor.
        """
        if self._stream is None:
            return
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        shown = printable(text).encode(encoding, "backslashreplace").decode(encoding)
        try:
            self._stream.write(start + shown + end)  # one write: the lines of several ranks stay whole
            self._stream.flush()
        except (OSError, ValueError) as error:  # ValueError: the stream is closed
            _report_loss("stdout" if self._stream is sys.stdout else "stderr", error)


def to_stdout(text: str) -> None:
    """Show a line on stdout, see `Console.write`."""
    Console(sys.stdout).write(text)


def to_stderr(text: str, *, start: str = "", end: str = "\n") -> None:
    """Show a line on stderr, see `Console.write`."""
    Console(sys.stderr).write(text, start=start, end=end)


def write_from_handler(text: str) -> None:
    """Write to stderr from a signal handler; what cannot be written is lost.

    Not through `sys.stderr`: the signal may have come in the middle of a write to it, which allows no second.
    """
    with contextlib.suppress(OSError):
        os.write(2, text.encode())


def open_streams() -> None:
    """Prepare stdin, stdout and stderr of a command.

    A closed stream would leave its descriptor to the next file that is opened, such as a checkpoint, and
    native code that writes to the stream would write into that file.
    """
    # 1. Closed streams get descriptors that cannot be written: printing there is an error, as on a full disk.
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDONLY)
            os.set_inheritable(descriptor, True)
            setattr(sys, name, open(descriptor, mode, encoding="utf-8"))
    # 2. Any text can be printed, whatever the locale.
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    _discard_at_exit()


def flush_output() -> None:
    """Flush stdout. Raises OSError if it cannot be written, unless lines for people have been lost there."""
    if "stdout" in _lost:
        flush_quietly()
    else:
        sys.stdout.flush()


def flush_quietly() -> None:
    """Flush stdout and stderr, as far as they can be written."""
    for stream in (sys.stdout, sys.stderr):
        Console(stream).write("", end="")


def _report_loss(name: str, error: Exception) -> None:
    """Tell once on stderr that lines are lost."""
    first = not _lost
    _lost.add(name)
    if first:
        _discard_at_exit()
        reason = getattr(error, "strerror", None) or error
        to_stderr(f"fastmp: the log cannot be written ({reason}); the work continues without it")


def _discard_at_exit() -> None:
    atexit.unregister(_discard)
    atexit.register(_discard)


def _discard() -> None:
    """Drop text that cannot be written: Python's own flush at exit would turn the status into 120."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
