"""`corpus`: the token files of `fastmp data build` without near-duplicates and pages of a test set.

Reads the command line before numpy is imported.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Sequence

from examples.megatron_paper.corpus import NGRAM
from fastmp.apps.data import add_build
from fastmp.config.command_line import Parser, exit_status
from fastmp.config.console import to_stdout

__all__ = ["main"]

PROG = "python -m examples.megatron_paper corpus"


def main(argv: Sequence[str] | None = None) -> int:
    """Run `corpus` with the arguments `argv`; return the exit status (2: one line on stderr)."""
    options = _parser().parse_args(list(argv or []))
    run, show = (_build, to_stdout) if options.command == "build" else (_overlap, print)
    return exit_status(PROG, lambda: show(run(options)))


def _parser() -> Parser:
    parser = Parser(prog=PROG, description="Clean a corpus, and measure its overlap with a test set.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    example = f"{PROG} build --input 'wiki/*.txt' --out data/wiki --dedup-jaccard 0.7"
    make = add_build(commands, example)
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
    summary = "report the share of A's word n-grams found in B [contamination]"
    text = f"{summary[0].upper()}{summary[1:]}.\n\n  {PROG} overlap data/test data/train"
    share = commands.add_parser("overlap", help=summary, description=text)
    share.add_argument("--ngram", type=int, default=NGRAM, metavar="N", help=f"words of an n-gram ({NGRAM})")
    share.add_argument(
        "--tokenizer", default="byte", metavar="PATH", help="tokenizer of Megatron-LM's files (byte)"
    )
    share.add_argument("--json", action="store_true", help="print the numbers, as JSON")
    text = "file pattern, directory of token files, or prefix of Megatron's"
    share.add_argument("a", metavar="A", help=text)
    share.add_argument("b", metavar="B", help="the same; A is looked up in it")
    return parser


def _build(options: Namespace) -> str:
    from examples.megatron_paper.corpus.hygiene import hygiene
    from fastmp.apps.data_main import build_report

    return build_report(options, hygiene(options.exclude, options.dedup_jaccard))


def _overlap(options: Namespace) -> str:
    from examples.megatron_paper.corpus.ngrams import overlap, texts_of

    if options.ngram < 1:
        raise ValueError(f"--ngram must be positive, got {options.ngram}")
    a, b = (texts_of(source, options.tokenizer) for source in (options.a, options.b))
    found = overlap(a, b, options.ngram)
    if options.json:
        return json.dumps(found.to_json())
    lines = [f"{options.ngram}-grams of {options.a} that occur in {options.b}"]
    for part, whole, what in (
        (found.ngrams_found, found.ngrams, "of all, each time it occurs"),
        (found.different_found, found.different, "of those that differ"),
        (found.documents_found, found.documents, "of the documents have one or more"),
    ):
        lines.append(f"  {part / max(1, whole):>8.3%} {what}: {part:,} of {whole:,}")
    return "\n".join(lines)
