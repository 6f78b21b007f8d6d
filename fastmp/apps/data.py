"""`fastmp data`: turn text into token files, describe and check them."""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path

from fastmp.config import DataConfig
from fastmp.config.command_line import Parser
from fastmp.config.data_files import is_megatron
from fastmp.training.data.blend import BlendedDataset, open_dataset
from fastmp.training.data.corpus import build
from fastmp.training.data.megatron import open_files
from fastmp.training.data.ngrams import NGRAM, overlap
from fastmp.training.data.progress import ProgressLine
from fastmp.training.data.texts import texts_of
from fastmp.training.data.tokenfile import open_split, open_tokenizer, read_index, verify


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands of `fastmp data`."""
    commands = parser.add_subparsers(dest="command", required=True)
    make = commands.add_parser("build", help="turn text files into token files")
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
        ("stats", "what a directory holds"),
        ("check", "compare all checksums, then stats"),
    ):
        commands.add_parser(name, help=summary).add_argument("dir", help="or the prefix of Megatron's files")

    share = commands.add_parser("overlap", help="the share of A's n-grams of words that occur in B")
    share.add_argument("--ngram", type=int, default=NGRAM, metavar="N", help=f"words of an n-gram ({NGRAM})")
    share.add_argument("--tokenizer", default="byte", help="that of Megatron's files (byte)")
    share.add_argument("--json", action="store_true", help="print the numbers, as JSON")
    share.add_argument(
        "a", metavar="A", help="file pattern, directory of token files, or prefix of Megatron's"
    )
    share.add_argument("b", metavar="B", help="the same, of what A is looked up in")
    mix = commands.add_parser(
        "blend", help="how samples of several sources alternate, and how often each is read"
    )
    mix.add_argument("blend", nargs="+", metavar="'WEIGHT PATH'", help="as data.blend of a recipe has them")
    mix.add_argument("--tokens", type=float, metavar="N", help="tokens of the run (those of all sources)")
    mix.add_argument("--seq-len", type=int, default=4096, metavar="N", help="tokens of a sample (4096)")
    mix.add_argument("--tokenizer", default="byte", help="that of Megatron's files (byte)")


def main(argv: list[str] | None = None) -> int:
    """Run `fastmp data` with the arguments `argv`; return the exit status (2: one line on stderr)."""
    parser = Parser(prog="fastmp data", description="Turn text into token files.")
    add_arguments(parser)
    options = parser.parse_args(argv)
    try:
        if options.command == "build":
            print(_report(_build(options), check=False))
        elif options.command == "blend":
            print(_blend_report(options))
        elif options.command == "overlap":
            print(_overlap_report(options))
        else:
            print(_report(Path(options.dir), check=options.command == "check"))
    except BrokenPipeError:  # who reads has seen enough, which `fastmp.apps.cli` knows
        raise
    except (ValueError, OSError) as error:
        print(f"fastmp data: {error}", file=sys.stderr)
        return 2
    return 0


def _build(options: argparse.Namespace) -> Path:
    progress = ProgressLine()
    try:
        return build(
            options.input,
            options.out,
            tokenizer=options.tokenizer,
            vocab_size=options.vocab_size,
            end_of_text=options.end_of_text,
            validation_fraction=options.validation_fraction,
            min_tokens=options.min_tokens,
            dedup_jaccard=options.dedup_jaccard,
            exclude=options.exclude,
            overwrite=options.overwrite,
            progress=progress,
        )
    finally:
        progress.end()


def _report(directory: Path, *, check: bool) -> str:
    if is_megatron(directory):
        return _megatron_report(directory, check=check)
    index = read_index(directory)
    open_tokenizer(directory, index)
    lines = [f"{directory}: {index.tokenizer} tokenizer, {index.vocab_size} tokens, {index.dtype}"]
    for name in index.splits:
        split = open_split(directory, index, name)
        if check:
            verify(split)
        info = split.info
        lines.append(
            f"  {name:<10} {info.num_documents:,} documents, {info.num_bytes:,} bytes, "
            f"{info.num_tokens:,} tokens, {info.bytes_per_token:.2f} bytes/token, "
            f"unigram entropy {info.unigram_entropy:.3f} nats/byte"
        )
        if info.num_changed:
            lines.append(
                f"  {'':<10} the tokenizer is not lossless: {info.num_changed:,} of these documents do not "
                "come back byte for byte"
            )
    left_out = [
        f"{number:,} {why}"
        for name, why in (
            ("num_excluded", "overlap excluded files"),
            ("num_near_duplicates", "resemble an earlier one"),
            ("num_short", "have too few tokens"),
        )
        if (number := index.source.get(name))
    ]
    if left_out:
        lines.append(f"  left out   {', '.join(left_out)}")
    return "\n".join(lines + (["  all checksums match"] if check else []))


def _megatron_report(prefix: Path, *, check: bool) -> str:
    files = open_files(prefix)
    largest = f", ids up to {files.largest_id()}" if check else ""
    return (
        f"{prefix}: a corpus of Megatron-LM, {files.tokens.dtype}\n  {files.num_documents:,} documents, "
        f"{len(files.offsets):,} sequences, {files.tokens.size:,} tokens{largest}"
    )


def _blend_report(options: argparse.Namespace) -> str:
    if options.tokens is not None and not 0 < options.tokens < math.inf:
        raise ValueError(f"--tokens must be a positive number, got {options.tokens}")
    config = DataConfig(
        blend=tuple(options.blend), seq_len=options.seq_len, micro_batch_size=1, tokenizer=options.tokenizer
    )
    data = open_dataset(config, cache_dir="")
    assert isinstance(data, BlendedDataset)
    shares, period = data.blend.shares, data.blend.period
    sizes = [source.train.info.num_tokens for source in data.sources]
    tokens = sum(sizes) if options.tokens is None else options.tokens
    lines = [f"{period:,} samples are a period; {tokens:,.0f} tokens read"]
    lines += [
        f"  {name}: {share:,} samples of a period, {share / period:.4%}; {size:,} tokens, "
        f"each {tokens * share / period / size:.3g} times"
        for name, share, size in zip(data.names, shares, sizes)
    ]
    return "\n".join(lines)


def _overlap_report(options: argparse.Namespace) -> str:
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
