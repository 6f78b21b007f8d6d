"""`fastmp plan`: what a layout means, before a single process starts. Never imports torch."""

from __future__ import annotations

import sys

from fastmp.config.command_line import run_command

COMMANDS = {
    "recipe": (
        "fastmp.plan.resources",
        "whether a recipe fits a number of ranks; what each holds, computes, sends",
    ),
    "graphs": ("fastmp.plan.graphs", "which CUDA graphs and static buffers each pipeline rank would have"),
    "groups": ("fastmp.plan.rank_groups", "which ranks form which groups"),
    "optimizer": (
        "fastmp.plan.buffer_layout",
        "where parameters lie in flat buffers and buckets, and what a rank owns of them",
    ),
    "time": (
        "fastmp.plan.time",
        "how long a step would take on named GPUs, and where the time goes: estimates",
    ),
    "schedule": (
        "fastmp.plan.schedule_report",
        "the order of steps on each pipeline rank, and the bubble",
    ),
}


def main(argv: list[str] | None = None) -> int:
    """Run one of COMMANDS; return its exit status."""
    return run_command("fastmp plan", COMMANDS, sys.argv[1:] if argv is None else argv)
