"""CUDA graphs for a `GraphManager`, over memory pools by number and one stream of captures.

Captures happen in the middle of training, where a wait for the device may become a wait for ranks that wait
for this one. So only `prepare` waits; torch 2.12 and 2.13 also do, once for each generator that a capture
registers. All graphs of a device are captured on one stream: a backward has to be captured on the stream of
its forward, and a library that keeps a workspace for each stream keeps one. Other threads may go on; the
thread of autograd takes part in a capture, because it runs backwards on the stream of their forwards.

Kernels know addresses only. A graph holds what its kernels read and no capture has made, such as parameters:
another tensor could lie there later.

Random numbers. A replay starts every random stream where the stream stands, and advances it. A recomputation
must start where its forward started, and states cannot be read or set inside a capture. Seeds, of which the
masks of hidden states are a pure function, are tensors: the recomputation reads those of the forward, where
that graph has drawn them, and nothing precedes its replay. For a stream from which an eager run of a part has
drawn anything else, as attention does, the part gets a generator of its own. It is set before the backward is
replayed, to where the forward's replay started, advanced by what the forward draws before that part; a graph
then begins with two small copies for each of them. Where one graph holds forwards and their backwards, all
are set before its replay, to where the step begins, advanced in the same way.
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fastmp.cuda_graphs.backends.interface import RandomStreams
from fastmp.cuda_graphs.errors import CaptureError
from fastmp.distributed.streams import beside, join
from fastmp.status import process_status

__all__ = ["CudaBackend", "CudaGraph"]

Generators = Mapping[str, torch.Generator]
Offsets = dict[str, int]

_NOT_ENDED: list[torch.cuda.CUDAGraph] = []  # torch's allocator of host memory asks them for ever


class DrawTrace(NamedTuple):
    """The random draws of an eager forward.

    parts: for each recomputed part, the offset at its start of each stream that it draws more than seeds
    from.
    moved: the names of the streams that the forward advanced.
    """

    parts: list[Offsets]
    moved: set[str]


@dataclass
class _Pool:
    """A memory pool. first: a graph that holds it while there is no other."""

    handle: Any
    first: CudaGraph | None = None


class CudaBackend:
    """Captures and replays graphs on the current device.

    rng: the streams that the work draws from; None: torch's default generator only, and no recomputation.

    A capture takes memory that is free in its pool, and enlarges the pool where that is not enough. A graph
    that nobody holds gives its memory back to the pool; `reset` frees all pools. After a failed capture the
    next ones have a new pool in place of its own.
    """

    runs_at_capture = False
    owner: weakref.ref[Any] | None = None

    def __init__(self, rng: RandomStreams | None = None) -> None:
        self.rng = rng
        self.stream = _stream_of_captures(torch.cuda.current_device())
        self._graphs: weakref.WeakSet[CudaGraph] = weakref.WeakSet()
        self.pools: dict[int, _Pool] = {}
        self.made: set[int] = set()  # the addresses of storages in the pools

    def _begin(self, number: int, generators: Sequence[torch.Generator] = ()) -> None:
        """Create a pool, whose first capture registers `generators`."""
        pool = self.pools[number] = _Pool(torch.cuda.graph_pool_handle())
        first = CudaGraph(self, generators, pool=number)
        torch.zeros(1, device=self.stream.device)  # the first time loads the kernel
        with first.capture():
            torch.zeros(1, device=self.stream.device)
        pool.first = first

    def prepare(self) -> None:
        """Empty the allocator's cache, which torch cannot do inside a capture."""
        _reset_releases_pool(self.stream)
        torch.cuda.empty_cache()

    def mend(self, failed: CudaGraph) -> None:
        """Recover from a capture that did not end.

        Its pool may still be allocated from, and be held for ever; and generators think that the capture goes
        on, until another one that registers them has ended.
        """
        _NOT_ENDED.append(failed.graph)
        pool = self.pools.pop(failed.pool)
        failed.reset()
        _release_pool(self.stream, pool.handle)
        self.made.clear()
        if pool.first is not None:
            self._begin(failed.pool, failed.generators)

    @property
    def nbytes(self) -> int:
        snapshots = [torch.cuda.memory_snapshot(pool.handle) for pool in self.pools.values()]
        return sum(segment["total_size"] for segments in snapshots for segment in segments)

    @contextmanager
    def trace_draws(self) -> Iterator[DrawTrace]:
        """Trace the random draws of eager work; the yielded `DrawTrace` is complete at exit."""
        draws, rng = DrawTrace([], set()), self.rng
        if rng is None:
            yield draws
            return
        first = {name: generator.get_offset() for name, generator in rng.generators().items()}

        open_parts: list[tuple[int, Offsets]] = []  # each inside the one before

        def note() -> None:
            open_parts.append((len(draws.parts), advanced()))
            draws.parts.append(open_parts[-1][1])

        def ended(seeds: Any) -> None:
            (number, start), now = open_parts.pop(), advanced()
            draws.parts[number] = {
                name: offset
                for name, offset in start.items()
                if now[name] - offset != seeds.advanced.get(name, 0)
            }

        def advanced() -> Offsets:
            now = rng.generators()
            return {name: now[name].get_offset() - offset for name, offset in first.items()}

        with rng.kept_by(note, ended, again=lambda: None):
            yield draws
        draws.moved.update(name for name, offset in advanced().items() if offset)

    def graph(
        self,
        forward: CudaGraph | None = None,
        draws: DrawTrace | None = None,
        has_backward: bool = False,
        pool: int = 0,
    ) -> CudaGraph:
        """Make a graph and register the random streams advanced by the traced work (a sync for each)."""
        if pool not in self.pools:
            self._begin(pool)
        streams = {} if self.rng is None else self.rng.generators()
        moved = draws.moved if draws is not None else set(streams) if forward is None else forward.moved
        drawn = [generator for name, generator in streams.items() if name in moved]
        parts: list[tuple[Offsets, Generators]] = [
            (offsets, {name: torch.Generator(streams[name].device) for name in offsets})
            for offsets in (draws.parts if draws is not None else [])
        ]
        recomputed = parts if has_backward else [] if forward is None else forward.parts
        drawn += [part[name] for _, part in recomputed for name in part if name in moved]
        graph = CudaGraph(self, drawn, forward, pool)
        graph.moved, graph.parts, graph.has_backward = moved, parts, has_backward
        self._graphs.add(graph)
        return graph

    def weak(self, tensor: Tensor) -> Callable[[], Tensor]:
        if tensor.device.type != self.stream.device.type:  # memory of the host, which the graph holds
            return tensor.detach
        return _without_memory(tensor).detach

    def reset(self) -> None:
        """Release all graphs. Replays that have begun finish; later ones are not allowed."""
        for graph in (*(pool.first for pool in self.pools.values()), *self._graphs):
            if graph is not None:
                graph.reset()
        self.pools.clear()
        self.made.clear()
        with suppress(RuntimeError):  # of a device that is lost
            self.stream.wait_stream(torch.cuda.current_stream())  # to give back what replays may still read


class CudaGraph:
    """`with graph.capture(): ...` notes work and does none of it; `replay()` does it on the current stream.

    generators: those that the work may draw from, besides torch's default one. pool: its number.
    forward: the graph whose backward this is. `parts`: the recomputed parts, see `CudaBackend.trace_draws`,
        and the generators of each. `moved`: the names of the streams that the forward draws from.
        `has_backward`: the work runs forwards and their backwards.

    RuntimeError from CUDA for work that cannot be captured: a value read on the host, a wait for the device.
    """

    def __init__(
        self,
        backend: CudaBackend,
        generators: Sequence[torch.Generator],
        forward: CudaGraph | None = None,
        pool: int = 0,
    ) -> None:
        self.backend, self.generators, self.forward, self.pool = backend, list(generators), forward, pool
        self.graph = torch.cuda.CUDAGraph()
        self.parts: list[tuple[Offsets, Generators]] = []
        self.moved: set[str] = set()
        self.has_backward = False
        self._starts: dict[str, tuple[int, int]] = {}  # seeds and offsets at the last replay
        self._held: list[torch.UntypedStorage] = []
        for generator in self.generators:
            self.graph.register_generator_state(generator)

    @contextmanager
    def capture(self) -> Iterator[None]:
        stream, current = self.backend.stream, torch.cuda.current_stream()
        stream.wait_stream(current)
        collects = gc.isenabled()
        gc.disable()  # a graph that is collected while another is captured would end the capture
        try:
            with torch.cuda.stream(stream), self._kept(), process_status.capturing(self):
                torch.cuda.current_blas_handle()  # its workspace is not to be in the pool
                reads = _Reads(self.backend.made, stream.device)
                with self._recorded(), reads:
                    yield
                self._held = list(reads.outside.values())
        finally:
            if collects:
                gc.enable()
        current.wait_stream(stream)

    @contextmanager
    def _recorded(self) -> Iterator[None]:
        """Begin and end the capture. The error of a failed end is dropped if the work inside has raised."""
        try:
            pool = self.backend.pools[self.pool].handle
            self.graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            yield
            for other in beside(self.backend.stream.device):  # a graph ends with its streams joined
                join(other, self.backend.stream.device)
        except BaseException:
            with suppress(RuntimeError):
                self._end()
            raise
        self._end()

    def _end(self) -> None:
        try:
            self.graph.capture_end()
        except RuntimeError:
            self.backend.mend(self)
            raise

    def _kept(self) -> AbstractContextManager[None]:
        """Have recomputed parts draw from their own generators, in a backward from the current ones."""
        rng = self.backend.rng
        if rng is None:
            return nullcontext()
        if self.forward is not None:
            return rng.kept_by(rng.generators)
        left = iter([generators for _, generators in self.parts])

        def part() -> Generators:
            found = next(left, None)
            if found is None:
                raise CaptureError(
                    f"graph: a recomputed part begins, and the traced run had {len(self.parts)}"
                )
            return found

        return rng.kept_by(part, again=rng.generators if self.has_backward else None)

    def replay(self) -> None:
        if self._draws and self.backend.rng is not None:
            streams = self.backend.rng.generators()
            self._starts = {name: (g.initial_seed(), g.get_offset()) for name, g in streams.items()}
        recomputed = self if self.has_backward else self.forward
        if recomputed is not None:
            recomputed._set_parts()
        self.graph.replay()

    @property
    def launch(self) -> Callable[[], None]:
        """`replay` if generators are set or read before it, otherwise torch's own C++ method."""
        if self._draws or (self.forward is not None and self.forward._draws):
            return self.replay
        return super(torch.cuda.CUDAGraph, self.graph).replay

    @property
    def _draws(self) -> bool:
        """True if a recomputed part draws more than seeds."""
        return any(offsets for offsets, _ in self.parts)

    @contextmanager
    def eager_backward(self) -> Iterator[None]:
        """Have recomputations inside draw the random numbers of the last replay of this forward."""
        rng = self.backend.rng
        if rng is None or not self.parts:
            yield
            return
        self._set_parts()
        with rng.kept_by(rng.generators):  # so that the streams are afterwards the generators they were
            yield

    def _set_parts(self) -> None:
        for offsets, generators in self.parts:
            for name, generator in generators.items():
                seed, offset = self._starts[name]
                generator.manual_seed(seed)
                generator.set_offset(offset + offsets[name])

    def reset(self) -> None:
        self.graph.reset()
        self._held = []


class _Reads(TorchDispatchMode):
    """Collects in `outside` the storages accessed by captured ops but created before the capture.

    made: the addresses of those that captured ops have made on `device`; memory of the pool is nobody else's.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Run compiled code as it is; torch would otherwise run what it was compiled from."""
        return True

    def __init__(self, made: set[int], device: torch.device) -> None:
        super().__init__()
        self.made, self.device = made, device
        self.outside: dict[int, torch.UntypedStorage] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for storage in _storages((args, kwargs)):
            if storage.data_ptr() not in self.made:
                self.outside[storage.data_ptr()] = storage
        outputs = func(*args, **kwargs)
        for storage in _storages(outputs):
            if storage.device == self.device and storage.data_ptr() not in self.outside:
                self.made.add(storage.data_ptr())
        return outputs


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    return [each.untyped_storage() for each in tree_leaves(tree) if isinstance(each, Tensor)]


def _release_pool(stream: torch.cuda.Stream, pool: Any) -> None:
    """Release the pool of a graph whose capture failed, if `reset` of the graph has not."""
    place = stream.device.index, pool
    with suppress(RuntimeError):  # torch 2.13 has ended it already, and says so
        torch._C._cuda_endAllocateToPool(*place)
    with suppress(RuntimeError):  # of a capture that did not begin, or of a device that is lost
        if not _reset_releases_pool(stream):
            torch._C._cuda_releasePool(*place)


@functools.cache
def _reset_releases_pool(stream: torch.cuda.Stream) -> bool:
    """Return True if torch releases the pool of a failed capture when its graph is reset.

    Torch 2.10 to 2.13 do not, later ones may; a pool that is released twice breaks the allocator. So let one
    small capture fail in a pool of its own, and check if the pool is gone.
    """
    pool, graph = torch.cuda.graph_pool_handle(), torch.cuda.CUDAGraph()
    with suppress(RuntimeError), torch.cuda.stream(stream):
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        with suppress(RuntimeError):
            torch.zeros(1, device=stream.device)
            stream.synchronize()  # which no capture allows
        graph.capture_end()
    _NOT_ENDED.append(graph)
    graph.reset()
    with suppress(RuntimeError):
        torch._C._cuda_endAllocateToPool(stream.device.index, pool)
    after = torch.cuda.CUDAGraph()  # until a capture ends, generators think that the failed one goes on
    with torch.cuda.stream(stream):
        after.capture_begin(pool=torch.cuda.graph_pool_handle(), capture_error_mode="thread_local")
        torch.zeros(1, device=stream.device)
        after.capture_end()
    after.reset()
    torch.cuda.empty_cache()
    if not torch.cuda.memory_snapshot(pool):
        return True
    with suppress(RuntimeError):
        torch._C._cuda_releasePool(stream.device.index, pool)
    return False


@functools.cache
def _stream_of_captures(device: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _without_memory(tensor: Tensor) -> Tensor:
    """Return an alias of `tensor` by address, which does not own the memory."""
    storage = tensor.untyped_storage()
    place: dict[str, Any] = {
        **{"nbytes": storage.nbytes(), "data_ptr": storage.data_ptr(), "device": tensor.device},
        **{"size": tensor.shape, "stride": tensor.stride(), "dtype": tensor.dtype},
        "storage_offset": tensor.storage_offset(),
    }
    bare = torch._C._construct_storage_from_data_pointer(place["data_ptr"], tensor.device, place["nbytes"])
    made = torch._C._construct_CUDA_Tensor_From_Storage_And_Metadata(place, bare)
    made = torch._conj(made) if tensor.is_conj() else made
    return torch._neg_view(made) if tensor.is_neg() else made
