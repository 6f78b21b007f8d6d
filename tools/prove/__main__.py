"""`python -m tools.prove`: check every claim of fastmp that needs no GPU, and write a report.

Each chapter runs in a process of its own, with its own environment variables, so that a crash is a claim that
does not hold.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import fastmp
from fastmp.config import with_variables
from fastmp.config.command_line import Parser
from tools.prove.claims import Chapter, Claim, Table
from tools.prove.page import line, page, verdict
from tools.prove.run import ENDS

# Chapters in the order of the page, and the variables of their processes.
CHAPTERS: dict[str, dict[str, str]] = {
    "kernels": {},
    "numbers": {"TRITON_INTERPRET": "1", "FASTMP_OPS": ""},
    "layouts": {},
    "graphs": {},
    "faults": {},
    "predictions": {},
}
_ALL = {"CUDA_VISIBLE_DEVICES": ""}  # ranks are forked, which a process that has seen a GPU cannot do


def main(argv: Sequence[str] | None = None) -> int:
    """Run the chapters, write prove.json and prove.md; return 1 if a claim does not hold, else 0."""
    parser = Parser(
        prog="python -m tools.prove",
        description="Check every claim of fastmp that needs no GPU, in a few minutes, and write a report: "
        "prove.md and its figures, prove.json. The exit status is 1 if a claim does not hold."
        "\n\n  python -m tools.prove --only kernels graphs --out report",
    )
    out, only = "directory of the report (prove)", f"chapters to check, of {', '.join(CHAPTERS)} (all)"
    parser.add_argument("--out", metavar="DIR", type=Path, default=Path("prove"), help=out)
    parser.add_argument("--only", nargs="+", choices=CHAPTERS, metavar="CHAPTER", help=only)
    options = parser.parse_args(argv)
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out {options.out}: {error.strerror}")
    chapters, begun = [], time.monotonic()
    for name in CHAPTERS if options.only is None else options.only:
        print(name, flush=True)
        chapters.append(_in_a_process(name))
        print(f"  {verdict(chapters[-1:])}, in {chapters[-1].seconds:g} s", flush=True)
    machine, good = _machine(), all(chapter.count(False) == 0 for chapter in chapters)
    found = {"good": good, "machine": machine, "chapters": [asdict(chapter) for chapter in chapters]}
    (options.out / "prove.json").write_text(json.dumps(found, indent=1) + "\n")
    (options.out / "prove.md").write_text(page(chapters, machine))
    print(f"{verdict(chapters)}, in {time.monotonic() - begun:.0f} s")
    print(f"report in {options.out / 'prove.md'}, figures in {options.out / 'prove.json'}")
    return 0 if good else 1


def _in_a_process(name: str) -> Chapter:
    """Return the chapter's findings, or a failed claim if its process dies."""
    with tempfile.TemporaryDirectory() as folder:
        file, begun = Path(folder) / "chapter.json", time.monotonic()
        command = [sys.executable, "-m", "tools.prove.run", name, str(file)]
        done = subprocess.run(command, env=with_variables(**_ALL, **CHAPTERS[name]))
        if done.returncode or not file.exists():
            died = Claim(ENDS, f"status {done.returncode}", "status 0", False)
            print(f"  {line(died)}")
            return Chapter(name, name, [died], seconds=round(time.monotonic() - begun, 1))
        found = json.loads(file.read_text())
    claims = [Claim(**each) for each in found.pop("claims")]
    return Chapter(claims=claims, tables=[Table(**each) for each in found.pop("tables")], **found)


def _machine() -> Mapping[str, Any]:
    """Return versions, the kind of machine and a digest of the sources, without names that identify the
    machine.
    """
    packages = {"python": platform.python_version(), "fastmp": fastmp.__version__}
    for name in ("torch", "triton", "numpy"):
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            packages[name] = "not installed"
    digest, root = hashlib.sha256(), Path(fastmp.__file__).parent
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {**packages, "sources": digest.hexdigest()[:12], "machine": platform.machine(), "cores": cores}


if __name__ == "__main__":
    raise SystemExit(main())
