"""`fastmp plan groups`: the ranks of every process group of a layout."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator

from fastmp.config.command_line import Parser
from fastmp.config.console import to_stderr
from fastmp.distributed.grid import RankGrid

DENSE = ("tp", "cp", "dp", "pp", "mp", "embedding")
EXPERT = ("etp", "ep", "edp", "pp")
_LINE_WIDTH, _MAX_RUNS = 80, 8  # longer lists are shortened for people, never in JSON


def main(arguments: list[str]) -> int:
    """Print the groups of a layout; return 0, or 2 with one line on stderr if it is invalid."""
    parser = Parser(
        prog="fastmp plan groups",
        description="Print the ranks of each process group of a parallel layout."
        "\n\n  fastmp plan groups --world-size 16 --tp 2 --pp 2 --ep 4",
    )
    _add_arguments(parser)
    options = vars(parser.parse_args(arguments))
    as_json = options.pop("json")
    try:
        grid = RankGrid(**options)
    except ValueError as error:
        to_stderr(f"fastmp plan groups: {error}")
        return 2
    print(json.dumps(groups(grid)) if as_json else "\n".join(describe(grid)))
    return 0


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add an option for each argument of `RankGrid`, under its name."""
    parser.add_argument("--world-size", type=int, required=True, metavar="N", help="number of ranks")
    for name, text in [
        ("tp", "tensor-parallel size"),
        ("cp", "context-parallel size"),
        ("pp", "pipeline stages"),
        ("ep", "expert-parallel size"),
    ]:
        parser.add_argument(f"--{name}", type=int, default=1, metavar="N", help=text)
    parser.add_argument("--dp", type=int, metavar="N", help="data-parallel size (the remaining ranks)")
    parser.add_argument("--etp", type=int, metavar="N", help="tensor-parallel size of each expert (tp)")
    parser.add_argument("--order", default="tp-cp-ep-dp-pp", help="axes, fastest first (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print every group as JSON")


def groups(grid: RankGrid) -> dict[str, dict[str, list[list[int]]]]:
    """Return all groups of both grids: {"dense": {"tp": [[...]], ...}, "expert": {"etp": ..., ...}}."""
    return {
        "dense": {name: grid.ranks(name) for name in DENSE},
        "expert": {name: grid.ranks(name) for name in EXPERT},
    }


def describe(grid: RankGrid) -> Iterator[str]:
    """Yield the lines that a person reads; long lists are shortened."""
    yield f"{grid}"
    yield f"order {'-'.join(grid.order)}: {grid.order[0]} varies fastest"
    for title, table in groups(grid).items():
        yield f"\n{title}"
        for name, lists in table.items():
            shown = "every rank alone" if len(lists[0]) == 1 else _shorten(lists)
            yield f"  {name:<9}  {f'{len(lists)} x {len(lists[0])}':<9}  {shown}"


def _shorten(lists: list[list[int]]) -> str:
    """Return as many groups as fit on a line, and the last one."""
    text = _members(lists[0])
    for i, group in enumerate(lists[1:], start=1):
        member_text = _members(group)
        if len(text) + len(member_text) > _LINE_WIDTH:
            return f"{text} ... {_members(lists[-1])}" if i < len(lists) - 1 else f"{text} {member_text}"
        text += f" {member_text}"
    return text


def _members(group: list[int]) -> str:
    """Return a group as [0-3,8-11]: runs of neighbouring ranks, without the middle of a long group."""
    runs: list[list[int]] = []
    for rank in group:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], rank]
        else:
            runs.append([rank])
    texts = [("," if len(run) == 2 and run[1] == run[0] + 1 else "-").join(map(str, run)) for run in runs]
    if len(texts) > _MAX_RUNS:
        texts = [*texts[:4], "...", texts[-1]]
    return f"[{','.join(texts)}]"
