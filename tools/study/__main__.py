"""`python -m tools.study`: compare published tables and formulas with predictions and measurements.

Each study writes a page with pictures; the command that made it makes it again.
"""

from __future__ import annotations

import shlex
import sys

from fastmp.config.command_line import run_command
from fastmp.config.console import to_stderr

COMMANDS = {
    "graphs": ("tools.study.graphs", "CPU time saved by partial CUDA graph capture, by launches"),
    "schedules": ("tools.study.schedules", "idle time and memory of every pipeline schedule"),
    "fp8": ("tools.study.fp8", "losses of small models in FP8 and in their dtype"),
    "recipes": ("tools.study.recipes", "recipes of configs/, predicted and measured"),
    "overlap": ("tools.study.overlap", "exchanges of experts beside another microbatch's compute"),
}


def main(argv: list[str] | None = None) -> int:
    """Run one of the studies above; 0, or 2 where something is wrong."""
    arguments = sys.argv[1:] if argv is None else argv
    if arguments[:1] == ["scaling"]:
        meant = f"python -m examples.megatron_paper {shlex.join(arguments)}"
        to_stderr(f"python -m tools.study: there is no command 'scaling'; did you mean: {meant}")
        return 2
    return run_command("python -m tools.study", COMMANDS, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
