"""Graphs of CUDA: what a `GraphManager` needs on a GPU, over one memory pool and one stream of captures.

Captures happen in the middle of training, so nothing here waits for the device. The stream of captures is
the same for all graphs of a device: what autograd remembers of a forward is where its backward has to be
captured, and a library that keeps a workspace for each stream keeps one. Other threads may go on as they
like; that of autograd is part of a capture, for it runs backwards on the stream of their forwards.

Random numbers. A replay starts every stream of random numbers where the stream stands, and moves it on. A
recomputation must start where its forward started, and states cannot be read or set inside a capture. So each
recomputed part gets generators of its own, which are set before the replay of its backward: to where the
forward's replay started, and on by what the forward draws before that part, which an eager run has shown.
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Protocol

import torch
from torch import Tensor

from fastmp.graphs.errors import CaptureError

__all__ = ["CudaBackend", "CudaGraph", "Streams"]

Generators = Mapping[str, torch.Generator]
Offsets = dict[str, int]


class Streams(Protocol):
    """Streams of random numbers, as those of an `RngTracker`."""

    def generators(self) -> dict[str, torch.Generator]: ...
    def kept_by(self, keeper: Callable[[], Generators | None]) -> AbstractContextManager[None]: ...


class CudaBackend:
    """For a `GraphManager`: graphs on the current device.

    rng: the streams that the work draws from; None: torch's default generator only, and no recomputation.

    A capture adds to the pool what is not free in it. A graph that nobody holds is gone; what it had in the
    pool is free for others, and after `reset` for all.
    """

    runs_at_capture = False

    def __init__(self, rng: Streams | None = None) -> None:
        self.rng = rng
        self.stream = _stream_of_captures(torch.cuda.current_device())
        self._graphs: weakref.WeakSet[CudaGraph] = weakref.WeakSet()
        self._begin()

    def _begin(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()
        self._first = CudaGraph(self, None, [])  # a pool without a graph would be let go, and never come back
        with self._first.capture():
            torch.zeros(1, device=self.stream.device)

    @property
    def nbytes(self) -> int:
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
        graph = CudaGraph(self, forward, watched or [])
        self._graphs.add(graph)
        return graph

    def weak(self, tensor: Tensor) -> Callable[[], Tensor]:
        return _without_memory(tensor).detach

    def reset(self) -> None:
        """Let go of all graphs; none may be replayed after that."""
        torch.cuda.synchronize()
        for graph in (self._first, *self._graphs):
            graph.reset()
        self._begin()


class CudaGraph:
    """`with graph.capture(): ...` notes work and does none of it; `replay()` does it on the current stream.

    RuntimeError of CUDA for work that it cannot capture: a value read on the host, a wait for the device.
    """

    def __init__(self, backend: CudaBackend, forward: CudaGraph | None, watched: list[Offsets]) -> None:
        self.backend, self.forward, rng = backend, forward, backend.rng
        self._graph = torch.cuda.CUDAGraph()
        self._starts: dict[str, tuple[int, int]] = {}  # seeds and offsets at the last replay
        self.parts: list[tuple[Offsets, Generators]] = []
        if rng is None:
            return
        streams = rng.generators()
        for offsets in watched:
            self.parts.append((offsets, {name: torch.Generator(g.device) for name, g in streams.items()}))
        repeated = [] if forward is None else [own for _, part in forward.parts for own in part.values()]
        for generator in (*streams.values(), *repeated):
            self._graph.register_generator_state(generator)

    @contextmanager
    def capture(self) -> Iterator[None]:
        stream, current = self.backend.stream, torch.cuda.current_stream()
        stream.wait_stream(current)
        collects = gc.isenabled()
        gc.disable()  # a graph that is collected while another is captured would end the capture
        try:
            with torch.cuda.stream(stream), self._kept(), _no_error_hides_another(self._graph):
                torch.cuda.current_blas_handle()  # its workspace is not to be in the pool
                self._graph.capture_begin(pool=self.backend.pool, capture_error_mode="thread_local")
                yield
        finally:
            if collects:
                gc.enable()
        current.wait_stream(stream)

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
        self._graph.replay()

    def _set_parts(self) -> None:
        for offsets, generators in self.parts:
            for name, generator in generators.items():
                seed, offset = self._starts[name]
                generator.manual_seed(seed)
                generator.set_offset(offset + offsets[name])

    def reset(self) -> None:
        self._graph.reset()


@contextmanager
def _no_error_hides_another(graph: torch.cuda.CUDAGraph) -> Iterator[None]:
    """Ends the capture. After an error inside, ending fails as well: that error says less."""
    try:
        yield
    except BaseException:
        with suppress(RuntimeError):
            graph.capture_end()
        raise
    graph.capture_end()


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
    return torch._C._construct_CUDA_Tensor_From_Storage_And_Metadata(place, bare)
