"""`python -m tools.study recipes`: the recipes of configs/ as a table, predicted and, where it was, measured.

Predictions are of the least number of H100s, a power of two, at which the recipe's layout fits; measured
figures are rows "recipes" of `benchmarks.gpu_check` in benchmarks/results.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fastmp.config import Recipe
from fastmp.config.data_files import expected_vocab_size
from fastmp.config.recipe import load_recipe
from fastmp.config.sizes import num_parameters
from fastmp.plan.hardware import GPUS
from fastmp.plan.layout import make_grid, problems
from fastmp.plan.published_runs import nearest_run, residual
from fastmp.plan.time import time_facts
from tools.study.page import parser, table

ROOT = Path(__file__).parents[2]
CONFIGS, RESULTS = ROOT / "configs", ROOT / "benchmarks" / "results"
HARDWARE, MOST = "h100", 4096
_COMMAND = re.compile(r"fastmp train --recipe configs/([\w.-]+)\.toml --steps \d+")
_INTRO = """# Recipes

A line for each recipe, made by `python -m tools.study recipes`. Layout and figures are of the least number of
H100s, a power of two, that the recipe fits on. tokens/s, MFU and memory are [estimates](../docs/planning.md).
For other GPUs: `fastmp plan time configs/NAME.toml --world-size N --hardware h200`; for the fastest layout:
`fastmp plan search`. `measured` has what one GPU did, by `python -m benchmarks.gpu_check --phase recipes`.

"""


def main(arguments: Sequence[str]) -> int:
    """Write the page."""
    made = parser("recipes", "List the recipes of configs/ with predicted and measured figures.")
    made.set_defaults(out=str(CONFIGS))
    options = made.parse_args(arguments)
    path = Path(options.out) / "README.md"
    path.write_text(page())
    print(path)
    return 0


def page() -> str:
    """Return the page."""
    measured = measured_rates(RESULTS)
    rows = [_row(path.stem, _load(path), measured) for path in sorted(CONFIGS.glob("*.toml"))]
    header = [
        *("recipe", "parameters", "H100s", "layout", "tokens/s/GPU", "MFU", "GiB", "nearest published run"),
        "measured",
    ]
    return _INTRO + table(header, rows)


def _load(path: Path) -> Recipe:
    """Return a recipe with the size of its vocabulary, also if its tokenizer has it."""
    recipe = load_recipe(path)
    size = recipe.model.vocab_size or expected_vocab_size(recipe.data)
    return replace(recipe, model=replace(recipe.model, vocab_size=size))


def _row(name: str, recipe: Recipe, measured: dict[str, str]) -> list[str]:
    size = least_size(recipe)
    facts = time_facts(recipe, size, HARDWARE)
    active, whole = num_parameters(recipe.model, active=True), num_parameters(recipe.model)
    parameters = _count(whole) if active == whole else f"{_count(whole)}, {_count(active)} active"
    grid = make_grid(recipe, size)
    axes = ("tp", "cp", "pp", *(("ep", "etp") if recipe.model.moe is not None else ()))
    layout = " ".join(f"{axis}{grid.size(axis)}" for axis in axes if grid.size(axis) > 1) or "-"
    rate = f"{facts['tokens_per_second'] / size:,.0f}"
    return [
        f"[{name}]({name}.toml)",
        parameters,
        str(size),
        layout,
        rate,
        f"{facts['mfu']:.0%}",
        f"{facts['memory'] / 2**30:.0f}",
        _nearest(recipe, size),
        measured.get(name, "-"),
    ]


def _nearest(recipe: Recipe, size: int) -> str:
    """Return the nearest published run and the estimate's ratio to it; "-" for a model of another scale."""
    run = nearest_run(recipe, size, HARDWARE)
    far = num_parameters(recipe.model) / num_parameters(run.recipe.model)
    return f"{run.name}: estimated at {residual(run):.2f}" if 1 / 8 < far < 8 else "-"


def _count(number: float) -> str:
    return f"{number / 1e9:.1f} B" if number >= 1e9 else f"{number / 1e6:.0f} M"


def least_size(recipe: Recipe) -> int:
    """Return the least number of H100s, a power of two, that a recipe fits on."""
    size = 1
    while size <= MOST:
        if not problems(recipe, size):
            facts = time_facts(recipe, size, HARDWARE)
            if facts["memory"] <= 0.9 * facts["capacity"]:
                return size
        size *= 2
    raise ValueError(f"recipe {recipe.train.name} fits on no number of {GPUS[HARDWARE].name} up to {MOST}")


def measured_rates(folder: Path) -> dict[str, str]:
    """Return {recipe: tokens/s, device and commit} of result files that have rows "recipes", or "runs"."""
    found: dict[str, str] = {}
    for path in sorted(folder.glob("*.json")):
        content: Any = json.loads(path.read_text())
        if not isinstance(content, dict):
            continue
        for run in content.get("runs", ()):  # of the command alone, without graphs for example
            if match := _COMMAND.fullmatch(run.get("command", "")):
                rate = statistics.median(each["tokens_per_second"] for each in run["steps"][1:])
                found[match[1]] = f"{rate:,.0f} tokens/s, {run['device']}, {run['commit']}"
        for row in content.get("recipes", ()):
            if "tokens_per_second" in row:
                own, rate = content["environment"], row["tokens_per_second"]
                found[row["recipe"]] = f"{rate:,.0f} tokens/s, {own['device']}, {own['commit']}"
    return found
