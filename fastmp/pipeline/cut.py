"""Cuts of the autograd graph between spans of layers, so that a backward runs span by span.

The order of sums does not change: losses, gradients and random numbers are bit for bit those of an uncut
graph. Only a layer that occurs twice in a chain, and an embedding that MTP modules use as well, add up their
gradients in another order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import GradientEdge, get_gradient_edge

from fastmp.nn.segment import Tensors
from fastmp.pipeline.streams import Streams

__all__ = ["CutLayers"]

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
        made, self._held, self._others = [*self._held, *self._others], [], []
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
