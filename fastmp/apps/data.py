"""`fastmp data`: read the command line before numpy is imported."""

from __future__ import annotations

import argparse
import shlex
import sys

from fastmp.config.command_line import Parser, exit_status
from fastmp.config.console import to_stdout

PAPER = ("overlap", "--dedup-jaccard", "--exclude")  # a command and options of examples.megatron_paper


def add_build(commands: argparse._SubParsersAction[Parser], example: str) -> Parser:
    """Add the command `build`, whose help shows `example`; return its parser."""
    make = commands.add_parser(
        "build",
        help="tokenize text files into token files",
        description="Tokenize text files into a directory of token files for --data.path. Each file is a "
        f'document; of .jsonl files each line is one, in its field "text".\n\n  {example}',
    )
    make.add_argument(
        "--input", nargs="+", required=True, metavar="PATTERN", help="file patterns, or pydoc or stdlib"
    )
    make.add_argument("--out", required=True, metavar="DIR", help="new directory")
    make.add_argument(
        "--overwrite", action="store_true", help="replace the token files in DIR, if there are any"
    )
    make.add_argument(
        "--tokenizer",
        default="byte",
        metavar="PATH",
        help="byte, bpe, or a tokenizer.json (byte)",
    )
    make.add_argument(
        "--end-of-text",
        metavar="TOKEN",
        help="end-of-text token, if the files of the tokenizer do not name it",
    )
    make.add_argument("--vocab-size", type=int, metavar="N", help="vocabulary size of bpe (4096)")
    make.add_argument(
        "--validation-fraction", type=float, default=0.05, metavar="X", help="share of bytes held out (0.05)"
    )
    make.add_argument(
        "--min-tokens", type=int, default=0, metavar="N", help="drop documents with fewer tokens (0)"
    )
    return make


def add_arguments(parser: Parser) -> None:
    """Add the subcommands of `fastmp data`."""
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    add_build(commands, "fastmp data build --input 'docs/**/*.md' --out data/docs --tokenizer bpe")
    for name, summary, sentence in (
        (
            "stats",
            "describe the token files of a directory",
            "Print tokenizer, documents, tokens and entropy of token files.",
        ),
        (
            "check",
            "verify all checksums, then stats",
            "Verify all checksums, then print what `fastmp data stats` prints.",
        ),
    ):
        made = commands.add_parser(
            name, help=summary, description=f"{sentence}\n\n  fastmp data {name} data/docs"
        )
        made.add_argument(
            "dir", metavar="DIR", help="directory of token files, or the prefix of Megatron-LM's files"
        )
    mix = commands.add_parser(
        "blend",
        help="report the mixture of several sources, and the epochs of each",
        description="Report the mixture of several sources, and the epochs of each.\n\n"
        "  fastmp data blend '0.7 data/web' '0.3 data/books' --tokens 1e9",
    )
    mix.add_argument(
        "blend",
        nargs="+",
        metavar="'WEIGHT PATH'",
        help="a weight and the path of a source, as in --data.blend",
    )
    mix.add_argument("--tokens", type=float, metavar="N", help="tokens of the run (one epoch of all sources)")
    mix.add_argument("--seq-len", type=int, default=4096, metavar="N", help="tokens of a sample (4096)")
    mix.add_argument(
        "--tokenizer", default="byte", metavar="PATH", help="tokenizer of Megatron-LM's files (byte)"
    )


def main(argv: list[str] | None = None) -> int:
    """Run `fastmp data` with the arguments `argv`; return the exit status (2: one line on stderr)."""
    parser = Parser(prog="fastmp data", description="Turn text into token files.")
    add_arguments(parser)
    arguments = sys.argv[1:] if argv is None else argv
    given = [each.partition("=")[0].replace("_", "-") for each in arguments if each.startswith("--")]
    if moved := [each for each in (*arguments[:1], *given) if each in PAPER]:
        meant = f"python -m examples.megatron_paper corpus {shlex.join(arguments)}"
        kind = "option" if moved[0].startswith("--") else "command"
        parser.error(f"there is no {kind} {moved[0]}; did you mean: {meant}")
    options = parser.parse_args(arguments)
    from fastmp.apps.data_main import run  # imports numpy

    show = to_stdout if options.command == "build" else print
    return exit_status("fastmp data", lambda: show(run(options)))
