"""The `fastmp` command: a lazy table of subcommands, each of which is imported when it runs."""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext

import fastmp
from fastmp.apps.signals import ended_by_signals
from fastmp.config.command_line import run_command

COMMANDS = {
    "train": ("fastmp.apps.train", "train a model from a recipe; on several ranks: fastmp launch train"),
    "generate": ("fastmp.apps.generate", "continue prompts with a trained model, of any layout"),
    "eval": ("fastmp.apps.evaluate", "evaluate a model on WikiText, LAMBADA or held-out text"),
    "finetune": ("fastmp.apps.finetune", "fine-tune a BERT for MNLI, QQP, SQuAD or RACE, over several seeds"),
    "launch": ("fastmp.apps.launch", "start ranks: torchrun and its options, with one rank a GPU by default"),
    "data": ("fastmp.apps.data", "turn text into token files"),
    "warm": (
        "fastmp.apps.warm",
        "compile a recipe's kernels before training, for a GPU that may be elsewhere",
    ),
    "checkpoint": ("fastmp.apps.checkpoint", "verify, inspect, reshard and compare checkpoints"),
    "hf": ("fastmp.apps.hf", "weights of transformers models in and out"),
    "plan": (
        "fastmp.apps.plan",
        "what a layout means before it runs: groups, memory, traffic, schedules, graphs",
    ),
    "hang": ("fastmp.apps.hang", "why a job stood still or lost a rank, from what it left in its directory"),
    "doctor": ("fastmp.apps.doctor", "versions, devices, and which implementation serves each op"),
}


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand and return its exit status; 2: invalid arguments."""
    arguments = sys.argv[1:] if argv is None else argv
    if arguments[:1] == ["--version"]:
        print(fastmp.__version__)
        return 0
    try:
        with ended_by_signals() if arguments[:1] in (["train"], ["launch"]) else nullcontext():
            status = run_command("fastmp", COMMANDS, arguments)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        print("fastmp: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # whoever read our output, `head` say, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
