"""Checkpoints that survive a kill at any moment, hold no pickle, and refuse to load what does not fit.

One checkpoint is one directory: safetensors written through torch.distributed.checkpoint, and `state.json`
with the step, the layout, the model's description and the size and CRC-32 of every file. It is written
under a staging name, synced, renamed, and only then does the file `latest` point to it (replaced
atomically). A shard is stored under its place in the model-parallel grid ("tp1.pp0/model/..."), because two
ranks that save plain tensors of one name would overwrite each other without a word; a shard of experts under
its place in the grid of experts ("etp0.ep1.pp0/model/...").
"""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter

from fastmp.parallel.collectives import group_rank
from fastmp.train.tokenfile import sync_directory, write_synced

if TYPE_CHECKING:
    from fastmp.parallel.groups import ParallelGroups

__all__ = ["CheckpointError", "Checkpointer"]

FORMAT = 1
STATE_FILE = "state.json"
POINTER = "latest"
_NAME = re.compile(r"step-(\d{8})(?:\.(\d+))?")
_STAGING = ".staging"
_LAYOUT_AXES = ("world_size", "tp", "cp", "ep", "dp", "pp", "etp")
_ONE_CHUNK = {"vpp": 1}  # also of checkpoints from before there were several
NO_TENSORS: Mapping[str, Tensor] = MappingProxyType({})


class CheckpointError(ValueError):
    """A checkpoint is damaged, or it is another model's or another layout's."""


class Checkpointer:
    """Saves and finds checkpoints in `directory`, which all ranks see.

    groups: this rank's groups; None for a process on its own. Every method is called by all ranks together.
    layout: JSON-able facts that decide, beside the sizes of the groups, which rank holds what; a checkpoint
        with others is refused. Without one a rank has one chunk of the model.
    description: JSON-able facts of the model (its configuration); a checkpoint with others is refused.
    defaults: what a fact stands at that a checkpoint does not name, because it is from before there was one.
    keep: how many checkpoints stay; older ones go after a newer one is in place. 0 keeps all.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        groups: ParallelGroups | None = None,
        layout: Mapping[str, Any] | None = None,
        description: Mapping[str, Any] | None = None,
        defaults: Mapping[str, Any] | None = None,
        keep: int = 2,
    ) -> None:
        self.directory = Path(directory)
        self.description = json.loads(json.dumps(dict(description or {})))
        self.defaults = json.loads(json.dumps(dict(defaults or {})))
        self.keep = keep
        self.distributed = groups is not None and groups.grid.world_size > 1
        self.rank = groups.rank if groups is not None else 0
        axes = {axis: 1 if groups is None else getattr(groups.grid, axis) for axis in _LAYOUT_AXES}
        self.layout = json.loads(json.dumps({**axes, **_ONE_CHUNK, **(layout or {})}))
        tp_rank, pp_rank = (0, 0) if groups is None else (group_rank(groups.tp), group_rank(groups.pp))
        etp_rank, ep_rank = (0, 0) if groups is None else (group_rank(groups.etp), group_rank(groups.ep))
        self._shard = f"tp{tp_rank}.pp{pp_rank}"
        self._expert_shard = f"etp{etp_rank}.ep{ep_rank}.pp{pp_rank}"
        self._owns_shard = groups is None or group_rank(groups.dp_cp) == 0
        self._owns_experts = groups is None or group_rank(groups.edp) == 0

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

        shard: tensors that data-parallel ranks hold alike (parameters, optimizer state), saved by one of
            them.
        own: tensors of each rank (random states). scalars: JSON-able values, equal on all ranks.
        experts: tensors that the ranks of `groups.edp` hold alike, saved by one of them.

        Raises OSError on all ranks if one of them could not write; what was there before is still there.
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
        tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
        with self._together(remove=staging):
            self._write(tensors, staging)
        files = self._gather_checksums(staging)
        with self._together(remove=staging):
            if self.rank == 0:
                state = {"format": FORMAT, "step": step, "layout": self.layout}
                state |= {"description": self.description, "scalars": dict(scalars), "files": files}
                document = {"crc32": zlib.crc32(json.dumps(state).encode()), "state": state}
                write_synced(staging / STATE_FILE, json.dumps(document, indent=1).encode())
                self._publish(staging, step)
        return self.directory / (self.directory / POINTER).read_text().strip()

    def load(
        self,
        shard: Mapping[str, Tensor],
        own: Mapping[str, Tensor],
        *,
        experts: Mapping[str, Tensor] = NO_TENSORS,
    ) -> dict[str, Any] | None:
        """Read the latest valid checkpoint into the given tensors.

        Returns {"step": int, **scalars}, or None where the directory has no checkpoint. Raises
        CheckpointError naming both sides where it belongs to another layout or model, or where none that is
        there is whole.
        """
        path = self._agree_on_latest()
        if path is None:
            return None
        state = _read_state(path)
        self._check_same("layout", path, {**_ONE_CHUNK, **state["layout"]}, self.layout)
        self._check_same("model", path, {**self.defaults, **state["description"]}, self.description)
        wanted = self._named(shard, self._shard) | self._named(own, f"rank{self.rank}")
        wanted |= self._named(experts, self._expert_shard)
        reader = HuggingFaceStorageReader(str(path))
        self._check_tensors(path, reader, wanted)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load(wanted, storage_reader=reader, no_dist=True)
        return {"step": state["step"], **state["scalars"]}

    def latest(self) -> Path | None:
        """The checkpoint `latest` points to if it is whole, else the newest whole one; None for none at all.

        Looks by itself, without the other ranks. Raises CheckpointError where there are some and none is
        whole.
        """
        candidates = self._by_age()
        try:
            pointed = self.directory / (self.directory / POINTER).read_text().strip()
        except (OSError, UnicodeDecodeError):
            pointed = None
        if pointed in candidates:
            candidates.append(pointed)
        problems = []
        for path in reversed(candidates):
            problem = _problem_of(path)
            if problem is None:
                return path
            problems.append(problem)
        if problems:
            raise CheckpointError(f"checkpoint: none in {self.directory} is whole; {problems[0]}")
        return None

    def _named(self, tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
        return {f"{prefix}/{name}": tensor.detach() for name, tensor in tensors.items()}

    def _write(self, tensors: dict[str, Tensor], staging: Path) -> None:
        writer = HuggingFaceStorageWriter(str(staging), save_distributed=True)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            try:
                dcp.save(tensors, storage_writer=writer, no_dist=not self.distributed)
            except dcp.api.CheckpointException as error:
                rank, (cause, _) = next(iter(error.failures.items()))
                raise OSError(f"rank {rank}: {cause}") from None

    def _gather_checksums(self, staging: Path) -> dict[str, dict[str, int]]:
        """Size and CRC-32 of every rank's file, each computed by the rank that wrote it."""
        name = "shard-{:05d}-model-00001-of-00001.safetensors"  # as torch's writer calls them
        path = staging / name.format(self.rank + 1)
        table = torch.tensor([_checksum(path) if path.exists() else (0, 0)])
        if self.distributed:
            table = table.to(_communication_device())
            rows = [torch.empty_like(table) for _ in range(dist.get_world_size())]
            dist.all_gather(rows, table)
            table = torch.cat(rows)
        return {
            name.format(i + 1): {"bytes": size, "crc32": checksum}
            for i, (size, checksum) in enumerate(table.tolist())
            if size
        }

    def _publish(self, staging: Path, step: int) -> None:
        """Rename the finished directory, point to it, drop the old ones.

        A kill between any two lines is harmless: where a step of that number is there already, the new one
        gets a suffix, so nothing that is in place is ever moved away.
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
            for path in others[: max(0, len(others) - (self.keep - 1))]:
                shutil.rmtree(path, ignore_errors=True)

    def _by_age(self) -> list[Path]:
        """Complete checkpoint directories, by step and then by attempt."""
        if not self.directory.is_dir():
            return []
        found = [(match, path) for path in self.directory.iterdir() if (match := _NAME.fullmatch(path.name))]
        return [path for _, path in sorted((((int(m[1]), int(m[2] or 0)), path) for m, path in found))]

    def _agree_on_latest(self) -> Path | None:
        """Rank 0 looks, all use what it found (as two numbers: no pickle on this path)."""
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
            number = number.to(_communication_device())
            dist.broadcast(number, src=0)
        step, attempt = number.tolist()
        if step == -2:
            raise problem or CheckpointError(f"checkpoint: none in {self.directory} is whole")
        return None if step == -1 else self.directory / _name(step, attempt)

    def _check_same(self, what: str, path: Path, saved: dict[str, Any], current: dict[str, Any]) -> None:
        if saved == current:
            return
        differing = [key for key in {**saved, **current} if saved.get(key) != current.get(key)]
        theirs = ", ".join(f"{key}={saved.get(key)}" for key in differing)
        ours = ", ".join(f"{key}={current.get(key)}" for key in differing)
        raise CheckpointError(f"checkpoint {path}: another {what}: saved with {theirs}; this run has {ours}")

    def _check_tensors(self, path: Path, reader: HuggingFaceStorageReader, wanted: dict[str, Tensor]) -> None:
        saved = {
            name: (tuple(entry.size), entry.properties.dtype)
            for name, entry in reader.read_metadata().state_dict_metadata.items()
            if name.startswith((f"{self._shard}/", f"{self._expert_shard}/", f"rank{self.rank}/"))
        }
        current = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in wanted.items()}
        for name in sorted({**saved, **current}):
            theirs, ours = (side.get(name, "nothing") for side in (saved, current))
            if theirs != ours:
                raise CheckpointError(f"checkpoint {path}: another model: {name} is {theirs}, here {ours}")

    @contextmanager
    def _together(self, remove: Path | None = None) -> Iterator[None]:
        """A block whose OSError on one rank becomes one on all of them, so that none waits for a lost one."""
        error = None
        try:
            yield
        except OSError as caught:
            error = caught
        failed = torch.tensor(error is not None, dtype=torch.int64)
        if self.distributed:
            failed = failed.to(_communication_device())
            dist.all_reduce(failed)
        if failed.item():
            if remove is not None and self.rank == 0:
                shutil.rmtree(remove, ignore_errors=True)
            reason = "another rank failed" if error is None else error
            raise OSError(f"checkpoint: cannot write in {self.directory}: {reason}") from None


def _name(step: int, attempt: int) -> str:
    return f"step-{step:08d}" + (f".{attempt}" if attempt else "")


def _communication_device() -> str:
    return "cpu" if "gloo" in dist.get_backend_config() else "cuda"


def _read_state(path: Path) -> dict[str, Any]:
    document = json.loads((path / STATE_FILE).read_text())
    state = document["state"]
    if document["crc32"] != zlib.crc32(json.dumps(state).encode()):
        raise CheckpointError(f"{path / STATE_FILE} is damaged (its checksum differs)")
    if state["format"] != FORMAT:
        raise CheckpointError(f"checkpoint {path}: format {state['format']}, this version reads {FORMAT}")
    return state


def _problem_of(path: Path) -> str | None:
    """Why the checkpoint is not whole, or None."""
    try:
        files = _read_state(path)["files"].items()
        for name, expected in files:
            if Path(name).name != name:
                return f"{path / STATE_FILE} names a file outside its directory: {name!r}"
            size, checksum = _checksum(path / name)
            if size != expected["bytes"]:
                return f"{path / name} has {size} bytes, {expected['bytes']} were written"
            if checksum != expected["crc32"]:
                return f"{path / name} is damaged (its checksum differs)"
    except CheckpointError as error:
        return str(error)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{path} cannot be read ({error})"
    return None


def _checksum(path: Path) -> tuple[int, int]:
    size = checksum = 0
    with path.open("rb") as file:
        while block := file.read(1 << 24):
            size += len(block)
            checksum = zlib.crc32(block, checksum)
    return size, checksum
