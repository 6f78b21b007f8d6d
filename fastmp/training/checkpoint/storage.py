"""Checkpoints as storage of torch.distributed.checkpoint (DCP), and its planners for `ShardedTensorRef`.

DCP plans reads and writes. A chunk that several ranks hold is written by one of them; a chunk that a rank
requests is assembled from all saved chunks that overlap it. DCP's own planners work with this storage, too:
`torch.distributed.checkpoint.load(state, storage_reader=CheckpointReader(path))` fills a state dict of
DTensors, such as FSDP2's. Nothing here reads or writes pickles.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    StorageReader,
    StorageWriter,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from fastmp.training.checkpoint.chunks import TensorChunk, full_chunk
from fastmp.training.checkpoint.format import (
    DTYPES,
    CheckpointError,
    File,
    Manifest,
    SavedShard,
    SavedTensor,
    check_tiled,
    file_name,
    read_manifest,
)
from fastmp.training.checkpoint.tensor_files import (
    READERS,
    ChunkReader,
    NamedTensorSpec,
    PlacedTensor,
    dtype_code,
    opened,
    write_tensors,
)

__all__ = [
    "CheckpointReader",
    "CheckpointWriter",
    "ShardLoadPlanner",
    "ShardedTensorRef",
    "PlansDiffer",
    "ShardSavePlanner",
]

Shape = tuple[int, ...]

# One process is a job of its own, which the library says at every save.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


@dataclass(frozen=True)
class ShardedTensorRef:
    """A tensor of the whole model, and this rank's shards of it as (offsets, tensor)."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    shards: Sequence[tuple[tuple[int, ...], Tensor]]

    @classmethod
    def whole(cls, tensor: Tensor) -> ShardedTensorRef:
        """Return the reference to a full tensor, replicated on every rank that names it."""
        return cls(tuple(tensor.shape), tensor.dtype, [((0,) * tensor.ndim, tensor.detach())])

    def at(self, offsets: Sequence[int]) -> Tensor:
        """Return the shard at these offsets."""
        wanted = tuple(offsets)
        return next(tensor for first, tensor in self.shards if first == wanted)


class PlansDiffer(ValueError):
    """Raised if some ranks save the same shards as before and others do not: all must plan again."""


# What a rank has of one tensor: its name, dtype and shape, and (first index, size) of each shard.
Offer = tuple[str, torch.dtype, Shape, tuple[tuple[Shape, Shape], ...]]


class ShardSavePlanner(SavePlanner):
    """Plan a save of {name: ShardedTensorRef}: each element once, by the rank with the fewest bytes so far.

    Ranks send the list of their shards to rank 0, which checks that they cover every tensor and assigns the
    writers. While all ranks hold the same shards as in the previous save, its plan is used again and nothing
    is sent.

    Args:
        copy: returns the state to save, in place of the one passed to `dcp.save`; called before any rank
            waits for another.
    """

    def __init__(self, copy: Callable[[], Mapping[str, ShardedTensorRef]] | None = None) -> None:
        self._copy = copy
        self._offer: list[Offer] = []
        self._planned: list[Offer] | None = None  # the offer that the last plan was made for
        self._items: list[WriteItem] = []  # this rank's share of it
        self._number = 0  # of the plan, which all ranks have made together
        self._tensors: dict[str, TensorStorageMetadata] = {}  # of the whole plan, on the first rank

    def forget(self) -> None:
        """Plan again at the next save."""
        self._planned = None

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        self._state: Mapping[str, ShardedTensorRef] = state_dict if self._copy is None else self._copy()

    def create_local_plan(self) -> SavePlan:
        self._offer = []
        for name, tensor in self._state.items():
            chunks = tuple((tuple(at), tuple(shard.shape)) for at, shard in tensor.shards)
            self._offer.append((name, tensor.dtype, tuple(tensor.shape), chunks))
        unchanged = self._planned is not None and self._offer == self._planned
        return SavePlan([], planner_data=self._number if unchanged else self._offer)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Assign a writer to each chunk. Raises ValueError if ranks disagree, or no rank has an element."""
        offers = [plan.planner_data for plan in all_plans]
        if all(offer == self._number for offer in offers):
            return all_plans, Metadata(dict(self._tensors))
        if any(isinstance(offer, int) for offer in offers):
            raise PlansDiffer("checkpoint: ranks save other shards than before")
        self._tensors, chosen = _choose_writers(offers)
        for name, tensor in self._tensors.items():
            check_tiled(name, tensor.size, [_tensor_chunk(each) for each in tensor.chunks], ValueError)
        number = self._number + 1
        return [SavePlan([], planner_data=(number, own)) for own in chosen], Metadata(dict(self._tensors))

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        if not isinstance(new_plan.planner_data, int):
            self._number, chosen = new_plan.planner_data
            self._planned, chunks = self._offer, _chunks_of(self._offer)
            self._items = [_write_item(*chunk) for chunk, own in zip(chunks, chosen, strict=True) if own]
        return SavePlan(self._items)

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        index = write_item.index
        return self._state[index.fqn].at(index.offset or ())


def _chunks_of(offer: Sequence[Offer]) -> Iterator[tuple[str, torch.dtype, Shape, Shape, Shape]]:
    """Yield (name, dtype, shape, offsets, sizes) for each shard of an offer."""
    for name, dtype, shape, shards in offer:
        for offsets, sizes in shards:
            yield name, dtype, shape, offsets, sizes


def _choose_writers(
    offers: Sequence[Sequence[Offer]],
) -> tuple[dict[str, TensorStorageMetadata], list[bytearray]]:
    """Return the tensors of all ranks, and per rank a flag for every chunk it writes.

    Raises ValueError if ranks disagree on the shape or dtype of a tensor.
    """
    forms: dict[str, tuple[int, torch.dtype, Shape]] = {}
    ranks: dict[tuple[str, Shape], list[tuple[int, int]]] = {}  # who has a chunk, as which of its own
    sizes_of: dict[tuple[str, Shape], Shape] = {}
    for rank, offer in enumerate(offers):
        for place, (name, dtype, shape, offsets, sizes) in enumerate(_chunks_of(offer)):
            first, *form = forms.setdefault(name, (rank, dtype, shape))
            if form != [dtype, shape] or sizes_of.setdefault((name, offsets), sizes) != sizes:
                raise ValueError(f"checkpoint: ranks {first} and {rank} do not agree on the shape of {name}")
            ranks.setdefault((name, offsets), []).append((rank, place))
    chosen, load = [bytearray(sum(len(each[3]) for each in offer)) for offer in offers], [0] * len(offers)
    tensors: dict[str, TensorStorageMetadata] = {}
    for key, holders in ranks.items():
        name, offsets = key
        _, dtype, shape = forms[name]
        if name not in tensors:
            tensors[name] = TensorStorageMetadata(TensorProperties(dtype), torch.Size(shape), [])
        sizes = sizes_of[key]
        tensors[name].chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
        writer, place = min(holders, key=lambda each: load[each[0]])
        load[writer] += prod(sizes) * dtype.itemsize
        chosen[writer][place] = 1
    return tensors, chosen


def _tensor_chunk(chunk: ChunkStorageMetadata) -> TensorChunk:
    return TensorChunk(tuple(chunk.offsets), tuple(chunk.sizes))


def _write_item(name: str, dtype: torch.dtype, shape: Shape, offsets: Shape, sizes: Shape) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
    data = TensorWriteData(chunk, TensorProperties(dtype), torch.Size(shape))
    return WriteItem(MetadataIndex(name, torch.Size(offsets)), WriteItemType.SHARD, tensor_data=data)


class Written(NamedTuple):
    """The file and the place of a written shard."""

    file: str
    facts: File
    placed: PlacedTensor


class CheckpointWriter(StorageWriter):
    """Write a checkpoint into the new directory `directory`.

    Args:
        prepare: creates the directory; called on rank 0 before any rank writes.
        finish: (tensors, files, finite) -> the name of the finished checkpoint; called on rank 0 when all
            ranks have written. All ranks get the name as `storage_data` of the metadata.
    """

    def __init__(
        self,
        directory: str | Path,
        prepare: Callable[[], None],
        finish: Callable[[dict[str, SavedTensor], dict[str, File], bool], str],
    ) -> None:
        self.directory, self._prepare, self._finish = Path(directory), prepare, finish
        self._rank = 0

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._rank = kwargs.get("rank", 0)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        self._prepare()
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        items = sorted(plan.items, key=lambda item: (item.index.fqn, item.index.offset or ()))
        tensors = [_tensor(planner, item) for item in items]
        forms = [
            NamedTensorSpec(_part_name(item), tensor.dtype, tensor.shape)
            for item, tensor in zip(items, tensors, strict=True)
        ]
        results = list[WriteResult]()
        if items:
            file = file_name(self._rank)
            facts, placed = write_tensors(self.directory / file, forms, tensors.__getitem__)
            for item, tensor, place in zip(items, tensors, placed, strict=True):
                results.append(WriteResult(item.index, tensor.nbytes, Written(file, facts, place)))
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        written = {result.index: result.storage_data for each in results for result in each}
        tensors = {}
        for name, tensor in metadata.state_dict_metadata.items():
            assert isinstance(tensor, TensorStorageMetadata)
            shards, dtype = [], tensor.properties.dtype
            for chunk in tensor.chunks:
                each = written[MetadataIndex(name, chunk.offsets)]
                shards.append(
                    SavedShard(_tensor_chunk(chunk), each.file, each.placed.start, each.placed.crc32)
                )
            tensors[name] = SavedTensor(dtype_code(name, dtype), tuple(tensor.size), tuple(shards))
        files = {each.file: each.facts for each in written.values()}
        metadata.storage_data = self._finish(
            tensors, files, all(each.placed.finite for each in written.values())
        )
        metadata.state_dict_metadata = {}  # all ranks are sent what is left, and need the name alone

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def _tensor(planner: SavePlanner, item: WriteItem) -> Tensor:
    data = planner.resolve_data(item)
    if not isinstance(data, Tensor):
        raise ValueError(f"checkpoint: {item.index.fqn} is no tensor; give other values as scalars")
    return data.detach().cpu().contiguous()


def _part_name(item: WriteItem) -> str:
    """Return the name of a shard in its file."""
    data = item.tensor_data
    assert data is not None  # a tensor, see `_tensor`
    return shard_name(item.index.fqn, _tensor_chunk(data.chunk), data.size)


def shard_name(name: str, chunk: TensorChunk, shape: Sequence[int]) -> str:
    """Return the name of a chunk in a file: "name[0:4, 0:8]", or "name" for a full tensor."""
    if chunk.sizes == tuple(shape):
        return name
    ranges = (f"{at}:{at + size}" for at, size in zip(*chunk))
    return f"{name}[{', '.join(ranges)}]"


class ShardLoadPlanner(LoadPlanner):
    """Plan the reads that fill a state {name: ShardedTensorRef} from a checkpoint of any layout."""

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self._state: Mapping[str, ShardedTensorRef] = state_dict
        self._tensors = {} if metadata is None else metadata.state_dict_metadata

    def create_local_plan(self) -> LoadPlan:
        items = list[ReadItem]()
        for name, tensor in self._state.items():
            chunks = [ChunkStorageMetadata(torch.Size(at), shard.shape) for at, shard in tensor.shards]
            saved = self._tensors[name]
            assert isinstance(saved, TensorStorageMetadata)
            items += create_read_items_for_chunk_list(name, saved, chunks)
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        raise CheckpointError(f"checkpoint: {read_item.dest_index.fqn} is no tensor")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        out = self._state[read_item.dest_index.fqn].at(read_item.dest_index.offset or ())
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths)):
            out = out.narrow(dim, start, length)
        return out

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        pass


class CheckpointReader(StorageReader):
    """Read the checkpoint `directory`. manifest: its manifest, if it has been read.

    Checksums are not verified here: see `files.verify`.
    """

    def __init__(self, directory: str | Path, manifest: Manifest | None = None) -> None:
        self.directory = Path(directory)
        self.manifest = read_manifest(self.directory) if manifest is None else manifest

    def read(self, wanted: Mapping[str, ShardedTensorRef]) -> None:
        """Read the shards of `wanted`, {name: reference}."""
        planner = ShardLoadPlanner()
        planner.set_up_planner(dict(wanted), self.read_metadata(wanted))
        self.read_data(planner.create_local_plan(), planner)

    def tensor(self, name: str, chunk: TensorChunk | None = None) -> Tensor:
        """Return a full tensor, or a chunk of it, on the CPU."""
        saved = self.manifest.tensors[name]
        chunk = full_chunk(saved.shape) if chunk is None else chunk
        tensor = torch.empty(chunk.sizes, dtype=DTYPES[saved.dtype])
        self.read({name: ShardedTensorRef(saved.shape, tensor.dtype, [(chunk.offsets, tensor)])})
        return tensor

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def read_metadata(self, names: Iterable[str] | None = None, **kwargs: Any) -> Metadata:
        """Return the metadata of the tensors `names` (None: all)."""
        tensors: dict[str, Any] = {}
        for name in self.manifest.tensors if names is None else names:
            tensor = self.manifest.tensors[name]
            chunks = [
                ChunkStorageMetadata(torch.Size(shard.chunk.offsets), torch.Size(shard.chunk.sizes))
                for shard in tensor.shards
            ]
            properties = TensorProperties(DTYPES[tensor.dtype])
            tensors[name] = TensorStorageMetadata(properties, torch.Size(tensor.shape), chunks)
        return Metadata(tensors)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kw: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        places = {
            (name, shard.chunk.offsets): shard
            for name in {item.storage_index.fqn for item in plan.items}
            for shard in self.manifest.tensors[name].shards
        }
        reads: dict[str, list[tuple[SavedShard, ReadItem]]] = {}
        for item in plan.items:
            shard = places[item.storage_index.fqn, tuple(item.storage_index.offset or ())]
            reads.setdefault(shard.file, []).append((shard, item))
        with ThreadPoolExecutor(READERS) as threads:
            work = [
                threads.submit(self._read_items, file, own, planner)
                for file, wanted in sorted(reads.items())
                for own in _shares(sorted(wanted, key=lambda each: each[0].start))
            ]
            for result in work:
                result.result()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @torch.no_grad()
    def _read_items(
        self, file: str, wanted: Sequence[tuple[SavedShard, ReadItem]], planner: LoadPlanner
    ) -> None:
        with opened(self.directory / file) as source:
            reader = ChunkReader(source)
            for shard, item in wanted:
                chunk = TensorChunk(tuple(item.storage_offsets), tuple(item.lengths))
                out = planner.resolve_tensor(item).detach()
                saved = DTYPES[self.manifest.tensors[item.storage_index.fqn].dtype]
                own = out if out.dtype == saved else torch.empty(chunk.sizes, dtype=saved)
                reader.read(shard.start, shard.chunk.sizes, saved, chunk, own)
                if own is not out:
                    out.copy_(own)
                planner.commit_tensor(item, out)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def _shares(wanted: Sequence[tuple[SavedShard, ReadItem]]) -> Iterator[Sequence[tuple[SavedShard, ReadItem]]]:
    """Split the reads of a file over threads."""
    size = -(-len(wanted) // READERS)
    for start in range(0, len(wanted), size):
        yield wanted[start : start + size]
