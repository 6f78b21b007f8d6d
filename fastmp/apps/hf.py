"""`fastmp hf`: import transformers models as checkpoints and recipes, and export checkpoints.

torch is imported by the commands, after the arguments are read.
"""

from __future__ import annotations

import json
import os
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastmp.config import GPTConfig
from fastmp.config.command_line import Parser, exit_status
from fastmp.config.console import to_stdout
from fastmp.config.data_files import TOKENIZER_LIMIT
from fastmp.config.file_access import read_file, write_synced
from fastmp.config.recipe import model_from
from fastmp.training.checkpoint.chunks import TensorChunk, full_chunk

if TYPE_CHECKING:
    from fastmp.training.checkpoint.storage import CheckpointReader

__all__ = ["main", "recipe_text"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run `fastmp hf` with the arguments `argv`; return the exit status."""
    options = _parser().parse_args(argv)
    return exit_status("fastmp hf", lambda: options.run(options))


def _parser() -> Parser:
    parser = Parser(prog="fastmp hf", description="Import and export weights of transformers models.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    made = commands.add_parser(
        "import",
        help="convert a transformers model into a checkpoint and a recipe",
        description="Convert a transformers model into a checkpoint, which any parallel layout loads, and a "
        "recipe, which starts from it.\n\n  fastmp hf import Qwen3-0.6B --out runs/qwen3",
    )
    made.add_argument("path", metavar="DIR", help="a directory with config.json and safetensors files")
    made.add_argument("--out", metavar="DIR", help="new directory (DIR-fastmp)")
    made.add_argument(
        "--ignore",
        metavar="NAME",
        action="append",
        default=[],
        help="ignore this unknown key of config.json; may be repeated",
    )
    made.set_defaults(run=import_command)
    _add_verify(made)
    made = commands.add_parser(
        "export",
        help="convert a checkpoint into a transformers model",
        description="Convert a checkpoint of any parallel layout into a directory for from_pretrained."
        "\n\n  fastmp hf export runs/qwen3 qwen3-trained --like Qwen3-0.6B",
    )
    made.add_argument("path", metavar="CHECKPOINT", help="a checkpoint, or a run for its latest one")
    made.add_argument("out", metavar="DIR", help="new directory")
    made.add_argument(
        "--like", metavar="DIR", help="copy tokenizer and generation settings of this transformers model"
    )
    made.set_defaults(run=export_command)
    _add_verify(made)
    return parser


def _add_verify(parser: Any) -> None:
    parser.add_argument(
        "--no-verify",
        dest="verify",
        action="store_false",
        help="skip comparing logits with transformers' model on a few tokens",
    )


def import_command(options: Namespace) -> None:
    """Verify a transformers model, then convert it; nothing is written if that fails."""
    from fastmp.hf.logit_check import verify
    from fastmp.hf.weight_io import FILE_BYTES, TransformersReader
    from fastmp.training.checkpoint.reshard import write_again

    source = Path(options.path)
    out = (
        Path(options.out) if options.out else source.absolute().with_name(f"{source.absolute().name}-fastmp")
    )
    _check_new(out)
    reader = TransformersReader(source, ignored=options.ignore)
    if options.verify:
        to_stdout(verify(source, reader, reader.config, ignored=options.ignore))
    size = sum(each.bytes(full_chunk(each.shape)) for each in reader.manifest.tensors.values())
    checkpoint = write_again(reader, _chunks(reader), out, files=max(1, -(-size // FILE_BYTES)))
    write_synced(out / "recipe.toml", recipe_text(reader.config, source, checkpoint).encode())
    count = len(reader.manifest.tensors)
    to_stdout(f"{checkpoint}: {reader.model_type}, {count} tensors, {size / 2**30:.2f} GiB")
    to_stdout(f"to train on: fastmp train --recipe {out / 'recipe.toml'}")


def export_command(options: Namespace) -> None:
    """Verify the checksums of a checkpoint, then convert it."""
    from fastmp.hf.config_json import family_of
    from fastmp.hf.logit_check import verify
    from fastmp.hf.stored import CONFIG, read_config
    from fastmp.hf.weight_io import export_weights, json_bytes
    from fastmp.training.checkpoint.directory import checkpoint_at, whole_manifest
    from fastmp.training.checkpoint.storage import CheckpointReader
    from fastmp.training.checkpoint.tensor_files import verify as verify_files

    checkpoint, out = checkpoint_at(options.path), Path(options.out)
    _check_new(out)
    manifest = whole_manifest(checkpoint)
    try:
        config = model_from(manifest.description)
        family_of(config)
    except ValueError as error:
        raise ValueError(f"{checkpoint}: {error}") from None
    files, tokens = _tokenizer_files(Path(options.like)) if options.like else ({}, {})
    verify_files(checkpoint, manifest, manifest.files)
    reader = CheckpointReader(checkpoint, manifest)

    def check(directory: Path) -> None:
        for name, content in files.items():
            write_synced(directory / name, content)
        write_synced(directory / CONFIG, json_bytes(read_config(directory) | tokens))
        if options.verify:
            to_stdout(verify(directory, reader, config))

    to_stdout(f"{export_weights(checkpoint, config, out, check=check)}")


# files of a model that generation needs besides weights
_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "tokenizer.model"),
    *("chat_template.jinja", "generation_config.json"),
)
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")  # of config.json


def _tokenizer_files(source: Path) -> tuple[dict[str, bytes], dict[str, Any]]:
    """Return a model's tokenizer and generation files by name, and the special tokens of its config.json."""
    from fastmp.hf.stored import is_transformers, read_config

    files = {
        name: read_file(source / name, TOKENIZER_LIMIT)
        for name in _TOKENIZER_FILES
        if (source / name).exists()
    }
    if not files:
        raise ValueError(f"{source} has no tokenizer and no generation configuration; leave --like out")
    content = read_config(source) if is_transformers(source) else {}
    return files, {key: content[key] for key in _TOKENS if key in content}


def _check_new(out: Path) -> None:
    if os.path.lexists(out):
        raise ValueError(f"{out} exists already; name a new directory")


def _chunks(reader: CheckpointReader) -> Iterator[tuple[str, TensorChunk]]:
    """Yield the chunks to write: full tensors, and those of experts one expert at a time."""
    for name, tensor in reader.manifest.tensors.items():
        if ".experts." not in name:
            yield name, full_chunk(tensor.shape)
            continue
        for e in range(tensor.shape[0]):
            yield name, TensorChunk((e, *(0,) * (len(tensor.shape) - 1)), (1, *tensor.shape[1:]))


def recipe_text(config: GPTConfig, source: Path, checkpoint: Path) -> str:
    """Return a recipe in TOML that trains the model from the weights in `checkpoint`."""
    tables: dict[str, Mapping[str, Any]] = {"model": _given(config)}
    for name in ("moe", "rope_scaling", "latent", "bert"):
        if getattr(config, name) is not None:
            tables[f"model.{name}"] = _given(getattr(config, name))
    if (source / "tokenizer.json").is_file():
        tables["data"] = {"tokenizer": str((source / "tokenizer.json").absolute())}
    if config.bert is not None:
        tables["data.masked_lm"] = {}
    tables["checkpoint"] = {"init_from": str(checkpoint.absolute())}
    lines = [f"# {source.absolute().name}, converted by fastmp hf import"]
    for table, values in tables.items():
        lines += ["", f"[{table}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items())]
    return "\n".join(lines) + "\n"


def _given(config: Any) -> dict[str, Any]:
    """Return the values of a table that differ from the defaults."""
    values = asdict(config)
    return {
        each.name: list(values[each.name]) if isinstance(values[each.name], tuple) else values[each.name]
        for each in fields(config)
        if values[each.name] != each.default and not isinstance(values[each.name], dict)
    }
