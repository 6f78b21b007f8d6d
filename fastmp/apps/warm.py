"""`fastmp warm`: compile a recipe's Triton kernels before training; the GPU need not be present."""

from __future__ import annotations

from collections.abc import Sequence

from fastmp.config.command_line import Parser
from fastmp.config.console import to_stderr, to_stdout
from fastmp.config.option_names import SYNONYMS
from fastmp.config.recipe import add_options
from fastmp.plan.layout import fewest_ranks
from fastmp.plan.resources import fitting_recipe


def main(argv: Sequence[str] | None = None) -> int:
    """Run `fastmp warm` with the arguments `argv`; return the exit status."""
    parser = Parser(
        prog="fastmp warm",
        usage="fastmp warm FILE [--arch CC] [options]",
        description="Compile a recipe's kernels into Triton's cache, as before a first step.\n\n"
        "  fastmp warm configs/moe-small.toml --arch 90 --tp 2 --ep 2",
        synonyms=SYNONYMS,
    )
    parser.add_argument("file", metavar="FILE", help="TOML file of the run, as in configs/")
    parser.add_argument(
        "--arch",
        type=int,
        metavar="CC",
        help="compute capability: 80 (A100), 90 (H100), 100 (B200) (that of this GPU)",
    )
    parser.add_argument("--world-size", type=int, metavar="N", help="number of ranks (the fewest that fit)")
    parser.add_argument("--processes", type=int, metavar="N", help="compiler processes (one for each core)")
    add_options(parser, first=("data", "parallelism", "optimizer and precision"))
    options = parser.parse_args(list(argv or []))
    recipe = fitting_recipe(parser.prog, options)
    if recipe is None:
        return 2
    from fastmp.ops.precompile import current_architecture  # torch, which no mistake above waits for
    from fastmp.training.recipe_kernels import progress_line, warm_up_recipe

    try:
        arch, ranks = (
            options.arch or current_architecture(),
            options.world_size or fewest_ranks(recipe.parallel),
        )
        count = warm_up_recipe(recipe, ranks, arch, processes=options.processes, progress=progress_line())
    except ValueError as error:
        to_stderr(f"{parser.prog}: {error}")
        return 2
    to_stdout(f"{count} kernels for compute capability {arch / 10} are in Triton's cache")
    return 0
