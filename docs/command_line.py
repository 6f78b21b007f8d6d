"""Write docs/reference/command-line.md from the parsers of the `fastmp` commands."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reference" / "command-line.md"
sys.path.insert(0, str(ROOT))

from fastmp.apps import cli  # noqa: E402
from fastmp.config import Recipe  # noqa: E402
from fastmp.config.command_line import Parser  # noqa: E402
from fastmp.config.recipe import OPTIONS_NOTE  # noqa: E402

HEAD = """# Command line

<!-- Written by `python docs/command_line.py` from the parsers of the commands. Change those instead. -->

Usage, an example and the options of every `fastmp` command. `fastmp COMMAND --help` prints the same on your
terminal.

- Defaults are in parentheses, usual names in square brackets.
- Underscores work as well: `--max_new_tokens` is `--max-new-tokens`.
- The options of `train`, which several commands take too, are on [Configuration](configuration.md).
- The exit status is 0 for success, 1 for a negative result (a damaged checkpoint, an inaccurate op), 2 for
  invalid arguments or unreadable files, and 130 after Ctrl-C.
"""
GUIDES = {  # the page that explains a command
    "train": "train",
    "generate": "generate",
    "eval": "evaluate",
    "launch": "many-machines",
    "data": "data",
    "warm": "troubleshooting",
    "checkpoint": "checkpoints",
    "hf": "transformers",
    "plan": "planning",
    "trace": "profiling",
    "hang": "faults",
    "verify": "how-to/verify-parallel-code",
    "doctor": "install",
}
NOT_RUN = "<!-- not run: needs files that this page does not make; tests/test_site.py parses it -->\n"
RUNS = ("fastmp plan", "fastmp data build", "fastmp data stats", "fastmp data check")


class _Found(Exception):
    """Carries the parser of a command that was asked for its help."""


def parsers(
    commands: dict[str, tuple[str, str]], prog: str = "fastmp"
) -> Iterator[tuple[str, str, Parser | None]]:
    """Yield (command, summary, parser) of all commands; parser: None for a mere group of commands."""
    for name, (module, summary) in commands.items():
        command, found = f"{prog} {name}", import_module(module)
        if hasattr(found, "COMMANDS"):
            yield command, summary, None
            yield from parsers(found.COMMANDS, command)
            continue
        parser = _parser_of(found.main)
        yield command, summary, parser
        for subparsers in (each for each in parser._actions if isinstance(each, argparse._SubParsersAction)):
            summaries = {choice.dest: choice.help for choice in subparsers._choices_actions}
            for sub, made in subparsers.choices.items():
                yield f"{command} {sub}", summaries[sub] or "", made


def _parser_of(main: object) -> Parser:
    """Return the parser that `main` makes, without running the command."""

    def print_help(self: Parser, file: object = None) -> None:
        raise _Found(self)

    with mock.patch.object(Parser, "print_help", print_help):
        try:
            main(["--help"])  # type: ignore[operator]
        except _Found as found:
            return found.args[0]  # type: ignore[no-any-return]
    raise AssertionError(f"{main} prints no help")


def examples(parser: Parser) -> list[str]:
    """Return the commands in a parser's description."""
    return re.findall(r"^  (fastmp .*)", parser.description or "", re.MULTILINE)


def own_options(parser: Parser) -> list[argparse.Action]:
    """Return the options of a command that configuration.md doesn't list."""
    listed = {field.name for field in fields(Recipe)}
    return [
        action
        for action in parser._actions
        if action.help != argparse.SUPPRESS
        and not isinstance(action, (argparse._HelpAction, argparse._SubParsersAction))
        and action.dest != "help_all"
        and not ("." in action.dest and action.dest.partition(".")[0] in listed)
    ]


def _invocation(parser: Parser, action: argparse.Action) -> str:
    """Return the names and the value of an option, or the name of an argument."""
    formatter = parser._get_formatter()
    if not action.option_strings:
        return f"`{action.metavar or action.dest}`"
    names = [f"`{name}`" for name in action.option_strings]
    if action.nargs != 0 and action.choices is None:
        default = formatter._get_default_metavar_for_optional(action)
        names[-1] = f"`{action.option_strings[-1]} {formatter._format_args(action, default)}`"
    return ", ".join(names)


def _meaning(parser: Parser, action: argparse.Action) -> str:
    text = parser._get_formatter()._expand_help(action) if action.help else ""
    if action.choices and not all(re.search(rf"\b{each}\b", text) for each in action.choices):
        text += ". One of " + ", ".join(f"`{each}`" for each in action.choices)
    return text.replace("|", "\\|")


def _usage(command: str, parser: Parser) -> str:
    """Return the usage: arguments, required options, [options]."""
    if parser.usage:
        return parser.usage
    parts, optional = [command], False
    for action in parser._actions:
        formatter = parser._get_formatter()
        if isinstance(action, argparse._SubParsersAction):
            parts.append(str(action.metavar))
        elif not action.option_strings:
            parts.append(formatter._format_args(action, action.dest))
        elif action.required:
            default = formatter._get_default_metavar_for_optional(action)
            parts.append(f"{action.option_strings[-1]} {formatter._format_args(action, default)}")
        else:
            optional |= not isinstance(action, argparse._HelpAction)
    for group in parser._mutually_exclusive_groups:
        if group.required:
            choices = [f"{each.option_strings[-1]} {each.metavar}" for each in group._group_actions]
            parts.append(f"({' | '.join(choices)})")
    return " ".join([*parts, *(["[options]"] if optional else [])])


def _table(parser: Parser, seen: dict[str, str], command: str) -> list[str]:
    """Return the table of a command's options, without most of those that a sibling has shown.

    seen: rows of the siblings so far, and the first command with each row.
    """
    rows = [f"| {_invocation(parser, each)} | {_meaning(parser, each)} |" for each in own_options(parser)]
    again = [row for row in rows if row in seen]
    note = []
    if len(again) > 8:
        other, first = seen[again[0]], again[0].split("|")[1].strip()
        rows = [row for row in rows if row not in again]
        note = [f"The other options are those of `{other}`, from {first} on."]
    for row in rows:
        seen.setdefault(row, command)
    return ["\n".join(["| option | meaning |\n|---|---|", *rows]), *note] if rows else note


def _section(command: str, summary: str, parser: Parser | None, seen: dict[str, str]) -> str:
    """Return the section of a command."""
    words = command.split()[1:]
    parts = [f"{'#' * (len(words) + 1)} {command}"]
    if parser is None or not parser.description:
        parts.append(f"{summary[0].upper()}{summary[1:]}.")
    else:
        text = parser.description.replace(OPTIONS_NOTE, "").partition("\n\n")[0]
        parts.append(" ".join(re.sub(r"(fastmp launch -n N \w+ \.\.\.)", r"`\1`", text).split()))
    if len(words) == 1:
        guide = GUIDES[words[0]]
        title = re.search(r"^# (.*)", (ROOT / "docs" / f"{guide}.md").read_text(), re.MULTILINE)
        assert title is not None
        parts[-1] += f" Guide: [{title[1]}](../{guide}.md)."
    if parser is None:
        return "\n\n".join(parts)
    parts.append(f"```text\n{_usage(command, parser)}\n```")
    if shown := examples(parser):
        note = "" if all(example.startswith(RUNS) for example in shown) else NOT_RUN
        parts.append(f"{note}```sh\n" + "\n".join(shown) + "\n```")
    parts += _table(parser, seen, command)
    if any("." in action.dest for action in parser._actions):
        parts.append(f"`{command}` also takes the options of a recipe: [Configuration](configuration.md).")
    if parser.epilog:
        parts.append(parser.epilog)
    return "\n\n".join(parts)


def page() -> str:
    """Return the whole page."""
    table = [f"| [`fastmp {name}`](#fastmp-{name}) | {text} |" for name, (_, text) in cli.COMMANDS.items()]
    seen: dict[str, dict[str, str]] = {}  # of each command and its subcommands
    sections = [_section(*each, seen.setdefault(each[0].split()[1], {})) for each in parsers(cli.COMMANDS)]
    return "\n\n".join([f"{HEAD}\n| command | purpose |\n|---|---|\n" + "\n".join(table), *sections]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
