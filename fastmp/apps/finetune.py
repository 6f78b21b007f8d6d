"""`fastmp finetune`: its command line, which is read before torch is imported."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stderr, redirect_stdout

from fastmp.apps.finetuning.recipe import FinetuneRecipe, load_finetune
from fastmp.apps.finetuning.tasks import TASKS
from fastmp.apps.first_rank import let_rank0_report_first
from fastmp.config import Environment
from fastmp.config.command_line import Parser
from fastmp.config.recipe import add_options, given_options

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run `fastmp finetune` with the arguments `argv`; returns the exit status."""
    arguments = list(argv or [])
    try:
        rank = Environment.read().rank or 0
    except ValueError as error:
        print(f"fastmp: {error}", file=sys.stderr)
        return 2
    with let_rank0_report_first(rank), ExitStack() as stack:
        if rank:
            stack.enter_context(redirect_stdout(io.StringIO()))
            stack.enter_context(redirect_stderr(io.StringIO()))
        parser = _parser()
        options = parser.parse_args(arguments)
        try:
            recipe = load_finetune(options.task, options.recipe, given_options(options))
        except ValueError as error:
            parser.error(str(error))
    from fastmp.apps.finetuning.finetune_main import run  # torch, which neither help nor a mistake waits for

    return run(options.task, recipe, grid=options.grid)


def _parser() -> Parser:
    parser = Parser(
        prog="fastmp finetune",
        usage="fastmp finetune TASK --data DIR [--recipe FILE] [--init-from PATH] [--grid] [options]",
        description="Fine-tune a BERT for a task with several seeds, and report the median on its "
        "development set. What was interrupted goes on when it is started again. On several ranks: fastmp "
        "launch -n N finetune ...",
    )
    parser.add_argument("task", metavar="TASK", choices=tuple(TASKS), help=", ".join(TASKS))
    parser.add_argument("--recipe", metavar="FILE", help="TOML file, as in configs/finetune/")
    parser.add_argument(
        "--grid", action="store_true", help="every batch size and learning rate of Table 6 for the task"
    )
    add_options(parser, FinetuneRecipe)
    return parser
