"""`fastmp data`: read the command line before numpy is imported."""

from __future__ import annotations

import argparse

from fastmp.config.command_line import Parser, exit_status
from fastmp.config.data_files import NGRAM


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands of `fastmp data`."""
    commands = parser.add_subparsers(dest="command", required=True)
    make = commands.add_parser("build", help="tokenize text files into token files")
    make.add_argument(
        "--input", nargs="+", required=True, metavar="PATTERN", help="'docs/**/*.md', or pydoc, stdlib"
    )
    make.add_argument("--out", required=True, metavar="DIR", help="directory to make")
    make.add_argument(
        "--overwrite", action="store_true", help="replace the token files in DIR, if there are any"
    )
    make.add_argument(
        "--tokenizer", default="byte", help="byte, bpe, a tokenizer.json, or the directory of one (byte)"
    )
    make.add_argument(
        "--end-of-text",
        metavar="TOKEN",
        help="the token between documents, where a model's files do not say it",
    )
    make.add_argument("--vocab-size", type=int, default=None, help="tokens that bpe learns (4096)")
    make.add_argument(
        "--validation-fraction", type=float, default=0.05, help="share of the bytes held out (0.05)"
    )
    make.add_argument(
        "--min-tokens", type=int, default=0, metavar="N", help="leave out documents with fewer tokens (0)"
    )
    make.add_argument(
        "--dedup-jaccard",
        type=float,
        metavar="J",
        help="leave out documents that resemble an earlier one more than that, as 0.7",
    )
    make.add_argument(
        "--exclude",
        nargs="+",
        default=[],
        metavar="PATTERN",
        help="leave out documents that share a tenth of their 8-grams of words with these files",
    )
    for name, summary in (
        ("stats", "describe the token files of a directory"),
        ("check", "verify all checksums, then stats"),
    ):
        commands.add_parser(name, help=summary).add_argument("dir", help="or the prefix of Megatron's files")

    share = commands.add_parser(
        "overlap", help="report the share of A's word n-grams found in B [contamination]"
    )
    share.add_argument("--ngram", type=int, default=NGRAM, metavar="N", help=f"words of an n-gram ({NGRAM})")
    share.add_argument("--tokenizer", default="byte", help="that of Megatron's files (byte)")
    share.add_argument("--json", action="store_true", help="print the numbers, as JSON")
    share.add_argument(
        "a", metavar="A", help="file pattern, directory of token files, or prefix of Megatron's"
    )
    share.add_argument("b", metavar="B", help="the same, of what A is looked up in")
    mix = commands.add_parser("blend", help="report the mixture of several sources, and the epochs of each")
    mix.add_argument("blend", nargs="+", metavar="'WEIGHT PATH'", help="as data.blend of a recipe has them")
    mix.add_argument("--tokens", type=float, metavar="N", help="tokens of the run (those of all sources)")
    mix.add_argument("--seq-len", type=int, default=4096, metavar="N", help="tokens of a sample (4096)")
    mix.add_argument("--tokenizer", default="byte", help="that of Megatron's files (byte)")


def main(argv: list[str] | None = None) -> int:
    """Run `fastmp data` with the arguments `argv`; return the exit status (2: one line on stderr)."""
    parser = Parser(prog="fastmp data", description="Turn text into token files.")
    add_arguments(parser)
    options = parser.parse_args(argv)
    from fastmp.apps.data_main import run  # imports numpy

    return exit_status("fastmp data", lambda: print(run(options)))
