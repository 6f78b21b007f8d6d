"""A checkpoint written again, as whole tensors in a few files."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from fastmp.train.checkpoint.boxes import whole_box
from fastmp.train.checkpoint.compare import read_tensor
from fastmp.train.checkpoint.directory import publish, staging, whole_manifest
from fastmp.train.checkpoint.files import Form, verify, write_tensors
from fastmp.train.checkpoint.format import DTYPES, File, Part, SavedTensor, file_name
from fastmp.train.checkpoint.storage import CheckpointReader

__all__ = ["reshard"]


def reshard(source: Path, directory: Path, *, files: int = 1, weights: bool = False) -> Path:
    """Write the checkpoint `source` again into `directory`; returns the new one.

    files: how many, of about equal size. weights: the model alone. One tensor at a time is in memory, and one
    part that it is read from. CheckpointError where the checkpoint is damaged.
    """
    manifest = whole_manifest(source)
    verify(source, manifest, manifest.files)
    reader = CheckpointReader(source, manifest)
    wanted = sorted(name for name in manifest.tensors if not weights or name.startswith("model/"))
    saved = {name: manifest.tensors[name] for name in wanted}
    forms = {name: Form(name, DTYPES[tensor.dtype], tensor.shape) for name, tensor in saved.items()}
    groups, sizes = [list[str]() for _ in range(files)], [0] * files
    for name in sorted(wanted, key=lambda name: (-forms[name].bytes, name)):
        smallest = sizes.index(min(sizes))
        groups[smallest].append(name)
        sizes[smallest] += forms[name].bytes
    target = staging(directory, manifest.step)
    target.mkdir(parents=True)
    try:
        written, tensors = dict[str, File](), dict[str, SavedTensor]()
        for number, names in enumerate(group for group in groups if group):
            file = file_name(number)

            def read(i: int, names: Sequence[str] = names) -> Tensor:
                return read_tensor(reader, names[i])

            written[file], placed = write_tensors(target / file, [forms[name] for name in names], read)
            for name, place in zip(names, placed, strict=True):
                part = Part(whole_box(saved[name].shape), file, place.start, place.crc32)
                tensors[name] = replace(saved[name], parts=(part,))
        return publish(target, replace(manifest, files=written, tensors=tensors))
    except BaseException:
        shutil.rmtree(target, ignore_errors=True)
        raise
