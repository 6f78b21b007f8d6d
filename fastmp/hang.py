"""`fastmp hang`: why a job stood still or lost a rank, from the files in the directory of its run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fastmp.commands import Parser
from fastmp.parallel.verdict import RankRecord, judge

__all__ = ["explain", "main"]


def explain(directory: Path) -> str | None:
    """Return the verdict that a job left, else one on what its ranks left; None if there is nothing.

    directory: of a run, or its `hang`. ValueError for a file that cannot be read.
    """
    if (directory / "hang").is_dir():
        directory = directory / "hang"
    if not directory.is_dir():
        raise ValueError(f"{directory} is not a directory; give it that of a run, such as runs/gpt")
    for name in ("verdict.json", "earlier-verdict.json"):
        if (directory / name).exists():
            said = f"{_read(directory / name)['text']}"
            break
    else:
        contents = [_read(path) for path in sorted(directory.glob("rank-?????.json"))]
        if not contents:
            return None
        last = max(content["time"] for content in contents)
        records = [_aged(content, last) for content in contents]
        verdict = judge(records, 1 + max(record.rank for record in records))
        said = f"no rank has taken a verdict; by what they wrote last: {verdict.text}"
    stacks = [path.name for path in sorted(directory.glob("rank-?????.stacks")) if path.stat().st_size]
    return "\n".join([said, *([f"stacks in {directory}: {', '.join(stacks)}"] if stacks else [])])


def _aged(content: dict[str, Any], last: float) -> RankRecord:
    record, age = RankRecord.from_json(content["record"]), last - content["time"]
    return replace(record, silent=age, still=record.still + age)


def _read(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from None
    return content


def main(argv: Sequence[str] | None = None) -> int:
    """Run `fastmp hang` with the arguments `argv`; return 1 where there is nothing to say, else 0."""
    parser = Parser(
        prog="fastmp hang",
        description="Print why a job stood still or lost a rank: which one, where it was, who waited.",
    )
    parser.add_argument("directory", metavar="DIR", type=Path, help="directory of the run, as runs/gpt")
    options = parser.parse_args(argv)
    try:
        said = explain(options.directory)
    except ValueError as error:
        parser.error(str(error))
    print(said or f"nothing in {options.directory}: no job of several ranks has stood still there")
    return 0 if said else 1
