"""A study's page: Markdown with tables, written beside its pictures."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from fastmp.commands import Parser

Draw = Callable[[Path], None]


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; columns but the first are aligned right."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def parser(study: str, description: str) -> Parser:
    """Return the parser of a study's command."""
    made = Parser(prog=f"fastmp study {study}", description=description)
    made.add_argument(
        "--out",
        default="studies",
        metavar="DIR",
        help="where the page and its pictures go (default: %(default)s)",
    )
    return made


def write(prog: str, out: str, name: str, text: str, pictures: Mapping[str, Draw]) -> int:
    """Write OUT/NAME.md and the pictures {file name: what draws it}; 0, or 2 with one line on stderr."""
    folder = Path(out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, draw in pictures.items():
            draw(folder / file)
        (folder / f"{name}.md").write_text(text)
    except ImportError:
        print(f'{prog}: no pictures: matplotlib is missing (pip install "fastmp[viz]")', file=sys.stderr)
        return 2
    except OSError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 2
    print(folder / f"{name}.md")
    return 0
