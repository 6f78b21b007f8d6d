"""Cuts of the autograd graph between spans of layers, and their streams: a backward runs span by span.

The order of sums does not change: losses, gradients and random numbers are bit for bit those of an uncut
graph. Only a layer that occurs twice in a chain, and an embedding that MTP modules use as well, add up their
gradients in another order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage
from torch.autograd import Function
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.multiprocessing.reductions import StorageWeakRef

from fastmp.distributed.streams import exchange_stream
from fastmp.nn.segment import Tensors

__all__ = ["CutLayers", "Streams"]

Run = Callable[[Tensors, Mapping[str, Any]], tuple[Tensors, Tensors]]


class _Gradient:
    """The gradient accumulated so far for a tensor at a cut."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self.value: Tensor | None = None

    def add(self, grad: Tensor) -> None:
        if self.value is not None:  # it may come from the other stream
            self._streams.lend([self.value])
        self.value = grad if self.value is None else self.value + grad

    def take(self) -> Tensor | None:
        """Return the sum and drop this reference to it."""
        value, self.value = self.value, None
        return value


class _Held(NamedTuple):
    """A detached tensor between two spans, and its gradient if it needs one."""

    tensor: Tensor
    gradient: _Gradient | None

    def given(self, exchange: bool) -> Tensor:
        """Return the tensor as input of a span.

        Autograd runs a node on the stream where it was created. Each span creates its own node, so that no
        span of a backward makes the other stream wait.
        """
        if self.gradient is None:
            return self.tensor
        return _cut_at(_anchor(self.tensor.device, exchange), self.tensor, self.gradient)


Roots = list[tuple[GradientEdge, _Gradient]]


class CutLayers:
    """The layers of a chunk in a microbatch, from their forward to the end of their backward.

    Args:
        before: the number of the span before them, whose backward is the last.
        tensors, shared: what their chain was called with.
    """

    def __init__(self, before: int, tensors: Tensors, shared: Mapping[str, Any]) -> None:
        self.shared = shared
        self._roots: dict[int, Roots] = {}  # of each span, by number
        self._streams = Streams(tensors[0])
        self._held, self._others = self._hold(before, tensors, {}), list[_Held]()

    def forward(self, span: int, exchange: bool, run: Run) -> None:
        """Run a span on the stream for its kind; `run` takes and returns tensors as `run_segments`."""
        with self._streams.on(span, exchange, [held.tensor for held in self._held]):
            given = tuple(held.given(exchange) for held in self._held)
            tensors, others = run(given, self.shared)
            made = self._hold(span, (*tensors, *others), {id(t): held for t, held in zip(given, self._held)})
        self._held = made[: len(tensors)]
        self._others += made[len(tensors) :]

    def outputs(self) -> Tensors:
        """Return the results of the chain after its last span, on the current stream."""
        made = [*self._held, *self._others]
        self._held, self._others, self.shared = [], [], {}
        self._streams.join([held.tensor for held in made])
        return tuple(held.given(False) for held in made)

    def backward(self, span: int, exchange: bool = False) -> None:
        """Run the backward of a span, or of the code before the layers, from the gradients that have come."""
        taken = [(edge, gradient.take()) for edge, gradient in self._roots.pop(span)]
        given = [(edge, grad) for edge, grad in taken if grad is not None]
        if given:
            edges, grads = zip(*given, strict=True)
            with self._streams.on(span, exchange, grads):
                torch.autograd.backward(edges, grads)

    def end(self) -> None:
        """Release what is held for streams, after the last backward."""
        self._streams.end()

    def _hold(self, span: int, tensors: Sequence[Tensor], given: Mapping[int, _Held]) -> list[_Held]:
        """Detach the results of a span; a tensor of `given`, by its id, was passed through unchanged."""
        roots, held = Roots(), list[_Held]()
        for tensor in tensors:
            gradient = None
            if id(tensor) in given:
                held.append(given[id(tensor)])
                continue
            if tensor.requires_grad:
                gradient = _Gradient(self._streams)
                roots.append((get_gradient_edge(tensor), gradient))
                tensor = tensor.detach()
            held.append(_Held(tensor, gradient))
        self._roots[span] = roots
        return held


class _Cut(Function):
    """The identity; backward stores the gradient and stops."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, value: Tensor, gradient: _Gradient) -> Tensor:
        ctx.gradient = gradient
        return value.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        ctx.gradient.add(grad)
        return None, None, None


def _cut_at(anchor: Tensor, value: Tensor, gradient: _Gradient) -> Tensor:
    """`_Cut.apply`, without its search of all arguments for tensors that torch.func has wrapped."""
    return super(Function, _Cut).apply(anchor, value, gradient)


@functools.cache
def _anchor(device: torch.device, exchange: bool) -> Tensor:
    """Return the leaf that gives cut tensors a backward; its node has a stream, so there is one a stream."""
    return torch.zeros((), device=device, requires_grad=True)


class Streams:
    """The streams of a microbatch: each span runs after the previous one, on the stream for its kind.

    The allocator reuses freed memory on the stream that allocated it, while the other stream may still read
    it. `record_stream` prevents that. In a capture it would also keep the memory from being reused until the
    capture ends, and a captured step holds all microbatches: there, references are held until the allocating
    stream has waited for the span that reads them.
    """

    def __init__(self, x: Tensor) -> None:
        self._device = x.device
        self._event: torch.cuda.Event | None = None
        self._exchange = self._returns = False  # the kind of the span that runs, and whether in backward
        # Storages that are held, by the kind of the span that reads them.
        self._held: dict[bool, list[UntypedStorage]] = {False: [], True: []}
        # By span, what it took in forward: its backward reads what autograd has saved of that.
        self._taken: dict[int, list[StorageWeakRef]] = {}

    def on(self, span: int, exchange: bool, tensors: Sequence[Tensor]) -> AbstractContextManager[None]:
        """Return a context on the stream of a span that reads `tensors`; a null context on a CPU."""
        return self._on(span, exchange, tensors) if self._device.type == "cuda" else nullcontext()

    @contextmanager
    def _on(self, span: int, exchange: bool, tensors: Sequence[Tensor]) -> Iterator[None]:
        current = torch.cuda.current_stream(self._device)
        stream = exchange_stream(self._device) if exchange else current
        # 1. Wait for the previous span, and release what spans on the other stream have read. Deferred wgrad
        #    GEMMs read later than the compute span that defers them: their inputs are held to the end.
        if self._event is None:
            stream.wait_stream(current)
        else:
            stream.wait_event(self._event)
        self._exchange = exchange
        if not (exchange and self._returns):
            self._held[not exchange].clear()
        # 2. Run on the stream.
        with torch.cuda.stream(stream):
            self.lend(tensors)
            if self._returns:
                saved = (UntypedStorage._new_with_weak_ptr(ref.cdata) for ref in self._taken.pop(span, ()))
                self._held[exchange] += [storage for storage in saved if storage is not None]
            elif torch.cuda.is_current_stream_capturing():
                self._taken[span] = [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]
            yield
        self._event = stream.record_event()

    def lend(self, tensors: Sequence[Tensor]) -> None:
        """Keep the memory of tensors until the running span is done with them; some may be on the host."""
        if self._device.type != "cuda":
            return
        if torch.cuda.is_current_stream_capturing():
            self._held[self._exchange] += [tensor.untyped_storage() for tensor in tensors]
            return
        for tensor in tensors:
            if tensor.is_cuda:
                tensor.record_stream(torch.cuda.current_stream(self._device))

    def join(self, tensors: Sequence[Tensor]) -> None:
        """Return `tensors` to the current stream after the forward."""
        self._exchange, self._returns = False, True
        if self._event is not None:
            torch.cuda.current_stream(self._device).wait_event(self._event)
            self.lend(tensors)
            self._event = None

    def end(self) -> None:
        """Release all tensors, once both streams have waited for each other."""
        if any(self._held.values()):
            current, exchanges = torch.cuda.current_stream(self._device), exchange_stream(self._device)
            exchanges.wait_stream(current)
            current.wait_stream(exchanges)
            for storages in self._held.values():
                storages.clear()
