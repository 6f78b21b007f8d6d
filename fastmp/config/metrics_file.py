"""Read the records of metrics.jsonl, which `fastmp.training.metrics` writes. Standard library only."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from fastmp.config.file_access import FOREIGN_ERRORS, read_or_name

__all__ = ["METRICS_LIMIT", "read_metrics"]

METRICS_LIMIT = 1 << 31  # bytes of a file; a record has about 250


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Return the records of a metrics.jsonl in order; a restart replaces the records after its start.

    An incomplete last line, of a run killed while writing, is left out.

    Raises:
        ValueError: the file cannot be read, or has another bad line; the message names it.
    """
    lines = read_or_name(path, METRICS_LIMIT).split(b"\n")
    records = [_record(path, number, line) for number, line in enumerate(lines[:-1], start=1)]
    kept, start = [], math.inf  # backwards: the earliest step from which a later run began
    for record in reversed(records):
        if record["kind"] == "run":
            start = min(start, record["step"])
        elif record["step"] > start:
            continue
        kept.append(record)
    return kept[::-1]


def _record(path: str | Path, number: int, line: bytes) -> dict[str, Any]:
    """Parse line `number` of a metrics file."""
    try:
        record: dict[str, Any] = json.loads(line.decode())
        kind, step = record["kind"], record["step"]
        others = [] if kind == "run" else [value for key, value in record.items() if key != "kind"]
        if isinstance(kind, str) and type(step) is int and 0 <= step < 1 << 63 and all(map(_plain, others)):
            return record
    except FOREIGN_ERRORS:
        pass
    raise ValueError(f"{path}: line {number} is not a metrics record")


def _plain(value: Any) -> bool:
    """Return True for a finite number, an integer of 64 bits, null, or a list of these."""
    if isinstance(value, list):
        return not any(isinstance(item, list) for item in value) and all(map(_plain, value))
    largest = 1 << 63 if isinstance(value, int) else math.inf
    return value is None or (isinstance(value, int | float) and abs(value) < largest)
