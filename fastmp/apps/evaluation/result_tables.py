"""Results of evaluations as people read them: a line while one runs, and tables. Standard library only."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fastmp.config.console import Console, printable, to_stderr
from fastmp.config.file_access import FOREIGN_ERRORS, read_or_name

__all__ = ["EvalProgress", "read_result", "table"]

Columns = Mapping[str, Sequence[str]]  # figures of each task that its table shows
_LIMIT = 1 << 20  # bytes of a result


class EvalProgress:
    """Progress of an evaluation on stderr: updated in place on a terminal, otherwise a line every ten
    seconds.

    total: rows of the task. done: those that need not be done again.
    """

    def __init__(self, name: str, unit: str, total: int, done: int) -> None:
        self.name, self.unit, self.total, self.done = name, unit, total, done
        self.terminal = Console(sys.stderr).is_terminal
        self.began = self.shown = time.perf_counter()
        self.new = self.read = self.scored = 0

    def add(self, rows: int, read: int, scored: int) -> None:
        """Add finished rows, the tokens the model read for them, and the targets that were scored."""
        self.done, self.new = self.done + rows, self.new + rows
        self.read, self.scored = self.read + read, self.scored + scored
        now = time.perf_counter()
        if now - self.shown > (0.5 if self.terminal else 10.0):
            self.shown = now
            left = (self.total - self.done) * (now - self.began) / self.new
            hours, seconds = divmod(round(left), 3600)
            eta = f"{hours}:{seconds // 60:02}:{seconds % 60:02}"
            to_stderr(f"{self._line(now)}, ETA {eta}", end="\r" if self.terminal else "\n")

    def end(self) -> None:
        """Print the last line."""
        to_stderr(self._line(time.perf_counter()) + " " * (12 * self.terminal))

    def _line(self, now: float) -> str:
        seconds = max(now - self.began, 1e-9)
        return (
            f"{self.name}: {self.done:,} of {self.total:,} {self.unit}, "
            f"{self.scored / seconds:,.0f} tokens/s scored, {self.read / seconds:,.0f} read"
        )


def read_result(path: str | Path, columns: Columns) -> dict[str, Any]:
    """Return a result that --out has written, of one of the tasks in `columns`.

    ValueError, which names the file, where it is none or cannot be read.
    """
    raw = read_or_name(path, _LIMIT)
    try:
        result = json.loads(raw)
        known = all(_is_number(name, result[name]) for name in columns[result["task"]])
        known = known and isinstance(result["model"], str)
    except FOREIGN_ERRORS:
        known = False
    if not known:
        raise ValueError(f"{path}: is no result of {' or '.join(columns)}: expected a file of --out")
    return dict(result)


def _is_number(name: str, value: object) -> bool:
    """Return True for a finite number of 64 bits; a perplexity may be infinite."""
    if type(value) is float:
        return math.isfinite(value) or (value == math.inf and name.startswith("perplexity"))
    return type(value) is int and abs(value) < 1 << 63


def table(results: Iterable[Mapping[str, Any]], columns: Columns) -> str:
    """Return the results as text, one table a task and one line a result."""
    of_tasks: dict[str, list[Mapping[str, Any]]] = {}
    for result in results:
        of_tasks.setdefault(result["task"], []).append(result)
    return "\n\n".join(_of_task(task, of_one, columns[task]) for task, of_one in of_tasks.items())


def _of_task(task: str, results: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> str:
    rows = [(task, *(name.removeprefix("num_").replace("_", " ") for name in columns))]
    rows += [
        (printable(result["model"]), *(_shown(name, result[name]) for name in columns)) for result in results
    ]
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:]))])
        for row in rows
    )


def _shown(name: str, value: float) -> str:
    if name == "accuracy":
        return f"{value:.2%}"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.4f}" if value < 1e9 else f"{value:.4g}"
