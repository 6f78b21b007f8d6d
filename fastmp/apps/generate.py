"""`fastmp generate`: its command line, which is read before torch is imported."""

from __future__ import annotations

import argparse
import io
from collections.abc import Callable, Sequence
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from typing import Any

from fastmp.apps.first_rank import let_rank0_report_first
from fastmp.config import Environment
from fastmp.config.command_line import Parser

__all__ = ["add_model_options", "main", "number", "parse_on_ranks"]

LARGEST = 1 << 62  # above which a seed is none


def main(argv: Sequence[str] | None = None) -> int:
    """Run `fastmp generate` with the arguments `argv`; returns the exit status."""
    options = parse_on_ranks(_parser(), argv)
    from fastmp.apps.generation.generate_main import run  # torch, which neither help nor a mistake waits for

    return run(options)


def parse_on_ranks(parser: Parser, argv: Sequence[str] | None) -> argparse.Namespace:
    """What `argv` says; of several ranks only the first one prints help, or what is wrong."""
    rank = Environment.read().rank or 0
    with let_rank0_report_first(rank), ExitStack() as stack:
        if rank:
            stack.enter_context(redirect_stdout(io.StringIO()))
            stack.enter_context(redirect_stderr(io.StringIO()))
        return parser.parse_args(argv)


def _parser() -> Parser:
    parser = Parser(
        prog="fastmp generate",
        description="Continue prompts with a trained model, all of them at once. On several ranks: fastmp "
        "launch -n N generate ...; ranks that are left divide the prompts among them.",
    )
    again: dict[str, Any]
    add, again = parser.add_argument, {"metavar": "TEXT", "action": "append"}
    add("--prompt", **again, required=True, help="what is continued; may be given again")
    tokens = number(int, 1)
    text = "of each prompt (128, or as many as the model has positions for)"
    add("--max-new-tokens", metavar="N", type=tokens, help=text)
    text = "what logits are divided by; 0: the likeliest token (1)"
    add("--temperature", metavar="T", type=number(float, 0), default=1.0, help=text)
    add("--top-k", metavar="K", type=number(int, 0), default=0, help="of the K likeliest; 0: of all (0)")
    text = "of the likeliest whose shares add up to P (1)"
    add("--top-p", metavar="P", type=number(float, 0), default=1.0, help=text)
    text = "ends a text before it; may be given again"
    add("--stop", **again, type=_text, default=[], help=text)
    text = "prompt i draws from seed N + i, from i = 0 on (0)"
    add("--seed", metavar="N", type=number(int, 0), default=0, help=text)
    add_model_options(parser, "of weights, keys and values")
    return parser


def add_model_options(parser: Parser, of_dtype: str) -> None:
    """Add the options that say which trained model is meant, and how it is divided over ranks."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--checkpoint", metavar="DIR", help="a checkpoint, or a run, whose latest one is meant"
    )
    source.add_argument("--hf", metavar="DIR", help="a transformers model: config.json and safetensors files")
    add = parser.add_argument
    add(
        "--tokenizer",
        metavar="FILE",
        help="byte, a tokenizer.json, or the directory of one (that of the run or of the model)",
    )
    text = f"{of_dtype}; auto: bfloat16 on a GPU, else float32"
    add("--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto", help=text)
    for axis, what in (("tp", "each layer"), ("pp", "the layers"), ("ep", "the experts")):
        text = f"ranks that divide {what} (1)"
        add(f"--{axis}", metavar="N", type=number(int, 1), default=1, help=text)
    add("--etp", metavar="N", type=number(int, 1), help="ranks that divide each expert (those of --tp)")
    text = "go on without this key of config.json"
    add("--ignore", metavar="NAME", action="append", default=[], help=text)


def number(kind: type[int] | type[float], least: int) -> Callable[[str], float]:
    """What reads the value of an option: a number of this kind, `least` or more."""

    def read(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = -1
        if not least <= value < LARGEST:
            what = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"must be {what}, {least} or more, got {text!r}")
        return value

    return read


def _text(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("must not be empty")
    return text
