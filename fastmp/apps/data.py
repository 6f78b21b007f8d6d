"""`fastmp data`: read the command line before numpy is imported."""

from __future__ import annotations

import argparse

from fastmp.config.command_line import Parser, exit_status
from fastmp.config.console import to_stdout
from fastmp.config.data_files import NGRAM


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands of `fastmp data`."""
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    make = commands.add_parser(
        "build",
        help="tokenize text files into token files",
        description="Tokenize text files into a directory of token files for --data.path. Each file is a "
        'document; of .jsonl files each line is one, in its field "text".\n\n'
        "  fastmp data build --input 'docs/**/*.md' --out data/docs --tokenizer bpe",
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
    make.add_argument(
        "--dedup-jaccard",
        type=float,
        metavar="J",
        help="drop near-duplicates: documents whose Jaccard similarity to an earlier one exceeds J, as 0.7",
    )
    make.add_argument(
        "--exclude",
        nargs="+",
        default=[],
        metavar="PATTERN",
        help="drop documents that share a tenth of their word 8-grams with these files [decontamination]",
    )
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

    share = commands.add_parser(
        "overlap",
        help="report the share of A's word n-grams found in B [contamination]",
        description="Report the share of A's word n-grams found in B [contamination].\n\n"
        "  fastmp data overlap data/test data/train",
    )
    share.add_argument("--ngram", type=int, default=NGRAM, metavar="N", help=f"words of an n-gram ({NGRAM})")
    share.add_argument(
        "--tokenizer", default="byte", metavar="PATH", help="tokenizer of Megatron-LM's files (byte)"
    )
    share.add_argument("--json", action="store_true", help="print the numbers, as JSON")
    share.add_argument(
        "a", metavar="A", help="file pattern, directory of token files, or prefix of Megatron's"
    )
    share.add_argument("b", metavar="B", help="the same; A is looked up in it")
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
    options = parser.parse_args(argv)
    from fastmp.apps.data_main import run  # imports numpy

    show = to_stdout if options.command == "build" else print
    return exit_status("fastmp data", lambda: show(run(options)))
