"""Recipes: a TOML file in `configs/`, and options of the command line that go over it.

    fastmp train configs/gpt-small.toml --tp 2 --optimizer.lr 1e-3
    fastmp train --recipe configs/moe-small.toml --tp 2 --ep 2 --model.moe.top-k 4
    fastmp train configs/gpt-small.toml --steps 20 --profile torch --profile-steps 10:13
    fastmp plan recipe configs/gpt-small.toml --world-size 2 --tp 2

Every field is an option `--table.field`, those of experts `--model.moe.field`; those in
`fastmp.config.option_names.SHORT` have a short name too. An unknown key or option is an error that suggests
the closest one.
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

from fastmp.config.command_line import Parser, did_you_mean
from fastmp.config.file_access import read_file
from fastmp.config.model import GPTConfig
from fastmp.config.option_names import FIRST, METAVARS, ORDER, SHORT, SWITCHED, SYNONYMS
from fastmp.config.options import ConfigError, help_of
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


OPTIONS_NOTE = "Options override the recipe; defaults are in parentheses, usual names in square brackets."
EXAMPLES = """\
  fastmp train configs/gpt-small.toml --steps 100 --name first
  fastmp train configs/gpt-small.toml --name first --resume auto
  fastmp launch -n 2 train configs/moe-small.toml --tp 2 --ep 2
  fastmp train configs/gpt-small.toml --data.path data/web --train.dtype bf16"""


def parse_arguments(argv: Sequence[str]) -> Recipe:
    """Return the recipe of a command line: its file, overridden by the options.

    Raises:
        SystemExit: the command line or the file is invalid; status 2, after a message on stderr.
    """
    parser = Parser(
        prog="fastmp train",
        usage="fastmp train [FILE] [options]",
        description="Train a GPT or a BERT from a recipe, a TOML file as in configs/. On several GPUs: "
        f"fastmp launch.\n\n{EXAMPLES}",
        synonyms=SYNONYMS,
    )
    add_recipe_option(parser)
    add_options(parser)
    options = parse_with_recipe(parser, argv)
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
            parser.error(
                f"{', '.join(idle)} would do nothing without {SHORT.get(switch, _option(switch))}: add it"
            )
    return recipe


def add_recipe_option(parser: Parser) -> None:
    """Add `--recipe FILE`, which `parse_with_recipe` also reads without its name."""
    text = "TOML file of the run, as in configs/; --recipe may be left out"
    parser.add_argument("--recipe", metavar="FILE", help=text)


def parse_with_recipe(parser: Parser, argv: Sequence[str]) -> argparse.Namespace:
    """Parse `argv`, in which the recipe may stand without `--recipe`, anywhere."""
    options, others = parser.parse_known_args(argv)
    if any(other.startswith("-") for other in others):
        parser.error(f"unrecognized arguments: {' '.join(others)}")
    recipes = [*others, *([] if options.recipe is None else [options.recipe])]
    if len(recipes) > 1:
        parser.error(f"expected one recipe, got {' and '.join(recipes)}")
    options.recipe = others[0] if others else options.recipe
    return options  # type: ignore[no-any-return]


def add_options(
    parser: Parser,
    kind: type = Recipe,
    first: Sequence[str] = tuple(FIRST),
    *,
    titles: Mapping[str, Sequence[str]] = FIRST,
    short: Mapping[str, str] = SHORT,
) -> None:
    """Add an option for every field of a recipe to `parser`; `given_options` reads them.

    kind: a dataclass whose fields are tables.
    first: titles of the options that --help shows; --help-all shows all.
    titles, short: the options under a title and the short names of options, by "table.field".
    """
    sentence, _, examples = (parser.description or "").partition("\n\n")
    parser.description = "\n\n".join(filter(None, (f"{sentence} {OPTIONS_NOTE}", examples)))
    parser.show_first({title: titles[title] for title in first})
    order = {table: number for number, table in enumerate(ORDER, 1)}
    tables = sorted(_tables(kind, ""), key=lambda each: order.get(each[0].partition(".")[0], 0))
    for table, cls in tables:
        group = parser.add_argument_group(f"[{table}]", (cls.__doc__ or "").partition("\n")[0])
        hints = _hints(cls)
        for field in fields(cls):
            if _table_of(hints[field.name]) is None:
                _add_option(group, f"{table}.{field.name}", field, hints[field.name], short)


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


def _add_option(
    group: argparse._ArgumentGroup, path: str, field: Field[Any], hint: Any, short: Mapping[str, str]
) -> None:
    """Add the option of the field at `path`; it is absent from the parsed options unless it is given."""
    table, _, name = path.replace("_", "-").rpartition(".")
    names = [_option(path), *([short[path]] if path in short else [])]
    text = help_of(field).replace("%", "%%")
    settings: dict[str, Any] = {"dest": path, "default": argparse.SUPPRESS}
    kind = _without_none(hint)
    if kind is bool:
        off = f"--{table}.no-{name}"
        text += f" (enabled; disable: {off})" if field.default else ""
        group.add_argument(*names, action="store_true", help=text, **settings)
        group.add_argument(off, action="store_false", help=argparse.SUPPRESS, **settings)
        return
    if field.default not in (None, "", ()):
        values = field.default if isinstance(field.default, tuple) else (field.default,)
        text += f" ({(':' if path == 'train.profile_steps' else ' ').join(map(str, values))})"
    settings["help"] = text
    optional = kind is not hint
    if typing.get_origin(kind) is tuple:
        items = typing.get_args(kind)
        settings["nargs"] = "+" if items[-1] is ... else len(items)
        kind = items[0]
    if path == "train.profile_steps":
        settings["nargs"] = None
        group.add_argument(*names, action=_ProfileSteps, metavar="FIRST:LAST", **settings)
    elif choices := field.metadata["choices"]:
        aliases = field.metadata["aliases"]
        group.add_argument(*names, type=lambda name: aliases.get(name, name), choices=choices, **settings)
    else:
        metavar = {int: "N", float: "X"}.get(kind, METAVARS.get(field.name, "NAME"))
        convert = _steps if path == "train.steps" else _or_none(kind) if optional else kind
        group.add_argument(*names, type=convert, metavar=metavar, **settings)


def _option(path: str) -> str:
    return f"--{path}".replace("_", "-")


def _or_none(kind: type) -> Callable[[str], Any]:
    def convert(text: str) -> Any:
        return None if text == "none" else kind(text)

    convert.__name__ = kind.__name__  # which argparse shows where the value is wrong
    return convert


def _steps(text: str) -> int:
    if text.isdecimal() and len(text) < 20:
        return int(text)
    meant = f"; to profile these steps: --profile-steps {text}" if ":" in text else ""
    raise argparse.ArgumentTypeError(f"expected a whole number of steps, got {text!r}{meant}")


class _ProfileSteps(argparse.Action):
    """`--profile-steps 10:13`: the first step to profile, and the one after the last."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        parts = values.split(":")
        if len(parts) != 2 or not all(part.isdecimal() and len(part) < 20 for part in parts):
            parser.error(f"{option_string}: expected FIRST:LAST as in 10:13, got {values!r}")
        setattr(namespace, self.dest, [int(part) for part in parts])


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
        return {} if path is None else _parse(read_file(path, LIMIT).decode("utf-8-sig"))
    except OSError as error:
        files = [
            str(file)
            for folder in {Path(path or "").parent, Path("configs")}
            for file in folder.glob("*.toml")
        ]
        meant = did_you_mean(str(path), files) if isinstance(error, FileNotFoundError) else ""
        raise ValueError(f"recipe {path}: cannot be read ({error.strerror}){meant}") from None
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
        except ValueError as error:  # of a table of others, it may be any
            found = error.problems if isinstance(error, ConfigError) else [(set(values), str(error))]
        # What may follow from a field that has already been complained about is left out.
        errors += [message for names, message in found if not (unclear | wrong) & names]
        more = set().union(*(names for names, _ in found)) & values.keys() - wrong
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
