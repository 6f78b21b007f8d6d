"""Commands that run on all ranks and print their result on rank 0."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from fastmp.apps.first_rank import let_rank0_report_first
from fastmp.config import Environment
from fastmp.config.console import to_stderr
from fastmp.distributed.runtime import Runtime, init, main_guard

__all__ = ["run_on_ranks"]

Result = TypeVar("Result")


def run_on_ranks(prog: str, work: Callable[[Runtime], Result], say: Callable[[Result], None]) -> int:
    """Run `work` as the whole program `prog` of this process; pass its result to `say` on rank 0.

    Returns the exit status: 2 for a ValueError or OSError of `work`, printed in one line on rank 0. Errors of
    `say`, as of a closed pipe, pass through.
    """
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
