"""`fastmp hang`: explain why a job hung or lost a rank, from the files in its run directory."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from fastmp.config.command_line import Parser
from fastmp.config.file_access import read_file
from fastmp.watchdog.diagnosis import diagnose
from fastmp.watchdog.records import MAX_RANKS, RankRecord

__all__ = ["explain", "main"]

T = TypeVar("T")
LIMIT = 1 << 26  # bytes of a file: a report has the records of hundreds of ranks


def explain(directory: Path) -> str | None:
    """Return the hang report of a job, or a diagnosis of its ranks' records; None if there are none.

    directory: of a run, or its `hang`. ValueError for a file that cannot be read.
    """
    if (directory / "hang").is_dir():
        directory = directory / "hang"
    if not directory.is_dir():
        raise ValueError(f"{directory} is not a directory; give it that of a run, such as runs/gpt")
    for name in ("report.json", "earlier-report.json"):
        if (directory / name).exists():
            said = _read(directory / name, _text)
            break
    else:
        left = [_read(path, _record) for path in sorted(directory.glob("rank-?????.json"))]
        if not left:
            return None
        last = max(time for time, _ in left)
        records = [
            replace(record, silent=last - time, stalled=record.stalled + last - time) for time, record in left
        ]
        report = diagnose(records, 1 + max(record.rank for record in records))
        said = f"no rank has written a hang report; by what they wrote last: {report.text}"
    stacks = [path.name for path in sorted(directory.glob("rank-?????.stacks")) if path.stat().st_size]
    return "\n".join([said, *([f"stacks in {directory}: {', '.join(stacks)}"] if stacks else [])])


def _text(content: Any) -> str:
    return f"{content['text']}"


def _record(content: Any) -> tuple[float, RankRecord]:
    """Return a rank's record and the time of writing."""
    record = RankRecord.from_json(content["record"])
    if not 0 <= record.rank < MAX_RANKS:
        raise ValueError(f"rank {record.rank}")
    return float(content["time"]), replace(record, silent=float(record.silent), stalled=float(record.stalled))


def _read(path: Path, part: Callable[[Any], T]) -> T:
    """Return `part` of a file's JSON. Raises ValueError for a foreign or truncated file."""
    try:
        return part(json.loads(read_file(path, LIMIT)))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path}: cannot be read: {type(error).__name__}: {error}") from None


def main(argv: Sequence[str] | None = None) -> int:
    """Run `fastmp hang` with the arguments `argv`; return 1 if there is nothing to report, else 0."""
    parser = Parser(
        prog="fastmp hang",
        description="Explain why a job hung or lost a rank: which rank, in which call, and which ranks "
        "waited.\n\n  fastmp hang runs/gpt",
    )
    parser.add_argument("directory", metavar="DIR", type=Path, help="directory of the run, such as runs/gpt")
    options = parser.parse_args(argv)
    try:
        said = explain(options.directory)
    except ValueError as error:
        parser.error(str(error))
    print(said or f"nothing in {options.directory}: no job of several ranks has hung there")
    return 0 if said else 1
