"""`fastmp trace`: compare the trace of a measured step with the estimate of `fastmp plan time --trace`."""

from __future__ import annotations

import sys

from fastmp.config.command_line import run_command

COMMANDS = {
    "diff": (
        "fastmp.apps.trace_diff",
        "rank the gaps between a measured step and its estimate, by phase and by kernel",
    ),
}
SYNONYMS = dict.fromkeys(("compare", "gaps"), "diff")


def main(argv: list[str] | None = None) -> int:
    """Run one of COMMANDS; return its exit status."""
    return run_command("fastmp trace", COMMANDS, sys.argv[1:] if argv is None else argv, SYNONYMS)
