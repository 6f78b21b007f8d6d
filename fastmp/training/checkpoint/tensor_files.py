"""Read and write safetensors files with checksums, in blocks, from several threads."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastmp.config.file_access import open_regular
from fastmp.host import HOST
from fastmp.training.checkpoint.chunks import TensorChunk, is_inside, split_in_two
from fastmp.training.checkpoint.format import DTYPES, CheckpointError, File, Manifest

__all__ = [
    "ChunkReader",
    "NamedTensorSpec",
    "PlacedTensor",
    "dtype_code",
    "opened",
    "tensor_bytes",
    "verify",
    "write_tensors",
]

_BLOCK = 1 << 20  # bytes read at once, few enough to be in the cache when their checksum is computed
_BUFFER = 16 << 20  # bytes read at once into a buffer, if they cannot be read into place
_AHEAD = 4  # tensors that may be written before their checksums are known
_SHARE = 64 << 20  # bytes of a task of a thread that verifies
THREADS = min(4, os.cpu_count() or 1)  # that verify
READERS = 2  # threads that load, each with one buffer
_CODES = {dtype: code for code, dtype in DTYPES.items()}


def dtype_code(name: str, dtype: torch.dtype) -> str:
    """Return the name of a dtype in safetensors. Raises ValueError, naming the tensor, if it has none."""
    if dtype not in _CODES:
        raise ValueError(f"checkpoint: {name} is {dtype}, which cannot be saved")
    return _CODES[dtype]


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor."""
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]


class PlacedTensor(NamedTuple):
    """A written tensor: the offset of its bytes in the file, their CRC-32, and if all numbers are finite."""

    start: int
    crc32: int
    finite: bool


class NamedTensorSpec(NamedTuple):
    """The name, dtype and shape of a tensor to be written."""

    name: str
    dtype: torch.dtype
    shape: Sequence[int]

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def write_tensors(
    path: Path,
    forms: Sequence[NamedTensorSpec],
    tensor: Callable[[int], Tensor],
    metadata: Mapping[str, str] | None = None,
) -> tuple[File, list[PlacedTensor]]:
    """Write contiguous CPU tensors to a new safetensors file and sync it.

    As safetensors requires, tensors with the largest elements come first, then by name.

    Args:
        forms: the specs of the tensors.
        tensor: i -> the tensor of forms[i]; called one after another, so that not all have to be in memory.
        metadata: texts for the header.

    Returns:
        the file, and for each spec its place, checksum and finiteness, computed in a thread while the next
        tensor is written.

    Raises:
        OSError: the file cannot be written.
    """
    order = sorted(range(len(forms)), key=lambda i: (-forms[i].dtype.itemsize, forms[i].name))
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    starts, end = [0] * len(forms), 0
    for i in order:
        name, dtype, shape = forms[i]
        starts[i], end = end, end + forms[i].bytes
        code = dtype_code(name, dtype)
        header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [starts[i], end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    opening = len(text).to_bytes(8, "little") + text
    looks = dict[int, Future[PlacedTensor]]()
    with open(path, "xb", buffering=0) as file, ThreadPoolExecutor(1) as beside:
        _write(file.fileno(), memoryview(opening))
        for i in order:
            own = tensor(i)
            looks[i] = beside.submit(_look_at, own, len(opening) + starts[i])
            _write(file.fileno(), tensor_bytes(own))
            if len(looks) > _AHEAD:  # so that few tensors are in memory for this alone
                looks[order[len(looks) - 1 - _AHEAD]].result()
        os.fsync(file.fileno())
        placed = [looks[i].result() for i in range(len(forms))]
    return File(len(opening) + end, len(opening), zlib.crc32(opening)), placed


def _look_at(tensor: Tensor, start: int) -> PlacedTensor:
    return PlacedTensor(start, zlib.crc32(tensor_bytes(tensor)), is_finite(tensor))


def is_finite(tensor: Tensor) -> bool:
    """Return True if all numbers of a contiguous CPU tensor are finite."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    if HOST is not None:
        return bool(HOST.is_finite(tensor_bytes(tensor), _CODES[tensor.dtype]))
    wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    return bool(tensor.sum(dtype=wide).isfinite()) or bool(tensor.isfinite().all())


def _write(descriptor: int, content: memoryview) -> None:
    while content:
        content = content[os.write(descriptor, content[: 1 << 30]) :]


class OpenFile(NamedTuple):
    """A file that is open for reading."""

    path: Path
    descriptor: int


@contextmanager
def opened(path: Path) -> Iterator[OpenFile]:
    """Open a file of a checkpoint. Raises CheckpointError if it cannot be read or is a link."""
    try:
        descriptor = open_regular(path, links=False)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror})") from None
    try:
        yield OpenFile(path, descriptor)
    finally:
        os.close(descriptor)


def verify(path: Path, manifest: Manifest, files: Iterable[str]) -> None:
    """Verify every byte of `files` of the checkpoint `path`. Raises CheckpointError for a damaged one."""
    of_files, work = manifest.shards_by_file(), list[tuple[Path, list[_ChecksumRange]]]()
    for name in files:
        file = manifest.files[name]
        with opened(path / name) as opened_file:
            size = os.fstat(opened_file.descriptor).st_size
        if size != file.bytes:
            raise CheckpointError(f"{path / name} has {size} bytes, {file.bytes} were written")
        pieces = [_ChecksumRange("its header", 0, file.header_bytes, file.header_crc32)]
        pieces += [
            _ChecksumRange(tensor, shard.start, size, shard.crc32) for tensor, shard, size in of_files[name]
        ]
        share, left = list[_ChecksumRange](), _SHARE
        for piece in pieces:
            share.append(piece)
            left -= piece.bytes
            if left <= 0:
                work.append((path / name, share))
                share, left = [], _SHARE
        work.append((path / name, share))
    with ThreadPoolExecutor(THREADS) as threads:
        for result in [threads.submit(_verify_pieces, *each) for each in work]:
            result.result()


class _ChecksumRange(NamedTuple):
    """A range of a file with a checksum. what: its name in errors."""

    what: str
    start: int
    bytes: int
    crc32: int


def _verify_pieces(path: Path, pieces: Sequence[_ChecksumRange]) -> None:
    block = memoryview(bytearray(_BLOCK))
    with opened(path) as file:
        for piece in pieces:
            checksum, at, end = 0, piece.start, piece.start + piece.bytes
            while at < end:
                part = block[: end - at]
                _read(file, part, at)
                checksum, at = zlib.crc32(part, checksum), at + len(part)
            if checksum != piece.crc32:
                raise CheckpointError(f"{path} is damaged ({piece.what}: its checksum differs)")


def _read(file: OpenFile, target: memoryview, start: int) -> None:
    while target:
        got = os.preadv(file.descriptor, [target[: 1 << 30]], start)
        if not got:
            raise CheckpointError(f"{file.path} ends at byte {start}")
        target, start = target[got:], start + got


class ChunkReader:
    """Read chunks of tensors from a file, with one buffer for bytes that cannot be read into place."""

    def __init__(self, file: OpenFile) -> None:
        self._file, self._buffer = file, torch.empty(0, dtype=torch.uint8)

    def read(
        self, start: int, sizes: Sequence[int], dtype: torch.dtype, chunk: TensorChunk, out: Tensor
    ) -> None:
        """Read a chunk of a saved tensor into `out`.

        No byte outside of the tensor is read: a chunk that is not inside its shape is a CheckpointError.
        A contiguous chunk is read into the memory of a contiguous CPU tensor `out`. Otherwise all bytes from
        the first element to the last go through the buffer; a chunk too large for it is halved.

        Args:
            start: the offset of the saved tensor in the file.
            sizes: its shape.
            dtype: its dtype.
            chunk: a chunk of it.
            out: a tensor of the shape of the chunk, of the same dtype.
        """
        if out.dtype != dtype or tuple(out.shape) != tuple(chunk.sizes):
            raise CheckpointError(
                f"{self._file.path}: expected a target of {dtype} and shape {tuple(chunk.sizes)}, got "
                f"{out.dtype} and {tuple(out.shape)}"
            )
        if len(sizes) != len(chunk.sizes) or not is_inside(chunk, sizes):
            raise CheckpointError(f"{self._file.path}: {chunk} lies outside of its tensor of {tuple(sizes)}")
        if not chunk.numel:
            return
        strides, n = list[int](), 1
        for size in reversed(sizes):
            strides.insert(0, n)
            n *= size
        first = sum(at * stride for at, stride in zip(chunk.offsets, strides))
        elements = 1 + sum((size - 1) * stride for size, stride in zip(chunk.sizes, strides))
        at, size = start + first * out.itemsize, elements * out.itemsize
        if elements == chunk.numel and out.device.type == "cpu" and out.is_contiguous():
            _read(self._file, tensor_bytes(out), at)
        elif size > _BUFFER and elements > 1:
            dim = next(dim for dim, length in enumerate(chunk.sizes) if length > 1)
            for half, own in zip(split_in_two(chunk, dim), out.chunk(2, dim), strict=True):
                self.read(start, sizes, dtype, half, own)
        else:
            if self._buffer.numel() < size:
                self._buffer = torch.empty(max(size, _BUFFER), dtype=torch.uint8)
            content = self._buffer[:size]
            _read(self._file, tensor_bytes(content), at)
            out.copy_(content.view(out.dtype).as_strided(chunk.sizes, strides))
