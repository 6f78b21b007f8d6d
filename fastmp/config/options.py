"""Options: fields of frozen dataclasses that know their help and their choices, and check themselves.

Standard library only.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import Field, field, fields
from typing import Any

from fastmp.config.option_names import DTYPE_ALIASES
from fastmp.config.specs import Registry

__all__ = [
    "Checked",
    "ConfigError",
    "DTYPES",
    "Problem",
    "dtype_name",
    "duration_seconds",
    "help_of",
    "option",
    "unknown_choice",
]

DTYPES = ("auto", "float32", "bfloat16", "float16")  # of weights


def option(
    default: Any, text: str, choices: Collection[str] = (), aliases: Mapping[str, str] | None = None
) -> Any:
    """Return a dataclass field with a default, the help text of its option, and its choices.

    aliases: other names of choices, which the field takes and replaces.
    """
    return field(default=default, metadata={"help": text, "choices": choices, "aliases": aliases or {}})


def dtype_name(given: str) -> str:
    """Return the full name of a dtype: "bfloat16" for "bf16"."""
    return DTYPE_ALIASES.get(given, given)


def help_of(option: Field[Any]) -> str:
    """Return the help of an option, including descriptions of registered choices."""
    text, choices = option.metadata["help"], option.metadata["choices"]
    return f"{text}: {choices.help}" if isinstance(choices, Registry) else text


def unknown_choice(name: str, value: Any, choices: Collection[Any]) -> str:
    """Return the error message for a value of option `name` that is not one of its choices."""
    return f"{name} must be one of {', '.join(map(str, choices))}, got {value!r}"


Problem = tuple[str, str]  # names of the fields that it is about, separated by blanks, and a message


class ConfigError(ValueError):
    """Raised for wrong values of a configuration, with all its `problems`; a line of the message for each."""

    def __init__(self, name: str, problems: Sequence[Problem]) -> None:
        super().__init__("\n".join(f"{name}: {message}" for _, message in problems))
        self.problems = [(set(names.split()), f"{name}: {message}") for names, message in problems]


class Checked:
    """A configuration that raises ConfigError for wrong values when it is made."""

    def __post_init__(self) -> None:
        for each in fields(self):  # type: ignore[arg-type]  # every subclass is a dataclass
            if aliases := each.metadata.get("aliases"):
                value = getattr(self, each.name)
                object.__setattr__(self, each.name, aliases.get(value, value))
        if found := [*self._unknown(), *self._problems()]:
            raise ConfigError(type(self).__name__, found)

    def _unknown(self) -> Iterator[Problem]:
        for each in fields(self):  # type: ignore[arg-type]  # every subclass is a dataclass
            choices, value = each.metadata.get("choices"), getattr(self, each.name)
            if choices and value not in choices:
                yield each.name, unknown_choice(each.name, value, choices)

    def _problems(self) -> Iterator[Problem]:
        """Yield the errors of a configuration, each with its fields and values."""
        raise NotImplementedError

    def _wrong(self, name: str, expected: str) -> Problem:
        return name, f"{name} must be {expected}, got {getattr(self, name)!r}"

    def _not_positive(self, *names: str) -> Iterator[Problem]:
        for name in names:
            value = getattr(self, name)
            if value is not None and value <= 0:
                yield self._wrong(name, "positive")

    def _negative(self, *names: str) -> Iterator[Problem]:
        for name in names:
            value = getattr(self, name)
            if value < 0:
                yield name, f"{name} must not be negative, got {value}"


_FORMS = re.compile(r"(?:(\d+)-(\d+)(?::(\d+))?(?::(\d+))?|(?:(\d+):)?(\d+):(\d+)|(\d+))")


def duration_seconds(text: str) -> int:
    """Return the seconds of a length of time in one of the forms of Slurm's `--time`.

    These are "minutes", "minutes:seconds", "hours:minutes:seconds", "days-hours", "days-hours:minutes" and
    "days-hours:minutes:seconds" (https://slurm.schedmd.com/sbatch.html). ValueError for anything else.
    """
    found = _FORMS.fullmatch(text.strip())
    if found is None:
        raise ValueError(
            f"a length of time must be minutes, minutes:seconds, hours:minutes:seconds or "
            f"days-hours[:minutes[:seconds]], got {text!r}"
        )
    days, of_days, *rest, alone = (int(number or 0) for number in found.groups())
    minutes_of_days, seconds_of_days, hours, minutes, seconds = rest
    minutes += minutes_of_days + alone
    return ((days * 24 + of_days + hours) * 60 + minutes) * 60 + seconds_of_days + seconds
