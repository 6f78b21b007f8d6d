"""`fastmp plan`: what a layout means, before a single process starts. Never imports torch."""

from __future__ import annotations

import sys

from fastmp.config.command_line import TOML, run_command

COMMANDS = {
    "recipe": (
        "fastmp.plan.resources",
        "check a recipe against a number of ranks: memory, FLOPs and traffic of each",
    ),
    "graphs": ("fastmp.plan.graphs", "list the CUDA graphs and static buffers of each pipeline rank"),
    "step": ("fastmp.plan.step_report", "list what a pipeline rank does in a step, in order"),
    "groups": ("fastmp.plan.rank_groups", "list the ranks of each process group"),
    "optimizer": (
        "fastmp.plan.buffer_layout",
        "show parameters in flat buffers and buckets, and the shard of a rank [ZeRO-1]",
    ),
    "time": (
        "fastmp.plan.time",
        "estimate the time of a step on named GPUs, by phase and by kernel",
    ),
    "search": (
        "fastmp.apps.plan_search",
        "search the fastest layouts of a model on a number of GPUs",
    ),
    "schedule": (
        "fastmp.plan.schedule_report",
        "show the order of steps on each pipeline rank, and the bubble",
    ),
}

SYNONYMS = {
    TOML: "recipe",
    **dict.fromkeys(("memory", "layout", "flops", "traffic", "check"), "recipe"),
    **dict.fromkeys(("speed", "throughput", "mfu", "step-time"), "time"),
    **dict.fromkeys(("pipeline", "bubble"), "schedule"),
}


def main(argv: list[str] | None = None) -> int:
    """Run one of COMMANDS; return its exit status."""
    return run_command("fastmp plan", COMMANDS, sys.argv[1:] if argv is None else argv, SYNONYMS)
