"""The directory of a run's checkpoints: which there are, which one is to be loaded, which may go.

A checkpoint is written under a staging name, synced and renamed; then the file `latest` is replaced by one
that points to it. A kill between any two steps leaves the old or the new one, whole.

Checkpoints are ordered by when their manifests were written, not by their steps: a run that went back to an
earlier step goes on beside later ones that it has given up.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from fastmp.config.files import read_file, sync_directory, write_synced
from fastmp.training.checkpoint.format import (
    MANIFEST,
    CheckpointError,
    Manifest,
    check_directory,
    is_finite,
    read_manifest,
    write_manifest,
)

__all__ = [
    "CheckpointName",
    "CheckpointEntry",
    "by_age",
    "candidates",
    "checkpoint_at",
    "prune",
    "publish",
    "remove_staging",
    "staging",
    "to_delete",
    "whole_manifest",
]

POINTER = "latest"
_NAME = re.compile(r"step-(\d{8,12})(?:\.(\d{1,6}))?")
_STAGING = ".staging"


class CheckpointName(NamedTuple):
    """The name of a checkpoint: its step, and a number where that step has been saved before."""

    step: int
    attempt: int = 0

    def __str__(self) -> str:
        return f"step-{self.step:08d}" + (f".{self.attempt}" if self.attempt else "")


def staging(directory: Path, step: int) -> Path:
    """The name under which the checkpoint of a step is written."""
    return directory / f"{CheckpointName(step)}{_STAGING}"


def remove_staging(directory: Path) -> None:
    """Delete what writers that have been killed left."""
    for leftover in directory.glob(f"step-*{_STAGING}"):
        if leftover.is_dir() and not leftover.is_symlink():
            shutil.rmtree(leftover)
        else:
            leftover.unlink(missing_ok=True)


class CheckpointEntry(NamedTuple):
    """A checkpoint, and when it was made, in nanoseconds; 0 where it has no manifest."""

    made: int
    name: CheckpointName


def by_age(directory: Path) -> list[CheckpointEntry]:
    """The checkpoints of a run, oldest first; those made at one time by step and number."""
    found = os.listdir(directory) if directory.is_dir() else []
    names = [(entry, _NAME.fullmatch(entry)) for entry in found]
    parsed = [(entry, CheckpointName(int(match[1]), int(match[2] or 0))) for entry, match in names if match]
    return sorted(
        CheckpointEntry(_made(directory / entry), name) for entry, name in parsed if str(name) == entry
    )


def _made(path: Path) -> int:
    try:
        return os.lstat(path / MANIFEST).st_mtime_ns
    except OSError:
        return 0


def candidates(directory: Path) -> list[CheckpointName]:
    """The checkpoints of a run, as they should be tried: the one pointed to, then the newest."""
    newest_first = [saved.name for saved in reversed(by_age(directory))]
    try:
        pointed = read_file(directory / POINTER, 100).decode().strip()
    except (OSError, UnicodeDecodeError):
        pointed = ""
    return sorted(newest_first, key=lambda name: str(name) != pointed)


def checkpoints_at(path: str | Path) -> list[Path]:
    """The checkpoint that `path` is; or, of the run whose directory it is, those that should be tried.

    CheckpointError where there is none.
    """
    path = Path(path)
    if (path / MANIFEST).exists():
        return [path]
    for directory in (path, path / "checkpoints"):
        if found := candidates(directory):
            return [directory / str(name) for name in found]
    raise CheckpointError(f"{path} is no checkpoint, and no directory of a run that has one")


def checkpoint_at(path: str | Path) -> Path:
    """The checkpoint that `path` is, or the latest one of the run whose directory it is."""
    return checkpoints_at(path)[0]


def publish(written: Path, manifest: Manifest) -> Path:
    """Put the manifest to the files in the staging directory `written`, and make them the latest checkpoint.

    Where there is a checkpoint of this step already, the new one gets a suffix, so that nothing that is in
    place is ever moved away.
    """
    directory = written.parent
    write_synced(written / MANIFEST, write_manifest(manifest))
    sync_directory(written)
    names = (CheckpointName(manifest.step, attempt) for attempt in count())
    final = next(path for name in names if not os.path.lexists(path := directory / str(name)))
    written.rename(final)
    sync_directory(directory)
    write_synced(directory / f"{POINTER}.new", f"{final.name}\n".encode())
    os.replace(directory / f"{POINTER}.new", directory / POINTER)
    sync_directory(directory)
    return final


def whole_manifest(path: Path) -> Manifest:
    """The manifest of a checkpoint whose directory has what it says and nothing else."""
    manifest = read_manifest(path)
    check_directory(path, manifest.files)
    for name, file in manifest.files.items():
        try:
            size = os.lstat(path / name).st_size
        except OSError as error:
            raise CheckpointError(f"{path / name} cannot be read ({error.strerror})") from None
        if size != file.bytes:
            raise CheckpointError(f"{path / name} has {size} bytes, {file.bytes} were written")
    return manifest


def to_delete(
    saved: Sequence[CheckpointEntry],
    finite: Callable[[CheckpointName], bool],
    *,
    keep: int,
    keep_every: int = 0,
    keep_hours: float = 0.0,
) -> list[CheckpointName]:
    """Choose the checkpoints to delete; `saved` are oldest first, and the last one has just been made.

    keep: how many of the newest stay; 0: all. keep_every: those of steps that it divides stay, too.
    keep_hours: so does one of every so many hours. The newest one that is `finite` always stays; newer ones
    are asked first, and none that is older.
    """
    if not keep:
        return []
    stays = {each.name for each in saved[-keep:]}
    stays |= {each.name for each in saved if keep_every and each.name.step % keep_every == 0}
    if keep_hours:
        first_of: dict[int, CheckpointName] = {}
        for each in saved:
            first_of.setdefault(int(each.made / 3.6e12 // keep_hours), each.name)
        stays |= set(first_of.values())
    newest = next((each.name for each in reversed(saved) if finite(each.name)), None)
    return [each.name for each in saved if each.name not in stays and each.name != newest]


def prune(directory: Path, made: Path, *, keep: int, **others: Any) -> None:
    """Delete the checkpoints `to_delete`, now that there is the one `made`.

    A link to a checkpoint elsewhere does not count, and stays.
    """
    if not keep:
        return
    saved = [each for each in by_age(directory) if not (directory / str(each.name)).is_symlink()]
    saved.sort(key=lambda each: str(each.name) == made.name)

    def finite(name: CheckpointName) -> bool:
        return is_finite(directory / str(name))

    for name in to_delete(saved, finite, keep=keep, **others):
        shutil.rmtree(directory / str(name), ignore_errors=True)
