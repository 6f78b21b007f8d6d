"""Graphs of CUDA: what a `GraphManager` needs on a GPU, over one memory pool and one stream of captures.

Captures happen in the middle of training, where a wait for the device may be one for ranks that wait for
this one: nothing here waits, but for `prepare`. The stream of captures is the same for all graphs of a
device: what autograd remembers of a forward is where its backward has to be captured, and a library that
keeps a workspace for each stream keeps one. Other threads may go on as they like; that of autograd is part
of a capture, for it runs backwards on the stream of their forwards.

Kernels know addresses only. What they read and no capture has made, a parameter or a tensor of Python's, is
held as long as its graph: what lies there later would be another's.

Random numbers. A replay starts every stream of random numbers where the stream stands, and moves it on. A
recomputation must start where its forward started, and states cannot be read or set inside a capture. So each
recomputed part gets generators of its own, which are set before the replay of its backward: to where the
forward's replay started, and on by what the forward draws before that part, which an eager run has shown.
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fastmp.graphs.errors import CaptureError

__all__ = ["CudaBackend", "CudaGraph", "Streams"]

Generators = Mapping[str, torch.Generator]
Offsets = dict[str, int]

_NOT_ENDED: list[torch.cuda.CUDAGraph] = []  # torch's allocator of host memory goes on asking them


class Streams(Protocol):
    """Streams of random numbers, as those of an `RngTracker`."""

    def generators(self) -> dict[str, torch.Generator]: ...
    def kept_by(self, keeper: Callable[[], Generators | None]) -> AbstractContextManager[None]: ...


class CudaBackend:
    """For a `GraphManager`: graphs on the current device.

    rng: the streams that the work draws from; None: torch's default generator only, and no recomputation.

    A capture adds to the pool what is not free in it. A graph that nobody holds is gone; what it had in the
    pool is free for others, and after `reset` for all. After a capture that failed, others have a new pool.
    """

    runs_at_capture = False

    def __init__(self, rng: Streams | None = None) -> None:
        self.rng = rng
        self.stream = _stream_of_captures(torch.cuda.current_device())
        self._graphs: weakref.WeakSet[CudaGraph] = weakref.WeakSet()
        self._leave()

    def _leave(self) -> None:
        self.pool: Any = None
        self.made: set[int] = set()  # where storages lie that captures have made: in the pool
        self._first: CudaGraph | None = None  # a pool without a graph would be let go, and never come back

    def _begin(self, generators: Sequence[torch.Generator] = ()) -> None:
        """A new pool, whose first capture knows of `generators`."""
        self.pool = torch.cuda.graph_pool_handle()
        first = CudaGraph(self, generators)
        torch.zeros(1, device=self.stream.device)  # the first time loads the kernel
        with first.capture():
            torch.zeros(1, device=self.stream.device)
        self._first = first

    def prepare(self) -> None:
        """Before a step that captures. Eager steps have left memory that is free; inside a capture none of it
        is given back, so a pool could not have it."""
        torch.cuda.empty_cache()

    def mend(self, failed: CudaGraph) -> None:
        """After a capture that did not come to its end: its pool is still written to then, and generators
        take it that a capture goes on, until one has ended that knows of them."""
        _NOT_ENDED.append(failed.graph)
        failed.reset()
        place, begun = (self.stream.device.index, self.pool), self._first is not None
        with suppress(RuntimeError):  # it came that far
            torch._C._cuda_endAllocateToPool(*place)
            torch._C._cuda_releasePool(*place)
        self._leave()
        if begun:
            self._begin(failed.generators)

    @property
    def nbytes(self) -> int:
        if self.pool is None:
            return 0
        return sum(segment["total_size"] for segment in torch.cuda.memory_snapshot(self.pool))

    @contextmanager
    def watch(self) -> Iterator[list[Offsets]]:
        """Around an eager forward. How far each stream is on, when a part begins that will be recomputed."""
        parts: list[Offsets] = []
        if self.rng is None:
            yield parts
            return
        first = {name: generator.get_offset() for name, generator in self.rng.generators().items()}

        def note() -> None:
            now = self.rng.generators()
            parts.append({name: now[name].get_offset() - offset for name, offset in first.items()})

        with self.rng.kept_by(note):
            yield parts

    def graph(self, forward: CudaGraph | None = None, watched: list[Offsets] | None = None) -> CudaGraph:
        if self.pool is None:
            self._begin()
        streams = {} if self.rng is None else self.rng.generators()
        repeated = [] if forward is None else [own for _, part in forward.parts for own in part.values()]
        graph = CudaGraph(self, [*streams.values(), *repeated], forward)
        graph.parts = [
            (offsets, {name: torch.Generator(stream.device) for name, stream in streams.items()})
            for offsets in watched or []
        ]
        self._graphs.add(graph)
        return graph

    def weak(self, tensor: Tensor) -> Callable[[], Tensor]:
        return _without_memory(tensor).detach

    def reset(self) -> None:
        """Let go of all graphs; none may be replayed after that. Those that run come to their end."""
        for graph in (self._first, *self._graphs):
            if graph is not None:
                graph.reset()
        self._leave()
        with suppress(RuntimeError):  # of a device that is lost
            self.stream.wait_stream(torch.cuda.current_stream())  # to give back what replays may still read


class CudaGraph:
    """`with graph.capture(): ...` notes work and does none of it; `replay()` does it on the current stream.

    generators: whose random numbers the work may draw, besides torch's default one.
    forward: the graph whose backward this is. `parts`: what is recomputed, see `CudaBackend.watch`, and the
        generators of each.

    RuntimeError of CUDA for work that it cannot capture: a value read on the host, a wait for the device.
    """

    def __init__(
        self, backend: CudaBackend, generators: Sequence[torch.Generator], forward: CudaGraph | None = None
    ) -> None:
        self.backend, self.generators, self.forward = backend, list(generators), forward
        self.graph = torch.cuda.CUDAGraph()
        self.parts: list[tuple[Offsets, Generators]] = []
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
            with torch.cuda.stream(stream), self._kept():
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
        """After an error inside, ending the capture fails as well: that error says less."""
        try:
            self.graph.capture_begin(pool=self.backend.pool, capture_error_mode="thread_local")
            yield
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
        """What a recomputation gets for states: the generators of its part, or in backward those in use."""
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
                    f"graph: a recomputed part begins, and the run that was watched had {len(self.parts)}"
                )
            return found

        return rng.kept_by(part)

    def replay(self) -> None:
        if self.parts:
            streams = self.backend.rng.generators()
            self._starts = {name: (g.initial_seed(), g.get_offset()) for name, g in streams.items()}
        if self.forward is not None:
            self.forward._set_parts()
        self.graph.replay()

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
    """Inside, `outside` collects the storages that ops read or write and that no op of a capture has made.

    made: where those lie that were made on `device`, in this capture and in others: the memory of a pool is
        nobody else's.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code runs as it is, where torch would else run what it was compiled from."""
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


@functools.cache
def _stream_of_captures(device: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _without_memory(tensor: Tensor) -> Tensor:
    """The same tensor by its address: it keeps no memory from others."""
    storage = tensor.untyped_storage()
    place = {
        **{"nbytes": storage.nbytes(), "data_ptr": storage.data_ptr(), "device": tensor.device},
        **{"size": tensor.shape, "stride": tensor.stride(), "dtype": tensor.dtype},
        "storage_offset": tensor.storage_offset(),
    }
    bare = torch._C._construct_storage_from_data_pointer(place["data_ptr"], tensor.device, place["nbytes"])
    made = torch._C._construct_CUDA_Tensor_From_Storage_And_Metadata(place, bare)
    made = torch._conj(made) if tensor.is_conj() else made
    return torch._neg_view(made) if tensor.is_neg() else made
