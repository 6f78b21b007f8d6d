"""Loading of trained models and tokenizers from checkpoints, runs or transformers directories."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from fastmp.config import DataConfig, GPTConfig
from fastmp.config.data_files import is_megatron
from fastmp.config.file_access import read_json
from fastmp.config.recipe import load_recipe, model_from
from fastmp.distributed.collectives import group_rank, group_size
from fastmp.distributed.grid import RankGrid
from fastmp.distributed.groups import ParallelGroups
from fastmp.hf.stored import check_local, is_transformers
from fastmp.hf.weight_io import TransformersReader
from fastmp.nn.gpt import GPT
from fastmp.nn.language_model import StageSpec
from fastmp.nn.placement import Placement
from fastmp.nn.stages import GPTStage, layers_of_stages
from fastmp.training.checkpoint.collective_load import agree
from fastmp.training.checkpoint.directory import checkpoint_at, whole_manifest
from fastmp.training.checkpoint.format import Manifest
from fastmp.training.checkpoint.model_weights import load_weights
from fastmp.training.checkpoint.storage import CheckpointReader
from fastmp.training.checkpoint.tensor_files import verify
from fastmp.training.data.dataset import TokenDataset
from fastmp.training.data.tokenfile import open_tokenizer, read_index
from fastmp.training.data.tokenize import Tokenizer, load_tokenizer

__all__ = [
    *("eos_token_ids", "load_model", "make_groups", "model_tokenizer", "open_either"),
    *("open_reader", "open_weights", "tokenizer_beside"),
]

_MAX_JSON = 1 << 20  # bytes
_SAY_ENDS = ("generation_config.json", "config.json")  # of transformers


def open_weights(
    checkpoint: str | None, hf: str | None, world: dist.ProcessGroup | None, ignored: Sequence[str] = ()
) -> tuple[CheckpointReader, GPTConfig]:
    """Return a reader of weights and its model; each rank of `world` verifies a share of the files.

    Args:
        checkpoint: a checkpoint, or the directory of a run for its latest one; None with `hf`.
        hf: the directory of a transformers model; None with `checkpoint`.
        world: the group of all ranks; None on a single rank.
        ignored: keys of config.json that are skipped.

    Returns:
        The reader and the model's configuration.

    Raises:
        CheckpointError: on all ranks, if there is no such model or it is damaged.

    Example (needs a checkpoint):
        >>> reader, config = open_weights("runs/gpt", None, None)
        >>> model = load_model(reader, config, ParallelGroups.alone())
    """
    if hf is not None:
        reader = agree(world, partial(TransformersReader, hf, ignored=ignored))
        return reader, reader.config
    assert checkpoint is not None, "one of the two is given"
    return agree(world, partial(_checkpoint, checkpoint, world))


def open_either(path: str, world: dist.ProcessGroup | None) -> tuple[CheckpointReader, GPTConfig]:
    """Return `open_weights` of a transformers directory, a checkpoint or a run."""
    agree(world, partial(check_local, Path(path)))
    return open_weights(None, path, world) if is_transformers(Path(path)) else open_weights(path, None, world)


def open_reader(path: str, world: dist.ProcessGroup | None) -> CheckpointReader:
    """Return the reader of `open_either`, also of a checkpoint without the description of a model."""
    agree(world, partial(check_local, Path(path)))
    if is_transformers(Path(path)):
        return agree(world, partial(TransformersReader, path))

    def opened() -> CheckpointReader:
        found = checkpoint_at(path)
        return _verified(found, whole_manifest(found), world)

    return agree(world, opened)


def _checkpoint(path: str, world: dist.ProcessGroup | None) -> tuple[CheckpointReader, GPTConfig]:
    found = checkpoint_at(path)
    manifest = whole_manifest(found)
    try:
        config = model_from(manifest.description)
    except ValueError as error:
        raise ValueError(f"{found}: {error}") from None
    return _verified(found, manifest, world), config


def _verified(found: Path, manifest: Manifest, world: dist.ProcessGroup | None) -> CheckpointReader:
    """Return a reader of a checkpoint after verifying this rank's share of the files."""
    verify(found, manifest, sorted(manifest.files)[group_rank(world) :: group_size(world)])
    return CheckpointReader(found, manifest)


def load_model(
    reader: CheckpointReader,
    config: GPTConfig,
    groups: ParallelGroups,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    sequence_parallel: bool = False,
) -> GPT:
    """Return the model, or this rank's pipeline stage, in evaluation mode on `device`.

    Layers are distributed over `groups.pp` as evenly as possible.

    Args:
        reader: of the weights.
        config: of the model.
        groups: process groups of the parallel layout.
        device: of the model.
        dtype: of the weights.
        sequence_parallel: shard activations along the sequence outside of tensor-parallel regions.

    Raises:
        ValueError: a stage would have no layer, the model is a BERT, or as `GPT` and `load_weights`.
    """
    if config.bert is not None:
        raise ValueError("expected a GPT, got a BERT, which predicts masked tokens and not the next one")
    rank, size = group_rank(groups.pp), group_size(groups.pp)
    if size > config.num_layers:
        raise ValueError(f"{config.num_layers} layers are too few for {size} pipeline stages; lower --pp")
    of_each = [(config.num_layers + i) // size for i in range(size)]
    spec = StageSpec(rank == 0, layers_of_stages(config.num_layers, size, of_each)[rank], rank == size - 1)
    moe = None if config.moe is None else replace(config.moe, jitter=0.0)  # else it would need generators
    config = replace(config, dropout=0.0, attention_dropout=0.0, moe=moe)
    kind = GPT if groups.pp is None else GPTStage
    model = kind(config, Placement(groups, sequence_parallel, device="meta", dtype=dtype), stage_spec=spec)
    model.to_empty(device=device)
    with torch.no_grad():
        for param in model.parameters():  # files lack the padding of the vocabulary
            param.zero_()
    load_weights(reader, config, [model], groups)
    return model.eval()


def make_groups(options: Namespace, world_size: int) -> ParallelGroups:
    """Return the process groups of a command line's parallel layout."""
    tp, pp, ep, etp, cp = options.tp, options.pp, options.ep, options.etp, getattr(options, "cp", 1)
    return ParallelGroups.create(RankGrid(world_size=world_size, tp=tp, cp=cp, pp=pp, ep=ep, etp=etp))


def model_tokenizer(options: Namespace, reader: CheckpointReader) -> Tokenizer:
    """Return the tokenizer of `--tokenizer`, of the model or of its run. Raises ValueError without one."""
    if options.tokenizer is not None:
        return load_tokenizer(options.tokenizer)
    try:
        return tokenizer_beside(reader.directory.absolute())
    except ValueError as error:
        raise ValueError(f"{error}; name the model's tokenizer by --tokenizer FILE") from None


def tokenizer_beside(checkpoint: Path) -> Tokenizer:
    """Return the tokenizer of a checkpoint's run, of a transformers model, or of an imported model.

    ValueError where no recipe lies where a run has it, or what it names is gone.
    """
    if is_transformers(checkpoint):
        return load_tokenizer(checkpoint)
    for run in (checkpoint.parent.parent, checkpoint.parent):
        if (run / "recipe.json").is_file():  # as `fastmp train` writes it
            recipe = load_recipe(None, read_json(run / "recipe.json", _MAX_JSON))
        elif (run / "recipe.toml").is_file():  # as `fastmp hf import` does
            recipe = load_recipe(run / "recipe.toml")
        else:
            continue
        return _tokenizer_of(recipe.data, run.parent / "data")
    raise ValueError(f"{checkpoint}: no recipe.json of a run lies beside it")


def _tokenizer_of(data: DataConfig, cache_dir: Path) -> Tokenizer:
    directory = TokenDataset.source(data, cache_dir)
    if is_megatron(directory) or (data.first_path is None and data.tokenizer != "bpe"):
        return load_tokenizer(data.tokenizer)
    return open_tokenizer(directory, read_index(directory))


def eos_token_ids(hf: Path) -> set[int]:
    """Return the end-of-text ids in the files of a transformers model."""
    for name in _SAY_ENDS:
        if (hf / name).is_file():
            said = read_json(hf / name, _MAX_JSON).get("eos_token_id")
            ids = said if isinstance(said, list) else [said]
            if found := {each for each in ids if type(each) is int}:
                return found
    return set()
