"""Markdown page of the proof report. Standard library only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tools.prove.claims import Chapter, Claim

MARKS = {True: "held", False: "NOT HELD", None: "not shown"}

NOT_PROVEN = """\
A machine without a GPU cannot show how fast kernels are, what threads of one program do to each other while
they run, what NCCL does, or how many programs a multiprocessor holds in practice. `python -m
benchmarks.gpu_check` measures speed on a GPU, beside what was predicted."""


def line(claim: Claim) -> str:
    """Return a claim as one line for a terminal."""
    bound = f" ({claim.bound})" if claim.bound else ""
    return f"{MARKS[claim.held]:<9}  {claim.says}: {_text(claim.found)}{bound}"


def verdict(chapters: Sequence[Chapter]) -> str:
    """Return the numbers of claims that held, failed and could not be shown."""
    counts = [sum(chapter.count(held) for chapter in chapters) for held in MARKS]
    parts = [f"{number} {MARKS[held]}" for number, held in zip(counts, MARKS, strict=True) if number]
    return f"{sum(counts)} claims: {', '.join(parts) or 'none'}"


def page(chapters: Sequence[Chapter], machine: Mapping[str, Any]) -> str:
    """Return the page: verdict, machine, a section for each chapter, and what only a GPU can show."""
    seconds = sum(chapter.seconds for chapter in chapters)
    described = ", ".join(f"{name} {value}" for name, value in machine.items())
    parts = [
        "# What fastmp claims, and what was found\n",
        f"**{verdict(chapters)}**, in {seconds:.0f} seconds. "
        f"Made by `python -m tools.prove` with {described}.\n",
    ]
    for chapter in chapters:
        parts += _section(chapter)
    return "\n".join([*parts, "## What is not proven here\n", NOT_PROVEN, ""])


def _section(chapter: Chapter) -> Iterator[str]:
    title, _, argument = chapter.argument.strip().partition("\n")
    yield f"## {title.rstrip('.')}\n"
    if argument.strip():
        yield f"{argument.strip()}\n"
    rows = [
        (MARKS[each.held], each.says, _text(each.found), each.bound, each.source) for each in chapter.claims
    ]
    cited = any(each.source for each in chapter.claims)
    columns = ("", "claim", "found", "bound", "source")
    yield from _grid(columns if cited else columns[:-1], rows if cited else [row[:-1] for row in rows])
    yield f"`{chapter.name}` took {chapter.seconds:g} seconds.\n"
    for table in chapter.tables:
        if table.on_page:
            yield f"### {table.title}\n"
            yield from _grid(table.columns, table.rows)
        else:
            yield f"`prove.json` has more: {table.title} ({len(table.rows)} rows).\n"


def _grid(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> Iterator[str]:
    yield f"| {' | '.join(columns)} |"
    yield f"|{'---|' * len(columns)}"
    for row in rows:
        yield f"| {' | '.join(_text(value).replace('|', '/') for value in row)} |"
    yield ""


def _text(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else f"{value}"
