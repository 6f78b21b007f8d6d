"""Choose and check a checkpoint on all ranks together: all read the same one, or none does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from fastmp.config import EXCHANGE_OPTIONS
from fastmp.config.console import to_stderr
from fastmp.distributed.collectives import group_rank, group_size
from fastmp.training.checkpoint.directory import whole_manifest
from fastmp.training.checkpoint.format import (
    DTYPES,
    MANIFEST,
    CheckpointError,
    Manifest,
    SavedTensor,
    check_types,
)
from fastmp.training.checkpoint.storage import ShardedTensorRef
from fastmp.training.checkpoint.tensor_files import verify

__all__ = ["agree", "choose", "check", "same_on_all"]

T = TypeVar("T")
# Symmetric memory works within one machine, so another layout may need another dispatcher.
_OF_LAYOUT = {f"moe.{name}" for name in EXCHANGE_OPTIONS}
_MESSAGE = 1000  # bytes of a problem that ranks tell each other
Group = dist.ProcessGroup | None


def agree(group: Group, work: Callable[[], T]) -> T:
    """Return work(); if it fails on one rank, raise CheckpointError on all (one all-gather)."""
    result, problem = None, ""
    try:
        result = work()
    except ValueError as error:  # the message suffices, as that of a CheckpointError does
        problem = str(error) or "damaged"
    except OSError as error:
        problem = f"the checkpoint cannot be read: {error}"
    except Exception as error:  # whatever it was, the others must not wait for this rank
        problem = f"{type(error).__name__}: {error}"
    if group is not None:
        text = problem.encode(errors="replace")[:_MESSAGE]
        row = torch.zeros(_MESSAGE, dtype=torch.uint8)
        row[: len(text)] = torch.tensor(list(text), dtype=torch.uint8)
        rows = [torch.empty_like(row) for _ in range(group_size(group))]
        dist.all_gather(rows, row, group=group)
        texts = [bytes(each.tolist()).rstrip(b"\0").decode(errors="replace") for each in rows]
        problem = problem or next(filter(None, texts), "")
    if problem:
        raise CheckpointError(problem)
    return cast(T, result)


def same_on_all(group: Group, paths: Sequence[Path]) -> list[Path]:
    """Broadcast the paths of rank 0."""
    if group is None:
        return list(paths)
    text = b"\0".join(str(path).encode() for path in paths)
    size = torch.tensor(len(text))
    dist.broadcast(size, group=group, group_src=0)
    content = torch.zeros(int(size), dtype=torch.uint8)
    if group_rank(group) == 0:
        content = torch.tensor(list(text), dtype=torch.uint8)
    if len(content):
        dist.broadcast(content, group=group, group_src=0)
    return [Path(each.decode()) for each in bytes(content.tolist()).split(b"\0") if each]


def choose(
    group: Group, paths: Sequence[Path], directory: Path | None = None
) -> tuple[Path, Manifest] | None:
    """Return the first intact checkpoint with finite values, else the first intact one, of `paths`.

    Every byte of a checkpoint is verified, divided over the ranks. Rank 0 prints a line for each checkpoint
    that is passed over.

    Args:
        directory: the directory of which `paths` are all checkpoints, for error messages.

    Returns:
        (path, manifest), or None if there are no paths.

    Raises:
        CheckpointError: on all ranks, if no checkpoint is intact.
    """
    problems: dict[Path, str] = {}
    not_finite: list[tuple[Path, Manifest]] = []
    chosen: tuple[Path, Manifest] | None = None
    for path in paths:
        try:
            manifest = agree(group, partial(_verified, group, path))
        except CheckpointError as error:
            problems[path] = str(error)
            continue
        if manifest.finite:
            chosen = path, manifest
            break
        not_finite.append((path, manifest))
        problems[path] = f"{path} holds values that are not finite"
    if chosen is None and not_finite:
        chosen = not_finite[0]
        problems.pop(chosen[0])
    if chosen is None and problems:
        first = next(iter(problems.values()))
        none = "" if directory is None else f"none in {directory} is whole; "
        raise CheckpointError(f"checkpoint: {none}{first}")
    if chosen is not None and group_rank(group) == 0:
        for other, problem in problems.items():
            text = f"checkpoint: {other.name} is passed over: {problem}; using {chosen[0].name}"
            to_stderr(text)
    return chosen


def _verified(group: Group, path: Path) -> Manifest:
    """Read the manifest of a checkpoint, and verify this rank's share of its files."""
    manifest = whole_manifest(path)
    verify(path, manifest, sorted(manifest.files)[group_rank(group) :: group_size(group)])
    return manifest


def check(
    group: Group,
    path: Path,
    manifest: Manifest,
    state: Mapping[str, ShardedTensorRef],
    *,
    description: Mapping[str, Any],
    defaults: Mapping[str, Any],
    scalars: Mapping[str, Any],
    optional: frozenset[str],
) -> None:
    """Raise CheckpointError, on all ranks, if the checkpoint belongs to another model."""
    saved = sorted(manifest.tensors)
    wanted = torch.tensor([name in state for name in saved], dtype=torch.uint8)
    if group is not None:
        dist.all_reduce(wanted, dist.ReduceOp.MAX, group=group)
    kinds = {name.partition("/")[0] for name in optional}
    left = [name for name, is_wanted in zip(saved, wanted.tolist()) if not is_wanted]

    def own() -> None:
        _check_same(path, manifest.description, description, defaults)
        check_types(f"{path / MANIFEST}: scalars", manifest.scalars, scalars)
        others = [name for name in left if name.partition("/")[0] not in kinds]
        for name in sorted([*others, *(name for name in state if name not in optional)]):
            theirs, ours = form(manifest.tensors.get(name)), form(state.get(name))
            if theirs != ours:
                raise CheckpointError(f"checkpoint {path}: another model: {name} is {theirs}, here {ours}")

    agree(group, own)


def _flat(facts: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested tables as one, with dotted names."""
    found: dict[str, Any] = {}
    for key, value in facts.items():
        inner = isinstance(value, Mapping) and value
        found |= _flat(value, f"{prefix}{key}.") if inner else {f"{prefix}{key}": value}
    return found


def form(tensor: SavedTensor | ShardedTensorRef | None) -> tuple[tuple[int, ...], torch.dtype] | str:
    """Return (shape, dtype) of a tensor of the whole model, or "nothing"."""
    if tensor is None:
        return "nothing"
    return tensor.shape, DTYPES[tensor.dtype] if isinstance(tensor, SavedTensor) else tensor.dtype


def _check_same(
    path: Path, saved: Mapping[str, Any], current: Mapping[str, Any], defaults: Mapping[str, Any]
) -> None:
    saved, current = {**_flat(defaults), **_flat(saved)}, _flat(current)
    differing = [key for key in {**saved, **current} if saved.get(key) != current.get(key)]
    differing = [key for key in differing if key not in _OF_LAYOUT]
    if not differing:
        return
    theirs, ours = (
        ascii(", ".join(f"{key}={values.get(key, 'the default')}" for key in differing))[1:-1][:2000]
        for values in (saved, current)
    )
    raise CheckpointError(f"checkpoint {path}: another model: saved with {theirs}; this run has {ours}")
