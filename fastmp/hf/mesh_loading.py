"""Load a transformers model with experts that is sharded over a mesh; each rank reads what it holds.

The model is made on the meta device, sharded, and filled from safetensors files, one tensor at a time.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fastmp.hf.acceleration import accelerate
from fastmp.hf.config_json import quantization_of
from fastmp.hf.mesh import all_ranks, check_mesh
from fastmp.hf.mesh_tensors import file_mappings, local_chunk, saved_tensors
from fastmp.hf.quantized import find_quantized
from fastmp.hf.stored import NOT_WEIGHTS, Shape, Stored, opened, read_config, stored_tensors
from fastmp.hf.tp_plan import agree
from fastmp.hf.weight_io import NameMapping
from fastmp.training.checkpoint.chunks import TensorChunk, full_chunk
from fastmp.training.checkpoint.format import DTYPES
from fastmp.training.checkpoint.tensor_files import ChunkReader


def from_pretrained(
    directory: str | Path, *, mesh: DeviceMesh, dtype: torch.dtype | None = None, **options: Any
) -> Any:
    """Load a causal language model with experts, sharded over a mesh; each rank reads only what it holds.

    The host memory of a rank is its shards and one tensor, or one expert's share of it. FP8 and MXFP4 files
    are dequantised.

    Args:
        directory: of config.json and safetensors files, the same on all ranks.
        mesh: of `fastmp.accelerate`; parameters are on its devices.
        dtype: of the parameters; None: as config.json says.
        options: of `fastmp.accelerate`: `dispatcher`, `shard_dense`, `fsdp`.

    Returns:
        The model, accelerated, in evaluation mode.

    Raises:
        ValueError: on all ranks, as `fastmp.accelerate`, or if tensors are missing, unexpected or of another
            shape.

    Example (needs several ranks):
        >>> mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp_shard", "ep"))
        >>> model = from_pretrained("Qwen3-30B-A3B", mesh=mesh, dtype=torch.bfloat16)
    """
    path = Path(directory)
    check_mesh(mesh, None)
    error = None
    # 1. Read the headers of files and make the model without its parameters.
    try:
        content, stored = read_config(path), stored_tensors(path)
        model = _on_meta(path, dtype)
        sources = {
            name: list(_stored_in(model, path, content, stored, name)) for name in saved_tensors(model)
        }
        _check_all_used(model, path, stored, sources)
    except ValueError as found:
        error = found
    agree(nn.Module(), all_ranks(mesh), error)
    # 2. Shard it.
    accelerate(model, mesh=mesh, **options)
    # 3. Read this rank's part of each tensor.
    device = torch.device(mesh.device_type)
    for name, tensor in saved_tensors(model).items():
        local, chunk = local_chunk(tensor)
        own = torch.empty(local.shape, dtype=local.dtype)
        for source in sources[name]:
            source.read(chunk, own)
        _set(model, tensor, own.to(device))
    return model.eval()


def _on_meta(path: Path, dtype: torch.dtype | None) -> Any:
    """Return the model of a directory with parameters and buffers of its files on the meta device."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(path)
    config.__dict__.pop("quantization_config", None)  # weights are dequantised
    with _parameters_on_meta():
        return AutoModelForCausalLM.from_config(config, dtype=dtype or config.dtype)


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Make new parameters on the meta device, but buffers, such as rotary frequencies, with their values."""
    register = nn.Module.register_parameter

    def on_meta(self: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.data.to("meta"), requires_grad=parameter.requires_grad)
        register(self, name, parameter)

    nn.Module.register_parameter = on_meta  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _set(model: nn.Module, tensor: Tensor, local: Tensor) -> None:
    """Replace a parameter or buffer by one with this local shard, in all modules that have it."""
    new: Tensor = local
    if isinstance(tensor, DTensor):
        new = DTensor.from_local(
            local,
            tensor.device_mesh,
            tensor.placements,
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )
    if isinstance(tensor, nn.Parameter):
        new = nn.Parameter(new, requires_grad=tensor.requires_grad)
    for module in model.modules():
        for name, each in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            if each is tensor:
                setattr(module, name, new)


class _Source:
    """A tensor in files, and the chunk of a parameter that it holds."""

    def __init__(self, path: Path, mapping: NameMapping, stored: Stored, low: Any) -> None:
        self.path, self.stored, self.low = path, stored, low
        self.mapping = mapping.of_transpose() if low is not None and low.mxfp4 else mapping

    def read(self, chunk: TensorChunk, out: Tensor) -> None:
        """Read what is in `chunk` of the parameter into `out`, which has its sizes."""
        ours = self.mapping.ours
        # 1. The intersection of both chunks of the parameter.
        starts = [max(pair) for pair in zip(ours.offsets, chunk.offsets)]
        ends = [min(a + n, b + m) for a, n, b, m in zip(*ours, *chunk)]
        if any(start >= end for start, end in zip(starts, ends)):
            return
        sizes = tuple(end - start for start, end in zip(starts, ends))
        # 2. Read it from the file, and convert dtype and layout.
        there = self.mapping.inside(TensorChunk(_minus(starts, ours.offsets), sizes))
        if self.low is not None:
            own = self.low.read(self.path, there)
        else:
            own = torch.empty(there.sizes, dtype=DTYPES[self.stored.dtype])
            with opened(self.path / self.stored.file) as file:
                ChunkReader(file).read(self.stored.start, self.mapping.shape, there, own)
        at = _minus(starts, chunk.offsets)
        self.mapping.view(out[tuple(slice(a, a + n) for a, n in zip(at, sizes))]).copy_(own)


def _minus(ends: Any, starts: Any) -> Shape:
    return tuple(end - start for end, start in zip(ends, starts))


def _stored_in(
    model: Any, path: Path, content: Mapping[str, Any], stored: Mapping[str, Stored], name: str
) -> Iterator[_Source]:
    """Yield the sources of a parameter. Raises ValueError if one is missing or has another shape."""
    shape = tuple(saved_tensors(model)[name].shape)
    mappings = list(file_mappings(model, name, shape))
    if mappings[0].name not in stored and name in stored:  # experts stacked as they are in memory
        mappings = [NameMapping(full_chunk(shape), name, shape, full_chunk(shape))]
    for mapping in mappings:
        low = find_quantized(path, quantization_of(content), stored.get, mapping.name, mapping.shape)
        found = stored.get(mapping.name)
        if low is not None:
            found = low.values._replace(shape=mapping.shape)
        if found is None:
            raise ValueError(f"{path}: {mapping.name} is missing, which {type(model).__name__} has")
        if found.shape != mapping.shape:
            raise ValueError(
                f"{path}: {mapping.name} has shape {list(found.shape)}, config.json says "
                f"{list(mapping.shape)}"
            )
        yield _Source(path, mapping, found, low)


def _check_all_used(
    model: Any, path: Path, stored: Mapping[str, Stored], sources: Mapping[str, list[_Source]]
) -> None:
    """Raise ValueError for a tensor of the files that the model has not."""
    used = {source.mapping.name for each in sources.values() for source in each}
    for each in sources.values():
        for source in each:
            if source.low is not None:
                used |= {name for name, found in stored.items() if found == source.low.scales}
                used |= {name for name, found in stored.items() if found == source.low.values}
    tied = set(model.all_tied_weights_keys)
    ignored = [re.compile(each) for each in model._keys_to_ignore_on_load_unexpected or ()]
    for name in stored:
        left_out = name in tied or NOT_WEIGHTS.search(name) or any(each.search(name) for each in ignored)
        if name not in used and not left_out:
            raise ValueError(f"{path}: unexpected {name}, which {type(model).__name__} has not")
