"""Errors that all ranks find alike are reported by rank 0 alone. Standard library only."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

PATIENCE = 3.0  # seconds in which the first rank may report what all ranks found wrong


@contextmanager
def let_rank0_report_first(rank: int) -> Iterator[None]:
    """Give the first rank time to report what all ranks find alike, such as a user's mistake.

    The launcher then ends the others together with it, and there is one message.
    """
    try:
        yield
    except (ValueError, ArithmeticError, SystemExit) as error:
        if rank and not (isinstance(error, SystemExit) and int(error.code or 0) > 128):  # by a signal
            time.sleep(PATIENCE)
        raise
