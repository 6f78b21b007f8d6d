"""`fastmp eval`: its command line, which is read before torch is imported."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence

from fastmp.apps.evaluation.report import read_result, table
from fastmp.apps.generate import add_model_options, number, parse_on_ranks
from fastmp.config.command_line import Parser

__all__ = ["main"]

TASKS = {
    "wikitext": ("perplexity per original word of WikiText", "a file of words, such as wiki.test.tokens"),
    "lambada": ("how often the last word of a passage is right", 'a file of lines {"text": "..."}'),
    "heldout": (
        "loss per token and per byte",
        "a directory of token files with held-out text, or a text file",
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run `fastmp eval` with the arguments `argv`; returns the exit status."""
    options = parse_on_ranks(_parser(), argv)
    if options.task == "table":
        return _table(options)
    from fastmp.apps.evaluation.evaluate_main import run  # torch, which neither help nor a mistake waits for

    return run(options)


def _table(options: Namespace) -> int:
    try:
        print(table(map(read_result, options.results)))
    except ValueError as error:
        print(f"fastmp eval: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> Parser:
    parser = Parser(
        prog="fastmp eval",
        description="Evaluate a trained model, of any layout, on files of this machine. On several ranks: "
        "fastmp launch -n N eval ...; ranks that are left share the batches.",
    )
    commands = parser.add_subparsers(dest="task", required=True, metavar="TASK")
    for name, (summary, data) in TASKS.items():
        made = commands.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
        made.add_argument("data", metavar="DATA", help=data)
        if name != "lambada":
            text = "tokens that the model sees at once (1024, or its positions if they are fewer)"
            made.add_argument("--window", metavar="N", type=number(int, 1), help=text)
            stride, default = (32, "32") if name == "wikitext" else (None, "the window")
            text = f"tokens that a window adds to the one before it, and scores ({default})"
            made.add_argument("--stride", metavar="N", type=number(int, 1), default=stride, help=text)
        add = made.add_argument
        add("--batch-size", metavar="N", type=number(int, 1), default=8, help="rows that go together (8)")
        text = "write the result there, as JSON; until it is done FILE.part, from which a killed one goes on"
        add("--out", metavar="FILE", help=text)
        add_model_options(made, "of weights")
        add("--cp", metavar="N", type=number(int, 1), default=1, help="ranks that divide each sequence (1)")
        text = "what --tp leaves whole is divided along the sequence"
        add("--sequence-parallel", action="store_true", help=text)
        add("--graphs", action="store_true", help="capture batches of one shape as a graph, and replay it")
    text = "several results beside each other"
    made = commands.add_parser("table", help=text, description=f"{text[0].upper()}{text[1:]}.")
    made.add_argument("results", metavar="FILE", nargs="+", help="what --out has written")
    return parser
