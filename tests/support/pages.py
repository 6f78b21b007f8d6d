"""The blocks of README and docs: `python tests/support/pages.py` lists those that are run, and why others are
not.

```python is a program, ```sh are commands; a block without a language is what something prints, below the
command that prints it where that is shown (`$ fastmp plan ...`). Comments above a block say what a reader
need not see:

    <!-- not run: why -->
    <!-- before: commands that make what the block takes for granted -->
    <!-- ranks: 1 2 -->          of a program: how many, each in turn
    <!-- after the commands -->  a program that reads what the commands above it have left
    <!-- needs: package -->
    <!-- status: 2 -->           of a command that is refused
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def in_nav(nav: object) -> list[str]:
    """Return the files of a navigation of mkdocs, from its first to its last."""
    if isinstance(nav, str):
        return [nav]
    return [file for part in (nav.values() if isinstance(nav, dict) else nav) for file in in_nav(part)]


NAV = in_nav(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
BLOCK = re.compile(
    r"(?P<notes>(?:^ *<!--(?:(?!-->).)*-->\n+)*)"
    r"^(?P<indent> *)```(?P<language>\w*)\n(?P<text>.*?)^(?P=indent)```$",
    re.DOTALL | re.MULTILINE,
)
NOTE = re.compile(r"<!-- (not run|before|ranks|after|needs|status):? (.*?) -->", re.DOTALL)
PROGRAMS = ("fastmp", "python", "pip", "make", "pytest", "torchrun", "srun", "sbatch", "mpirun", "torchx")


@dataclass(frozen=True)
class Block:
    """A block of a page. `number` counts those of its page from 1; `notes` are in the comments above it."""

    page: str
    number: int
    language: str
    text: str
    notes: dict[str, str]

    def __str__(self) -> str:
        return f"{self.page}-{self.number}"

    @property
    def kind(self) -> str:
        """python, sh, console (a command and what it prints), or text, which nobody runs."""
        if self.language in ("python", "sh"):
            return self.language
        return "console" if self.text.startswith("$ ") else "text"

    @property
    def runs(self) -> bool:
        return self.kind != "text" and "not run" not in self.notes

    @property
    def command(self) -> str:
        """The command of a console block."""
        return re.match(r"\$ ((?:.*\\\n)*.*)", self.text)[1]

    @property
    def shown(self) -> str:
        """Return the output that a console block shows below its command."""
        return self.text.removeprefix(f"$ {self.command}\n")


def blocks(page: Path) -> list[Block]:
    """All blocks of a page."""
    found = enumerate(BLOCK.finditer(page.read_text()), 1)
    name = page.relative_to(ROOT).as_posix()
    return [
        Block(name, i, block["language"], textwrap.dedent(block["text"]), dict(NOTE.findall(block["notes"])))
        for i, block in found
    ]


BLOCKS = [block for page in PAGES for block in blocks(page)]


def main() -> None:
    code = [block for block in BLOCKS if block.kind != "text"]
    for block in code:
        first = block.text.strip().splitlines()[0]
        print(f"{block!s:32} {block.kind:8} {block.notes.get('not run', 'runs')[:60]:60} {first[:60]}")
    run = sum(block.runs for block in code)
    print(f"{run} blocks are run, {len(code) - run} are not")


if __name__ == "__main__":
    main()
