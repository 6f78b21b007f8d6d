"""Weights of `transformers` models as checkpoints of fastmp, and checkpoints as their weights.

Where each element of our tensors lies in theirs is worked out once, from a family's table of names, as
`Link`s between boxes. `TransformersReader` reads a directory of theirs through them as if it were a
checkpoint, so that everything that takes a checkpoint takes it, in any layout; `export_weights` goes the
other way. One tensor at a time is in memory, of experts one expert.
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

from fastmp.config import GPTConfig
from fastmp.config.files import sync_directory, write_synced
from fastmp.hf.families import family_of, from_transformers, to_transformers
from fastmp.hf.stored import (
    CONFIG,
    INDEX,
    NOT_WEIGHTS,
    Shape,
    Stored,
    check_sizes,
    opened,
    read_config,
    stored_tensors,
)
from fastmp.hf.tables import FAMILIES, FUSED
from fastmp.nn import GPT, Bert, Placement
from fastmp.tensor_parallel.attributes import parallel_attributes
from fastmp.training.checkpoint.checkpointer import described
from fastmp.training.checkpoint.chunks import TensorChunk, full_chunk
from fastmp.training.checkpoint.compare import fill_shards
from fastmp.training.checkpoint.files import ChunkReader, TensorSpec, write_tensors
from fastmp.training.checkpoint.format import DTYPES, Manifest, SavedShard, SavedTensor
from fastmp.training.checkpoint.storage import CheckpointReader, ShardedTensorRef

__all__ = ["TransformersReader", "check_family", "export_weights", "own_tensors"]

FILE_BYTES = 5 << 30  # after which a file is full
_PIECE = 1 << 24  # bytes that are compared at a time


class Link(NamedTuple):
    """A box of one of our tensors, and of theirs the one with the same elements.

    squeezed: theirs lacks our first dimension, which is that of experts. transposed: it has columns for rows.
    """

    ours: TensorChunk
    name: str
    shape: Shape
    theirs: TensorChunk
    squeezed: bool = False
    transposed: bool = False

    def view(self, ours: Tensor) -> Tensor:
        """A tensor of the sizes of a box of ours, as theirs has it."""
        ours = ours.squeeze(0) if self.squeezed else ours
        return ours.t() if self.transposed else ours

    def inside(self, box: TensorChunk) -> TensorChunk:
        """Where `box`, counted from our box, lies in their tensor."""
        first = 1 if self.squeezed else 0
        offsets, sizes = box.offsets[first:], box.sizes[first:]
        if self.transposed:
            offsets, sizes = offsets[::-1], sizes[::-1]
        return TensorChunk(tuple(a + b for a, b in zip(self.theirs.offsets, offsets)), sizes)


def own_tensors(config: GPTConfig) -> dict[str, Shape]:
    """{name: shape} of what a checkpoint holds of a model, without the padding of its vocabulary."""
    found = {}
    made = (GPT if config.bert is None else Bert)(config, Placement(device="meta"))
    for name, tensor in made.state_dict(keep_vars=True).items():
        rows = parallel_attributes(tensor).num_valid_rows
        found[name] = (rows, *tensor.shape[1:]) if rows else tuple(tensor.shape)
    return found


def links(kind: str, config: GPTConfig, name: str, shape: Shape, *, fused: bool = False) -> Iterator[Link]:
    """Where the elements of our tensor `name` are in a model of the family `kind`.

    fused: experts are all in one tensor, as transformers 5 has them in memory. ValueError where the family
    has no such parameter.
    """
    family = FAMILIES[kind]
    prefix, number, own = "", "", name
    if name.startswith("layers."):
        _, number, own = name.split(".", 2)
        prefix = f"{family.base}.{number}."
    table = {**family.names, **FUSED} if fused else family.names
    found = table.get(own) if number else family.ends.get(name)
    if found is None:
        raise ValueError(f"{kind} has no parameter for {name}")
    names = [prefix + each for each in found.split()]
    transposed = family.conv1d and bool(number) and len(shape) == 2
    if own.startswith("attention.qkv."):
        yield from _attention(config, names, shape, transposed)
    elif "{e}" in found:
        rows = shape[1] // len(names)
        for e in range(shape[0]):
            for i, each in enumerate(names):
                box = TensorChunk((e, i * rows, 0), (1, rows, shape[2]))
                their: Shape = (rows, shape[2])
                yield Link(box, each.format(e=e), their, full_chunk(their), squeezed=True)
    else:
        rows = shape[0] // len(names)
        for i, each in enumerate(names):
            box = TensorChunk((i * rows, *(0,) * (len(shape) - 1)), (rows, *shape[1:]))
            their = box.sizes[::-1] if transposed else box.sizes
            yield Link(box, each, their, full_chunk(their), transposed=transposed)


def _attention(config: GPTConfig, names: list[str], shape: Shape, transposed: bool) -> Iterator[Link]:
    """Queries, keys and values: three tensors of theirs, or one after the other in one."""
    D, groups, rest = config.head_dim, config.kv_heads, shape[1:]
    queries, zero = config.num_heads // groups, (0,) * (len(shape) - 1)
    before = 0
    for i, (start, heads) in enumerate(((0, queries), (queries, 1), (queries + 1, 1))):
        rows = heads * D
        whole = (shape[0] if len(names) == 1 else groups * rows, *rest)
        for g in range(groups):
            ours = TensorChunk(((g * (queries + 2) + start) * D, *zero), (rows, *rest))
            at = ((before if len(names) == 1 else 0) + g * rows, *zero)
            box = TensorChunk(at[::-1], ours.sizes[::-1]) if transposed else TensorChunk(at, ours.sizes)
            their = whole[::-1] if transposed else whole
            yield Link(ours, names[i % len(names)], their, box, transposed=transposed)
        before += groups * rows


class TransformersReader(CheckpointReader):
    """Reads a directory of a `transformers` model as a checkpoint of its weights alone.

    directory: with config.json and safetensors files, several with an index. Links to files are followed, as
        caches of downloads have them; an index may name files of this directory only.
    ignored: keys of config.json that are not looked at.

    Attributes: `kind`, the model type; `config`, our configuration of the model.

    ValueError, one line, where the model is of another family, or the files do not hold its tensors: missing,
    unexpected, or in other shapes. Nothing but their headers has been read then, and a head that is tied.
    """

    def __init__(self, directory: str | Path, *, ignored: Sequence[str] = ()) -> None:
        path = Path(directory)
        content = read_config(path)
        self._stored = stored_tensors(path)
        check_sizes(path, content, self._stored)
        try:
            self.kind, self.config = from_transformers(content, ignored)
        except ValueError as error:
            raise ValueError(f"{path / CONFIG}: " + "; ".join(str(error).splitlines())) from None
        except (TypeError, ArithmeticError) as error:
            raise ValueError(f"{path / CONFIG}: a value that makes no sense: {error}") from None
        if (bert := self.config.bert) is not None:  # config.json may name a model of fewer heads
            order = FAMILIES[self.kind].ends["sentence_head.order.weight"] in self._stored
            self.config = replace(self.config, bert=replace(bert, sentence_order=order))
        self._links: dict[tuple[str, Shape], Link] = {}
        try:
            own = own_tensors(self.config)
        except (RuntimeError, ValueError) as error:
            raise ValueError(
                f"{path / CONFIG}: no such model can be made: {str(error).splitlines()[0]}"
            ) from None
        tensors = {f"model/{name}": self._tensor(path, name, shape) for name, shape in own.items()}
        self._check_all_used(path)
        self._check_tied(path)
        description = json.loads(json.dumps(described(self.config)["description"]))
        manifest = Manifest(0, True, {}, description, {}, files={}, tensors=tensors)
        super().__init__(path, manifest)

    def _tensor(self, path: Path, name: str, shape: Shape) -> SavedTensor:
        found = list(links(self.kind, self.config, name, shape))
        if self._find(found[0].name) is None and name.split(".", 2)[-1] in FUSED:
            fused = list(links(self.kind, self.config, name, shape, fused=True))
            found = fused if self._find(fused[0].name) is not None else found
        parts, dtypes = [], set()
        for link in found:
            stored = self._find(link.name)
            if stored is None:
                raise ValueError(f"{path}: {link.name} is missing, which {self.kind} has")
            if stored.shape != link.shape:
                raise ValueError(
                    f"{path}: {link.name} has shape {list(stored.shape)}, {CONFIG} says {list(link.shape)}"
                )
            dtypes.add(stored.dtype)
            parts.append(SavedShard(link.ours, stored.file, stored.start, 0))
            self._links[f"model/{name}", link.ours.offsets] = link
        if len(dtypes) > 1:
            raise ValueError(f"{path}: {', '.join(sorted(dtypes))} in what is one tensor here, {name}")
        return SavedTensor(dtypes.pop(), shape, tuple(parts))

    def _find(self, name: str) -> Stored | None:
        """A tensor; early files leave out a part of GPT-2's names, and have TensorFlow's norms in BERT's."""
        early = name.removeprefix("transformer.")
        for kind, first in (("weight", "gamma"), ("bias", "beta")):
            early = early.replace(f"LayerNorm.{kind}", f"LayerNorm.{first}")
        return self._stored.get(name) or self._stored.get(early)

    def _check_all_used(self, path: Path) -> None:
        used = {id(self._find(link.name)) for link in self._links.values()}
        tied = self._tied()
        for name, stored in self._stored.items():
            if id(stored) not in used and name not in tied and not NOT_WEIGHTS.search(name):
                raise ValueError(f"{path}: unexpected {short(name)}, which {self.kind} has not")

    def _tied(self) -> dict[str, str]:
        """What the files may hold a second time, and its first name."""
        family = FAMILIES[self.kind]
        head, table = (family.ends[f"{each}.weight"] for each in ("output_layer", "word_embedding"))
        return {**family.tied, **({head: table} if self.config.tie_embeddings else {})}

    def _check_tied(self, path: Path) -> None:
        """What is tied may be stored, too; another one would be lost, where transformers unties it."""
        for name, first in self._tied().items():
            again, stored = self._find(name), self._find(first)
            if again and stored and not _same_bytes(path, again, stored):
                raise ValueError(f"{path}: {name} is not {first}, though {CONFIG} ties them")

    @torch.no_grad()
    def _read_items(self, file: str, wanted: Sequence[Any], planner: Any) -> None:
        with opened(self.directory / file) as source:
            reader = ChunkReader(source)
            for shard, item in wanted:
                name, box = (
                    item.storage_index.fqn,
                    TensorChunk(tuple(item.storage_offsets), tuple(item.lengths)),
                )
                link = self._links[name, shard.chunk.offsets]
                there = link.inside(box)
                out = planner.resolve_tensor(item).detach()
                own = torch.empty(there.sizes, dtype=DTYPES[self.manifest.tensors[name].dtype])
                reader.read(shard.start, link.shape, there, own)
                link.view(out).copy_(own)
                planner.commit_tensor(item, out)


def _same_bytes(path: Path, one: Stored, other: Stored) -> bool:
    """Whether two tensors of a directory are equal to the bit, of one dtype and shape."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    size = prod(one.shape) * DTYPES[one.dtype].itemsize
    with opened(path / one.file) as first, opened(path / other.file) as second:
        return all(
            os.pread(first.descriptor, length, one.start + at)
            == os.pread(second.descriptor, length, other.start + at)
            for at in range(0, size, _PIECE)
            for length in (min(_PIECE, size - at),)
        )


def check_family(config: GPTConfig) -> str:
    """The family of `transformers` that computes the model; ValueError where none does."""
    try:
        return family_of(config)
    except ValueError as error:
        raise ValueError(f"checkpoint.weights_interval: {error}") from None


def export_weights(
    checkpoint: Path, config: GPTConfig, out: Path, *, check: Callable[[Path], None] | None = None
) -> Path:
    """Write the weights of `checkpoint` to the new directory `out`, whole or not at all; returns it.

    check: called with the directory before it gets its name, to add files, too; where it raises, nothing is
        left.
    """
    reader, kind = CheckpointReader(checkpoint), family_of(config)
    theirs = _their_tensors(reader, kind, config)
    forms = [TensorSpec(name, DTYPES[dtype], shape) for name, (dtype, shape, _) in theirs.items()]
    staging = out.with_name(f"{out.name}.staging")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    try:
        names = _write(staging, forms, lambda form: _read(reader, form, theirs[form.name][2]))
        if len(set(names.values())) > 1:
            index = {"metadata": {"total_size": sum(form.bytes for form in forms)}, "weight_map": names}
            write_synced(staging / INDEX, json_bytes(index))
        table = reader.manifest.tensors["model/word_embedding.weight"]
        dtype = str(DTYPES[table.dtype]).removeprefix("torch.")
        write_synced(staging / CONFIG, json_bytes(to_transformers(kind, config, dtype)))
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


_Pieces = list[tuple[str, Link]]


def _their_tensors(
    reader: CheckpointReader, kind: str, config: GPTConfig
) -> dict[str, tuple[str, Shape, _Pieces]]:
    """{name: (dtype, shape, our tensors and where they are in it)} of the model in transformers."""
    found: dict[str, tuple[str, Shape, _Pieces]] = {}
    saved = reader.manifest.tensors
    for name, shape in own_tensors(config).items():
        tensor = saved.get(f"model/{name}")
        if tensor is None or tensor.shape != shape:
            theirs = "nothing" if tensor is None else list(tensor.shape)
            raise ValueError(f"{reader.directory}: {name} is {theirs}, the model has {list(shape)}")
        for link in links(kind, config, name, shape):
            found.setdefault(link.name, (tensor.dtype, link.shape, []))[2].append((f"model/{name}", link))
    return found


def _write(
    directory: Path, forms: Sequence[TensorSpec], read: Callable[[TensorSpec], Tensor]
) -> dict[str, str]:
    """Write tensors to files of at most `FILE_BYTES`, or of one tensor; returns the file of each."""
    groups, names = _in_files(forms), dict[str, str]()
    for number, group in enumerate(groups):
        of = f"-{number + 1:05d}-of-{len(groups):05d}" if len(groups) > 1 else ""
        file, own = f"model{of}.safetensors", [forms[i] for i in group]
        write_tensors(directory / file, own, partial(_nth, own, read), metadata={"format": "pt"})
        names |= {form.name: file for form in own}
    return names


def _nth(forms: Sequence[TensorSpec], read: Callable[[TensorSpec], Tensor], number: int) -> Tensor:
    return read(forms[number])


def _in_files(forms: Sequence[TensorSpec]) -> list[list[int]]:
    groups, left = [list[int]()], FILE_BYTES
    for i, form in enumerate(forms):
        if groups[-1] and form.bytes > left:
            groups.append([])
            left = FILE_BYTES
        groups[-1].append(i)
        left -= form.bytes
    return groups


def _read(reader: CheckpointReader, form: TensorSpec, pieces: _Pieces) -> Tensor:
    """One tensor of theirs, put together from boxes of ours."""
    out = torch.empty(tuple(form.shape), dtype=form.dtype)
    of_ours: dict[str, list[tuple[Shape, Tensor]]] = {}
    for name, link in pieces:
        view = out[tuple(slice(at, at + size) for at, size in zip(*link.theirs))]
        view = view.t() if link.transposed else view
        of_ours.setdefault(name, []).append((link.ours.offsets, view.unsqueeze(0) if link.squeezed else view))
    for name, parts in of_ours.items():
        fill_shards(reader, name, ShardedTensorRef(reader.manifest.tensors[name].shape, form.dtype, parts))
    return out


def json_bytes(content: Mapping[str, Any]) -> bytes:
    """The content of a JSON file as transformers writes them."""
    return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()
