"""The subcommands of `fastmp data`: build token files, describe and check them."""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

from fastmp.config import DataConfig
from fastmp.config.data_files import is_megatron
from fastmp.training.data.blend import BlendedDataset, open_dataset
from fastmp.training.data.corpus import Select, build
from fastmp.training.data.megatron import open_files
from fastmp.training.data.progress import ProgressLine
from fastmp.training.data.tokenfile import open_split, open_tokenizer, read_index, verify


def run(options: argparse.Namespace) -> str:
    """Run the subcommand of the parsed `options`; return the text to print."""
    if options.command == "build":
        return build_report(options)
    if options.command == "blend":
        return _blend_report(options)
    return _report(Path(options.dir), check=options.command == "check")


def build_report(options: argparse.Namespace, select: Select | None = None) -> str:
    """Build the token files of `options` from the documents of `select`; return their description."""
    progress = ProgressLine(sys.stderr)
    try:
        built = build(
            options.input,
            options.out,
            tokenizer=options.tokenizer,
            vocab_size=options.vocab_size,
            end_of_text=options.end_of_text,
            validation_fraction=options.validation_fraction,
            min_tokens=options.min_tokens,
            select=select,
            overwrite=options.overwrite,
            progress=progress,
        )
    finally:
        progress.end()
    return _report(built, check=False)


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
