"""`fastmp plan search`: the fastest layouts of a model on a number of GPUs, and their recipe."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any

from fastmp.config import GPTConfig, Recipe
from fastmp.config.console import to_stderr
from fastmp.plan.search_report import (
    describe_search,
    memory_limit,
    read_condition,
    search_facts,
    search_parser,
    space_of,
    why,
)
from fastmp.plan.space import AXES, Candidate, Space


def main(arguments: list[str]) -> int:
    """Print the fastest layouts; return 0, 1 where none fits, or 2 with one line on stderr."""
    parser = search_parser("fastmp plan search")
    options = parser.parse_args(arguments)
    try:
        if options.out is not None and not Path(options.out).parent.is_dir():
            raise ValueError(f"--out: {Path(options.out).parent} is no directory; make it first")
        space = space_of(options, _of_transformers(Path(options.model), options.ignore))
        condition = None if options.why is None else read_condition(options.why)
        limit = memory_limit(options, space.gpu)
        facts = search_facts(space, limit)
        if condition is not None:
            facts["why"] = list(why(space, limit, facts, condition))
        found = _fastest(space, facts)
        if found is not None and options.out is not None:
            Path(options.out).write_text(recipe_toml(found, _comment(facts)) + "\n")
            facts["out"] = options.out
        if found is not None and options.check:
            from fastmp.apps.layout_check import check_run  # imports torch

            facts["check"] = check_run(found)
    except (ValueError, OSError) as error:
        to_stderr(f"{parser.prog}: {error}")
        return 2
    print(json.dumps(facts) if options.json else "\n".join(_lines(facts)))
    return 0 if facts["best"] else 1


def _of_transformers(directory: Path, ignored: Sequence[str]) -> GPTConfig | None:
    """Return the model of a transformers directory; None without a config.json. Raises ValueError."""
    if not (directory / "config.json").is_file():
        return None
    from fastmp.hf.stored import model_of, read_config  # imports torch

    return model_of(directory, read_config(directory), ignored)[1]


def _lines(facts: dict[str, Any]) -> list[str]:
    lines = [*describe_search(facts), *facts.get("why", ())]
    if "out" in facts:
        lines.append(
            f"written   {facts['out']}: fastmp plan time {facts['out']} --world-size {facts['gpus']}"
        )
    if "check" in facts:
        lines.append(f"check     {facts['check']}")
    return lines


def _fastest(space: Space, facts: dict[str, Any]) -> Recipe | None:
    """Return the recipe of the fastest candidate; None where none fits."""
    if not facts["best"]:
        return None
    return space.recipe_of(Candidate(**{axis: facts["best"][0][axis] for axis in AXES}))


def _comment(facts: dict[str, Any]) -> str:
    best = facts["best"][0]
    return (
        f"{facts['name']} on {facts['gpus']} x {facts['hardware']}, by fastmp plan search: an estimate of "
        f"{best['seconds']:.3g} s a step,\n{best['tokens_per_second_per_gpu']:,.0f} tokens/s of a GPU and "
        f"{best['memory'] / 2**30:.1f} GiB."
    )


def recipe_toml(recipe: Recipe, comment: str = "") -> str:
    """Return the text of a file that `load_recipe` reads as `recipe`.

    comment: lines at its top.

    Example:
        >>> print(recipe_toml(Recipe(), "small"))
        # small
    """
    lines = [f"# {line}" for line in comment.splitlines()]
    for table, own in _tables(recipe, ""):
        values = [
            f"{field.name} = {_value(getattr(own, field.name))}"
            for field in fields(own)
            if not is_dataclass(getattr(own, field.name))
            and getattr(own, field.name) is not None
            and (field.default is MISSING or getattr(own, field.name) != field.default)
        ]
        optional = table.count(".") > 0  # a table that is absent by default
        if values or optional:
            lines += ["", f"[{table}]", *values]
    return "\n".join(lines)


def _tables(own: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield (table name, dataclass) of every dataclass below `own`, parents first."""
    for field in fields(own):
        below = getattr(own, field.name)
        if is_dataclass(below):
            table = f"{name}.{field.name}" if name else field.name
            yield table, below
            yield from _tables(below, table)


def _value(value: Any) -> str:
    """Return a number, a string, a bool or a tuple of them in TOML."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value)
