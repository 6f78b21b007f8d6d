"""Commands on several ranks: errors that all ranks find, and results, are printed by rank 0 only."""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from typing import TYPE_CHECKING, TypeVar

from fastmp.config import Environment
from fastmp.config.console import to_stderr

if TYPE_CHECKING:
    from fastmp.distributed.runtime import Runtime

Result = TypeVar("Result")
GRACE_SECONDS = 3.0  # for rank 0 to report an error that all ranks found


@contextmanager
def let_rank0_report_first(rank: int) -> Iterator[None]:
    """Delay errors on ranks other than 0, so that rank 0 reports an error found by all ranks.

    The launcher then ends the other ranks, and there is one message.
    """
    try:
        yield
    except (ValueError, ArithmeticError, SystemExit) as error:
        if rank and not (isinstance(error, SystemExit) and int(error.code or 0) > 128):  # by a signal
            time.sleep(GRACE_SECONDS)
        raise


@contextmanager
def only_rank0_prints() -> Iterator[None]:
    """Let only rank 0 print while the command line is parsed; the other ranks fail after it.

    Raises:
        SystemExit: the variables of the launcher (RANK, WORLD_SIZE, ...) are invalid; status 2.
    """
    try:
        rank = Environment.read().rank or 0
    except ValueError as error:
        to_stderr(f"fastmp: {error}")
        raise SystemExit(2) from None
    with let_rank0_report_first(rank), ExitStack() as stack:
        if rank:
            stack.enter_context(redirect_stdout(io.StringIO()))
            stack.enter_context(redirect_stderr(io.StringIO()))
        yield


def run_on_ranks(prog: str, work: Callable[[Runtime], Result], say: Callable[[Result], None]) -> int:
    """Run `work` as the whole program `prog` of this process; pass its result to `say` on rank 0.

    Returns the exit status: 2 for a ValueError or OSError of `work`, printed in one line on rank 0. Errors of
    `say`, as of a closed pipe, pass through.
    """
    from fastmp.distributed.runtime import init, main_guard  # imports torch

    made: list[Result] = []

    def job() -> None:
        try:
            with let_rank0_report_first(Environment.read().rank or 0):
                runtime = init()
                result = work(runtime)
        except (ValueError, OSError) as error:
            to_stderr(f"{prog}: {str(error).removeprefix(f'{prog.split()[-1]}: ')}")
            raise SystemExit(2) from None
        if runtime.rank == 0:
            made.append(result)
        runtime.close()

    status = main_guard(job)
    for result in made:
        say(result)
    return status
