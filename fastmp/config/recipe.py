"""Recipes: a TOML file in `configs/`, and options of the command line that go over it.

    fastmp train --recipe configs/gpt-small.toml --tp 2 --optimizer.lr 1e-3
    fastmp train --recipe configs/moe-small.toml --tp 2 --ep 2 --model.moe.top-k 1
    fastmp train --recipe configs/gpt-small.toml --pp 2 --vpp 2 --parallel.schedule zero_bubble
    fastmp train --recipe configs/gpt-small.toml --profile torch --steps 10:13
    fastmp plan recipe configs/gpt-small.toml --world-size 2 --tp 2

Every field is an option `--table.field`, those of experts `--model.moe.field`; the ones in `SHORT` have a
short name too. `--steps 500` is how many there are, `--steps 10:13` which of them are profiled; both may be
given. A key or option that does not exist is an error that says which one may have been meant.
"""

from __future__ import annotations

import argparse
import difflib
import functools
import math
import re
import reprlib
import tomllib
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import Field, fields, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from fastmp.config.command_line import Parser
from fastmp.config.file_access import read_file
from fastmp.config.model import GPTConfig
from fastmp.config.options import help_of
from fastmp.config.training import Recipe

__all__ = [
    "Reading",
    "add_options",
    "given_options",
    "load_as",
    "load_recipe",
    "model_from",
    "parse_arguments",
    "read_recipe",
]

T = TypeVar("T")
LIMIT = 1 << 16  # bytes; a recipe that names every field has 4 kB
LARGEST = (1 << 63) - 1  # which is TOML's own limit, too
DEEPEST = 200  # dots of a line, which separate the parts of keys
LONGEST = 4096  # characters of a text, which may be a path
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")

SHORT = {
    "parallel.tp": "--tp",
    "parallel.cp": "--cp",
    "parallel.pp": "--pp",
    "parallel.vpp": "--vpp",
    "parallel.ep": "--ep",
    "parallel.etp": "--etp",
    "model.moe.dispatcher": "--dispatcher",
    "train.steps": "--steps",
    "train.max_time": "--max-time",
    "train.name": "--name",
    "checkpoint.resume": "--resume",
    "checkpoint.init_from": "--init-from",
    "finetune.path": "--data",
    "finetune.init_from": "--init-from",
    "finetune.name": "--name",
    "finetune.seeds": "--seeds",
    "train.profile": "--profile",
    "graphs.enabled": "--graphs",
    "graphs.scope": "--scope",
}
# Options, by the switch without which a run does not look at them; in a file they may wait for it.
SWITCHED = {
    "graphs.enabled": ("impl", "scope", "warmup", "verify_every", "evaluation"),
    "parallel.tp_overlap": ("tp_overlap_rows",),
}


def parse_arguments(argv: Sequence[str]) -> Recipe:
    """Return the recipe of a command line: the file of `--recipe`, overridden by the other options.

    Raises:
        SystemExit: the command line or the file is invalid; status 2, after a message on stderr.
    """
    parser = Parser(
        prog="fastmp train",
        usage="fastmp train [--recipe FILE] [options]",
        description="Train a GPT or a BERT; under torchrun on several ranks.",
    )
    parser.add_argument("--recipe", metavar="FILE", help="TOML file of the run, as in configs/")
    add_options(parser)
    options = parser.parse_args(argv)
    given = given_options(options)
    try:
        recipe = load_recipe(options.recipe, given)
    except ValueError as error:
        parser.error(str(error))
    for switch, names in SWITCHED.items():
        table, _, name = switch.partition(".")
        own = given.get(table, {})
        idle = [_option(f"{table}.{each}") for each in names if own.get(each) is not None]
        if idle and not getattr(getattr(recipe, table), name):
            parser.error(f"{', '.join(idle)} would do nothing without {SHORT.get(switch, _option(switch))}")
    return recipe


def add_options(parser: argparse.ArgumentParser, kind: type = Recipe) -> None:
    """Add an option for every field of a recipe to `parser`; `given_options` reads them.

    kind: a dataclass whose fields are tables.
    """
    parser.description = (
        f"{parser.description} Options go over the file; in brackets is the value where neither gives one."
    )
    for table, cls in _tables(kind, ""):
        group = parser.add_argument_group(f"[{table}]", (cls.__doc__ or "").partition("\n")[0])
        hints = _hints(cls)
        for field in fields(cls):
            if _table_of(hints[field.name]) is None:
                _add_option(group, f"{table}.{field.name}", field, hints[field.name])


def given_options(options: argparse.Namespace) -> dict[str, Any]:
    """Return parsed `options` in the form of a file: {"model": {"norm": "rmsnorm"}, ...}."""
    content: dict[str, Any] = {}
    for path, value in vars(options).items():
        *tables, name = path.split(".")
        if tables:
            table = content
            for each in tables:
                table = table.setdefault(each, {})
            table[name] = None if value == [None] else value
    return content


def _tables(cls: type, table: str) -> Iterator[tuple[str, type]]:
    """Yield (table name, dataclass) of every dataclass below `cls`, parents first."""
    hints = _hints(cls)
    for field in fields(cls):
        if below := _table_of(hints[field.name]):
            name = f"{table}.{field.name}" if table else field.name
            yield name, below
            yield from _tables(below, name)


def _add_option(group: argparse._ArgumentGroup, path: str, field: Field[Any], hint: Any) -> None:
    """Add the option of the field at `path`; it is absent from the parsed options unless it is given."""
    table, _, name = path.replace("_", "-").rpartition(".")
    names = [_option(path), *([SHORT[path]] if path in SHORT else [])]
    text = help_of(field).replace("%", "%%")
    settings: dict[str, Any] = {"dest": path, "default": argparse.SUPPRESS}
    kind = _without_none(hint)
    if kind is bool:
        off = f"--{table}.no-{name}"
        text += f" (on; off: {off})" if field.default else ""
        group.add_argument(*names, action="store_true", help=text, **settings)
        group.add_argument(off, action="store_false", help=argparse.SUPPRESS, **settings)
        return
    if field.default is not None:
        values = field.default if isinstance(field.default, tuple) else (field.default,)
        text += f" ({' '.join(map(str, values))})"
    settings["help"] = text
    optional = kind is not hint
    if typing.get_origin(kind) is tuple:
        items = typing.get_args(kind)
        settings["nargs"] = "+" if items[-1] is ... else len(items)
        kind = items[0]
    if path == "train.steps":
        group.add_argument(*names, action=_Steps, metavar="N|FIRST:LAST", **settings)
    elif choices := field.metadata["choices"]:
        group.add_argument(*names, choices=choices, **settings)
    else:
        metavar = {int: "N", float: "X"}.get(kind, "NAME")
        group.add_argument(*names, type=_or_none(kind) if optional else kind, metavar=metavar, **settings)


def _option(path: str) -> str:
    return f"--{path}".replace("_", "-")


def _or_none(kind: type) -> Callable[[str], Any]:
    def convert(text: str) -> Any:
        return None if text == "none" else kind(text)

    convert.__name__ = kind.__name__  # which argparse shows where the value is wrong
    return convert


class _Steps(argparse.Action):
    """`--steps 500` is how many there are; `--steps 10:13` which of them are profiled."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        first, colon, last = values.partition(":")
        if not all(part.isdecimal() and len(part) < 20 for part in ((first, last) if colon else (first,))):
            parser.error(f"{option_string} needs a number, or two as in 10:13, got {values!r}")
        if colon:
            setattr(namespace, "train.profile_steps", [int(first), int(last)])
        else:
            setattr(namespace, self.dest, int(first))


class Reading(NamedTuple):
    """Result of reading a file: the recipe, all errors, and the fields whose values were not used.

    Those have their defaults in `recipe`, as "table.field".
    """

    recipe: Recipe
    errors: list[str]
    unused: set[str]


def load_recipe(path: str | Path | None, options: Mapping[str, Any] | None = None) -> Recipe:
    """Return the recipe in the TOML file `path`: one table a dataclass; missing fields keep their defaults.

    `options`, of the same form as the file's content, go over it; they are all where there is no file.
    ValueError naming the file, and the key, the type or the value that is wrong: all of them, one a line.
    """
    return load_as(Recipe, path, options)


def load_as(
    kind: type[T], path: str | Path | None, options: Mapping[str, Any] | None = None, **defaults: Any
) -> T:
    """Return another dataclass of tables from a TOML file, as `load_recipe`.

    defaults: of the form of the file's content, which goes over them.
    """
    content = _over(defaults, _over(_content(path), options or {}))
    errors: list[str] = []
    made: T = _build(kind, content, "", errors, set())
    if errors:
        lines = errors if len(errors) == 1 else [f"{len(errors)} problems:", *(f"  {e}" for e in errors)]
        raise ValueError(("" if path is None else f"recipe {path}: ") + "\n".join(lines))
    return made


def read_recipe(path: str | Path | None, options: Mapping[str, Any] | None = None) -> Reading:
    """Return the recipe of a TOML file overridden by `options`, as far as it can be read, and all errors.

    ValueError where there is no such file, or it is not TOML.
    """
    errors: list[str] = []
    unused: set[str] = set()
    return Reading(_build(Recipe, _over(_content(path), options or {}), "", errors, unused), errors, unused)


def _content(path: str | Path | None) -> dict[str, Any]:
    """Return the content of a recipe's file; empty without a file."""
    try:
        return {} if path is None else _parse(read_file(path, LIMIT).decode())
    except OSError as error:
        raise ValueError(f"recipe {path}: cannot be read ({error.strerror})") from None
    except RecursionError:
        raise ValueError(f"recipe {path}: nested too deeply: a recipe has tables of values") from None
    except ValueError as error:  # also of bytes that are not UTF-8, and of numbers of thousands of digits
        raise ValueError(f"recipe {path}: not TOML: {error}") from None


def model_from(description: Mapping[str, Any]) -> GPTConfig:
    """Return the model that a checkpoint describes. Raises ValueError with all errors in one line."""
    errors: list[str] = []
    content = {
        key: _over(value, {}) if isinstance(value, Mapping) else value for key, value in description.items()
    }
    made: GPTConfig = _build(GPTConfig, _over(content, {}), "model", errors, set())
    if errors:
        raise ValueError("; ".join(errors))
    return made


def _parse(text: str) -> dict[str, Any]:
    """Return the content of a TOML file.

    A key of very many parts is refused before tomllib takes memory by the square of their number.
    """
    if any(line.count(".") > DEEPEST for line in text.splitlines()):
        raise RecursionError
    return tomllib.loads(text)


def _over(content: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return `content` with its tables overridden by `options`; None removes a key."""
    merged = dict(content)
    for key, value in options.items():
        if isinstance(value, Mapping):
            below = merged.get(key, {})
            value = (
                _over(below, value) if isinstance(below, Mapping) else below
            )  # a mistake in the file stays
        merged[key] = value
    return {key: value for key, value in merged.items() if value is not None}


def _build(cls: type, content: dict[str, Any], table: str, errors: list[str], unused: set[str]) -> Any:
    """Return an object of `cls` from a table; errors are added to `errors`, fields left at defaults to
    `unused`.
    """
    hints = _hints(cls)
    known = [field.name for field in fields(cls)]
    values: dict[str, Any] = {}
    unclear: set[str] = set()
    for key, value in content.items():
        if key not in known:
            where = f"in [{table}]" if table else "table"
            meant = difflib.get_close_matches(key, known, n=1)
            there_are = f"; did you mean {meant[0]!r}?" if meant else f"; there are {', '.join(known)}"
            errors.append(f"unknown key {_shown(key)} {where}{there_are}")
            unclear.update(meant)
            continue
        hint, name = _without_none(hints[key]), f"{table}.{key}" if table else key
        below = _table_of(hint)
        if below and isinstance(value, dict):
            values[key] = _build(below, value, name, errors, unused)
            continue
        try:
            if below:
                raise ValueError(f"[{name}] must be a table, got {_shown(value)}")
            values[key] = _convert(value, hint, name)
        except ValueError as error:
            errors.append(str(error))
            unclear.add(key)
    unused.update(f"{table}.{key}" for key in unclear)
    wrong: set[str] = set()
    while True:
        try:
            made = cls(**{key: value for key, value in values.items() if key not in wrong})
            break
        except ValueError as error:
            lines = [(line, set(re.findall(r"\w+", line))) for line in str(error).splitlines()]
        # What follows only from a field that has already been complained about is left out.
        errors += [line for line, words in lines if not (unclear | wrong) & words]
        more = {key for key in values if any(key in words for _, words in lines)} - wrong
        if not more and wrong >= values.keys():
            raise ValueError(f"{cls.__name__}: its defaults are wrong: " + "; ".join(errors))
        wrong |= more or set(values)
    unused.update(f"{table}.{key}" for key in wrong)
    return made


def _table_of(hint: Any) -> type | None:
    """Return the dataclass that a field of this type holds; None if it holds a value."""
    kind: type = _without_none(hint)
    return kind if is_dataclass(kind) else None


def _without_none(hint: Any) -> Any:
    """Return X for X | None, and any other type as it is."""
    if isinstance(hint, types.UnionType):
        return next(option for option in hint.__args__ if option is not types.NoneType)
    return hint


def _convert(value: Any, hint: Any, name: str) -> Any:
    """Return `value` as type `hint` (int, float, str, bool or a tuple of them), or raise ValueError."""
    if typing.get_origin(hint) is tuple:
        items = typing.get_args(hint)
        if not isinstance(value, list) or (items[-1] is not ... and len(value) != len(items)):
            size = "" if items[-1] is ... else f" of {len(items)} values"
            raise ValueError(f"{name} must be a list{size}, got {_shown(value)}")
        if items[-1] is ...:
            items = items[:1] * len(value)
        return tuple(_convert(v, item, name) for v, item in zip(value, items))
    if type(value) is int and hint in (int, float) and abs(value) > LARGEST:
        raise ValueError(f"{name} must be a number of 64 bits, got one of {value.bit_length()}")
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:
        raise ValueError(f"{name} must be of type {hint.__name__}, got {_shown(value)}")
    if hint is float and not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number, got {value}")
    if hint is str and (len(value) > LONGEST or _CONTROL.search(value)):
        raise ValueError(
            f"{name} must be at most {LONGEST} characters, none of them a control character, "
            f"got {_shown(value)}"
        )
    return value


_hints = functools.cache(typing.get_type_hints)  # which evaluates the text of annotations


class _Short(reprlib.Repr):
    """Shows a value of a file in a message, however long or deep it is."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = 100

    def repr_int(self, x: int, level: int) -> str:
        return repr(x) if abs(x) <= LARGEST else f"a number of {x.bit_length()} bits"


_shown = _Short().repr
