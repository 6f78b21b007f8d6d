"""Several cases in one group of forked ranks, which costs less than a group for each."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from fastmp.testing.ranks import SEED


def in_turn(rank: int, world_size: int, check: Callable[..., Any], cases: Iterable[tuple]) -> list[Any]:
    """Run `check(rank, world_size, *case)` for each case, each from the seed of `run_ranks`.

    Returns:
        The results, one for each case.

    Raises:
        Exception: what a case raised, with a note that says which one.
    """
    results = []
    for case in cases:
        torch.manual_seed(SEED)
        try:
            results.append(check(rank, world_size, *case))
        except Exception as error:
            error.add_note(f"case {case}")
            raise
    return results
