"""`python -m tools.prove.run NAME FILE`: run one chapter in its own process and write its findings as JSON.

A chapter that cannot end well, by an error or a crash, is a claim that is not held.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
import traceback
from dataclasses import asdict
from pathlib import Path

from tools.prove.claims import Chapter, Claim, Table
from tools.prove.page import line

ENDS = "the chapter runs to its end"


def run_chapter(name: str) -> Chapter:
    """Run chapter `name`, and print each claim as soon as it is decided."""
    module = importlib.import_module(f"tools.prove.{name}")
    chapter, begun = Chapter(name, module.__doc__ or name), time.monotonic()
    try:
        for said in module.claims():
            _add(chapter, said)
    except Exception as error:
        traceback.print_exc()
        _add(chapter, Claim(ENDS, f"{type(error).__name__}: {error}", "no error", False))
    chapter.seconds = round(time.monotonic() - begun, 1)
    return chapter


def _add(chapter: Chapter, said: Claim | Table) -> None:
    if isinstance(said, Table):
        chapter.tables.append(said)
    else:
        chapter.claims.append(said)
        print(f"  {line(said)}", flush=True)


def main(argv: list[str]) -> int:
    """Run the chapter `argv[0]` and write its findings to the file `argv[1]`."""
    name, file = argv
    Path(file).write_text(json.dumps(asdict(run_chapter(name))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
