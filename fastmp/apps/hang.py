"""`fastmp hang`: explain why a job hung or lost a rank, from the files in its run directory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from reprlib import repr as short
from typing import Any, TypeVar

from fastmp.config.command_line import Parser
from fastmp.config.console import printable
from fastmp.config.file_access import FOREIGN_ERRORS, read_json
from fastmp.watchdog.diagnosis import diagnose
from fastmp.watchdog.records import FILE_LIMIT, MAX_RANKS, RankRecord

__all__ = ["explain", "main"]

T = TypeVar("T")
_LARGEST = 1 << 62  # of numbers in records


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
        said = f"no rank has written a hang report; by what they wrote last: {_diagnosis(directory, left)}"
    stacks = [
        path.name
        for path in sorted(directory.glob("rank-?????.stacks"))
        if path.is_file() and path.stat().st_size
    ]
    return "\n".join([said, *([f"stacks in {directory}: {', '.join(stacks)}"] if stacks else [])])


def _diagnosis(directory: Path, left: Sequence[tuple[float, RankRecord]]) -> str:
    """Return the diagnosis of records with the times of writing."""
    last = max(time for time, _ in left)
    records = [
        replace(record, silent=last - time, stalled=record.stalled + last - time) for time, record in left
    ]
    # Ranks that have left no record are known from the groups of others.
    ranks = {rank for record in records for each in record.groups.values() for rank in each}
    try:
        return diagnose(records, 1 + max(ranks.union(record.rank for record in records))).text
    except FOREIGN_ERRORS:
        raise ValueError(f"{directory}: the records of its ranks contradict each other") from None


def _text(content: Any) -> str:
    if not isinstance(content["text"], str):
        raise ValueError("text")
    return content["text"]


def _record(content: Any) -> tuple[float, RankRecord]:
    """Return a rank's record and the time of writing."""
    record = RankRecord.from_json(content["record"])
    calls = [*record.calls, *([] if record.inside is None else [record.inside])]
    numbers = [content["time"], record.stalled, record.silent, record.left_at, record.pid, record.step]
    numbers += [*record.started.values(), *(call.began for call in calls)]
    numbers += [each for call in calls for each in (call.number, call.peer) if each is not None]
    numbers += [each for call in calls for size in call.sizes for each in size]
    texts = [record.host, record.phase, record.where, record.state, record.reason]
    texts += [text for call in calls for text in (call.op, call.group, *call.dtypes)]
    for rank in (record.rank, *(each for ranks in record.groups.values() for each in ranks)):
        if type(rank) is not int or not 0 <= rank < MAX_RANKS:
            raise ValueError(f"rank {short(rank)}")
    if not all(isinstance(each, int | float) and abs(each) < _LARGEST for each in numbers):
        raise ValueError("numbers")
    if not all(isinstance(each, str) for each in texts):
        raise ValueError("texts")
    return float(content["time"]), record


def _read(path: Path, part: Callable[[Any], T]) -> T:
    """Return `part` of a file's JSON. Raises ValueError for a foreign or truncated file."""
    content = read_json(path, FILE_LIMIT)
    try:
        return part(content)
    except FOREIGN_ERRORS as error:
        raise ValueError(f"{path}: is not a file of a hang: {repr(error)[:200]}") from None


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
    print(printable(said or f"nothing in {options.directory}: no job of several ranks has hung there"))
    return 0 if said else 1
