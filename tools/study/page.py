"""A study's page: Markdown with tables, written beside its pictures."""

from __future__ import annotations

import json
import os
import platform
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from importlib import metadata
from operator import getitem
from pathlib import Path
from typing import Any

from fastmp.config.command_line import Parser

Draw = Callable[[Path], None]
_CPUINFO = Path("/proc/cpuinfo")


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; columns but the first are aligned right."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def parser(study: str, description: str, *, measures: str = "", package: str = "tools.study") -> Parser:
    """Return the parser of a study's command; `measures` is the help of --measure, if the study has it."""
    made = Parser(prog=f"python -m {package} {study}", description=description)
    made.add_argument(
        "--out",
        default="docs/studies",
        metavar="DIR",
        help="where the page and its pictures go (default: %(default)s)",
    )
    if measures:
        made.add_argument(
            "--measure", action="store_true", help=f"take {measures} on this machine, and keep them"
        )
    return made


def machine() -> dict[str, Any]:
    """Return processor, cores and torch version for a measurement."""
    names = re.findall(r"model name\s*: (.*)", _CPUINFO.read_text()) if _CPUINFO.exists() else []
    name = names[0] if names else platform.processor() or platform.machine()
    return {"cpu": name, "cores": os.cpu_count(), "torch": metadata.version("torch")}


def measurement(prog: str, file: Path, needs: Iterable[tuple[str, ...]]) -> dict[str, Any] | None:
    """Return the content of a measurement file; None if there is none.

    ValueError where it is not JSON, or lacks one of `needs`: keys from the outermost to the innermost.
    """
    if not file.exists():
        return None
    try:
        found = json.loads(file.read_text())
        for keys in needs:
            reduce(getitem, keys, found)
    except (ValueError, TypeError, LookupError) as error:
        what = f"{prog}: {file} is no file of measurements ({error}); take them with --measure"
        raise ValueError(what) from None
    return dict(found)


def save(found: Mapping[str, Any], out: Path) -> None:
    """Write measurements."""
    out.write_text(json.dumps(found, indent=2) + "\n")


def write(prog: str, out: str, name: str, text: str, pictures: Mapping[str, Draw]) -> int:
    """Write OUT/NAME.md and the pictures {file name: what draws it}; 0, or 2 with one line on stderr."""
    folder = Path(out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, draw in pictures.items():
            draw(folder / file)
        (folder / f"{name}.md").write_text(text)
    except ImportError:
        print(f"{prog}: no pictures: matplotlib is missing (pip install matplotlib)", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 2
    print(folder / f"{name}.md")
    return 0
