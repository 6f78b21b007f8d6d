"""EP communication overlap: the all-to-all of one microbatch with the compute of another (DualPipe-style).

`OverlappedLayers` is the runner of the chunks' `LayerChain`s. It partitions a chain where segments
begin or cease to communicate, and cuts the autograd graph at the same places, so that a backward also runs
part by part. A forward that is overlapped with a backward interleaves the parts of both in the order of
`fastmp.schedule.stream_schedule`. On a GPU, communication runs on the exchange stream. Embeddings and losses
outside the chains use plain autograd: their backward ends where a chain ends, and continues where it begins.

The order of sums does not change: losses, gradients and random numbers are bit for bit those of a run without
overlap. Only a layer that occurs twice in a chain, and an embedding that MTP modules use as well, add up
their gradients in another order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage, nn
from torch.autograd import Function
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.multiprocessing.reductions import StorageWeakRef

from fastmp.distributed.streams import exchange_stream
from fastmp.nn.segment import BoundSegment, LayerChain, Tensors, run_segments
from fastmp.ops.wgrad import WgradQueue, defer_wgrad
from fastmp.schedule.stream_schedule import (
    Launch,
    SegmentCost,
    backward_ops,
    forward_ops,
    launch_order,
    partition_segments,
)
from fastmp.tensor_parallel.attributes import hook_traits

__all__ = ["OverlappedLayers"]

Key = tuple[int, int]  # microbatch, chunk


class OverlappedLayers:
    """Runs the layers of pipeline chunks in parts, so that two microbatches overlap.

    A forward is `with forward(key, overlapped): chunk(...)`, with a key (microbatch, chunk). Its backward
    begins with autograd's, from the loss or the next stage down to the last layer; `backward(key)` runs the
    rest, and with `split` all but the deferred wgrad, which another `backward(key)` runs. To overlap a
    backward with a forward, begin the backward, pass its key as `overlapped`, and call `backward` after the
    forward. Other calls of the chains, such as evaluation, run as usual.

    Attributes:
        runner: who runs the parts in place of `run_part`, with its arguments, or None: a graph manager.
        chains: the layers of each chunk.
        sections: the parts of each chunk.

    Raises:
        ValueError: a chain recomputes activations; in `begin_step`, a layer has hooks that would be skipped
            (a forward pre-hook with the trait `replayed` is called); in a forward, keywords have an autograd
            graph, or a chain is called again before its backward.
    """

    def __init__(self, chains: Sequence[LayerChain]) -> None:
        if any(chain.call is not None for chain in chains):
            raise ValueError("overlap_experts: layers are run in parts, which recompute=True does not know")
        self.chains = list(chains)
        parts = [_cut(chain.bound_segments()) for chain in chains]
        self._links = [[links for links, _ in own] for own in parts]
        self.sections = [[section for _, section in own] for own in parts]
        self._live: dict[Key, _Microbatch] = {}
        self._queue = WgradQueue()
        self._now: tuple[Key, Key | None] | None = None
        self._orders: dict[tuple[int, int | None], tuple[Launch, ...]] = {}
        for chunk, chain in enumerate(chains):
            chain.runner = partial(self._forward, chunk)
        self.runner: Callable[..., tuple[Tensors, Tensors]] | None = None

    @property
    def exchanges(self) -> bool:
        """True if a layer exchanges rows with other ranks; a pipeline stage may have none."""
        return any(section.exchange for own in self.sections for section in own)

    def links(self, chunk: int, part: int) -> list[BoundSegment]:
        """Return the segments of a part."""
        return self._links[chunk][part]

    def run_part(
        self, chunk: int, part: int, tensors: Tensors, shared: Mapping[str, Any]
    ) -> tuple[Tensors, Tensors]:
        """Run the segments of a part, with the forward hooks of layers; returns as `run_segments` does."""
        links = self.links(chunk, part)
        for layer in (link.layer for link in links if link.first):
            for hook in _replayed_hooks(layer):
                hook(layer, ())
        return run_segments(links, tensors, shared=shared)

    def begin_step(self) -> None:
        """Drop the state of a failed step, and check the hooks of layers."""
        self._live.clear()
        self._queue.take()
        for layer in (layer for chain in self.chains for layer in chain):
            if (hook := _skipped_hook(layer)) is not None:
                raise ValueError(
                    f"overlap_experts: layers are run in parts, so {type(layer).__name__} is not called, "
                    f"nor its hook {hook}; put it on a module inside the layer"
                )

    @contextmanager
    def forward(self, key: Key, overlapped: Key | None = None) -> Iterator[None]:
        """Return the context to call chunk `key[1]` in; overlapped: the key of a backward that has begun."""
        self._now = key, overlapped
        try:
            yield
        finally:
            self._now = None

    def backward(self, key: Key, *, split: bool = False) -> None:
        """Run the rest of a backward, down to the chunk's input and the parameters before its layers.

        split: leave the deferred wgrad to a later call.
        """
        if key in self._live:
            self._live[key].finish(split)
            if not split:
                del self._live[key]

    def _forward(self, chunk: int, chain: LayerChain, tensors: Tensors, shared: Mapping[str, Any]) -> Tensors:
        if self._now is None or not torch.is_grad_enabled():
            return chain.run(tensors, shared)
        key, overlapped = self._now
        self._check(key, shared)
        other = None if overlapped is None else self._live.get(overlapped)
        run = partial(self.run_part if self.runner is None else self.runner, chunk)
        own = self._live[key] = _Microbatch(self.sections[chunk], run, tensors, self._queue)
        for launch in self._order(chunk, None if overlapped is None or other is None else overlapped[1]):
            if launch.sequence == 0:
                own.forward(launch.op, shared)
            elif other is not None:
                other.backward(launch.op)
        if overlapped is not None:  # down to its input: the loss of this forward adds to gradients before it
            self.backward(overlapped)
        return own.outputs()

    def _check(self, key: Key, shared: Mapping[str, Any]) -> None:
        if key in self._live:
            raise ValueError(
                f"overlap_experts: the layers of chunk {key[1]} were called again with microbatch {key[0]} "
                "before its backward was over"
            )
        for name, value in shared.items():
            if isinstance(value, Tensor) and value.requires_grad and not value.is_leaf:
                raise ValueError(
                    f"overlap_experts: keyword {name!r} of all layers has a graph of its own, through which "
                    "each part of a backward would go again; hand it from layer to layer, or detach it"
                )

    def _order(self, chunk: int, other: int | None) -> tuple[Launch, ...]:
        """Return the launch order of a forward, overlapped with the backward of chunk `other`."""
        if (chunk, other) not in self._orders:
            chains = [forward_ops(self.sections[chunk])]
            if other is not None:
                chains.append(backward_ops(self.sections[other], defer=True))
            self._orders[chunk, other] = launch_order(*chains)
        return self._orders[chunk, other]


def _cut(links: Sequence[BoundSegment]) -> list[tuple[list[BoundSegment], SegmentCost]]:
    """Partition a chain where segments begin or cease to communicate."""
    parts = partition_segments([link.facts for link in links])
    return [([links[i] for i in own], section) for own, section in parts]


def _skipped_hook(layer: nn.Module) -> Callable[..., Any] | None:
    """Return a hook of `layer` that running its segments would skip, or None."""
    before = [hook for hook in layer._forward_pre_hooks.values() if hook not in _replayed_hooks(layer)]
    others = (layer._forward_hooks, layer._backward_pre_hooks, layer._backward_hooks)
    return next(iter((*before, *(hook for hooks in others for hook in hooks.values()))), None)


def _replayed_hooks(layer: nn.Module) -> list[Callable[..., Any]]:
    """Return the forward pre-hooks of `layer` that are called as hook(layer, ()) before its first segment."""
    return [hook for hook in layer._forward_pre_hooks.values() if hook_traits(hook).replayed]


class _Gradient:
    """The gradient accumulated so far for a tensor at a cut."""

    def __init__(self, lane: _Lane) -> None:
        self._lane = lane
        self.value: Tensor | None = None

    def add(self, grad: Tensor) -> None:
        if self.value is not None:  # it may come from the other stream
            self._lane.lend([self.value])
        self.value = grad if self.value is None else self.value + grad

    def take(self) -> Tensor | None:
        """Return the sum and drop this reference to it."""
        value, self.value = self.value, None
        return value


class _Held(NamedTuple):
    """A detached tensor between two parts, and its gradient if it needs one."""

    tensor: Tensor
    gradient: _Gradient | None

    def given(self, exchange: bool) -> Tensor:
        """Return the tensor as input of a part.

        Autograd runs a node on the stream where it was created. Each part creates its own node, so that no
        part of a backward makes the other stream wait.
        """
        if self.gradient is None:
            return self.tensor
        return _cut_at(_anchor(self.tensor.device, exchange), self.tensor, self.gradient)


Roots = list[tuple[GradientEdge, _Gradient]]


class _Microbatch:
    """The state of a microbatch in the parts of a chunk, from its forward to the end of its backward."""

    def __init__(
        self, sections: Sequence[SegmentCost], run: Callable[..., Any], tensors: Tensors, queue: WgradQueue
    ) -> None:
        self._sections, self._run, self._queue = sections, run, queue
        self._roots: list[Roots] = []  # of each run, behind those of what came before the chain
        self._lane, self._device_type = _Lane(tensors[0]), tensors[0].device.type
        self._held, self._others = self._hold(tensors, {}), list[_Held]()
        self._parts = backward_ops(sections, defer=True)
        self._left = list(range(len(self._parts)))
        self._deferred: dict[int, list[Any]] = {}

    def forward(self, part: int, shared: Mapping[str, Any]) -> None:
        exchange = self._sections[part].exchange
        with self._on(part, exchange, [held.tensor for held in self._held], defers=not exchange):
            given = tuple(held.given(exchange) for held in self._held)
            tensors, others = self._run(part, given, shared)
            made = self._hold((*tensors, *others), {id(t): held for t, held in zip(given, self._held)})
        self._held = made[: len(tensors)]
        self._others += made[len(tensors) :]

    def outputs(self) -> Tensors:
        """Return the results of the chain after its last part."""
        made, self._held, self._others = [*self._held, *self._others], [], []
        self._lane.join([held.tensor for held in made])
        return tuple(held.given(False) for held in made)

    def backward(self, part: int) -> None:
        """Run a part of the backward: the dgrad of its segments, or deferred wgrad."""
        self._left.remove(part)
        which = self._parts[part]
        with self._not_of_a_forward():
            if which.deferred:
                WgradQueue.run(self._deferred.pop(which.first))
                return
            self._propagate(1 + which.first, which.exchange)
        if not which.exchange:
            self._deferred[which.first] = self._queue.take()

    def finish(self, split: bool) -> None:
        """Run the remaining parts, or those that are not deferred, then the backward before the chain."""
        for part in [part for part in self._left if not (split and self._parts[part].deferred)]:
            self.backward(part)
        with self._not_of_a_forward():
            self._propagate(0, False)
        if not split:
            self._lane.end()

    def _not_of_a_forward(self) -> AbstractContextManager[Any]:
        """Return a context without the autocast of the forward that this backward runs in."""
        device = self._device_type
        return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()

    def _propagate(self, number: int, exchange: bool) -> None:
        roots, self._roots[number] = self._roots[number], []
        taken = [(edge, gradient.take()) for edge, gradient in roots]
        given = [(edge, grad) for edge, grad in taken if grad is not None]
        if given:
            edges, grads = zip(*given, strict=True)
            with self._on(number - 1, exchange, grads, defers=number > 0 and not exchange):
                torch.autograd.backward(edges, grads)

    @contextmanager
    def _on(self, part: int, exchange: bool, tensors: Sequence[Tensor], *, defers: bool) -> Iterator[None]:
        """Enter the stream of a part, and a queue for its wgrad GEMMs if it `defers` them."""
        with self._lane.on(part, exchange, tensors), defer_wgrad(self._queue if defers else None):
            yield

    def _hold(self, tensors: Tensors, given: Mapping[int, _Held]) -> list[_Held]:
        """Detach the results of a part; a tensor of `given`, by its id, was passed through unchanged."""
        roots, held = Roots(), []
        for tensor in tensors:
            gradient = None
            if id(tensor) in given:
                held.append(given[id(tensor)])
                continue
            if tensor.requires_grad:
                gradient = _Gradient(self._lane)
                roots.append((get_gradient_edge(tensor), gradient))
                tensor = tensor.detach()
            held.append(_Held(tensor, gradient))
        self._roots.append(roots)
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


class _Lane:
    """The streams of a microbatch: each part runs after the previous one, on the stream for its kind.

    The allocator reuses freed memory on the stream that allocated it, while the other stream may still read
    it. `record_stream` prevents that. In a capture it would also keep the memory from being reused until the
    capture ends, and a captured step holds all microbatches: there, references are held until the allocating
    stream has waited for the part that reads them.
    """

    def __init__(self, x: Tensor) -> None:
        self._device = x.device
        self._event: torch.cuda.Event | None = None
        self._exchange = self._returns = False  # the kind of the part that runs, and whether in backward
        # Storages that are held, by the kind of the part that reads them.
        self._held: dict[bool, list[UntypedStorage]] = {False: [], True: []}
        # By part, what it took in forward: its backward reads what autograd has saved of that.
        self._taken: dict[int, list[StorageWeakRef]] = {}

    def on(self, part: int, exchange: bool, tensors: Sequence[Tensor]) -> AbstractContextManager[None]:
        """Return a context on the stream of a part that reads `tensors`; a null context on a CPU."""
        return self._on(part, exchange, tensors) if self._device.type == "cuda" else nullcontext()

    @contextmanager
    def _on(self, part: int, exchange: bool, tensors: Sequence[Tensor]) -> Iterator[None]:
        current = torch.cuda.current_stream(self._device)
        stream = exchange_stream(self._device) if exchange else current
        # 1. Wait for the previous part, and release what parts on the other stream have read. Deferred wgrad
        #    GEMMs read later than the compute part that defers them: their inputs are held to the end.
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
                saved = (UntypedStorage._new_with_weak_ptr(ref.cdata) for ref in self._taken.pop(part, ()))
                self._held[exchange] += [storage for storage in saved if storage is not None]
            elif torch.cuda.is_current_stream_capturing():
                self._taken[part] = [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]
            yield
        self._event = stream.record_event()

    def lend(self, tensors: Sequence[Tensor]) -> None:
        """Keep the memory of tensors until the running part is done with them; some may be on the host."""
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
