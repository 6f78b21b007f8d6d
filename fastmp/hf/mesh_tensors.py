"""Parameters of models that are sharded over a mesh: this rank's chunks, and the tensors of files."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fastmp.hf.families import CONVERSIONS
from fastmp.hf.families.llama_like import FUSED_EXPERT_WEIGHTS
from fastmp.hf.stored import Shape
from fastmp.hf.weight_io import NameMapping
from fastmp.training.checkpoint.chunks import TensorChunk, full_chunk


def saved_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and saved buffers of a model by name; tied ones once."""
    found = dict[str, Tensor](model.named_parameters())
    saved = model.state_dict(keep_vars=True)
    return found | {name: buffer for name, buffer in model.named_buffers() if name in saved}


def local_chunk(tensor: Tensor) -> tuple[Tensor, TensorChunk]:
    """Return the local shard of a parameter, and the chunk of the full tensor that it is.

    FSDP2 shards what the ep rank holds: placements apply from the last dimension of the mesh to the first.
    """
    if not isinstance(tensor, DTensor):
        return tensor, full_chunk(tensor.shape)
    offsets, sizes = [0] * tensor.dim(), list(tensor.shape)
    coordinates = tensor.device_mesh.get_coordinate()
    assert coordinates is not None
    for number in reversed(range(len(coordinates))):
        placement = tensor.placements[number]
        if placement.is_replicate():
            continue
        dim, size = placement.dim, tensor.device_mesh.size(number)  # type: ignore[attr-defined]
        rows = -(-sizes[dim] // size)
        start = min(coordinates[number] * rows, sizes[dim])
        offsets[dim] += start
        sizes[dim] = min(rows, sizes[dim] - start)
    local = tensor.to_local()
    if list(local.shape) != sizes:
        raise ValueError(
            f"a shard of shape {tuple(local.shape)} with {tensor.placements} is not {sizes}, as expected"
        )
    return local, TensorChunk(tuple(offsets), tuple(sizes))


def file_names(model: Any, name: str) -> tuple[str, list[str]]:
    """Return the layer prefix of a parameter and its names in files, with `{e}` for an expert."""
    family = CONVERSIONS[model.config.model_type]
    layer = re.match(rf"{re.escape(family.layers)}\.\d+\.", name)
    if layer is None:
        return "", [name]
    prefix, own = layer.group(), name[layer.end() :]
    weights = family.layer_weights
    table = {theirs: weights[ours] for ours, theirs in FUSED_EXPERT_WEIGHTS.items() if ours in weights}
    return prefix, table.get(own, own).split()


def file_mappings(model: Any, name: str, shape: Shape) -> Iterator[NameMapping]:
    """Yield the mappings of a parameter to the tensors of files."""
    prefix, names = file_names(model, name)
    if "{e}" not in names[0]:
        yield NameMapping(full_chunk(shape), prefix + names[0], shape, full_chunk(shape))
        return
    rows = shape[1] // len(names)
    for expert in range(shape[0]):
        for number, each in enumerate(names):
            ours = TensorChunk((expert, number * rows, 0), (1, rows, shape[2]))
            theirs = (rows, shape[2])
            yield NameMapping(ours, prefix + each.format(e=expert), theirs, full_chunk(theirs), squeezed=True)
