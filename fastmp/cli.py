"""The `fastmp` command: one line a subcommand, each imported only when it is asked for."""

from __future__ import annotations

import os
import sys
from importlib import import_module

import fastmp

COMMANDS = {
    "train": ("fastmp.train.main", "train a model from a recipe; run it under torchrun for several ranks"),
    "data": ("fastmp.train.data", "turn text into token files"),
    "plan": ("fastmp.plan", "print which ranks form which groups, and what each holds"),
    "bench": ("fastmp.bench", "tables and a roofline picture of benchmark results"),
    "doctor": ("fastmp.doctor", "versions, devices, and which implementation serves each op"),
}


def usage() -> str:
    lines = [
        f"fastmp {fastmp.__version__}",
        "",
        "usage: fastmp COMMAND [options]    (fastmp COMMAND --help)",
        "",
    ]
    return "\n".join(lines + [f"  {name:<8} {summary}" for name, (_, summary) in COMMANDS.items()])


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand and return its exit status; 2 means the command line itself was wrong."""
    arguments = sys.argv[1:] if argv is None else argv
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage())
        return 0 if arguments else 2
    if arguments[0] == "--version":
        print(fastmp.__version__)
        return 0
    command, *rest = arguments
    if command not in COMMANDS:
        print(f"fastmp: unknown command {command!r}; choose from {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    try:
        status = import_module(COMMANDS[command][0]).main(rest)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # whoever read our output, `head` say, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
