"""`python -m tools.study`: compare published tables and formulas with predictions and measurements.

Each study writes a page with pictures; the command that made it makes it again.
"""

from __future__ import annotations

import sys

from fastmp.config.command_line import run_command

COMMANDS = {
    "scaling": ("tools.study.scaling", "model and data parallelism, as published, predicted, and measured"),
    "graphs": ("tools.study.graphs", "CPU time saved by partial CUDA graph capture, by launches"),
    "schedules": ("tools.study.schedules", "idle time and memory of every pipeline schedule"),
    "fp8": ("tools.study.fp8", "losses of small models in FP8 and in their dtype"),
    "recipes": ("tools.study.recipes", "recipes of configs/, predicted and measured"),
    "overlap": ("tools.study.overlap", "exchanges of experts beside another microbatch's compute"),
}


def main(argv: list[str] | None = None) -> int:
    """Run one of the studies above; 0, or 2 where something is wrong."""
    return run_command("python -m tools.study", COMMANDS, sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    raise SystemExit(main())
