"""The format of a checkpoint on disk: safetensors files, and their manifest in JSON.

    step-00000100/
        manifest.json            step, layout, model, scalars, files and tensors
        rank-00000.safetensors   the shards that rank 0 wrote, and so on

The manifest lists the tensors of the whole model, and the file and offset of each of their shards. CRC-32
checksums of the manifest, of the header of every file and of every shard cover all bytes of a checkpoint.
They find damage; they are no signature against someone who can write to the checkpoint.

Reading is strict. These are a `CheckpointError` that names the file:
- a name that is not that of a plain file in the directory;
- a shard outside its tensor or its file, or two shards that overlap;
- bytes that belong to no shard.
"""

from __future__ import annotations

import gc
import json
import re
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from reprlib import repr as short
from typing import Any, NamedTuple

import torch

from fastmp.config.file_access import open_binary, read_file
from fastmp.training.checkpoint.chunks import TensorChunk

__all__ = [
    "DTYPES", "MANIFEST", "CheckpointError", "File", "Manifest", "SavedShard", "SavedTensor",
    "check_tiled", "check_types", "file_name", "is_finite", "read_manifest", "sequence_of",
    "write_manifest",
]  # fmt: skip

FORMAT = 2
MANIFEST = "manifest.json"
LARGEST_MANIFEST = 1 << 27  # bytes: two million shards or more
LONGEST_NAME = 1000  # characters of a tensor's name
DIMENSIONS = 64  # at most, as in torch
LIMIT = 1 << 62  # below it is every number, and the bytes of a tensor without its empty dimensions
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool,
}  # fmt: skip
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}\.safetensors")
_OPENING = re.compile(rb'\{"crc32": (\d{1,10}), "manifest": ')
_FINITE = re.compile(rb'\{\s*"format": \d+,\s*"step": \d+,\s*"finite": true,')
_SEQUENCE = re.compile(rb'[^\[]{1,200}?,\s*"sequence": (\d{1,19}),\s*"layout": ')
_CLOSING = b"}\n"


class CheckpointError(ValueError):
    """Raised for a damaged checkpoint, or one that does not fit the loading run."""


@dataclass(frozen=True)
class File:
    """A safetensors file: its size and that of its header, in bytes, and the header's CRC-32."""

    bytes: int
    header_bytes: int
    header_crc32: int


class SavedShard(NamedTuple):
    """A chunk of a tensor, with the file and offset of its bytes and their CRC-32."""

    chunk: TensorChunk
    file: str
    start: int
    crc32: int


@dataclass(frozen=True)
class SavedTensor:
    """A tensor of the whole model; its dtype is named as in safetensors."""

    dtype: str
    shape: tuple[int, ...]
    shards: tuple[SavedShard, ...]

    def bytes(self, chunk: TensorChunk) -> int:
        return chunk.numel * DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class Manifest:
    """The contents of a checkpoint.

    step: the number of steps done.
    finite: True if all numbers in it are finite.
    sequence: the number of this checkpoint in its directory, from 1, in the order of publication; 0: none.
    layout: the sizes of the grid that wrote it, for information.
    description: the model.
    scalars: values that are not tensors.
    """

    step: int
    finite: bool
    layout: dict[str, Any]
    description: dict[str, Any]
    scalars: dict[str, Any]
    files: dict[str, File]
    tensors: dict[str, SavedTensor]
    sequence: int = 0

    def shards_by_file(self) -> dict[str, list[tuple[str, SavedShard, int]]]:
        """Return {file: [(tensor name, shard, bytes)]} in the order of the bytes; empty shards come first."""
        found: dict[str, list[tuple[str, SavedShard, int]]] = {name: [] for name in self.files}
        for name, tensor in self.tensors.items():
            for shard in tensor.shards:
                found[shard.file].append((name, shard, tensor.bytes(shard.chunk)))
        return {
            file: sorted(shards, key=lambda each: (each[1].start, each[2])) for file, shards in found.items()
        }


def file_name(rank: int) -> str:
    """Return the name of the file that a rank writes."""
    return f"rank-{rank:05d}.safetensors"


def write_manifest(manifest: Manifest) -> bytes:
    """Return the bytes of a manifest, equal for equal manifests. Raises ValueError if it is too large."""
    files = {name: manifest.files[name] for name in sorted(manifest.files)}
    numbers = {name: number for number, name in enumerate(files)}
    opening = {
        "format": FORMAT,
        "step": manifest.step,
        "finite": manifest.finite,
        "sequence": manifest.sequence,
        "layout": manifest.layout,
        "description": manifest.description,
        "scalars": manifest.scalars,
        "files": {name: [file.bytes, file.header_bytes, file.header_crc32] for name, file in files.items()},
    }
    lines = [f"{json.dumps(key)}: {json.dumps(value, sort_keys=True)}" for key, value in opening.items()]
    tensors = []
    for name, tensor in sorted(manifest.tensors.items()):
        shards = [
            [numbers[shard.file], shard.start, shard.crc32, shard.chunk.offsets, shard.chunk.sizes]
            for shard in sorted(tensor.shards, key=lambda shard: shard.chunk)
        ]
        tensors.append(f"{json.dumps(name)}: {json.dumps([tensor.dtype, tensor.shape, shards])}")
    lines.append('"tensors": {\n' + ",\n".join(tensors) + "\n}")
    body = ("{\n" + ",\n".join(lines) + "\n}").encode()
    if len(body) > LARGEST_MANIFEST - 100:
        raise ValueError(f"checkpoint: a manifest of {len(body)} bytes, at most {LARGEST_MANIFEST} are read")
    return b'{"crc32": %d, "manifest": ' % zlib.crc32(body) + body + _CLOSING


def read_manifest(path: Path) -> Manifest:
    """Read and check the manifest of the checkpoint `path`, without its files.

    Takes up to 40 times the memory of the file, which has at most 128 MiB.
    """
    file = path / MANIFEST
    try:
        with _no_collection():
            values = json.loads(str(_body(file), "utf-8"))
            if not isinstance(values, dict) or values.get("format") != FORMAT:
                found = values.get("format") if isinstance(values, dict) else None
                raise _Wrong(f"format {short(found)}, this version reads {FORMAT}")
            return _manifest(values)
    except _Wrong as wrong:
        raise CheckpointError(f"{file}: {wrong}") from None
    except CheckpointError:
        raise
    except (ValueError, RecursionError):
        raise CheckpointError(f"{file} is not JSON") from None


@contextmanager
def _no_collection() -> Iterator[None]:
    """Pause the garbage collector, which would scan many small objects: it halves the time."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def is_finite(path: Path) -> bool:
    """Return the `finite` flag of the manifest of the checkpoint `path`; False if it is damaged.

    Tensors are not read, so this is fast.
    """
    try:
        return _FINITE.match(_body(path / MANIFEST)) is not None
    except CheckpointError:
        return False


def sequence_of(path: Path) -> int:
    """Return the sequence number of the checkpoint `path`; 0 if its manifest has none or cannot be read.

    Only the first bytes are read, and no checksum is verified.
    """
    try:
        with open_binary(path / MANIFEST, links=False) as file:
            found = _SEQUENCE.match(file.read(300))
    except OSError:
        return 0
    number = int(found[1]) if found else 0
    return number if number < LIMIT else 0


def _body(file: Path) -> memoryview:
    """Return the body of a manifest after verifying its checksum."""
    try:
        content = read_file(file, LARGEST_MANIFEST, links=False)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read ({error.strerror})") from None
    opening = _OPENING.match(content)
    if opening is None or not content.endswith(_CLOSING):
        raise CheckpointError(f"{file} is damaged (not as it was written)")
    body = memoryview(content)[opening.end() : -len(_CLOSING)]
    if zlib.crc32(body) != int(opening[1]):
        raise CheckpointError(f"{file} is damaged (its checksum differs)")
    return body


class _Wrong(ValueError):
    """Raised for an entry of a manifest; the caller adds the name of the file."""


_FIELDS = {"step": int, "finite": bool, "layout": dict, "description": dict, "scalars": dict}


def _manifest(values: dict[str, Any]) -> Manifest:
    for name, kind in {**_FIELDS, "files": dict, "tensors": dict}.items():
        if type(values.get(name)) is not kind:
            raise _Wrong(f"{name} must be of type {kind.__name__}, got {type(values.get(name)).__name__}")
    _count("step", values["step"])
    sequence = _count("sequence", values.get("sequence", 0))  # older checkpoints have none
    files = {name: _file(name, entry) for name, entry in values["files"].items()}
    order = list(files)
    entries = values["tensors"]  # an entry takes more memory than what is made of it: none is kept
    tensors = {name: _tensor(name, entries.pop(name), order) for name in list(entries)}
    facts = {name: values[name] for name in _FIELDS}
    manifest = Manifest(**facts, files=files, tensors=tensors, sequence=sequence)
    for name, shards in manifest.shards_by_file().items():
        end = files[name].header_bytes
        for tensor, shard, size in shards:
            if shard.start != end:
                raise _Wrong(f"{tensor} begins at byte {shard.start} of {name}, where {end} is expected")
            end += size
        if end != files[name].bytes:
            raise _Wrong(f"{name} has {files[name].bytes} bytes, of which {end} belong to tensors")
    return manifest


def _count(what: str, value: Any) -> int:
    if type(value) is not int or not 0 <= value < LIMIT:
        raise _Wrong(f"{what} must be a number from 0 to below 2^62, got {short(value)}")
    return value


def _counts(what: str, value: Any, length: int | None = None) -> tuple[int, ...]:
    if type(value) is not list or (length is not None and len(value) != length):
        size = "" if length is None else f" of {length} numbers"
        raise _Wrong(f"{what} must be a list{size}, got {short(value)}")
    return tuple(_count(what, each) for each in value)


def _file(name: str, entry: Any) -> File:
    if not _FILE_NAME.fullmatch(name):
        raise _Wrong(f"{short(name)} is not the name of a safetensors file in the checkpoint's directory")
    return File(*_counts(f"the entry of {name}", entry, 3))


def _tensor(name: str, entry: Any, files: Sequence[str]) -> SavedTensor:
    _check_name(name, _Wrong)
    if type(entry) is not list or len(entry) != 3 or type(entry[2]) is not list:
        raise _Wrong(f"{name}: its entry must be dtype, shape and shards")
    dtype, shape = entry[0], _counts(f"the shape of {name}", entry[1])
    if type(dtype) is not str or dtype not in DTYPES:
        raise _Wrong(f"{name}: unknown dtype {short(dtype)}")
    shards = tuple(_shard(name, each, files, len(shape)) for each in entry[2])
    check_tiled(name, shape, [shard.chunk for shard in shards], _Wrong)
    return SavedTensor(dtype, shape, shards)


def _shard(name: str, entry: Any, files: Sequence[str], dims: int) -> SavedShard:
    if type(entry) is not list or len(entry) != 5 or not type(entry[3]) is type(entry[4]) is list:
        raise _Wrong(f"{name}: a shard must be file, start, checksum, offsets and sizes, got {short(entry)}")
    file, start, crc32, offsets, sizes = entry
    if len(offsets) != dims or len(sizes) != dims:
        raise _Wrong(f"{name}: a shard of {len(offsets)} and {len(sizes)} dimensions, the tensor has {dims}")
    for value in (file, start, crc32, *offsets, *sizes):
        if type(value) is not int or not 0 <= value < LIMIT:
            raise _Wrong(f"a shard of {name} must have numbers from 0 to below 2^62, got {short(value)}")
    if file >= len(files):
        raise _Wrong(f"{name}: a shard lies in file {file} of {len(files)}")
    return SavedShard(TensorChunk(tuple(offsets), tuple(sizes)), files[file], start, crc32)


def _check_name(name: str, error: type[ValueError]) -> None:
    if not name.isprintable() or len(name) > LONGEST_NAME:
        raise error(
            f"{short(name)} cannot be the name of a tensor: it has {len(name)} characters; at most "
            f"{LONGEST_NAME} that can be printed are allowed"
        )


def check_tiled(
    name: str, shape: Sequence[int], chunks: Sequence[TensorChunk], error: type[ValueError]
) -> None:
    """Raise `error` where a checkpoint cannot have a tensor of this name and shape, or `chunks` are not all
    of it, each element once."""
    _check_name(name, error)
    widest = max(dtype.itemsize for dtype in DTYPES.values())
    if len(shape) > DIMENSIONS or prod(n or 1 for n in shape) * widest >= LIMIT:
        raise error(f"{name}: its shape {short(tuple(shape))} has too many dimensions or elements")
    there = 0
    for offsets, sizes in chunks:
        for at, size, n in zip(offsets, sizes, shape):
            if at + size > n:
                raise error(f"{name}: a shard at {offsets} of size {sizes} is outside of {tuple(shape)}")
        there += prod(sizes)
    if there != prod(shape):
        raise error(
            f"{name}: its shards have {there} elements, the tensor of shape {tuple(shape)} {prod(shape)}"
        )
    if len({offsets for offsets, _ in chunks}) < len(chunks):  # else an empty one could stand for another
        raise error(f"{name}: shards overlap or are empty where another one begins")
    if len(chunks) > 1 and there:
        _check_tiling(name, shape, chunks, error)


def _check_tiling(
    name: str, shape: Sequence[int], chunks: Sequence[TensorChunk], error: type[ValueError]
) -> None:
    """Raise `error` unless `chunks` tile the tensor, by summing the signed corners of chunks.

    The chunks cover each element once if and only if all corners cancel except those of the tensor. Corners
    are made one dimension after another and cancel where chunks meet, so a grid takes time in proportion to
    its number of chunks.
    """
    cut = [dim for dim, n in enumerate(shape) if any(sizes[dim] != n for _, sizes in chunks)]
    counts: dict[tuple[Any, ...], int] = defaultdict(int)
    for offsets, sizes in chunks:
        counts[tuple([(offsets[dim], offsets[dim] + sizes[dim]) for dim in cut])] += 1
    counts[tuple([(0, shape[dim]) for dim in cut])] -= 1
    for dim in range(len(cut)):
        corners: dict[tuple[Any, ...], int] = defaultdict(int)
        for key, count in counts.items():
            before, (start, end), behind = key[:dim], key[dim], key[dim + 1 :]
            corners[*before, start, *behind] += count
            corners[*before, end, *behind] -= count
            if len(corners) > 4 * len(chunks) + 100_000:
                raise error(f"{name}: its {len(chunks)} shards are too irregular")
        counts = {key: count for key, count in corners.items() if count}
    if counts:
        at = dict(zip(cut, min(counts)))
        place = tuple(at.get(dim, 0) for dim in range(len(shape)))
        raise error(f"{name}: shards overlap or leave a gap, first at {place}")


def check_types(where: str, saved: Mapping[str, Any], examples: Mapping[str, Any]) -> None:
    """Raise CheckpointError unless `saved` has the types of `examples`, at any depth; `where` names it."""
    for key, example in examples.items():
        found = saved.get(key)
        if type(found) is not type(example):
            what = short(found) if key in saved else "nothing"
            raise CheckpointError(f"{where}.{key} must be of type {type(example).__name__}, got {what}")
        if isinstance(found, dict) and isinstance(example, dict):
            check_types(f"{where}.{key}", found, example)
