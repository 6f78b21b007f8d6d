"""Command dispatch and a parser that suggests close matches. Standard library only."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, NoReturn


def run_command(prog: str, commands: Mapping[str, tuple[str, str]], arguments: Sequence[str]) -> int:
    """Import the module of the command `arguments[0]` and call its `main` with the rest; return the exit
    status.

    `commands` maps a name to its module, which is imported only then, and to a summary. The list of commands
    is printed on request (status 0), and on stderr where the name is wrong or missing (status 2).
    """
    width = max(map(len, commands))
    listing = [f"  {name:<{width}}  {summary}" for name, (_, summary) in commands.items()]
    usage = "\n".join([f"usage: {prog} COMMAND [options]    ({prog} COMMAND --help)", "", *listing])
    name, *rest = arguments or [""]
    if name in ("-h", "--help"):
        print(usage)
        return 0
    if name not in commands:
        said = (
            f"there is no command {name!r}{did_you_mean(name, commands)}" if name else "a command is missing"
        )
        print(f"{prog}: {said}\n\n{usage}", file=sys.stderr)
        return 2
    status: int = import_module(commands[name][0]).main(rest)
    return status


def exit_status(prog: str, work: Callable[[], int | None]) -> int:
    """Return the status of `work`; 2 after printing its ValueError or OSError in one line on stderr."""
    try:
        return work() or 0
    except BrokenPipeError:  # handled by `fastmp.apps.cli`
        raise
    except (ValueError, OSError) as error:
        print(f"{prog}: {error}", file=sys.stderr)
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
    ends = [each for each in known if each.endswith("." + name.lstrip("-"))]
    close = ends or difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {' or '.join(close)}?" if close else ""


class _Formatter(argparse.HelpFormatter):
    """Help formatter that prints the value of an option once, after all of its names."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        value = self._format_args(action, self._get_default_metavar_for_optional(action))
        return f"{', '.join(action.option_strings)} {value}"


class Parser(argparse.ArgumentParser):
    """argparse parser with one-line errors and suggestions; `--a_b` is accepted for `--a-b`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=_Formatter, **options)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        arguments = list(sys.argv[1:] if args is None else args)
        if self._subparsers is None:  # else the options are those of the command
            arguments = [self._known(argument) for argument in arguments]
        return super().parse_known_args(arguments, namespace)

    def _known(self, argument: str) -> str:
        name, equals, value = argument.partition("=")
        if not name.startswith("--") or name == "--":
            return argument
        name = name.replace("_", "-")
        if name not in self._option_string_actions:
            self.error(f"there is no option {name}{did_you_mean(name, self._option_string_actions)}")
        return name + equals + value

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {message}", file=sys.stderr)
        raise SystemExit(2)
