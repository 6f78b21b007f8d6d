"""Save and load the state of a run, on all of its ranks together.

A save runs in a thread, with a gloo process group of its own, while training continues:

1. `start_save` records events on the current stream and returns.
2. The thread copies the state to host memory (`Staging`), from a GPU on a stream of its own. Training calls
   `wait_staged` before it changes parameters: a GPU's stream waits for the copies, the host does not.
3. All ranks send rank 0 the list of their shards, unless it is that of the last save; rank 0 checks that they
   cover every tensor and assigns a writer to each chunk.
4. Every rank writes its file into the staging directory, with checksums, and syncs it.
5. Rank 0 writes the manifest, renames the directory, updates `latest`, and deletes old checkpoints.
A save that fails is tried again, then given up; training continues and the next save is due as usual.

A load reads every byte twice:

1. Ranks meet in a barrier with a timeout; rank 0 lists the candidates, newest first, and broadcasts them.
2. Ranks verify the files of a candidate, each its share, and agree; a damaged one is passed over.
3. Every rank checks model, scalars and shapes against its own.
4. Every rank reads the chunks that overlap its shards.
"""

from __future__ import annotations

import contextlib
import errno
import json
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from fastmp.distributed.groups import ParallelGroups
from fastmp.training.checkpoint import collective_load as loading
from fastmp.training.checkpoint import directory as names
from fastmp.training.checkpoint.format import File, Manifest, SavedTensor
from fastmp.training.checkpoint.staging import Staging
from fastmp.training.checkpoint.storage import (
    CheckpointReader,
    CheckpointWriter,
    PlansDiffer,
    ShardedTensorRef,
    ShardSavePlanner,
)

__all__ = ["Checkpointer", "Loaded", "Note", "described"]

NO_SCALARS: Mapping[str, Any] = MappingProxyType({})
PAUSE = 2.0  # seconds before a save is tried again
_POLL = 0.1  # seconds between looks at a save that is waited for
# For collectives of a save, not for creating its group: ranks wait for the slowest disk. A lost rank ends it.
PATIENCE = timedelta(days=1)
_LAYOUT_AXES = ("world_size", "tp", "cp", "ep", "dp", "pp", "etp")


class Note(NamedTuple):
    """The outcome of a save, a line for the log. failed: it is a failure."""

    text: str
    failed: bool = False


@dataclass(frozen=True)
class Loaded:
    """A loaded checkpoint, without its tensors.

    layout: the sizes of the grid that saved it.
    missing: optional tensors that the checkpoint lacks, or has in another shape or dtype.
    """

    path: Path
    step: int
    layout: dict[str, int]
    scalars: dict[str, Any]
    missing: frozenset[str]


class Checkpointer:
    """Save and load checkpoints in `directory`, which must be visible to all ranks.

    All ranks call every method together. `close` destroys the process group; the next save or load creates it
    again.

    Args:
        groups: this rank's process groups.
        description: JSON-able facts about the model (its configuration). A checkpoint with other facts
            raises CheckpointError.
        defaults: the values of facts that older checkpoints do not have.
        keep, keep_every, keep_hours: the checkpoints to keep, see `directory.to_delete`.
        after: (checkpoint, step) -> a line for the log; called on rank 0, in a thread, after each save. Its
            errors are lines for the log, too. Nothing is deleted while it runs.
        timeout: how long ranks wait for each other before they load.
        attempts: at a save, before it is given up.
        waiting: called every 0.1 s while a caller waits for a save, so that `notes` are reported at once.

    Example:
        import tempfile

        checkpointer = Checkpointer(tempfile.mkdtemp())
        state = {name: ShardedTensorRef.whole(param) for name, param in model.named_parameters()}
        checkpointer.save(100, state, {"tokens": 12_800})
        loaded = checkpointer.load(state)
        assert (loaded.step, loaded.scalars) == (100, {"tokens": 12_800})
        checkpointer.close()
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        groups: ParallelGroups = ParallelGroups.alone(),
        description: Mapping[str, Any] | None = None,
        defaults: Mapping[str, Any] | None = None,
        keep: int = 2,
        keep_every: int = 0,
        keep_hours: float = 0.0,
        after: Callable[[Path, int], str] | None = None,
        timeout: timedelta = timedelta(minutes=10),
        attempts: int = 3,
        waiting: Callable[[], None] = lambda: None,
    ) -> None:
        self.directory = Path(directory)
        self.description = json.loads(json.dumps(dict(description or {})))
        self.defaults = json.loads(json.dumps(dict(defaults or {})))
        self.layout = {axis: getattr(groups.grid, axis) for axis in _LAYOUT_AXES}
        self.failed = False  # the save that was begun last
        self._rank, self._world_size, self._timeout = groups.rank, groups.grid.world_size, timeout
        self._attempts, self._waiting = attempts, waiting
        self._kept: dict[str, Any] = {"keep": keep, "keep_every": keep_every, "keep_hours": keep_hours}
        self._after, self._following = after, list[Future[None]]()
        self._group: dist.ProcessGroup | None = None
        self._threads: tuple[ThreadPoolExecutor, ThreadPoolExecutor] | None = None  # that save, that follow
        self._saving: Future[Path] | None = None
        self._staging = Staging()
        self._planner = ShardSavePlanner(self._staging.copy)
        self._notes = list[Note]()
        self._failures = 0  # saves in a row
        self._open()

    def start_save(
        self,
        step: int,
        state: Mapping[str, ShardedTensorRef],
        scalars: Mapping[str, Any],
        *,
        alone: bool = False,
    ) -> None:
        """Begin to save the state after `step` steps; see `wait_staged`, `wait` and `notes`.

        state: {name: this rank's shards of a tensor of the whole model}. Every element must be on some rank;
            ranks that have the same box have equal numbers in it. scalars: JSON-able, equal on all ranks.
        alone: the caller waits for the save at once, so that tensors on the host need no copy.

        Waits for the save before. Before the process ends, wait for the last one, or `close`.
        """
        self.settle()
        self._open()
        if self._threads is None:
            saving = ThreadPoolExecutor(1, thread_name_prefix="fastmp-checkpoint")
            self._threads = saving, ThreadPoolExecutor(1, thread_name_prefix="fastmp-after-checkpoint")
        self._staging.begin(state, nothing=alone)
        self._saving = self._threads[0].submit(self._save, step, dict(scalars))

    def wait_staged(self) -> None:
        """Wait until the tensors being saved may change. On a GPU its stream waits, not the host."""
        if self._saving is not None:
            while not self._staging.wait(_POLL):
                self._waiting()

    @property
    def is_staging(self) -> bool:
        """True if `wait_staged` would block."""
        return self._saving is not None and self._staging.is_busy

    def wait(self) -> Path | None:
        """Wait for the last save and return its directory; None if there is none.

        Raises:
            OSError: on all ranks, if one of them could not write; earlier checkpoints are still there.
        """
        saving, self._saving = self._saving, None
        if saving is None:
            return None
        self.failed = True
        while not wait([saving], _POLL).done:
            self._waiting()
        path = saving.result()
        self.failed = False
        return path

    def notes(self) -> list[Note]:
        """Return and clear the notes since the last call: finished checkpoints and failed saves."""
        if self._saving is not None and self._saving.done():
            self.settle()
        notes, self._notes = self._notes, []
        return notes

    def save(self, step: int, state: Mapping[str, ShardedTensorRef], scalars: Mapping[str, Any]) -> Path:
        """Save as `start_save` and wait; return the directory of the checkpoint."""
        self.start_save(step, state, scalars, alone=True)
        path = self.wait()
        assert path is not None
        return path

    def settle(self) -> None:
        """Wait for the last save; a failure is only a note."""
        with contextlib.suppress(OSError):
            self.wait()

    def wait_following(self) -> None:
        """Wait for the `after` callbacks of finished checkpoints."""
        for each in list(self._following):
            each.result()

    def close(self) -> None:
        """Wait for the last save and its callback; end the threads and the process group."""
        self.settle()
        for thread in self._threads or ():
            thread.shutdown()
        self._threads = None
        self._staging.close()
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None

    def _open(self) -> None:
        if self._group is None and self._world_size > 1:
            connecting = max(self._timeout, timedelta(minutes=1))  # which a loaded machine may take
            group = dist.new_group(backend="gloo", timeout=connecting, group_desc="fastmp:checkpoint")
            # patience only for collectives: while the group is made, a rank may be gone
            dist.distributed_c10d._set_pg_timeout(PATIENCE, group)
            self._group = group

    def _save(self, step: int, scalars: dict[str, Any]) -> Path:
        """Save, in the thread, with at most `attempts` attempts; the same attempts fail on all ranks."""
        try:
            for attempt in range(1, self._attempts + 1):
                try:
                    path = self._write(step, scalars)
                    break
                except OSError as error:
                    last = attempt == self._attempts
                    self._failures += last
                    again = f"given up ({self._failures} in a row)" if last else "trying again"
                    self._notes.append(Note(f"step {step}: {error}; {again}", failed=True))
                    if last:
                        raise
                    time.sleep(PAUSE)
        finally:
            self._staging.end()
        self._failures = 0
        self._notes.append(Note(f"step {step}: saved {path}"))
        if self._after is not None and self._rank == 0 and self._threads is not None:
            self._following.append(self._threads[1].submit(self._follow, path, step))
        return path

    def _follow(self, path: Path, step: int) -> None:
        assert self._after is not None
        try:
            note = Note(self._after(path, step))
        except Exception as error:
            note = Note(f"{type(error).__name__}: {error}", failed=True)
        if note.text:
            self._notes.append(note._replace(text=f"step {step}: {note.text}"))

    def _write(self, step: int, scalars: dict[str, Any]) -> Path:
        staging = names.staging(self.directory, step)

        def prepare() -> None:
            names.remove_staging(self.directory)
            staging.mkdir(parents=True)

        def finish(tensors: dict[str, SavedTensor], files: dict[str, File], finite: bool) -> str:
            facts = (self.layout, self.description, scalars)
            made = names.publish(staging, Manifest(step, finite, *facts, files, tensors))
            self._following = [each for each in self._following if not each.done()]
            if not self._following:
                names.prune(self.directory, made, **self._kept)
            return made.name

        try:
            metadata = self._save_planned(CheckpointWriter(staging, prepare, finish))
        except CheckpointException as error:
            if self._rank == 0:
                with contextlib.suppress(OSError):
                    names.remove_staging(self.directory)
            raise _cause(error, self.directory) from None
        return self.directory / str(metadata.storage_data)

    def _save_planned(self, writer: CheckpointWriter) -> Metadata:
        """Save with the plan of the previous save, or with a new one if a rank has other shards now."""
        options: dict[str, Any] = {"storage_writer": writer, "planner": self._planner}
        options |= {"process_group": self._group, "no_dist": self._group is None}
        try:
            return dcp.save({}, **options)
        except CheckpointException as error:  # the same one on all ranks
            if not any(isinstance(cause, PlansDiffer) for cause, _ in error.failures.values()):
                raise
        self._planner.forget()
        return dcp.save({}, **options)

    def load(
        self,
        state: Mapping[str, ShardedTensorRef],
        scalars: Mapping[str, Any] = NO_SCALARS,
        *,
        optional: frozenset[str] = frozenset(),
        path: str | Path | None = None,
    ) -> Loaded | None:
        """Read the latest valid checkpoint, saved with any layout, into the tensors of `state`.

        A damaged checkpoint, or one with values that are not finite, is passed over for an older one, with a
        line on stderr. Nothing is read from a checkpoint before all of its files are verified.

        Args:
            scalars: examples of the scalars that must have been saved, by name and type.
            optional: names in `state` that the checkpoint may lack, or have in another shape or dtype; it
                may have others with the same prefix, up to the first "/".
            path: a checkpoint, or the directory of a run, for its latest valid one; None: `directory`.

        Returns:
            the loaded checkpoint, or None if `directory` has none.

        Raises:
            CheckpointError: on all ranks, if the checkpoint belongs to another model or has other scalars
                (the message names both sides), or if no checkpoint is intact.
            RuntimeError: the timeout is over; the message names the ranks that have not called `load`.
        """
        self.settle()
        self._open()
        if self._group is not None:
            dist.monitored_barrier(self._group, timeout=self._timeout)
        paths = loading.agree(self._group, lambda: self._candidates(path))
        own = self.directory if path is None else None
        found = loading.choose(self._group, loading.same_on_all(self._group, paths), own)
        if found is None:
            return None
        chosen, manifest = found
        facts: dict[str, Any] = {"description": self.description, "defaults": self.defaults}
        loading.check(self._group, chosen, manifest, state, **facts, scalars=scalars, optional=optional)
        wanted = {
            name: ref
            for name, ref in state.items()
            if name not in optional or loading.form(manifest.tensors.get(name)) == loading.form(ref)
        }
        loading.agree(self._group, lambda: CheckpointReader(chosen, manifest).read(wanted))
        missing = frozenset(state.keys() - wanted.keys())
        return Loaded(chosen, manifest.step, manifest.layout, manifest.scalars, missing)

    def _candidates(self, path: str | Path | None) -> list[Path]:
        """Return the checkpoints to try, in order, on rank 0; [] on other ranks."""
        if self._rank:
            return []
        if path is not None:
            return names.checkpoints_at(path)
        return [self.directory / str(name) for name in names.candidates(self.directory)]


def _cause(error: CheckpointException, directory: Path) -> BaseException:
    """Return the error of the lowest rank that failed, as an OSError if the disk or memory is at fault."""
    rank, (cause, _) = min(error.failures.items())
    if isinstance(cause, MemoryError):
        cause = OSError(errno.ENOMEM, "there is no memory for a copy of what is saved")
    if not isinstance(cause, OSError):
        return cause
    return OSError(f"checkpoint: cannot write in {directory}: {cause}" + (f" (rank {rank})" if rank else ""))


def described(config: Any) -> dict[str, Any]:
    """Return `description` and `defaults` of a `Checkpointer` for a configuration of fastmp, else {}.

    Configurations of others may not be JSON-able, or change with a version.
    """
    own = type(config).__module__.startswith("fastmp.")
    if not own or not is_dataclass(config) or isinstance(config, type):
        return {}
    defaults = {name: _plain(value) for name, value in _defaults(config).items()}
    for each in fields(config):  # of a table in it, by names with dots
        table = getattr(config, each.name)
        if is_dataclass(table):
            defaults |= {f"{each.name}.{name}": value for name, value in _defaults(table).items()}
    return {"description": _plain(config), "defaults": defaults}


def _defaults(config: Any) -> dict[str, Any]:
    return {field.name: field.default for field in fields(config) if field.default is not MISSING}


def _plain(value: Any) -> Any:
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
