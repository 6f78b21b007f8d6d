"""Shared parts of the soak scripts; this docstring is their manual.

A soak script repeats something so often that rare faults show: kills, restarts, damaged files.

    python tests/soak/inputs.py            # the whole size: minutes; writes tests/soak/results/inputs.json
    python tests/soak/inputs.py --quick    # the size of the test: seconds; writes nothing

inputs      mutated token files, tokenizers, recipes and metrics are refused, or have a legal content
hangs       jobs that stand still or lose a rank: the hang report is right, and all ranks leave in time
reshard     checkpoints of 8 layouts, each loaded into the others
damaged     mutated checkpoints load with the bits that were saved, or are refused, and nothing is loaded
nonfinite   gradients that are not finite: the step is skipped on every rank, and nothing else changes
kills       SIGKILL while checkpoints are written: no step that was said to be saved is lost
restarts    killed ranks that are started again end with the bits of an undisturbed run
memory      resident memory over thousands of steps; threads and open files over many jobs

Each script prints a line of progress now and then, and a table at the end; its status is 1 where a case
failed. A results file has the figures, the versions and the command of the last whole run. `test_soak.py`
runs the same functions at their quick size. A case is made from what a failure names alone.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


@dataclass
class Outcome:
    """Findings of a soak run. rows: the table, a dict a line. failures: a line for each case that failed."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


class Progress:
    """Prints how far a run is, every few seconds."""

    def __init__(self, what: str, total: int) -> None:
        self._what, self._total, self._next = what, total, time.monotonic() + 5

    def at(self, done: int) -> None:
        if time.monotonic() > self._next:
            self._next = time.monotonic() + 5
            print(f"  {self._what}: {done} of {self._total}", flush=True)


def main(name: str, run: Callable[[bool], Outcome], argv: list[str] | None = None) -> int:
    """Run a soak script: `run(quick)`, its table, and at the whole size its results file."""
    parser = argparse.ArgumentParser(prog=f"tests/soak/{name}.py")
    parser.add_argument("--quick", action="store_true", help="the size of the test, and no results file")
    options = parser.parse_args(argv)
    began = time.monotonic()
    outcome = run(options.quick)
    seconds = time.monotonic() - began
    print(table(outcome.rows))
    for line in outcome.failures:
        print(f"FAILED {line}")
    print(f"{name}: {len(outcome.failures)} failures, {seconds:.0f} s")
    if not options.quick:
        record(name, outcome, seconds)
    return 1 if outcome.failures else 0


def table(rows: list[dict[str, Any]]) -> str:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [columns, *([str(row.get(column, "")) for column in columns] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths)) for line in cells)


def record(name: str, outcome: Outcome, seconds: float) -> None:
    import torch

    versions = {"python": platform.python_version(), "torch": torch.__version__, "kernel": platform.release()}
    content = {
        "command": f"python tests/soak/{name}.py",
        "versions": versions,
        "seconds": round(seconds),
        "rows": outcome.rows,
        "failures": outcome.failures,
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(__doc__)
