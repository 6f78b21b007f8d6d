"""`fastmp train`: read the command line before torch is imported."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence

from fastmp.apps.first_rank import only_rank0_prints
from fastmp.config import Environment, Recipe
from fastmp.config.recipe import parse_arguments
from fastmp.plan.layout import fewest_ranks, problems


def main(argv: Sequence[str] | None = None) -> int:
    """Run `fastmp train` with the arguments `argv`; return the exit status."""
    arguments = list(argv or [])
    with only_rank0_prints():
        recipe = parse_arguments(arguments)
        if Environment.read().world_size == 1 and (missing := _missing_ranks(recipe, arguments)):
            print(f"fastmp train: {missing}", file=sys.stderr)
            return 2
    from fastmp.apps.train_main import run  # imports torch

    return run(recipe, arguments)


def _missing_ranks(recipe: Recipe, arguments: Sequence[str]) -> str:
    """Return the command that starts the processes of `recipe`, which is run on one; "" if one is enough."""
    ranks = fewest_ranks(recipe)
    if ranks == 1:
        return ""
    axes = ("tp", "cp", "pp", "ep", "etp")
    given = " ".join(f"--{axis} {size}" for axis in axes if (size := getattr(recipe.parallel, axis) or 1) > 1)
    command = shlex.join(["fastmp", "launch", "-n", str(ranks), "train", *arguments])
    others = "".join(f"\n  {problem}" for problem in problems(recipe, ranks))
    return f"{given} needs {ranks} processes, got 1; run: {command}{others}"
