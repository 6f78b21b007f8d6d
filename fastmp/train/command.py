"""`fastmp train`: its command line, which is read before torch is imported."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from fastmp.config import Environment
from fastmp.train.recipe import parse_arguments

PATIENCE = 3.0  # seconds in which the first rank may report what all ranks found wrong


def main(argv: Sequence[str] | None = None) -> int:
    """Run `fastmp train` with the arguments `argv`; returns the exit status."""
    arguments = list(argv or [])
    try:
        environment = Environment.read()
    except ValueError as error:
        print(f"fastmp: {error}", file=sys.stderr)
        return 2
    with first_rank_speaks(environment.rank or 0):
        recipe = parse_arguments(arguments, quiet=bool(environment.rank))
    from fastmp.train.main import run  # torch, which neither help nor a mistake waits for

    return run(recipe, arguments)


@contextmanager
def first_rank_speaks(rank: int) -> Iterator[None]:
    """Give the first rank time to report what all ranks find alike, such as a user's mistake.

    The launcher then ends the others together with it, and there is one message.
    """
    try:
        yield
    except (ValueError, ArithmeticError, SystemExit) as error:
        if rank and not (isinstance(error, SystemExit) and int(error.code or 0) > 128):  # by a signal
            time.sleep(PATIENCE)
        raise
