"""`fastmp train`: read the command line before torch is imported."""

from __future__ import annotations

from collections.abc import Sequence

from fastmp.apps.first_rank import only_rank0_prints
from fastmp.apps.launch import launch_instead
from fastmp.config import Environment, Recipe
from fastmp.config.console import to_stderr
from fastmp.config.recipe import parse_arguments
from fastmp.plan.layout import check_layout, fewest_ranks, problems


def main(argv: Sequence[str] | None = None) -> int:
    """Run `fastmp train` with the arguments `argv`; return the exit status."""
    arguments = list(argv or [])
    with only_rank0_prints():
        recipe = parse_arguments(arguments)
        world_size = Environment.read().world_size
        if world_size == 1 and (missing := _missing_ranks(recipe, arguments)):
            to_stderr(f"fastmp train: {missing}")
            return 2
        try:
            check_layout(recipe, world_size)
        except ValueError as error:
            to_stderr(f"fastmp train: {error}")
            raise SystemExit(2) from None
    from fastmp.apps.train_main import run  # imports torch

    return run(recipe, arguments)


def _missing_ranks(recipe: Recipe, arguments: Sequence[str]) -> str:
    """Return the message of `launch_instead`, and all other problems; "" if one process is enough."""
    ranks = fewest_ranks(recipe.parallel)
    if ranks == 1:
        return ""
    others = "".join(f"\n  {problem}" for problem in problems(recipe, ranks))
    return launch_instead(recipe.parallel, "processes, got 1", "train", arguments) + others
