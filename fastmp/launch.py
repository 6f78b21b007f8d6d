"""`fastmp launch`: torchrun, whose own tracebacks do not follow what the ranks have said."""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Start ranks with torchrun's options `argv`; return the exit status of the first rank that failed.

    A signal is passed on to the ranks; the status is then 128 and its number, as in shells.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    try:
        torchrun(list(argv or []))
    except SignalException as error:
        return 128 + int(error.sigval)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        print(f"fastmp launch: rank {rank} ended first, with status {failure.exitcode}", file=sys.stderr)
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    return 0
