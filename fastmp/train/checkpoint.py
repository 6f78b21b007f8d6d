"""Checkpoints that survive a kill at any moment, hold no pickle, and refuse to load what does not fit.

A checkpoint is a directory: a safetensors file for each rank that has something to save, and `state.json`
with the step, the layout, the model's description and the size and CRC-32 of every file. Only files listed
there are read. The directory is written under a staging name, synced and renamed; then the file `latest` is
replaced by one that points to it. Names of tensors begin with the place of their shard in the model-parallel
grid ("tp1.pp0/model/..."), or in the grid of experts ("etp0.ep1.pp0/model/..."), so that no two ranks save
different tensors under one name.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fastmp.parallel.collectives import group_rank
from fastmp.parallel.groups import ParallelGroups
from fastmp.train.tokenfile import sync_directory, write_synced

__all__ = ["CheckpointError", "Checkpointer", "communication_device", "described"]

FORMAT = 1
STATE_FILE = "state.json"
POINTER = "latest"
_NAME = re.compile(r"step-(\d{8})(?:\.(\d+))?")
_STAGING = ".staging"
_LAYOUT_AXES = ("world_size", "tp", "cp", "ep", "dp", "pp", "etp")
_ONE_CHUNK = {"vpp": 1}  # the default, also for checkpoints that do not name it
_BLOCK = 1 << 20  # bytes read at once
NO_TENSORS: Mapping[str, Tensor] = MappingProxyType({})
NO_SCALARS: Mapping[str, Any] = MappingProxyType({})


class CheckpointError(ValueError):
    """A checkpoint is damaged, or belongs to another model or another layout."""


class Checkpointer:
    """Saves and finds checkpoints in `directory`, which all ranks see.

    groups: this rank's groups. Every method is called by all ranks together.
    layout: JSON-able facts that decide, beside the sizes of the groups, which rank holds what. A checkpoint
        with other facts is refused. By default a rank has one chunk of the model.
    description: JSON-able facts about the model (its configuration). A checkpoint with others is refused.
    defaults: the value of each fact that older checkpoints do not name.
    keep: how many checkpoints stay; older ones are deleted once a newer one is in place. 0 keeps all. The
        newest one whose tensors are all finite is never deleted.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        groups: ParallelGroups = ParallelGroups.alone(),
        layout: Mapping[str, Any] | None = None,
        description: Mapping[str, Any] | None = None,
        defaults: Mapping[str, Any] | None = None,
        keep: int = 2,
    ) -> None:
        self.directory = Path(directory)
        self.description = json.loads(json.dumps(dict(description or {})))
        self.defaults = json.loads(json.dumps(dict(defaults or {})))
        self.keep = keep
        self.distributed = groups.grid.world_size > 1
        self.rank = groups.rank
        axes = {axis: getattr(groups.grid, axis) for axis in _LAYOUT_AXES}
        self.layout = json.loads(json.dumps({**axes, **_ONE_CHUNK, **(layout or {})}))
        tp_rank, pp_rank = group_rank(groups.tp), group_rank(groups.pp)
        etp_rank, ep_rank = group_rank(groups.etp), group_rank(groups.ep)
        self._shard = f"tp{tp_rank}.pp{pp_rank}"
        self._expert_shard = f"etp{etp_rank}.ep{ep_rank}.pp{pp_rank}"
        self._owns_shard = group_rank(groups.dp_cp) == 0
        self._owns_experts = group_rank(groups.edp) == 0

    def save(
        self,
        step: int,
        shard: Mapping[str, Tensor],
        own: Mapping[str, Tensor],
        scalars: Mapping[str, Any],
        *,
        experts: Mapping[str, Tensor] = NO_TENSORS,
    ) -> Path:
        """Write the state after `step` steps and make it the latest; returns its directory.

        shard: tensors that all data-parallel ranks hold alike (parameters, optimizer state); one rank saves
            them.
        own: tensors of each rank (random states). scalars: JSON-able values, equal on all ranks.
        experts: tensors that all ranks of `groups.edp` hold alike; one rank saves them.

        Raises OSError on all ranks if one of them could not write; earlier checkpoints are still there.
        """
        staging = self.directory / f"step-{step:08d}{_STAGING}"
        with self._together():
            if self.rank == 0:
                for leftover in self.directory.glob(f"step-*{_STAGING}"):
                    shutil.rmtree(leftover)
                staging.mkdir(parents=True)
        tensors = self._named(own, f"rank{self.rank}")
        if self._owns_shard:
            tensors |= self._named(shard, self._shard)
        if self._owns_experts:
            tensors |= self._named(experts, self._expert_shard)
        with self._together(remove=staging):
            _write_tensors(staging / _file_name(self.rank), tensors)
        files, finite = self._describe_files(staging, tensors.values())
        with self._together(remove=staging):
            if self.rank == 0:
                state = {"format": FORMAT, "step": step, "finite": finite, "layout": self.layout}
                state |= {"description": self.description, "scalars": dict(scalars), "files": files}
                document = {"crc32": zlib.crc32(json.dumps(state).encode()), "state": state}
                write_synced(staging / STATE_FILE, json.dumps(document, indent=1).encode())
                self._publish(staging, step)
        return self.directory / (self.directory / POINTER).read_text().strip()

    def load(
        self,
        shard: Mapping[str, Tensor],
        own: Mapping[str, Tensor],
        scalars: Mapping[str, Any] = NO_SCALARS,
        *,
        experts: Mapping[str, Tensor] = NO_TENSORS,
    ) -> dict[str, Any] | None:
        """Read the latest valid checkpoint into the given tensors.

        scalars: examples of the values that must be among those saved, each under its name and of its type.

        Returns {"step": int, **scalars}, or None where the directory has no checkpoint. A damaged checkpoint,
        or one with values that are not finite, is passed over for an older one, with a line on stderr.

        Raises CheckpointError naming both sides where the checkpoint belongs to another layout or model or
        has other scalars, and where there are checkpoints but none is whole.
        """
        path = self._agree_on_latest()
        if path is None:
            return None
        state = _read_state(path)
        self._check_same("layout", path, {**_ONE_CHUNK, **state.layout}, self.layout)
        self._check_same("model", path, {**self.defaults, **state.description}, self.description)
        _check_types(path / STATE_FILE, "scalars", state.scalars, scalars)
        wanted = self._named(shard, self._shard) | self._named(own, f"rank{self.rank}")
        wanted |= self._named(experts, self._expert_shard)
        prefixes = f"{self._shard}/", f"{self._expert_shard}/", f"rank{self.rank}/"
        saved = _read_tensors(path, state.files, prefixes)
        _check_tensors(path, saved, wanted)
        for name, tensor in wanted.items():
            tensor.copy_(saved[name])
        return {"step": state.step, **state.scalars}

    def latest(self) -> Path | None:
        """The checkpoint that `load` would read; None where there is none at all.

        It is the one that `latest` points to, else the newest, that is whole and finite; where none is
        finite, one that is whole. What is passed over is said on stderr. The other ranks take no part.
        Raises CheckpointError where there are checkpoints and none is whole.
        """
        candidates = self._by_age()
        try:
            pointed = self.directory / (self.directory / POINTER).read_text().strip()
        except (OSError, UnicodeDecodeError):
            pointed = None
        if pointed in candidates:
            candidates.append(pointed)
        problems: dict[Path, str] = {}
        usable: list[tuple[bool, Path]] = []  # is it finite
        for path in dict.fromkeys(reversed(candidates)):
            try:
                state = _verified_state(path)
            except CheckpointError as error:
                problems[path] = str(error)
                continue
            usable.append((state.finite, path))
            if state.finite:
                break
            problems[path] = f"{path} holds values that are not finite"
        if not usable:
            if problems:
                raise CheckpointError(
                    f"checkpoint: none in {self.directory} is whole; {next(iter(problems.values()))}"
                )
            return None
        _, chosen = max(usable, key=lambda pair: pair[0])
        problems.pop(chosen, None)
        for path, problem in problems.items():
            print(f"checkpoint: {path.name} is passed over: {problem}; using {chosen.name}", file=sys.stderr)
        return chosen

    def _named(self, tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
        return {f"{prefix}/{name}": tensor.detach() for name, tensor in tensors.items()}

    def _describe_files(
        self, staging: Path, tensors: Iterable[Tensor]
    ) -> tuple[dict[str, dict[str, int]], bool]:
        """Size and CRC-32 of each rank's file, computed by that rank; whether all values are finite."""
        path = staging / _file_name(self.rank)
        size, checksum = _checksum(path) if path.exists() else (0, 0)
        table = torch.tensor([[size, checksum, int(_all_finite(tensors))]])
        if self.distributed:
            table = table.to(communication_device())
            rows = [torch.empty_like(table) for _ in range(dist.get_world_size())]
            dist.all_gather(rows, table)
            table = torch.cat(rows)
        files = {
            _file_name(rank): {"bytes": size, "crc32": checksum}
            for rank, (size, checksum, _) in enumerate(table.tolist())
            if size
        }
        return files, bool(table[:, 2].all())

    def _publish(self, staging: Path, step: int) -> None:
        """Rename the finished directory, point to it, delete old ones.

        A kill between any two lines is harmless. Where there is a checkpoint of this step already, the new
        one gets a suffix, so that nothing that is in place is ever moved away.
        """
        sync_directory(staging)
        final = next(path for i in count() if not (path := self.directory / _name(step, i)).exists())
        staging.rename(final)
        sync_directory(self.directory)
        write_synced(self.directory / f"{POINTER}.new", f"{final.name}\n".encode())
        os.replace(self.directory / f"{POINTER}.new", self.directory / POINTER)
        sync_directory(self.directory)
        if self.keep:
            others = [path for path in self._by_age() if path != final]
            old = others[: max(0, len(others) - (self.keep - 1))]
            kept = [final, *reversed(others[len(old) :])]
            if not any(map(_is_finite, kept)):
                old = [path for path in old if path != next(filter(_is_finite, reversed(old)), None)]
            for path in old:
                shutil.rmtree(path, ignore_errors=True)

    def _by_age(self) -> list[Path]:
        """Complete checkpoint directories, by step and then by attempt."""
        if not self.directory.is_dir():
            return []
        found = [(match, path) for path in self.directory.iterdir() if (match := _NAME.fullmatch(path.name))]
        return [path for _, path in sorted((((int(m[1]), int(m[2] or 0)), path) for m, path in found))]

    def _agree_on_latest(self) -> Path | None:
        """Rank 0 looks and tells the others what it found (as two numbers: no pickle on this path)."""
        number, problem = torch.tensor([-1, 0]), None
        if self.rank == 0:
            try:
                path = self.latest()
            except CheckpointError as error:
                problem, number = error, torch.tensor([-2, 0])
            else:
                if path is not None:
                    match = _NAME.fullmatch(path.name)
                    number = torch.tensor([int(match[1]), int(match[2] or 0)])
        if self.distributed:
            number = number.to(communication_device())
            dist.broadcast(number, src=0)
        step, attempt = number.tolist()
        if step == -2:
            raise problem or CheckpointError(f"checkpoint: none in {self.directory} is whole")
        return None if step == -1 else self.directory / _name(step, attempt)

    def _check_same(self, what: str, path: Path, saved: dict[str, Any], current: dict[str, Any]) -> None:
        if saved == current:
            return
        differing = [key for key in {**saved, **current} if saved.get(key) != current.get(key)]
        theirs = ", ".join(f"{key}={saved.get(key, 'the default')}" for key in differing)
        ours = ", ".join(f"{key}={current.get(key, 'the default')}" for key in differing)
        raise CheckpointError(f"checkpoint {path}: another {what}: saved with {theirs}; this run has {ours}")

    @contextmanager
    def _together(self, remove: Path | None = None) -> Iterator[None]:
        """Turn an OSError of the block on one rank into one on all ranks, so that none waits for a lost one.

        remove: a directory that rank 0 deletes in that case.
        """
        error = None
        try:
            yield
        except OSError as caught:
            error = caught
        failed = torch.tensor(error is not None, dtype=torch.int64)
        if self.distributed:
            failed = failed.to(communication_device())
            dist.all_reduce(failed)
        if failed.item():
            if remove is not None and self.rank == 0:
                shutil.rmtree(remove, ignore_errors=True)
            reason = "another rank failed" if error is None else error
            raise OSError(f"checkpoint: cannot write in {self.directory}: {reason}") from None


def described(config: Any) -> dict[str, dict[str, Any]]:
    """The `description` and the `defaults` of a `Checkpointer` for a configuration, if it is a dataclass."""
    if not is_dataclass(config) or isinstance(config, type):
        return {}
    values = {field.name: field.default for field in fields(config) if field.default is not MISSING}
    defaults = {name: asdict(value) if is_dataclass(value) else value for name, value in values.items()}
    return {"description": asdict(config), "defaults": defaults}


def _name(step: int, attempt: int) -> str:
    return f"step-{step:08d}" + (f".{attempt}" if attempt else "")


def communication_device() -> str:
    """The device of tensors for the default process group: the host where one of its backends takes them."""
    return "cpu" if "gloo" in dist.get_backend_config() else "cuda"


def _file_name(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def _write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write and sync a safetensors file; none where there are no tensors."""
    if not tensors:
        return
    try:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    except SafetensorError as error:
        raise OSError(str(error)) from None
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _read_tensors(path: Path, files: Iterable[str], prefixes: tuple[str, ...]) -> dict[str, Tensor]:
    """The tensors of `files` whose names begin with one of `prefixes`, mapped from disk."""
    tensors: dict[str, Tensor] = {}
    for file_name in files:
        try:
            with safe_open(path / file_name, framework="pt") as file:
                names = [name for name in file.keys() if name.startswith(prefixes)]
                found = {name: file.get_tensor(name) for name in names}
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path / file_name} cannot be read ({error})") from None
        for name in found.keys() & tensors.keys():
            raise CheckpointError(f"{path / file_name}: another file of the checkpoint has {name}, too")
        tensors |= found
    return tensors


def _check_tensors(path: Path, saved: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    def form(tensors: Mapping[str, Tensor], name: str) -> tuple[tuple[int, ...], torch.dtype] | str:
        return (tuple(tensors[name].shape), tensors[name].dtype) if name in tensors else "nothing"

    for name in sorted({**saved, **wanted}):
        theirs, ours = form(saved, name), form(wanted, name)
        if theirs != ours:
            raise CheckpointError(f"checkpoint {path}: another model: {name} is {theirs}, here {ours}")


def _check_types(file: Path, name: str, saved: Mapping[str, Any], examples: Mapping[str, Any]) -> None:
    """Check that `saved`, called `name` in `file`, has values of the types of `examples`, at any depth."""
    for key, example in examples.items():
        found = saved.get(key)
        if type(found) is not type(example):
            what = repr(found) if key in saved else "nothing"
            raise CheckpointError(
                f"{file}: {name}.{key} must be of type {type(example).__name__}, got {what}"
            )
        if isinstance(example, dict):
            _check_types(file, f"{name}.{key}", found, example)


def _all_finite(tensors: Iterable[Tensor]) -> bool:
    floating = [tensor for tensor in tensors if tensor.is_floating_point() and tensor.numel()]
    return not floating or bool(torch.stack([torch.isfinite(tensor).all() for tensor in floating]).all())


@dataclass(frozen=True)
class _State:
    """The content of state.json. files: {name: (size in bytes, CRC-32)}."""

    step: int
    finite: bool
    layout: dict[str, Any]
    description: dict[str, Any]
    scalars: dict[str, Any]
    files: dict[str, tuple[int, int]]


_FIELDS = {"step": int, "finite": bool, "layout": dict, "description": dict, "scalars": dict, "files": dict}


def _read_state(path: Path) -> _State:
    """Read and check the state.json of the checkpoint `path`; CheckpointError names the file."""
    file = path / STATE_FILE
    try:
        document = json.loads(file.read_bytes())
        state = document["state"]
        intact = document["crc32"] == zlib.crc32(json.dumps(state).encode())
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise CheckpointError(f"{file} is damaged (not the JSON that was written)") from None
    if not intact:
        raise CheckpointError(f"{file} is damaged (its checksum differs)")
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        found = state.get("format") if isinstance(state, dict) else None
        raise CheckpointError(f"{file}: format {found!r}, this version reads {FORMAT}")
    values = {"finite": True} | {name: state.get(name) for name in _FIELDS if name in state}
    for name, kind in _FIELDS.items():
        if type(values.get(name)) is not kind:
            found = type(values.get(name)).__name__
            raise CheckpointError(f"{file}: {name} must be of type {kind.__name__}, got {found}")
    files: dict[str, tuple[int, int]] = {}
    for name, entry in values["files"].items():
        numbers = [entry.get(key) for key in ("bytes", "crc32")] if isinstance(entry, dict) else [None]
        if any(type(number) is not int for number in numbers):
            raise CheckpointError(f"{file}: {name!r} must have its size and CRC-32 as integers")
        if Path(name).name != name:
            raise CheckpointError(f"{file} names a file outside its directory: {name!r}")
        files[name] = (numbers[0], numbers[1])
    return _State(**{**values, "files": files})


def _verified_state(path: Path) -> _State:
    """The state of the checkpoint `path`; CheckpointError says why it is not whole."""
    state = _read_state(path)
    for name, (size, checksum) in state.files.items():
        try:
            found = _checksum(path / name)
        except OSError as error:
            raise CheckpointError(f"{path / name} cannot be read ({error.strerror})") from None
        if found[0] != size:
            raise CheckpointError(f"{path / name} has {found[0]} bytes, {size} were written")
        if found[1] != checksum:
            raise CheckpointError(f"{path / name} is damaged (its checksum differs)")
    return state


def _is_finite(path: Path) -> bool:
    try:
        return _read_state(path).finite
    except CheckpointError:
        return False


def _checksum(path: Path) -> tuple[int, int]:
    """Size and CRC-32 of a file."""
    size = checksum = 0
    block = memoryview(bytearray(_BLOCK))
    with path.open("rb", buffering=0) as file:
        while read := file.readinto(block):
            size += read
            checksum = zlib.crc32(block[:read], checksum)
    return size, checksum
