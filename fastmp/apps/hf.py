"""`fastmp hf`: models of transformers become checkpoints and recipes, and checkpoints such models."""

from __future__ import annotations

import json
import os
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from fastmp.config import GPTConfig
from fastmp.config.command_line import Parser
from fastmp.config.files import read_file, write_synced
from fastmp.config.recipe import model_from
from fastmp.hf.config_json import family_of
from fastmp.hf.stored import CONFIG, is_transformers, read_config
from fastmp.hf.verify import verify
from fastmp.hf.weights import FILE_BYTES, TransformersReader, export_weights, json_bytes
from fastmp.training.checkpoint.chunks import TensorChunk, full_chunk
from fastmp.training.checkpoint.directory import checkpoint_at, whole_manifest
from fastmp.training.checkpoint.files import verify as verify_files
from fastmp.training.checkpoint.reshard import write_again
from fastmp.training.checkpoint.storage import CheckpointReader
from fastmp.training.data.tokenize import TOKENIZER_LIMIT

__all__ = ["main", "recipe_text"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run `fastmp hf` with the arguments `argv`; returns the exit status."""
    options = _parser().parse_args(argv)
    try:
        options.run(options)
    except BrokenPipeError:  # who reads has seen enough, which `fastmp.apps.cli` knows
        raise
    except (ValueError, OSError) as error:
        print(f"fastmp hf: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> Parser:
    parser = Parser(prog="fastmp hf", description="Weights of transformers models in and out.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    made = commands.add_parser(
        "import",
        help="write the weights of a model as a checkpoint, and its configuration as a recipe",
        description="Write the weights of a transformers model as a checkpoint, which any layout loads, and "
        "its configuration as a recipe, which starts from them.",
    )
    made.add_argument("path", metavar="DIR", help="a directory with config.json and safetensors files")
    made.add_argument("--out", metavar="DIR", help="the new directory (DIR-fastmp)")
    made.add_argument(
        "--ignore", metavar="NAME", action="append", default=[], help="go on without this key of config.json"
    )
    made.set_defaults(run=import_command)
    _add_verify(made)
    made = commands.add_parser(
        "export",
        help="write the weights of a checkpoint of any layout for transformers",
        description="Write the weights of a checkpoint of any layout as a directory for from_pretrained.",
    )
    made.add_argument("path", metavar="CHECKPOINT", help="a checkpoint, or a run, whose latest one is meant")
    made.add_argument("out", metavar="DIR", help="the new directory")
    made.add_argument(
        "--like",
        metavar="DIR",
        help="a model of transformers whose tokenizer and generation settings go with it",
    )
    made.set_defaults(run=export_command)
    _add_verify(made)
    return parser


def _add_verify(parser: Any) -> None:
    parser.add_argument(
        "--no-verify",
        dest="verify",
        action="store_false",
        help="do not run both models on a few tokens to compare their logits",
    )


def import_command(options: Namespace) -> None:
    """Verify a model, then write it; nothing is written of one that cannot be read."""
    source = Path(options.path)
    out = (
        Path(options.out) if options.out else source.absolute().with_name(f"{source.absolute().name}-fastmp")
    )
    _check_new(out)
    reader = TransformersReader(source, ignored=options.ignore)
    if options.verify:
        print(verify(source, reader, reader.config))
    size = sum(each.bytes(full_chunk(each.shape)) for each in reader.manifest.tensors.values())
    checkpoint = write_again(reader, _pieces(reader), out, files=max(1, -(-size // FILE_BYTES)))
    write_synced(out / "recipe.toml", recipe_text(reader.config, source, checkpoint).encode())
    count = len(reader.manifest.tensors)
    print(f"{checkpoint}: {reader.model_type}, {count} tensors, {size / 2**30:.2f} GiB")
    print(f"to train on: fastmp train --recipe {out / 'recipe.toml'}")


def export_command(options: Namespace) -> None:
    """Write the weights of a checkpoint whose every byte is right."""
    checkpoint, out = checkpoint_at(options.path), Path(options.out)
    _check_new(out)
    manifest = whole_manifest(checkpoint)
    try:
        config = model_from(manifest.description)
        family_of(config)
    except ValueError as error:
        raise ValueError(f"{checkpoint}: {error}") from None
    files, tokens = _beside(Path(options.like)) if options.like else ({}, {})
    verify_files(checkpoint, manifest, manifest.files)
    reader = CheckpointReader(checkpoint, manifest)

    def check(directory: Path) -> None:
        for name, content in files.items():
            write_synced(directory / name, content)
        write_synced(directory / CONFIG, json_bytes(read_config(directory) | tokens))
        if options.verify:
            print(verify(directory, reader, config))

    print(export_weights(checkpoint, config, out, check=check))


# what generation needs beside weights, of those that a model may have
_BESIDE = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "tokenizer.model"),
    *("chat_template.jinja", "generation_config.json"),
)
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")  # of config.json


def _beside(source: Path) -> tuple[dict[str, bytes], dict[str, Any]]:
    """A model's tokenizer and generation settings: files by name, and what its config.json says of them."""
    files = {name: read_file(source / name, TOKENIZER_LIMIT) for name in _BESIDE if (source / name).exists()}
    if not files:
        raise ValueError(f"{source} has no tokenizer and no generation configuration")
    content = read_config(source) if is_transformers(source) else {}
    return files, {key: content[key] for key in _TOKENS if key in content}


def _check_new(out: Path) -> None:
    if os.path.lexists(out):
        raise ValueError(f"{out} exists already; name a new directory")


def _pieces(reader: CheckpointReader) -> Iterator[tuple[str, TensorChunk]]:
    """All tensors whole, but for those of experts, which are large: one expert at a time."""
    for name, tensor in reader.manifest.tensors.items():
        if ".experts." not in name:
            yield name, full_chunk(tensor.shape)
            continue
        for e in range(tensor.shape[0]):
            yield name, TensorChunk((e, *(0,) * (len(tensor.shape) - 1)), (1, *tensor.shape[1:]))


def recipe_text(config: GPTConfig, source: Path, checkpoint: Path) -> str:
    """A recipe that trains the model on, from the weights in `checkpoint`."""
    tables: dict[str, Mapping[str, Any]] = {"model": _given(config)}
    for name in ("moe", "rope_scaling", "bert"):
        if getattr(config, name) is not None:
            tables[f"model.{name}"] = _given(getattr(config, name))
    if (source / "tokenizer.json").is_file():
        tables["data"] = {"tokenizer": str((source / "tokenizer.json").absolute())}
    if config.bert is not None:
        tables["data.masked_lm"] = {}
    tables["checkpoint"] = {"init_from": str(checkpoint.absolute())}
    lines = [f"# {source.absolute().name}, as fastmp hf import has read it"]
    for table, values in tables.items():
        lines += ["", f"[{table}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items())]
    return "\n".join(lines) + "\n"


def _given(config: Any) -> dict[str, Any]:
    """The values of a table that are not the default ones."""
    values = asdict(config)
    return {
        each.name: list(values[each.name]) if isinstance(values[each.name], tuple) else values[each.name]
        for each in fields(config)
        if values[each.name] != each.default and not isinstance(values[each.name], dict)
    }
