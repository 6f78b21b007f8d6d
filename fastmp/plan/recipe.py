"""`fastmp plan recipe`: whether a recipe fits a number of ranks, and what each of them would hold."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

from fastmp.config import Recipe
from fastmp.layout import make_grid, problems
from fastmp.plan.parser import Parser
from fastmp.sizes import count_parameters, flops_per_token, pad_vocab
from fastmp.train.recipe import read_recipe


def main(arguments: list[str]) -> int:
    """Print what a recipe means for its ranks; 0, or 2 with all that does not fit on stderr."""
    parser = Parser(
        prog="fastmp plan recipe",
        description="Check a recipe for a number of ranks, and print what each of them would hold.",
        allow_abbrev=False,
    )
    parser.add_argument("file", help="a recipe, as in configs/")
    parser.add_argument(
        "--world-size", "--world_size", type=int, required=True, metavar="N", help="number of ranks"
    )
    parser.add_argument("--json", action="store_true", help="the numbers, as JSON")
    options = parser.parse_args(arguments)
    try:
        found, errors, unused = read_recipe(options.file)
    except ValueError as error:
        print(f"fastmp plan recipe: {error}", file=sys.stderr)
        return 2
    # With sizes that could not be read, how many ranks there would be of what is not known.
    layout_known = not any(name.startswith("parallel.") for name in unused)
    world_size = options.world_size if layout_known else None
    errors += [str(each) for each in problems(found, world_size) if not unused & set(each.fields)]
    if errors:
        count = f"{len(errors)} problems on {options.world_size} ranks:"
        lines = errors if len(errors) == 1 else [count, *(f"  {error}" for error in errors)]
        print(f"fastmp plan recipe: recipe {options.file}:", "\n".join(lines), file=sys.stderr)
        return 2
    facts = recipe_facts(found, options.world_size)
    print(json.dumps(facts) if options.json else "\n".join(describe_recipe(facts)))
    return 0


def recipe_facts(recipe: Recipe, world_size: int) -> dict[str, int | float | str]:
    """What `recipe` is on `world_size` ranks, where it has no `problems`."""
    model, data, grid = recipe.model, recipe.data, make_grid(recipe, world_size)
    samples = data.micro_batch_size * grid.dp
    count = count_parameters(model)
    experts, others = count_parameters(model, pad_vocab(model.vocab_size, grid.tp)).per_rank(
        grid.tp, grid.ep, grid.etp
    )
    narrow = recipe.train.dtype != "float32"  # a narrow parameter has a float32 master, a wide one is its own
    held = experts + others
    return {
        "name": recipe.train.name,
        "layout": str(grid),
        "parameters": count.total,
        "active_parameters": count.active,
        "flops_per_token": flops_per_token(model, data.seq_len, causal=True),
        "tokens_per_step": recipe.train.global_batch_size * data.seq_len,
        "microbatches": recipe.train.global_batch_size // samples,
        "dtype": "bfloat16" if narrow else "float32",
        "rank_expert_parameters": experts,
        "rank_other_parameters": others,
        "rank_weight_bytes": held * (2 if narrow else 4),
        "rank_gradient_bytes": held * 4,
        "rank_optimizer_bytes": held * (12 if narrow else 8),
    }


def describe_recipe(facts: dict[str, int | float | str]) -> Iterator[str]:
    """The lines a person reads."""
    weights, gradients, optimizer = (
        float(facts[f"rank_{part}_bytes"]) / 2**30 for part in ("weight", "gradient", "optimizer")
    )
    yield f"{facts['name']}: {_billions(facts['parameters'])} parameters" + (
        f", {_billions(facts['active_parameters'])} of them for one token"
        if facts["active_parameters"] != facts["parameters"]
        else ""
    )
    yield f"{facts['layout']}"
    yield (
        f"a step    {facts['tokens_per_step']:,} tokens in {facts['microbatches']} microbatches, "
        f"{float(facts['flops_per_token']) * float(facts['tokens_per_step']):.3g} model FLOPs"
    )
    yield (
        f"a rank    {_billions(facts['rank_expert_parameters'])} parameters of experts, "
        f"{_billions(facts['rank_other_parameters'])} others"
    )
    yield (
        f"memory    {weights + gradients + optimizer:.1f} GiB a rank without activations: weights in "
        f"{facts['dtype']} {weights:.1f}, gradients {gradients:.1f}, optimizer {optimizer:.1f}"
    )


def _billions(number: int | float | str) -> str:
    return f"{float(number) / 1e9:.2f} B" if float(number) >= 1e8 else f"{float(number) / 1e6:.2f} M"
