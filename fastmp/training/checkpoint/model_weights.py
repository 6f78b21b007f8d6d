"""Load only the weights of a checkpoint, to start another run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from fastmp.config import GPTConfig
from fastmp.config.model import canonical_config
from fastmp.config.recipe import model_from
from fastmp.distributed.groups import ParallelGroups
from fastmp.optim.named_params import named_buffers, named_parameters
from fastmp.training.checkpoint.format import CheckpointError
from fastmp.training.checkpoint.state import param_shards
from fastmp.training.checkpoint.storage import CheckpointReader, ShardedTensorRef

__all__ = ["check_same_function", "load_weights"]


def load_weights(
    reader: CheckpointReader,
    config: GPTConfig,
    chunks: Sequence[nn.Module],
    groups: ParallelGroups,
    *,
    name_of: Callable[[str], str | None] = lambda name: name,
) -> None:
    """Load the parameters and buffers of this rank's `chunks`; call it before you make the optimizer.

    Dtypes may differ: numbers are rounded to the dtype of the parameters.

    Args:
        name_of: parameter -> its name in the checkpoint; None for a parameter that keeps its values.

    Raises:
        CheckpointError: the checkpoint's model computes another function than `config`, or has other shapes;
            the message names both sides.
    """
    check_same_function(reader, config)
    wanted = {
        f"model/{saved_as}": param_shards(param, groups)
        for name, param in named_parameters(chunks)
        if (saved_as := name_of(name)) is not None
    }
    wanted |= {f"model/{name}": ShardedTensorRef.whole(buffer) for name, buffer in named_buffers(chunks)}
    for name, ref in wanted.items():
        saved = reader.manifest.tensors.get(name)
        if saved is None or saved.shape != ref.shape:
            theirs = "nothing" if saved is None else list(saved.shape)
            raise CheckpointError(
                f"checkpoint {reader.directory}: another model: {name} is {theirs}, here {list(ref.shape)}"
            )
    reader.read(wanted)


def check_same_function(reader: CheckpointReader, config: GPTConfig) -> None:
    """Raise CheckpointError if the model of the checkpoint computes another function than `config`."""
    try:
        saved, current = canonical_config(model_from(reader.manifest.description)), canonical_config(config)
    except ValueError as error:
        raise CheckpointError(
            f"checkpoint {reader.directory}: no model is described in it: {error}"
        ) from None
    has, needs = saved.pop("mtp_depth"), current.pop("mtp_depth")  # modules beside the model: fewer will do
    if needs > has:
        raise CheckpointError(
            f"checkpoint {reader.directory}: it has {has} MTP modules, this run {needs}; set model.mtp_depth "
            f"to {has}"
        )
    if config.position == "rope":  # which is computed for as many positions as a run has
        saved.pop("max_seq_len"), current.pop("max_seq_len")
    differing = [key for key in {**saved, **current} if saved.get(key) != current.get(key)]
    if differing:
        theirs, ours = (_listed(each, differing) for each in (saved, current))
        raise CheckpointError(
            f"checkpoint {reader.directory}: another model: it has {theirs}; this run has {ours}"
        )


def _listed(facts: dict[str, Any], keys: Sequence[str]) -> str:
    return ascii(", ".join(f"{key}={facts.get(key)}" for key in keys))[1:-1][:1000]
