"""`fastmp train`: its command line, which is read before torch is imported."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from fastmp.apps.first_rank import let_rank0_report_first
from fastmp.config import Environment
from fastmp.config.recipe import parse_arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Run `fastmp train` with the arguments `argv`; returns the exit status."""
    arguments = list(argv or [])
    try:
        environment = Environment.read()
    except ValueError as error:
        print(f"fastmp: {error}", file=sys.stderr)
        return 2
    with let_rank0_report_first(environment.rank or 0):
        recipe = parse_arguments(arguments, quiet=bool(environment.rank))
    from fastmp.apps.train_main import run  # torch, which neither help nor a mistake waits for

    return run(recipe, arguments)
