"""Load a transformers model with experts that is sharded over a mesh; each rank reads what it holds.

The model is made on the meta device, sharded, and filled from safetensors files, one tensor at a time.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from reprlib import repr as short
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fastmp.hf.acceleration import accelerate
from fastmp.hf.config_json import Quantization, quantization_of
from fastmp.hf.families import ACCELERATIONS
from fastmp.hf.mesh import all_ranks, check_mesh
from fastmp.hf.mesh_tensors import file_mappings, local_chunk, saved_tensors
from fastmp.hf.quantized import find_quantized
from fastmp.hf.stored import (
    NOT_WEIGHTS,
    Shape,
    Stored,
    check_shape,
    missing,
    opened,
    read_config,
    stored_tensors,
)
from fastmp.hf.tp_plan import agree
from fastmp.hf.weight_io import NameMapping
from fastmp.training.checkpoint.chunks import TensorChunk, full_chunk
from fastmp.training.checkpoint.tensor_files import ChunkReader


def from_pretrained(
    directory: str | Path,
    *,
    mesh: DeviceMesh,
    dtype: torch.dtype | None = None,
    peft_config: Any = None,
    **options: Any,
) -> Any:
    """Load a causal language model with experts, sharded over a mesh; each rank reads only what it holds.

    The host memory of a rank is its shards and one tensor, or one expert's share of it. FP8 and MXFP4 files
    are dequantised.

    Args:
        directory: of config.json and safetensors files, the same on all ranks.
        mesh: of `fastmp.accelerate`; parameters are on its devices.
        dtype: of the parameters; None: as config.json says.
        peft_config: a `LoraConfig` of PEFT, whose adapters are initialised and sharded with the model. Seed
            all ranks with the same number before.
        options: of `fastmp.accelerate`: `dispatcher`, `shard_dense`, `fsdp`.

    Returns:
        The model, accelerated, in evaluation mode; with `peft_config` the PEFT model that holds it.

    Raises:
        ValueError: on all ranks, as `fastmp.accelerate`, or if tensors are missing, unexpected or of another
            shape.

    Example (needs several ranks):
        >>> mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp_shard", "ep"))
        >>> model = from_pretrained("Qwen3-30B-A3B", mesh=mesh, dtype=torch.bfloat16)
    """
    path = Path(directory)
    check_mesh(mesh, None)
    ranks, error = all_ranks(mesh), None
    # 1. Read the headers of files and make the model without its parameters.
    try:
        content = read_config(path)
        if content.get("model_type") not in ACCELERATIONS:
            raise ValueError(
                f"{path}: model_type {content.get('model_type')!r} is not supported; expected one of "
                f"{', '.join(ACCELERATIONS)}"
            )
        model = _on_meta(path, dtype)
        whole = model if peft_config is None else _with_adapters(model, peft_config)
        sources = _sources(model, path, quantization_of(content))
    except Exception as found:  # whatever it is, other ranks wait
        error = found if isinstance(found, ValueError) else ValueError(f"{path}: {found!r}")
    agree(nn.Module(), ranks, error)
    # 2. Shard it.
    accelerate(whole, mesh=mesh, **options)
    # 3. Read this rank's part of each tensor.
    try:
        _fill(model, sources, torch.device(mesh.device_type))
    except Exception as found:
        error = found if isinstance(found, ValueError) else ValueError(f"{path}: {found!r}")
    agree(nn.Module(), ranks, error)
    return whole.eval()


def _on_meta(path: Path, dtype: torch.dtype | None) -> Any:
    """Return the model of a directory with parameters and buffers of its files on the meta device."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(path)
    config.__dict__.pop("quantization_config", None)  # weights are dequantised
    with parameters_on_meta():
        return AutoModelForCausalLM.from_config(config, dtype=dtype or config.dtype)


def _with_adapters(model: Any, config: Any) -> Any:
    """Return the PEFT model of a model on the meta device, with adapters on the CPU that are initialised."""
    import peft

    if config.peft_type != peft.PeftType.LORA or config.init_lora_weights not in (True, False, "gaussian"):
        raise ValueError(
            "from_pretrained: expected a LoraConfig with init_lora_weights True, False or 'gaussian', got "
            f"{config.peft_type} with {config.init_lora_weights!r}; others read the weights, which are not "
            "loaded yet"
        )
    found = peft.get_peft_model(model, config)
    for module in found.modules():
        if isinstance(module, peft.tuners.lora.LoraLayer):
            for factors in (module.lora_A, module.lora_B):
                factors.to_empty(device="cpu")
            for adapter in module.lora_A:
                module.reset_lora_parameters(adapter, config.init_lora_weights)
    return found


@contextlib.contextmanager
def parameters_on_meta() -> Iterator[None]:
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


def _fill(model: nn.Module, sources: Mapping[str, list[_Source]], device: torch.device) -> None:
    """Replace parameters and buffers by ones with numbers from the files, in all modules that have them."""
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, each in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            owners.setdefault(id(each), []).append((module, name))
    for name, tensor in saved_tensors(model).items():
        if name not in sources:
            continue
        local, chunk = local_chunk(tensor)
        own = torch.empty(local.shape, dtype=local.dtype)
        for source in sources[name]:
            source.read(chunk, own)
        new: Tensor = own.to(device)
        if isinstance(tensor, DTensor):
            new = DTensor.from_local(
                new,
                tensor.device_mesh,
                tensor.placements,
                run_check=False,
                shape=tensor.shape,
                stride=tensor.stride(),
            )
        if isinstance(tensor, nn.Parameter):
            new = nn.Parameter(new, requires_grad=tensor.requires_grad)
        for module, attribute in owners[id(tensor)]:
            setattr(module, attribute, new)


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
            with opened(self.path / self.stored.file) as file:
                own = self.stored.read(ChunkReader(file), there)
        at = _minus(starts, chunk.offsets)
        self.mapping.view(out[tuple(slice(a, a + n) for a, n in zip(at, sizes))]).copy_(own)


def _minus(ends: Any, starts: Any) -> Shape:
    return tuple(end - start for end, start in zip(ends, starts))


def _sources(model: Any, path: Path, quantization: Quantization | None) -> dict[str, list[_Source]]:
    """Return {parameter or buffer: its tensors in the files}, after reading headers; adapters have none.

    Raises:
        ValueError: tensors are missing, unexpected or of another shape.
    """
    stored = stored_tensors(path)
    found: dict[str, list[_Source]] = {}
    used = set[Stored]()
    for name, tensor in saved_tensors(model).items():
        if isinstance(tensor, nn.Parameter) and not tensor.is_meta:
            continue
        shape, alone = tuple(tensor.shape), name.replace(".base_layer", "")  # without adapters around it
        mappings = list(file_mappings(model, alone, shape))
        if mappings[0].name not in stored and alone in stored:  # experts stacked as they are in memory
            mappings = [NameMapping(full_chunk(shape), alone, shape, full_chunk(shape))]
        found[name] = []
        for mapping in mappings:
            low = find_quantized(path, quantization, stored.get, mapping.name, mapping.shape)
            each = stored.get(mapping.name) if low is None else low.values
            if each is None:
                raise missing(path, mapping.name, stored, type(model).__name__)
            if low is None:
                check_shape(path, mapping.name, each, mapping.shape)
            used |= {each} if low is None else {low.values, low.scales}
            found[name].append(_Source(path, mapping, each, low))
    ignored = [re.compile(each) for each in model._keys_to_ignore_on_load_unexpected or ()]
    for name, each in stored.items():
        tied = name in model.all_tied_weights_keys
        if each not in used and not (
            tied or NOT_WEIGHTS.search(name) or any(i.search(name) for i in ignored)
        ):
            raise ValueError(
                f"{path / each.file}: unexpected {short(name)}, which {type(model).__name__} has not"
            )
    return found
