"""Recipes: a TOML file in `configs/`, and typed overrides of every field on the command line.

    fastmp train --recipe configs/gpt-small.toml --tp 2 --optimizer.lr 1e-3
    fastmp train --recipe configs/moe-small.toml --tp 2 --ep 2 --model.moe.top-k 1
    fastmp train --recipe configs/gpt-small.toml --pp 2 --vpp 2 --parallel.schedule zero_bubble
    fastmp train --recipe configs/gpt-small.toml --profile torch --steps 10:13

Every field is `--table.field`, those of experts `--model.moe.field`; the ones in `SHORT` have a short name
too. `--steps 500` is how many there are, `--steps 10:13` which of them are profiled; both may be given. A key
or option that does not exist is an error that says which one may have been meant.
"""

from __future__ import annotations

import difflib
import io
import re
import tomllib
import types
import typing
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from fastmp.config import MoEConfig, Recipe

__all__ = ["Reading", "load_recipe", "parse_arguments", "read_recipe"]

SHORT = {
    "--tp": "--parallel.tp",
    "--cp": "--parallel.cp",
    "--pp": "--parallel.pp",
    "--vpp": "--parallel.vpp",
    "--ep": "--parallel.ep",
    "--etp": "--parallel.etp",
    "--steps": "--train.steps",
    "--name": "--train.name",
    "--resume": "--train.resume",
    "--profile": "--train.profile",
    "--graphs": "--graphs.enabled",
}


def parse_arguments(argv: Sequence[str], *, quiet: bool = False) -> Recipe:
    """The recipe that `argv` describes: `--recipe FILE` (config's defaults without), then the other options.

    ValueError for what is wrong in the file. What is wrong on the command line ends the program with status
    2, after a message on stderr (none if `quiet`: the first of several ranks is enough).
    """
    try:
        import tyro
    except ImportError:
        raise ValueError('fastmp train needs tyro: pip install "fastmp[train]"') from None
    path, options = _split(argv)
    default = Recipe() if path is None else load_recipe(path)
    if default.model.moe is None and any(option.startswith("--model.moe.") for option in options):
        default = replace(default, model=replace(default.model, moe=MoEConfig()))
    short = ", ".join(f"{name} is {full}" for name, full in SHORT.items())
    with ExitStack() as stack:
        if quiet:
            stack.enter_context(redirect_stdout(io.StringIO()))
            stack.enter_context(redirect_stderr(io.StringIO()))
        return tyro.cli(
            Recipe,
            prog="fastmp train [--recipe FILE]",
            description=f"Train a GPT, under torchrun on several ranks. {short}; "
            "--steps 10:13 are those that --profile looks at.",
            args=options,
            default=default,
            config=(tyro.conf.AvoidSubcommands,),  # experts are there or not, as in `default`
        )


class Reading(NamedTuple):
    """What a file says: `recipe`, all that is wrong in it, and the fields whose values could not be used.

    Those have their defaults in `recipe`, as "table.field".
    """

    recipe: Recipe
    errors: list[str]
    unused: set[str]


def load_recipe(path: str | Path) -> Recipe:
    """The recipe in the TOML file `path`: a table per dataclass; fields left out keep their defaults.

    ValueError naming the file, and the key, the type or the value that is wrong: all of them, one a line.
    """
    recipe, errors, _ = read_recipe(path)
    if errors:
        several = len(errors) > 1
        raise ValueError(f"recipe {path}: " + "".join(f"\n  {e}" if several else e for e in errors))
    return recipe


def read_recipe(path: str | Path) -> Reading:
    """What can be read of the recipe in the TOML file `path`, and what is wrong with the rest.

    ValueError where there is no such file, or it is not TOML.
    """
    try:
        with open(path, "rb") as file:
            content = tomllib.load(file)
    except OSError as error:
        raise ValueError(f"recipe {path}: cannot be read ({error.strerror})") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"recipe {path}: not TOML: {error}") from None
    errors: list[str] = []
    unused: set[str] = set()
    return Reading(_build(Recipe, content, "", errors, unused), errors, unused)


def _split(argv: Sequence[str]) -> tuple[str | None, list[str]]:
    """The file of `--recipe`, and the other arguments with short names written out."""
    path, options, rest = None, [], iter(argv)
    for argument in rest:
        name, equals, value = argument.partition("=")
        if name == "--recipe":
            path = value if equals else next(rest, None)
            if not path:
                raise ValueError("fastmp train: --recipe needs a file")
        else:
            options.append(SHORT.get(name, name) + equals + value)
    return path, _with_profiled_steps(options)


def _with_profiled_steps(options: list[str]) -> list[str]:
    """`--train.steps 10:13` as what it stands for, `--train.profile-steps 10 13`."""
    written: list[str] = []
    rest = iter(options)
    for option in rest:
        name, equals, value = option.partition("=")
        if name != "--train.steps":
            written.append(option)
            continue
        value = value if equals else next(rest, "")
        first, colon, last = value.partition(":")
        if not colon:
            written += [name, value] if value else [name]
        elif first.isdecimal() and last.isdecimal():
            written += ["--train.profile-steps", first, last]
        else:
            raise ValueError(f"fastmp train: --steps FIRST:LAST needs two numbers, got {value!r}")
    return written


def _build(cls: type, content: dict[str, Any], table: str, errors: list[str], unused: set[str]) -> Any:
    """An object of `cls` from a table; what is wrong goes to `errors`, fields left out for it to `unused`."""
    hints = typing.get_type_hints(cls)
    known = [field.name for field in fields(cls)]
    values: dict[str, Any] = {}
    unclear: set[str] = set()
    for key, value in content.items():
        if key not in known:
            where = f"in [{table}]" if table else "table"
            errors.append(f"unknown key {key!r} {where}{_suggestion(key, known)}")
            unclear.update(_meant(key, known))
            continue
        hint, name = _without_none(hints[key]), f"{table}.{key}" if table else key
        if is_dataclass(hint) and isinstance(value, dict):
            values[key] = _build(hint, value, name, errors, unused)
            continue
        try:
            if is_dataclass(hint):
                raise ValueError(f"[{name}] must be a table, got {value!r}")
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
        wrong |= more or set(values)
    unused.update(f"{table}.{key}" for key in wrong)
    return made


def _without_none(hint: Any) -> Any:
    """X of X | None."""
    if isinstance(hint, types.UnionType):
        return next(option for option in hint.__args__ if option is not types.NoneType)
    return hint


def _convert(value: Any, hint: Any, name: str) -> Any:
    """`value`, if it is of type `hint` (int, float, str, bool, tuple of these)."""
    if typing.get_origin(hint) is tuple:
        items = typing.get_args(hint)
        if not isinstance(value, list) or (items[-1] is not ... and len(value) != len(items)):
            size = "" if items[-1] is ... else f" of {len(items)} values"
            raise ValueError(f"{name} must be a list{size}, got {value!r}")
        if items[-1] is ...:
            items = items[:1] * len(value)
        return tuple(_convert(v, item, name) for v, item in zip(value, items))
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:
        raise ValueError(f"{name} must be of type {hint.__name__}, got {value!r}")
    return value


def _suggestion(key: str, known: list[str]) -> str:
    close = _meant(key, known)
    return f"; did you mean {close[0]!r}?" if close else f"; there are {', '.join(known)}"


def _meant(key: str, known: list[str]) -> list[str]:
    """The known key that is most like `key`, if one is."""
    return difflib.get_close_matches(key, known, n=1)
