"""Rewrite a checkpoint as full tensors in a few files."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from fastmp.training.checkpoint.chunks import TensorChunk, full_chunk
from fastmp.training.checkpoint.directory import publish, staging, whole_manifest
from fastmp.training.checkpoint.format import DTYPES, File, SavedShard, file_name
from fastmp.training.checkpoint.storage import CheckpointReader, shard_name
from fastmp.training.checkpoint.tensor_files import NamedTensorSpec, verify, write_tensors

__all__ = ["reshard", "write_again"]


def reshard(source: Path, directory: Path, *, files: int = 1, weights: bool = False) -> Path:
    """Write the checkpoint `source` into `directory` as full tensors; return the new checkpoint.

    Memory holds one tensor and one shard at a time.

    Args:
        files: the number of files, of about equal size.
        weights: True to copy the model alone.

    Raises:
        CheckpointError: the checkpoint is damaged.
    """
    manifest = whole_manifest(source)
    verify(source, manifest, manifest.files)
    wanted = (name for name in manifest.tensors if not weights or name.startswith("model/"))
    pieces = [(name, full_chunk(manifest.tensors[name].shape)) for name in wanted]
    return write_again(CheckpointReader(source, manifest), pieces, directory, files=files)


def write_again(
    reader: CheckpointReader, pieces: Iterable[tuple[str, TensorChunk]], directory: Path, *, files: int = 1
) -> Path:
    """Write `pieces`, chunks of tensors of `reader`, into `directory` as a checkpoint; return it.

    Memory holds one piece and one shard at a time.
    """
    manifest = reader.manifest
    tensors = manifest.tensors
    forms = {
        (name, chunk): NamedTensorSpec(
            shard_name(name, chunk, tensors[name].shape), DTYPES[tensors[name].dtype], chunk.sizes
        )
        for name, chunk in pieces
    }
    groups, sizes = [list[tuple[str, TensorChunk]]() for _ in range(files)], [0] * files
    for piece in sorted(forms, key=lambda piece: (-forms[piece].bytes, piece)):
        smallest = sizes.index(min(sizes))
        groups[smallest].append(piece)
        sizes[smallest] += forms[piece].bytes
    target = staging(directory, manifest.step)
    target.mkdir(parents=True)
    try:
        written, shards, finite = dict[str, File](), dict[str, list[SavedShard]](), True
        for number, own in enumerate(group for group in groups if group):
            file = file_name(number)

            def read(i: int, own: Sequence[tuple[str, TensorChunk]] = own) -> Tensor:
                return reader.tensor(*own[i])

            written[file], placed = write_tensors(target / file, [forms[piece] for piece in own], read)
            for (name, chunk), place in zip(own, placed, strict=True):
                shards.setdefault(name, []).append(SavedShard(chunk, file, place.start, place.crc32))
                finite = finite and place.finite
        resharded = {
            name: replace(tensors[name], shards=tuple(sorted(own, key=lambda shard: shard.chunk)))
            for name, own in shards.items()
        }
        finite = manifest.finite and finite
        return publish(target, replace(manifest, finite=finite, files=written, tensors=resharded))
    except BaseException:
        shutil.rmtree(target, ignore_errors=True)
        raise
