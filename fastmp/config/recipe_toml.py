"""Recipe as the text of a TOML file: what differs from the defaults, one table a dataclass."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

from fastmp.config.training import Recipe


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
