"""`fastmp study`: what published tables and formulas say, beside what is predicted and measured here.

Each study writes a page with pictures; the command that made it makes it again.
"""

from __future__ import annotations

import sys

from fastmp.commands import run_command

COMMANDS = {
    "scaling": ("fastmp.study.scaling", "model and data parallelism, as published, predicted, and measured"),
    "graphs": ("fastmp.study.graphs", "what partial capture saves, by the launches that it removes"),
    "schedules": ("fastmp.study.schedules", "idle time and memory of every pipeline schedule"),
    "overlap": ("fastmp.study.overlap", "exchanges of experts beside another microbatch's compute"),
}


def main(argv: list[str] | None = None) -> int:
    """Run one of the studies above; 0, or 2 where something is wrong."""
    return run_command("fastmp study", COMMANDS, sys.argv[1:] if argv is None else argv)
