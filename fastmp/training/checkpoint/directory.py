"""The directory of a run's checkpoints: publish, list, choose and prune.

A checkpoint is published in three steps: its files are written in a staging directory and synced; the
directory is renamed; the file `latest` is replaced. A kill between any two of them leaves the old or the new
checkpoint intact.

Checkpoints are ordered by the sequence numbers in their manifests, not by step: a run that went back to an
earlier step has newer checkpoints than those that it abandoned. Nor by time: clocks go back, and copies may
lose times. Checkpoints of older versions have no number; by the time of their manifests, they come first.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from fastmp.config.file_access import read_file, sync_directory, write_synced
from fastmp.training.checkpoint.format import (
    LIMIT,
    MANIFEST,
    CheckpointError,
    Manifest,
    is_finite,
    read_manifest,
    sequence_of,
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
    """The name of a checkpoint: its step, and a number if that step was saved before."""

    step: int
    attempt: int = 0

    def __str__(self) -> str:
        return f"step-{self.step:08d}" + (f".{self.attempt}" if self.attempt else "")


def staging(directory: Path, step: int) -> Path:
    """Return the staging directory of a step's checkpoint."""
    return directory / f"{CheckpointName(step)}{_STAGING}"


def remove_staging(directory: Path) -> None:
    """Delete the staging directories of killed writers."""
    for leftover in directory.glob(f"step-*{_STAGING}"):
        if leftover.is_dir() and not leftover.is_symlink():
            shutil.rmtree(leftover)
        else:
            leftover.unlink(missing_ok=True)


class CheckpointEntry(NamedTuple):
    """A checkpoint, its sequence number, and the time of its manifest in nanoseconds; 0 if it has none."""

    sequence: int
    made: int
    name: CheckpointName


def by_age(directory: Path) -> list[CheckpointEntry]:
    """Return the checkpoints of a run, oldest first: by sequence number, time, step and attempt."""
    found = os.listdir(directory) if directory.is_dir() else []
    names = [(entry, _NAME.fullmatch(entry)) for entry in found]
    parsed = [(entry, CheckpointName(int(match[1]), int(match[2] or 0))) for entry, match in names if match]
    return sorted(
        CheckpointEntry(sequence_of(directory / entry), _made(directory / entry), name)
        for entry, name in parsed
        if str(name) == entry
    )


def _made(path: Path) -> int:
    try:
        return os.lstat(path / MANIFEST).st_mtime_ns
    except OSError:
        return 0


def candidates(directory: Path) -> list[CheckpointName]:
    """Return the checkpoints of a run in the order to try them: that of `latest`, then newest first."""
    newest_first = [saved.name for saved in reversed(by_age(directory))]
    try:
        pointed = read_file(directory / POINTER, 100).decode().strip()
    except (OSError, UnicodeDecodeError):
        pointed = ""
    return sorted(newest_first, key=lambda name: str(name) != pointed)


def checkpoints_at(path: str | Path) -> list[Path]:
    """Return [path] if it is a checkpoint, or the `candidates` of the run at `path`.

    Raises CheckpointError if there are none.
    """
    path = Path(path)
    if (path / MANIFEST).exists():
        return [path]
    for directory in (path, path / "checkpoints"):
        if found := candidates(directory):
            return [directory / str(name) for name in found]
    raise CheckpointError(
        f"{path}: no checkpoint found; expected a checkpoint, or the directory of a run with checkpoints/"
    )


def checkpoint_at(path: str | Path) -> Path:
    """Return `path` if it is a checkpoint, or the latest checkpoint of the run at `path`."""
    return checkpoints_at(path)[0]


def publish(written: Path, manifest: Manifest) -> Path:
    """Write the manifest into the staging directory `written`, and make it the latest checkpoint.

    Its sequence number is one more than the largest of the directory. If this step was saved before, the new
    checkpoint gets a suffix; published checkpoints are never moved.

    Raises:
        CheckpointError: a manifest of the directory has the largest number.
    """
    # 1. The files are on disk already; the manifest makes them a checkpoint.
    directory = written.parent
    sequence = 1 + max((saved.sequence for saved in by_age(directory)), default=0)
    if sequence >= LIMIT:
        raise CheckpointError(
            f"{directory}: expected sequence numbers below {LIMIT - 1}, got {sequence - 1}; move the "
            "checkpoint with it elsewhere"
        )
    write_synced(written / MANIFEST, write_manifest(replace(manifest, sequence=sequence)))
    sync_directory(written)
    # 2. Rename to the first name that is free.
    names = (CheckpointName(manifest.step, attempt) for attempt in count())
    final = next(path for name in names if not os.path.lexists(path := directory / str(name)))
    written.rename(final)
    sync_directory(directory)
    # 3. Point `latest` to it.
    write_synced(directory / f"{POINTER}.new", f"{final.name}\n".encode())
    os.replace(directory / f"{POINTER}.new", directory / POINTER)
    sync_directory(directory)
    return final


def whole_manifest(path: Path) -> Manifest:
    """Read the manifest of a checkpoint, and check the names and sizes of the files in its directory.

    Names that begin with a dot are ignored: network file systems leave such files.
    """
    manifest = read_manifest(path)
    known = {MANIFEST, *manifest.files}
    for entry in sorted(os.listdir(path)):
        if entry not in known and not entry.startswith("."):
            raise CheckpointError(f"{path / entry} is no part of the checkpoint; take it away")
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
    """Return the checkpoints to delete.

    The newest checkpoint that is `finite` always stays.

    Args:
        saved: all checkpoints, oldest first; the last one is new.
        finite: called newest first, until it returns True.
        keep: how many of the newest stay; 0: all.
        keep_every: checkpoints of steps that it divides stay, too; 0: none.
        keep_hours: so does the first one of every so many hours; 0: none.
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
    """Delete the checkpoints that `to_delete` returns, after `made` was published.

    Symbolic links to checkpoints elsewhere are not counted, and stay.
    """
    if not keep:
        return
    saved = [each for each in by_age(directory) if not (directory / str(each.name)).is_symlink()]
    saved.sort(key=lambda each: str(each.name) == made.name)

    def finite(name: CheckpointName) -> bool:
        return is_finite(directory / str(name))

    for name in to_delete(saved, finite, keep=keep, **others):
        shutil.rmtree(directory / str(name), ignore_errors=True)
