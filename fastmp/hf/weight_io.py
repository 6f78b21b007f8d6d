"""Import and export of weights of transformers models.

`NameMapping`s between chunks of our tensors and chunks of theirs are derived from a family's weight names.
`TransformersReader` reads a directory of transformers through them as a checkpoint, so everything that reads
a checkpoint, in any parallel layout, also reads transformers weights; `export_weights` is the inverse. One
tensor (or one expert) is in memory at a time.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from reprlib import repr as short
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastmp.config import MAX_LAYERS, GPTConfig
from fastmp.config.file_access import sync_directory, write_synced
from fastmp.hf.config_json import family_of, quantization_of, to_transformers
from fastmp.hf.families import CONVERSIONS
from fastmp.hf.families.family import optional_int
from fastmp.hf.families.llama_like import FUSED_EXPERT_WEIGHTS, MTP_COPIES, MTP_WEIGHTS
from fastmp.hf.quantized import QuantizedTensor, find_quantized
from fastmp.hf.stored import (
    CONFIG,
    INDEX,
    NOT_WEIGHTS,
    Shape,
    Stored,
    check_shape,
    check_sizes,
    missing,
    model_of,
    opened,
    read_config,
    stored_tensors,
)
from fastmp.nn import GPT, Bert, Placement
from fastmp.tensor_parallel.attributes import parallel_attributes
from fastmp.training.checkpoint.checkpointer import described
from fastmp.training.checkpoint.chunks import TensorChunk, full_chunk
from fastmp.training.checkpoint.format import DTYPES, Manifest, SavedShard, SavedTensor
from fastmp.training.checkpoint.storage import CheckpointReader, ShardedTensorRef
from fastmp.training.checkpoint.tensor_files import ChunkReader, NamedTensorSpec, write_tensors

__all__ = ["TransformersReader", "check_family", "export_weights", "own_tensors"]

FILE_BYTES = 5 << 30  # largest size of a file with several tensors
_CHUNK_BYTES = 1 << 24  # compared at a time


class NameMapping(NamedTuple):
    """A chunk (box) of one of our tensors and the chunk of theirs with the same elements.

    Args:
        ours: the chunk in our tensor.
        name: their tensor.
        shape: of their tensor.
        theirs: the chunk in their tensor.
        squeezed: their tensor lacks our first dimension, experts.
        transposed: their tensor has (columns, rows), behind a dimension of experts if there is one.
    """

    ours: TensorChunk
    name: str
    shape: Shape
    theirs: TensorChunk
    squeezed: bool = False
    transposed: bool = False

    def view(self, ours: Tensor) -> Tensor:
        """Return a tensor with the sizes of our chunk in the layout of theirs."""
        ours = ours.squeeze(0) if self.squeezed else ours
        return ours.transpose(-1, -2) if self.transposed else ours

    def of_transpose(self) -> NameMapping:
        """Return the mapping to the transpose of their tensor."""
        theirs = TensorChunk(_swapped(self.theirs.offsets), _swapped(self.theirs.sizes))
        return self._replace(shape=_swapped(self.shape), theirs=theirs, transposed=not self.transposed)

    def inside(self, chunk: TensorChunk) -> TensorChunk:
        """Return the chunk in their tensor of `chunk`, which is relative to our chunk."""
        first = 1 if self.squeezed else 0
        offsets, sizes = chunk.offsets[first:], chunk.sizes[first:]
        if self.transposed:
            offsets, sizes = _swapped(offsets), _swapped(sizes)
        return TensorChunk(tuple(a + b for a, b in zip(self.theirs.offsets, offsets)), sizes)


def _swapped(sizes: Shape) -> Shape:
    """Return sizes with the last two exchanged."""
    return (*sizes[:-2], *sizes[:-3:-1])


def own_tensors(config: GPTConfig) -> dict[str, Shape]:
    """Return {name: shape} of a model's tensors in a checkpoint, without padding of the vocabulary."""
    found = {}
    made = (GPT if config.bert is None else Bert)(config, Placement(device="meta"))
    for name, tensor in made.state_dict(keep_vars=True).items():
        rows = parallel_attributes(tensor).num_valid_rows
        found[name] = (rows, *tensor.shape[1:]) if rows else tuple(tensor.shape)
    return found


def name_mappings(
    model_type: str, config: GPTConfig, name: str, shape: Shape, *, fused: bool = False
) -> Iterator[NameMapping]:
    """Yield the mappings of our tensor `name` to the tensors of a family.

    Args:
        model_type: of the family.
        config: of the model.
        name: of our tensor.
        shape: of our tensor.
        fused: the experts of a layer are stacked in one tensor, as transformers 5 has them in memory.

    Raises:
        ValueError: the family has no such parameter.
    """
    family = CONVERSIONS[model_type]
    prefix, number, own, table = "", "", name, family.model_weights
    if name.startswith("mtp."):
        _, depth, own = name.split(".", 2)
        number, table = str(config.num_layers + int(depth)), family.mtp_weights
    if name.startswith("layers.") or own.startswith("layers."):
        _, number, own = own.split(".", 2)
        table = {**family.layer_weights, **FUSED_EXPERT_WEIGHTS} if fused else family.layer_weights
    if number:
        prefix = f"{family.layers}.{number}."
    found = table.get(own)
    if found is None:
        raise ValueError(f"{model_type} has no parameter for {name}")
    names = [prefix + each for each in found.split()]
    transposed = family.transposed_linears and bool(number) and len(shape) == 2
    transposed |= family.transposed_experts and len(shape) == 3
    if own.startswith("attention.qkv."):
        yield from _attention(config, names, shape, transposed)
    elif "{e}" in found:
        rows = shape[1] // len(names)
        for e in range(shape[0]):
            for i, each in enumerate(names):
                chunk = TensorChunk((e, i * rows, 0), (1, rows, shape[2]))
                their: Shape = (rows, shape[2])
                yield NameMapping(chunk, each.format(e=e), their, full_chunk(their), squeezed=True)
    else:
        rows = shape[0] // len(names)
        for i, each in enumerate(names):
            chunk = TensorChunk((i * rows, *(0,) * (len(shape) - 1)), (rows, *shape[1:]))
            their = _swapped(chunk.sizes) if transposed else chunk.sizes
            yield NameMapping(chunk, each, their, full_chunk(their), transposed=transposed)


def _attention(config: GPTConfig, names: list[str], shape: Shape, transposed: bool) -> Iterator[NameMapping]:
    """Yield the mappings of queries, keys and values: three tensors of theirs, or stacked in one."""
    D, groups, rest = config.head_dim, config.kv_heads, shape[1:]
    queries, zero = config.num_heads // groups, (0,) * (len(shape) - 1)
    before = 0
    for i, (start, heads) in enumerate(((0, queries), (queries, 1), (queries + 1, 1))):
        rows = heads * D
        whole = (shape[0] if len(names) == 1 else groups * rows, *rest)
        for g in range(groups):
            ours = TensorChunk(((g * (queries + 2) + start) * D, *zero), (rows, *rest))
            at = ((before if len(names) == 1 else 0) + g * rows, *zero)
            chunk = TensorChunk(at[::-1], ours.sizes[::-1]) if transposed else TensorChunk(at, ours.sizes)
            their = whole[::-1] if transposed else whole
            yield NameMapping(ours, names[i % len(names)], their, chunk, transposed=transposed)
        before += groups * rows


class TransformersReader(CheckpointReader):
    """Reader of a transformers directory as a checkpoint of weights.

    Args:
        directory: with config.json and safetensors files, several with an index. Symbolic links are followed,
            as in the cache of downloads; an index may only name files of this directory.
        ignored: keys of config.json that are skipped.

    Attributes:
        model_type: the family.
        config: the model as a `GPTConfig`.
        quantization: of the files, whose weights are read dequantised; None without one.

    Raises:
        ValueError: the family is not supported, or tensors are missing, unexpected or of other shapes; one
            line. Only headers are read before, and a head that is tied.

    Example (needs a pretrained model):
        >>> reader = TransformersReader("Qwen3-0.6B")
        >>> model = GPT(reader.config, Placement())
        >>> load_weights(reader, reader.config, [model], ParallelGroups.alone())
    """

    def __init__(self, directory: str | Path, *, ignored: Sequence[str] = ()) -> None:
        path = Path(directory)
        content = read_config(path)
        self._stored = stored_tensors(path)
        check_sizes(path, content, self._stored)
        self.model_type, self.config = model_of(path, content, ignored)
        self.quantization = quantization_of(content)
        if (bert := self.config.bert) is not None:  # config.json may name an architecture with fewer heads
            order = CONVERSIONS[self.model_type].model_weights["sentence_head.order.weight"] in self._stored
            self.config = replace(self.config, bert=replace(bert, sentence_order=order))
        first, depth = next(_mtp_prefixes(self.model_type, self.config), ""), self.config.mtp_depth
        if (
            depth and f"{first}{MTP_WEIGHTS['proj.weight']}" not in self._stored
        ):  # as transformers writes files
            self.config = replace(self.config, mtp_depth=0)
        self._mappings: dict[tuple[str, Shape], NameMapping] = {}
        self._quantized: dict[str, QuantizedTensor] = {}
        try:
            own = own_tensors(self.config)
        except (RuntimeError, ValueError) as error:
            raise ValueError(
                f"{path / CONFIG}: no such model can be made: {str(error).splitlines()[0]}"
            ) from None
        tensors = {f"model/{name}": self._tensor(path, name, shape) for name, shape in own.items()}
        self._check_all_used(path, _further_layers(self.model_type, content, self.config))
        self._check_tied(path)
        description = json.loads(json.dumps(described(self.config)["description"]))
        manifest = Manifest(0, True, {}, description, {}, files={}, tensors=tensors)
        super().__init__(path, manifest)

    def _tensor(self, path: Path, name: str, shape: Shape) -> SavedTensor:
        found = list(name_mappings(self.model_type, self.config, name, shape))
        if self._find(found[0].name) is None and _in_layer(name) in FUSED_EXPERT_WEIGHTS:
            fused = list(name_mappings(self.model_type, self.config, name, shape, fused=True))
            found = fused if self._find(fused[0].name) is not None else found
        parts, dtypes = [], set()
        for mapping in found:
            stored = self._find(mapping.name)
            low = find_quantized(path, self.quantization, self._find, mapping.name, mapping.shape)
            if low is not None and self.quantization is not None:
                self._quantized[mapping.name], stored = low, low.values
                mapping = mapping.of_transpose() if low.mxfp4 else mapping
                dtypes.add(self.quantization.dtype)
            elif stored is not None:
                check_shape(path, mapping.name, stored, mapping.shape)
                dtypes.add(stored.dtype)
            else:
                raise missing(path, mapping.name, self._stored, self.model_type)
            parts.append(SavedShard(mapping.ours, stored.file, stored.start, 0))
            self._mappings[f"model/{name}", mapping.ours.offsets] = mapping
        if len(dtypes) > 1:
            raise ValueError(f"{path}: {', '.join(sorted(dtypes))} in what is one tensor here, {name}")
        return SavedTensor(dtypes.pop(), shape, tuple(parts))

    def _find(self, name: str) -> Stored | None:
        """Return a stored tensor by its name, or by its name in early GPT-2 and BERT files."""
        early = name.removeprefix("transformer.")
        for kind, first in (("weight", "gamma"), ("bias", "beta")):
            early = early.replace(f"LayerNorm.{kind}", f"LayerNorm.{first}")
        return self._stored.get(name) or self._stored.get(early)

    def _check_all_used(self, path: Path, further: range) -> None:
        """Raise ValueError for a tensor that nothing here reads; those of layers `further` are left out."""
        used = {id(self._find(mapping.name)) for mapping in self._mappings.values()}
        used |= {id(part) for low in self._quantized.values() for part in (low.values, low.scales)}
        tied, layers = self._tied(), CONVERSIONS[self.model_type].layers
        beyond = tuple(f"{layers}.{layer}." for layer in further)
        for name, stored in self._stored.items():
            left_out = name in tied or NOT_WEIGHTS.search(name) or name.startswith(beyond)
            if id(stored) not in used and not left_out:
                raise ValueError(
                    f"{path / stored.file}: unexpected {short(name)}, which {self.model_type} has not"
                )

    def _tied(self) -> dict[str, str]:
        """Return {parameter that files may repeat: the parameter it is tied to}."""
        family = CONVERSIONS[self.model_type]
        head, table = (family.model_weights[f"{each}.weight"] for each in ("output_layer", "word_embedding"))
        found = {**family.tied_weights, **({head: table} if self.config.tie_embeddings else {})}
        for prefix in _mtp_prefixes(self.model_type, self.config):
            found |= {f"{prefix}{copy}": family.model_weights[own] for own, copy in MTP_COPIES.items()}
        return found

    def _check_tied(self, path: Path) -> None:
        """Raise ValueError if a tied parameter is stored with other values, which would be lost."""
        prefixes = tuple(_mtp_prefixes(self.model_type, self.config))
        for name, first in self._tied().items():
            again, stored = self._find(name), self._find(first)
            reason = f"though {CONFIG} ties them"
            if name.startswith(prefixes):
                reason = "which MTP modules use; --ignore num_nextn_predict_layers leaves the modules out"
            if again and stored and not _same_bytes(path, again, stored):
                raise ValueError(f"{path / again.file}: {name} is not {first}, {reason}")

    def stored_name(self, name: str, shard: SavedShard) -> str:
        """Return the name in the files of a shard of our tensor `name`."""
        return self._mappings[name, shard.chunk.offsets].name

    @torch.no_grad()
    def _read_items(self, file: str, wanted: Sequence[Any], planner: Any) -> None:
        with opened(self.directory / file) as source:
            reader = ChunkReader(source)
            for shard, item in wanted:
                name, chunk = (
                    item.storage_index.fqn,
                    TensorChunk(tuple(item.storage_offsets), tuple(item.lengths)),
                )
                mapping = self._mappings[name, shard.chunk.offsets]
                there = mapping.inside(chunk)
                out = planner.resolve_tensor(item).detach()
                if low := self._quantized.get(mapping.name):
                    own = low.read(self.directory, there).to(DTYPES[self.manifest.tensors[name].dtype])
                else:
                    stored = self._find(mapping.name)
                    assert stored is not None
                    own = stored.read(reader, there)
                mapping.view(out).copy_(own)
                planner.commit_tensor(item, out)


def _in_layer(name: str) -> str:
    """Return the name of our parameter in its layer."""
    return name.rpartition("layers.")[2].partition(".")[2]


def _mtp_prefixes(model_type: str, config: GPTConfig) -> Iterator[str]:
    """Yield the prefix of their tensors of each MTP module."""
    for depth in range(config.mtp_depth):
        yield f"{CONVERSIONS[model_type].layers}.{config.num_layers + depth}."


def _further_layers(model_type: str, content: Mapping[str, Any], config: GPTConfig) -> range:
    """Return the layer numbers of the MTP modules that import leaves out."""
    family = CONVERSIONS[model_type]
    num_layers = config.num_layers
    if config.mtp_depth:
        return range(num_layers, num_layers)
    known = {*family.read_keys, *family.fields}
    names = [name for name in ("num_nextn_predict_layers", "num_mtp_layers") if name in known]
    further = max((optional_int(content, name, 0) or 0 for name in names), default=0)
    return range(num_layers, num_layers + min(further, MAX_LAYERS))


def _same_bytes(path: Path, one: Stored, other: Stored) -> bool:
    """Return True if two tensors of a directory are bitwise equal, with the same dtype and shape."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    size = prod(one.shape) * DTYPES[one.dtype].itemsize
    with opened(path / one.file) as first, opened(path / other.file) as second:
        return all(
            os.pread(first.descriptor, length, one.start + at)
            == os.pread(second.descriptor, length, other.start + at)
            for at in range(0, size, _CHUNK_BYTES)
            for length in (min(_CHUNK_BYTES, size - at),)
        )


def check_family(config: GPTConfig) -> str:
    """Return the transformers family of a model. Raises ValueError naming checkpoint.weights_interval."""
    try:
        return family_of(config)
    except ValueError as error:
        raise ValueError(f"checkpoint.weights_interval: {error}") from None


def export_weights(
    checkpoint: Path, config: GPTConfig, out: Path, *, check: Callable[[Path], None] | None = None
) -> Path:
    """Write the weights of a checkpoint as a transformers directory, atomically.

    Args:
        checkpoint: the directory of the checkpoint.
        config: the model. MTP modules are left out if files of its family have none.
        out: the directory to write; an existing one is replaced.
        check: called with the staging directory before it is renamed to `out`; may add files. If it raises,
            nothing is left.

    Returns:
        `out`.

    Raises:
        ValueError: no transformers family computes the model, or the checkpoint lacks its tensors.

    Example (needs a checkpoint):
        >>> config = load_recipe("runs/gpt/recipe.toml").model
        >>> export_weights(Path("runs/gpt/checkpoints/step-1000"), config, Path("gpt-hf"))
    """
    reader, model_type = CheckpointReader(checkpoint), family_of(config)
    if not CONVERSIONS[model_type].mtp_weights:
        config = replace(config, mtp_depth=0)
    theirs = _their_tensors(reader, model_type, config)
    specs = [NamedTensorSpec(name, DTYPES[dtype], shape) for name, (dtype, shape, _) in theirs.items()]
    staging = out.with_name(f"{out.name}.staging")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    try:
        names = _write(staging, specs, lambda spec: _read(reader, spec, theirs[spec.name][2]))
        if len(set(names.values())) > 1:
            index = {"metadata": {"total_size": sum(spec.bytes for spec in specs)}, "weight_map": names}
            write_synced(staging / INDEX, json_bytes(index))
        table = reader.manifest.tensors["model/word_embedding.weight"]
        dtype = str(DTYPES[table.dtype]).removeprefix("torch.")
        write_synced(staging / CONFIG, json_bytes(to_transformers(model_type, config, dtype)))
        if check is not None:
            check(staging)
        sync_directory(staging)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    if out.exists():
        shutil.rmtree(out)
    os.rename(staging, out)
    sync_directory(out.parent)
    return out


_Sources = list[tuple[str, NameMapping]]  # our tensors with the chunks of one of theirs


def _their_tensors(
    reader: CheckpointReader, model_type: str, config: GPTConfig
) -> dict[str, tuple[str, Shape, _Sources]]:
    """Return {name: (dtype, shape, sources)} of the model in transformers."""
    found: dict[str, tuple[str, Shape, _Sources]] = {}
    saved = reader.manifest.tensors
    for name, shape in own_tensors(config).items():
        tensor = saved.get(f"model/{name}")
        if tensor is None or tensor.shape != shape:
            theirs = "nothing" if tensor is None else list(tensor.shape)
            raise ValueError(f"{reader.directory}: {name} is {theirs}, the model has {list(shape)}")
        copies = [""]
        if name in MTP_COPIES:
            copies += [f"{prefix}{MTP_COPIES[name]}" for prefix in _mtp_prefixes(model_type, config)]
        for mapping in name_mappings(model_type, config, name, shape):
            for each in (copy or mapping.name for copy in copies):
                _, _, sources = found.setdefault(each, (tensor.dtype, mapping.shape, []))
                sources.append((f"model/{name}", mapping))
    return found


def _write(
    directory: Path, specs: Sequence[NamedTensorSpec], read: Callable[[NamedTensorSpec], Tensor]
) -> dict[str, str]:
    """Write tensors to files of at most `FILE_BYTES` or a single tensor, and return {tensor: file}."""
    groups, names = _in_files(specs), dict[str, str]()
    for number, group in enumerate(groups):
        of = f"-{number + 1:05d}-of-{len(groups):05d}" if len(groups) > 1 else ""
        file, own = f"model{of}.safetensors", [specs[i] for i in group]
        write_tensors(directory / file, own, partial(_nth, own, read), metadata={"format": "pt"})
        names |= {spec.name: file for spec in own}
    return names


def _nth(specs: Sequence[NamedTensorSpec], read: Callable[[NamedTensorSpec], Tensor], number: int) -> Tensor:
    return read(specs[number])


def _in_files(specs: Sequence[NamedTensorSpec]) -> list[list[int]]:
    groups, left = [list[int]()], FILE_BYTES
    for i, spec in enumerate(specs):
        if groups[-1] and spec.bytes > left:
            groups.append([])
            left = FILE_BYTES
        groups[-1].append(i)
        left -= spec.bytes
    return groups


def _read(reader: CheckpointReader, spec: NamedTensorSpec, sources: _Sources) -> Tensor:
    """Assemble one tensor of theirs from chunks of ours."""
    out = torch.empty(tuple(spec.shape), dtype=spec.dtype)
    of_ours: dict[str, list[tuple[Shape, Tensor]]] = {}
    for name, mapping in sources:
        view = out[tuple(slice(at, at + size) for at, size in zip(*mapping.theirs))]
        view = view.transpose(-1, -2) if mapping.transposed else view
        of_ours.setdefault(name, []).append(
            (mapping.ours.offsets, view.unsqueeze(0) if mapping.squeezed else view)
        )
    for name, parts in of_ours.items():
        reader.read({name: ShardedTensorRef(reader.manifest.tensors[name].shape, spec.dtype, parts)})
    return out


def json_bytes(content: Mapping[str, Any]) -> bytes:
    """Return the bytes of a JSON file in transformers' formatting."""
    return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()
