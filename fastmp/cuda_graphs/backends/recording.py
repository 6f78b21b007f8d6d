"""Graphs on a CPU: a replay does the ops of a capture again, on the same memory.

This does for torch ops what CUDA does for kernels, by the same rules, so that mistakes with graphs show on
any machine. A captured op keeps addresses, not tensors. Its results lie in blocks of the pool. A block is
free as soon as nobody holds its tensor, also while other graphs are captured; who reads it later reads
another's result, as on a GPU. No Python of the model runs at replay.

At replay a random op draws from the same stream as at capture, and goes on where that stands. An op that
started where one of the forward had started is a recomputation, and starts there again. In a graph that holds
forwards and their backwards, it is an op that starts where the stream has been before.
"""

from __future__ import annotations

import ctypes
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._distributed_c10d import FakeWork
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from fastmp.cuda_graphs.backends.interface import RandomStreams
from fastmp.cuda_graphs.errors import CaptureError
from fastmp.cuda_graphs.op_inspection import OpInspector, where
from fastmp.status import process_status

__all__ = ["CaptureError", "Pool", "RecordedGraph", "RecordingBackend"]

_ALIGNMENT = 64
_SEEDED = "random stream {!r} has got a seed or a state, which replay would not set"


class _Block:
    """A block of the pool, which reports when its tensor is garbage-collected."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        with torch.inference_mode(False):  # outside of which its tensors could not be written to
            self.memory = torch.empty(nbytes, dtype=torch.uint8)
        self.address = self.memory.data_ptr()

    def lend(self, give_back: Callable[[], None]) -> torch.UntypedStorage:
        """Make a storage on the memory; `give_back` is called when it dies."""
        holder = (ctypes.c_char * self.nbytes).from_address(self.address)
        weakref.finalize(holder, give_back)
        return torch.frombuffer(holder, dtype=torch.uint8).untyped_storage()


class Pool:
    """Memory that graphs share. A block is free for another tensor of its size once its own is gone.

    `nbytes`: the bytes of all blocks; the peak of a step, if graphs are captured in the order of their
    replays.

    blocks: of all pools of a backend, by address, because graphs of one pool read the memory of another.
    """

    def __init__(self, blocks: dict[int, _Block] | None = None) -> None:
        self.nbytes = 0
        self._blocks: dict[int, _Block] = {} if blocks is None else blocks
        self._free: dict[int, list[_Block]] = defaultdict(list)

    def keep(self, tensor: Tensor) -> Tensor:
        """Move a tensor into the pool."""
        storage = tensor.untyped_storage()
        kept = self._take(storage.nbytes())
        _bytes(kept)[: storage.nbytes()].copy_(_bytes(storage))
        return _on(kept, _view(tensor))

    def place(self, tensor: Tensor) -> _InPool | _Outside:
        block = self.block_of(tensor)
        if block is None:
            return _Outside(tensor, tensor.data_ptr())
        return _InPool(block.memory, _view(tensor))

    def block_of(self, tensor: Tensor) -> _Block | None:
        return self._blocks.get(tensor.untyped_storage().data_ptr())

    def memory_of(self, tensor: Tensor) -> Tensor:
        """Return the whole block of a tensor in the pool, as bytes."""
        return self._blocks[tensor.untyped_storage().data_ptr()].memory

    def _take(self, nbytes: int) -> torch.UntypedStorage:
        nbytes += -nbytes % _ALIGNMENT
        free = self._free[nbytes]
        if free:
            block = free.pop()
        else:
            block = _Block(nbytes)
            self._blocks[block.address] = block
            self.nbytes += nbytes
        return block.lend(lambda: free.append(block))


class _View(NamedTuple):
    """The view of a tensor on its storage. conj, neg: its lazy conjugate and negative bits."""

    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    conj: bool
    neg: bool


class _InPool(NamedTuple):
    """The place of a tensor in the pool, which is not kept alive."""

    memory: Tensor
    view: _View

    def tensor(self) -> Tensor:
        return _on(self.memory.untyped_storage(), self.view)


class _Outside(NamedTuple):
    """A tensor from before the capture: a parameter, a static input, a gradient buffer, a constant."""

    held: Tensor
    address: int

    def tensor(self) -> Tensor:
        return self.held


class _Draw(NamedTuple):
    """The stream of a random op and its start; with `repeats`, the start of the forward op it recomputes."""

    stream: str
    own: bytes
    repeats: dict[bytes, Tensor] | None


class _Op(NamedTuple):
    func: Any
    arguments: list[Any]  # flat, as `spec` says, tensors as places
    spec: Any
    made: list[tuple[int, Tensor]]  # of the flat outputs, those that are new, and the memory of each
    draw: _Draw | None
    grad: bool  # some ops make more where gradients are wanted


class RecordedGraph:
    """`with graph.capture(): ...` does the work once and records it; `replay()` repeats it in place.

    pool: holds the results; graphs that are captured in the order in which they run may share one.
    rng: the streams that the work draws from; None: torch's default generator only.
    forward: the graph whose backward this is; a recomputation in it draws what the forward drew.
    has_backward: the work has forwards and their backwards in it.

    Tensors from outside must stay where they are: a replay reads them where they were at capture.
    CaptureError for what a CUDA graph cannot hold either: a value that is read on the host, a shape that
    depends on data, a generator that is not the default one.
    """

    def __init__(
        self,
        pool: Pool,
        rng: RandomStreams | None = None,
        forward: RecordedGraph | None = None,
        has_backward: bool = False,
    ) -> None:
        self.pool, self.rng, self.forward, self.has_backward = pool, rng, forward, has_backward
        self.starts: dict[bytes, Tensor] = {}  # {where a random op started at capture: at the last replay}
        self.ends: dict[str, bytes] = {}  # where each stream is behind its last op that repeats nothing
        self._ops: list[_Op] = []
        self._ready: list[tuple[_Op, Any, Any]] = []

    def __len__(self) -> int:
        """The number of ops."""
        return len(self._ops)

    @contextmanager
    def capture(self) -> Iterator[None]:
        if self._ops:
            raise CaptureError("graph: it is captured already; make another graph")
        self.ends = self._places()
        with _ValueReads(), _Recorder(self), process_status.capturing(self):
            yield
        for stream, place in self._places().items():
            if place != self.ends[stream]:
                raise CaptureError(f"graph: {_SEEDED.format(stream)}")

    @torch.no_grad()  # or as at capture; afterwards as it is now
    def replay(self) -> None:
        if len(self._ready) != len(self._ops):
            self._ready = [(op, *_arguments(op)) for op in self._ops]
        # What autograd did and autocast has cast is among the ops.
        with torch._C._AutoDispatchBelowAutograd(), torch._C._DisableAutocast():
            for op, args, kwargs in self._ready:
                torch._C._set_grad_enabled(op.grad)
                drawn = op.draw is not None
                outputs = self._drawn(op, args, kwargs) if drawn else op.func(*args, **kwargs)
                flat = tree_flatten(outputs)[0]
                for i, memory in op.made:
                    made = _bytes(flat[i].untyped_storage())
                    memory[: len(made)].copy_(made)
                _finished(flat)

    @property
    def launch(self) -> Callable[[], None]:
        return self.replay

    def eager_backward(self) -> AbstractContextManager[None]:
        return nullcontext()

    def _drawn(self, op: _Op, args: Any, kwargs: Any) -> Any:
        draw, generator = op.draw, torch.default_generator
        assert draw is not None
        with self._stream(draw.stream):
            here = generator.get_state()
            if draw.repeats is None:
                self.starts[draw.own] = here
                return op.func(*args, **kwargs)
            generator.set_state(draw.repeats[draw.own])
            outputs = op.func(*args, **kwargs)
            generator.set_state(here)
            return outputs

    def _places(self) -> dict[str, bytes]:
        """Return the present state of each stream, by name."""
        states = {"default": torch.get_rng_state()} if self.rng is None else self.rng.states()
        return {name: _place(name, state) for name, state in states.items()}

    def _stream(self, name: str) -> AbstractContextManager[None]:
        return nullcontext() if self.rng is None or name == self.rng.current else self.rng.fork(name)


class RecordingBackend:
    """Captures and replays graphs on a CPU, over pools by number, drawing from the streams of `rng`."""

    runs_at_capture = True
    owner: weakref.ref[Any] | None = None

    def __init__(self, rng: RandomStreams | None = None) -> None:
        self.rng = rng
        self.reset()

    @property
    def nbytes(self) -> int:
        return sum(pool.nbytes for pool in self.pools.values())

    def trace_draws(self) -> AbstractContextManager[None]:
        return nullcontext()

    def prepare(self) -> None:
        """Do nothing: on a CPU a pool takes memory like anything else."""

    def graph(
        self,
        forward: RecordedGraph | None = None,
        draws: None = None,
        has_backward: bool = False,
        pool: int = 0,
    ) -> RecordedGraph:
        return RecordedGraph(self.pools[pool], self.rng, forward, has_backward)

    def weak(self, tensor: Tensor) -> Callable[[], Tensor]:
        return self.pools[0].place(tensor.detach()).tensor().detach

    def reset(self) -> None:
        """Start new pools; graphs are freed with their last reference."""
        blocks: dict[int, _Block] = {}
        self.pools: defaultdict[int, Pool] = defaultdict(lambda: Pool(blocks))


class _Recorder(OpInspector):
    """Records every op, and moves its results into the pool."""

    def __init__(self, graph: RecordedGraph) -> None:
        super().__init__()
        self.graph = graph

    def problem(self, kind: str, message: str) -> None:
        raise CaptureError(f"graph: {message}; called in {where()}")

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        graph, pool = self.graph, self.graph.pool
        if func.namespace == "profiler":  # a name for what runs, which a replay leaves out
            return func(*args, **kwargs)
        draw = self._draw() if torch.Tag.nondeterministic_seeded in func.tags else None
        flat, spec = tree_flatten((args, kwargs))
        arguments = [pool.place(a) if isinstance(a, Tensor) else a for a in flat]
        there = {a.untyped_storage().data_ptr() for a in flat if isinstance(a, Tensor)}
        with torch._C.DisableTorchFunction():  # what an op in Python reads is its own business
            outputs, form = tree_flatten(func(*args, **kwargs))
        outputs = _finished(outputs)
        if draw is not None and draw.repeats is None:
            graph.ends[draw.stream] = _place(draw.stream, torch.get_rng_state())
        made: list[tuple[int, Tensor]] = []
        moved: dict[int, torch.UntypedStorage] = {}
        for i, output in enumerate(outputs):
            if not isinstance(output, Tensor) or not output.untyped_storage().nbytes():
                continue
            address = output.untyped_storage().data_ptr()
            if address in there or pool.block_of(output) is not None:
                continue
            if address in moved:
                outputs[i] = _on(moved[address], _view(output))
                continue
            outputs[i] = kept = pool.keep(output)
            moved[address] = kept.untyped_storage()
            made.append((i, pool.memory_of(kept)))
        graph._ops.append(_Op(func, arguments, spec, made, draw, torch.is_grad_enabled()))
        return tree_unflatten(outputs, form)

    def _draw(self) -> _Draw:
        graph = self.graph
        stream = "default" if graph.rng is None else graph.rng.current
        here = torch.get_rng_state()
        own = _place(stream, here)
        before = {} if graph.forward is None else graph.forward.starts
        if graph.has_backward and graph.ends[stream] != own:
            before = graph.starts
        if own in before:
            return _Draw(stream, own, before)
        if graph.ends[stream] != own:
            raise CaptureError(f"graph: {_SEEDED.format(stream)}; called in {where()}")
        graph.starts[own] = here
        return _Draw(stream, own, None)


class _ValueReads(TorchFunctionMode):
    """Raises CaptureError for functions that read values and are no op on a CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("tolist", "numpy", "__array__"):
            raise CaptureError(
                f"graph: {name.strip('_')}() reads values on the host: replay would not see them change; "
                f"called in {where()}"
            )
        return func(*args, **(kwargs or {}))


def _place(stream: str, state: Tensor) -> bytes:
    """Return an identifier of a stream's present state."""
    return stream.encode() + ctypes.string_at(state.data_ptr(), state.nbytes)


def _arguments(op: _Op) -> tuple[Any, Any]:
    places = [a.tensor() if isinstance(a, _InPool | _Outside) else a for a in op.arguments]
    return tree_unflatten(places, op.spec)


def _finished(outputs: list[Any]) -> list[Any]:
    """Wait for collectives among `outputs`, and replace them by finished work.

    Copies that gloo makes when a caller waits are part of the collective, not ops of their own.
    """
    works: list[Any] = [output for output in outputs if isinstance(output, torch.ScriptObject)]
    for work in works:
        work.wait()
    return (
        [FakeWork().boxed() if isinstance(o, torch.ScriptObject) else o for o in outputs]
        if works
        else outputs
    )


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def _view(tensor: Tensor) -> _View:
    offset, lazy = int(tensor.storage_offset()), (tensor.is_conj(), tensor.is_neg())
    return _View(tensor.dtype, offset, tuple(tensor.shape), tensor.stride(), *lazy)


def _on(storage: torch.UntypedStorage, view: _View) -> Tensor:
    tensor = torch.empty(0, dtype=view.dtype).set_(storage, view.offset, view.shape, view.stride)
    tensor = torch._conj(tensor) if view.conj else tensor
    return torch._neg_view(tensor) if view.neg else tensor
