"""Command dispatch and a parser that suggests close matches. Standard library only."""

from __future__ import annotations

import argparse
import difflib
import shlex
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from itertools import pairwise
from typing import Any, NoReturn

from fastmp.config.console import to_stderr

TOML = "*.toml"  # stands for a recipe in the place of a command


def run_command(
    prog: str,
    commands: Mapping[str, tuple[str, str]],
    arguments: Sequence[str],
    synonyms: Mapping[str, str] | None = None,
) -> int:
    """Import the module of the command `arguments[0]` and call its `main` with the rest; return the exit
    status.

    `commands` maps a name to its module, which is imported only then, and to a summary. The list of commands
    is printed on request (status 0), and on stderr where the name is missing or resembles none (status 2).
    A name that resembles one is a line with the user's own command, mended. `synonyms` maps names of other
    programs to commands (words between spaces), and `TOML` to the command that takes a recipe.
    """
    width = max(map(len, commands))
    listing = [f"  {name:<{width}}  {summary}" for name, (_, summary) in commands.items()]
    usage = "\n".join([f"usage: {prog} COMMAND [options]    ({prog} COMMAND --help)", "", *listing])
    name, *rest = arguments or [""]
    if name in ("-h", "--help"):
        print(usage)
        return 0
    if name not in commands:
        said = f"there is no command {name!r}" if name else "a command is missing"
        if mended := _mended(name, commands, synonyms or {}):
            to_stderr(
                f"{prog}: {said}; did you mean: {shlex.join([*prog.split(), *mended, *rest])}",
            )
            return 2
        if name.startswith("-"):
            said = f"a command is missing before {name}"
        to_stderr(f"{prog}: {said}\n\n{usage}")
        return 2
    status: int = import_module(commands[name][0]).main(rest)
    return status


def _mended(name: str, commands: Mapping[str, Any], synonyms: Mapping[str, str]) -> list[str]:
    """Return the words to put in the place of an unknown command `name`; none if it resembles nothing."""
    if name.endswith(".toml"):
        return [synonyms[TOML], name] if TOML in synonyms else []
    if name in synonyms:
        return synonyms[name].split()
    return difflib.get_close_matches(name, commands, n=1)


def exit_status(prog: str, work: Callable[[], int | None]) -> int:
    """Return the status of `work`; 2 after printing its ValueError or OSError in one line on stderr."""
    try:
        return work() or 0
    except BrokenPipeError:  # handled by `fastmp.apps.cli`
        raise
    except (ValueError, OSError) as error:
        to_stderr(f"{prog}: {error}")
        return 2


def number(kind: type[int] | type[float], least: int) -> Callable[[str], float]:
    """Return a parser of option values: a number of this type, `least` or more and below 2^62."""

    def read(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = -1
        if not least <= value < 1 << 62:
            what = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"must be {what}, {least} or more, got {text!r}")
        return value

    return read


def did_you_mean(name: str, known: Mapping[str, Any] | Sequence[str]) -> str:
    """Return "; did you mean X?" with the known names closest to an unknown `name`, or ""."""
    ends = [each for each in known if each.endswith((f".{name.lstrip('-')}", f"/{name}.toml"))]
    close = ends or difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {' or '.join(close)}?" if close else ""


class _Formatter(argparse.HelpFormatter):
    """Help formatter that prints the value of an option once, after all of its names."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        """Wrap paragraphs; the lines of one that begins with a space are left as they are."""
        fill = super()._fill_text
        return "\n\n".join(
            paragraph if paragraph.startswith(" ") else fill(paragraph, width, indent)
            for paragraph in text.split("\n\n")
        )

    def _split_lines(self, text: str, width: int) -> list[str]:
        """Wrap the help of an option, and leave the names of options whole."""
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        value = self._format_args(action, self._get_default_metavar_for_optional(action))
        return f"{', '.join(action.option_strings)} {value}"


class _HelpAll(argparse.Action):
    """`--help-all`: print the help of every option."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        parser.first = {}
        parser.print_help()
        parser.exit()


class Parser(argparse.ArgumentParser):
    """argparse parser with one-line errors and suggestions; `--a_b` is accepted for `--a-b`.

    synonyms: what to type for an option of another program, {"--train-iters": "--steps"}, or why nothing.
    """

    def __init__(self, *, synonyms: Mapping[str, str] | None = None, **options: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=_Formatter, **options)
        self.synonyms = synonyms or {}
        self.first: Mapping[str, Sequence[str]] = {}

    def show_first(self, first: Mapping[str, Sequence[str]]) -> None:
        """Limit --help to the options so far and those with the destinations `first`, by title.

        --help-all, which this adds, prints every option.
        """
        self.first = first
        text = "show every option, by the table of the recipe it belongs to"
        self.add_argument("--help-all", action=_HelpAll, nargs=0, help=text)

    def format_help(self) -> str:
        if not self.first:
            return super().format_help()
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        formatter.add_text(self.description)
        by_dest = {action.dest: action for action in reversed(self._actions)}
        own = [action for action in self._actions if "." not in action.dest]
        sections = {"arguments": own}
        sections |= {
            title: [by_dest[dest] for dest in dests if dest in by_dest] for title, dests in self.first.items()
        }
        for title, actions in sections.items():
            formatter.start_section(title)
            formatter.add_arguments(actions)
            formatter.end_section()
        formatter.add_text(self.epilog)
        return formatter.format_help()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        arguments = list(sys.argv[1:] if args is None else args)
        if self._subparsers is None:  # else the options are those of the command
            unknown = list(filter(None, map(self._unknown, arguments)))
            if len(unknown) == 1:
                self.error(f"there is no option {unknown[0]}")
            if unknown:
                self.error("\n  ".join(["there are no such options:", *unknown]))
            arguments = [self._normalized(argument) for argument in arguments]
            for name, value in pairwise(arguments):
                self._check_switch(name, value)
        return super().parse_known_args(arguments, namespace)

    def _unknown(self, argument: str) -> str:
        """Return "" for an option of this parser and for values, else its name and what to type instead."""
        name = argument.partition("=")[0].replace("_", "-")
        if not name.startswith("--") or name in ("--", *self._option_string_actions):
            return ""
        said = self.synonyms.get(name, "")
        if said:
            return f"{name}; did you mean {said}?" if said.startswith("--") else f"{name}: {said}"
        return name + (did_you_mean(name, self._option_string_actions) or f" ({self.prog} --help)")

    def _normalized(self, argument: str) -> str:
        """Return the argument with hyphens for underscores in the name of an option."""
        name, equals, value = argument.partition("=")
        if not name.startswith("--") or name == "--":
            return argument
        name = name.replace("_", "-")
        if equals:
            self._check_switch(name, value)
        return name + equals + value

    def _check_switch(self, name: str, value: str) -> None:
        """Raise SystemExit for `--switch true`: an option without a value."""
        action = self._option_string_actions.get(name)
        if action is None or action.nargs != 0 or value.lower() not in _ANSWERS:
            return
        off = next(
            (
                other.option_strings[0]
                for other in self._actions
                if other.dest == action.dest and other.const is False
            ),
            "",
        )
        disable = f"write {off} instead" if off else f"leave {name} out"
        meant = f"leave {value!r} out" if _ANSWERS[value.lower()] else disable
        self.error(f"{name} takes no value: {meant}")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Raise ArgumentError for a value that is not a choice, with the closest one and all of them."""
        if action.choices is not None and value not in action.choices:
            choices = [str(choice) for choice in action.choices]
            close = difflib.get_close_matches(str(value), choices, n=1, cutoff=0.7)
            meant = f"; did you mean {close[0]}?" if close else ""
            listed = ", ".join(map(repr, choices))
            raise argparse.ArgumentError(action, f"invalid choice: {value!r} (choose from {listed}){meant}")

    def print_help(self, file: Any = None) -> None:
        """Print the help to stdout; argparse's own method hides that it cannot be written."""
        print(self.format_help(), end="")

    def error(self, message: str) -> NoReturn:
        if "required" in message:
            message += f"; usage: {self.usage}" if self.usage else f" ({self.prog} --help)"
        to_stderr(f"{self.prog}: {message}")
        raise SystemExit(2)


_ANSWERS = {
    **dict.fromkeys(("true", "on", "yes", "1"), True),
    **dict.fromkeys(("false", "off", "no", "0"), False),
}
