"""The `fastmp` command: a lazy table of subcommands, each of which is imported when it runs."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import nullcontext

import fastmp
from fastmp.apps.signals import ended_by_signals
from fastmp.config.command_line import TOML, run_command
from fastmp.config.console import flush_output, open_streams, to_stderr

COMMANDS = {
    "train": ("fastmp.apps.train", "train a model from a recipe; on several GPUs: fastmp launch train"),
    "generate": ("fastmp.apps.generate", "continue prompts with a trained model"),
    "eval": ("fastmp.apps.evaluate", "evaluate a model on held-out text"),
    "launch": ("fastmp.apps.launch", "start several processes with torchrun, by default one for each GPU"),
    "data": ("fastmp.apps.data", "tokenize text into token files; inspect and blend them"),
    "warm": (
        "fastmp.apps.warm",
        "compile the Triton kernels of a recipe ahead of time; needs no GPU",
    ),
    "checkpoint": ("fastmp.apps.checkpoint", "verify, inspect, reshard and compare checkpoints"),
    "hf": ("fastmp.apps.hf", "convert weights from and to Hugging Face models"),
    "plan": (
        "fastmp.apps.plan",
        "estimate memory, step time and communication of a recipe, without a GPU",
    ),
    "trace": ("fastmp.apps.trace", "compare the profile of a step with its estimate"),
    "hang": ("fastmp.apps.hang", "explain why a job hung or lost a rank, from the files in its directory"),
    "verify": ("fastmp.apps.verify", "test parallel code against its dense module on forked CPU ranks"),
    "doctor": (
        "fastmp.apps.doctor",
        "print versions, devices and the implementation of each op; test the ops",
    ),
}

SYNONYMS = {
    TOML: "train",
    **dict.fromkeys(("pretrain", "run", "fit"), "train"),
    **dict.fromkeys(("evaluate", "test", "validate"), "eval"),
    **dict.fromkeys(("sample", "inference", "infer", "chat", "complete"), "generate"),
    **dict.fromkeys(("convert", "import", "export"), "hf"),
    **dict.fromkeys(("torchrun", "mpirun", "start"), "launch"),
    **dict.fromkeys(("compile", "precompile"), "warm"),
    **dict.fromkeys(("preprocess", "tokenize", "prepare"), "data"),
    **dict.fromkeys(("estimate", "memory"), "plan"),
    **dict.fromkeys(("info", "env", "check", "version"), "doctor"),
    "finetune": "launch -m examples.megatron_paper finetune",  # in a checkout
}


def main(
    argv: list[str] | None = None,
    prog: str = "fastmp",
    commands: Mapping[str, tuple[str, str]] = COMMANDS,
    synonyms: Mapping[str, str] = SYNONYMS,
) -> int:
    """Run one of the `commands` of `prog` and return its exit status; 2: invalid arguments."""
    arguments = sys.argv[1:] if argv is None else argv
    open_streams()
    try:
        try:
            if arguments[:1] == ["--version"]:
                print(fastmp.__version__)
                return 0
            trains = arguments[:1] in (["train"], ["launch"])
            with ended_by_signals(exits=argv is None) if trains else nullcontext():
                return run_command(prog, commands, arguments, synonyms)
        finally:
            flush_output()
    except KeyboardInterrupt:
        to_stderr(f"{prog}: interrupted")
        return 130
    except BrokenPipeError:  # whoever read our output, `head` say, has seen enough
        return 1
    except OSError as error:  # the output cannot be written
        to_stderr(f"{prog}: {error}")
        return 1
