"""The subcommands of `fastmp data`: build token files, describe and check them."""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path

from fastmp.config import DataConfig
from fastmp.config.data_files import is_megatron
from fastmp.training.data.blend import BlendedDataset, open_dataset
from fastmp.training.data.corpus import build
from fastmp.training.data.megatron import open_files
from fastmp.training.data.ngrams import overlap
from fastmp.training.data.progress import ProgressLine
from fastmp.training.data.texts import texts_of
from fastmp.training.data.tokenfile import open_split, open_tokenizer, read_index, verify


def run(options: argparse.Namespace) -> str:
    """Run the subcommand of the parsed `options`; return the text to print."""
    if options.command == "build":
        return _report(_build(options), check=False)
    if options.command == "blend":
        return _blend_report(options)
    if options.command == "overlap":
        return _overlap_report(options)
    return _report(Path(options.dir), check=options.command == "check")


def _build(options: argparse.Namespace) -> Path:
    progress = ProgressLine(sys.stderr)
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
            ("num_empty", "are empty"),
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
