"""Options: fields of frozen dataclasses that know their help and their choices, and check themselves.

Standard library only.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import Field, field, fields
from typing import Any

from fastmp.config.option_names import DTYPE_ALIASES
from fastmp.config.specs import Registry

__all__ = ["DTYPES", "Checked", "dtype_name", "help_of", "option", "unknown_choice"]

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


class Checked:
    """A configuration that raises ValueError for wrong values when it is made."""

    def __post_init__(self) -> None:
        for each in fields(self):  # type: ignore[arg-type]  # every subclass is a dataclass
            if aliases := each.metadata.get("aliases"):
                value = getattr(self, each.name)
                object.__setattr__(self, each.name, aliases.get(value, value))
        found = [f"{type(self).__name__}: {message}" for message in (*self._unknown(), *self._problems())]
        if found:
            raise ValueError("\n".join(found))

    def _unknown(self) -> Iterator[str]:
        for each in fields(self):  # type: ignore[arg-type]  # every subclass is a dataclass
            choices, value = each.metadata.get("choices"), getattr(self, each.name)
            if choices and value not in choices:
                yield unknown_choice(each.name, value, choices)

    def _problems(self) -> Iterator[str]:
        """Yield the errors of a configuration, each with its field and value."""
        raise NotImplementedError

    def _not_positive(self, *names: str) -> Iterator[str]:
        for name in names:
            value = getattr(self, name)
            if value is not None and value <= 0:
                yield f"{name} must be positive, got {value}"

    def _negative(self, *names: str) -> Iterator[str]:
        for name in names:
            value = getattr(self, name)
            if value < 0:
                yield f"{name} must not be negative, got {value}"
