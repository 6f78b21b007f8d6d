"""Write docs/reference/configuration.md from the fields of `fastmp.config`."""

from __future__ import annotations

import sys
import typing
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reference" / "configuration.md"
sys.path.insert(0, str(ROOT))

from fastmp.config import recipe  # noqa: E402
from fastmp.config.options import help_of  # noqa: E402
from fastmp.config.training import Recipe  # noqa: E402

HEAD = """# Configuration: recipes and command-line options

<!-- Written by `python docs/configuration.py` from the fields of fastmp.config. Change those instead. -->

Every option of a training run: its field in a recipe, its command-line option, type, default and meaning.
A recipe is a TOML file with one table per section of this page. Options on the command line override it:

```toml
[parallel]
tp = 2
recompute = true

[optimizer]
lr = 3e-4
```

```sh
fastmp train --recipe configs/gpt-small.toml --optimizer.lr 3e-4 --parallel.recompute --steps 6
```

Conventions:

- A switch takes no value. `--table.no-field` turns off a switch that is on by default.
- Type `none` on the command line to unset a field that a file sets.
- A list takes several values: `--optimizer.betas 0.9 0.98`.
- An unknown key or a wrong value ends the command before any rank starts, with all errors at once.
- The names of Megatron-LM's options are on [Move from Megatron-LM](../from-megatron.md).
"""


def type_name(hint: Any) -> str:
    """Return the type of a field as a reader of TOML knows it."""
    kind = recipe._without_none(hint)
    if typing.get_origin(kind) is tuple:
        items = [type_name(item) for item in typing.get_args(kind) if item is not ...]
        return f"list of {items[0]}" if ... in typing.get_args(kind) else f"{len(items)} x {items[0]}"
    return {"bool": "switch", "str": "text", "int": "integer", "float": "number"}[kind.__name__]


def default_of(value: Any) -> str:
    """Return a default as it stands in a recipe."""
    if value is None or value == ():
        return "unset"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return " ".join(f"`{each}`" for each in value)
    if value == "":
        return "empty"
    return f"`{value:,}`".replace(",", "_") if type(value) is int and value >= 10_000 else f"`{value}`"


def row(path: str, field: Any, hint: Any) -> str:
    """Return the row of one field."""
    name = path.rpartition(".")[2]
    option = "--" + path.replace("_", "-")
    if type_name(hint) == "switch" and field.default is True:
        table, _, last = option.rpartition(".")
        option = f"{table}.no-{last}"
    names = f"`{option}`" + (f", `{recipe.SHORT[path]}`" if path in recipe.SHORT else "")
    choices, meaning = field.metadata.get("choices"), help_of(field)
    if choices and not all(each in meaning for each in choices):
        meaning += ". One of " + ", ".join(f"`{each}`" for each in choices)
    cells = (f"`{name}`", names, type_name(hint), default_of(field.default), meaning.replace("|", "\\|"))
    return f"| {' | '.join(cells)} |"


def page() -> str:
    """Return the whole page."""
    parts = [HEAD]
    for table, cls in recipe._tables(Recipe, ""):
        hints = recipe._hints(cls)
        summary = " ".join((cls.__doc__ or "").partition("\n\n")[0].split())
        parts.append(f"## `[{table}]`\n\n{summary}\n")
        parts.append('<div class="options" markdown>\n')  # a class of site.css: names do not wrap
        parts.append("| field | option | type | default | meaning |\n|---|---|---|---|---|")
        rows = [
            row(f"{table}.{field.name}", field, hints[field.name])
            for field in fields(cls)
            if recipe._table_of(hints[field.name]) is None and field.default is not MISSING
        ]
        parts.append("\n".join(rows) + "\n\n</div>\n")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page())
