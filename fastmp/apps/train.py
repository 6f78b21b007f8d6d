"""`fastmp train`: read the command line before torch is imported."""

from __future__ import annotations

from collections.abc import Sequence

from fastmp.apps.first_rank import only_rank0_prints
from fastmp.config.recipe import parse_arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Run `fastmp train` with the arguments `argv`; return the exit status."""
    arguments = list(argv or [])
    with only_rank0_prints():
        recipe = parse_arguments(arguments)
    from fastmp.apps.train_main import run  # imports torch

    return run(recipe, arguments)
