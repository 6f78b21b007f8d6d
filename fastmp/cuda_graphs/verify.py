"""Compares replays with their segments, run eagerly on the same inputs and random numbers, bit by bit."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec

from fastmp.cuda_graphs.backends.base import RandomStreams
from fastmp.cuda_graphs.errors import GraphError
from fastmp.cuda_graphs.graph_set import Captured, Key, ReplaySlot
from fastmp.cuda_graphs.hooks import suspended_hooks
from fastmp.cuda_graphs.partition import CapturedSpan, made_by
from fastmp.cuda_graphs.replay import Replay
from fastmp.cuda_graphs.restore import SpanSnapshot, random_states, restore_random_states
from fastmp.nn.segment import Tensors
from fastmp.ops.wgrad import WgradQueue, defer_wgrad
from fastmp.pipeline.schedule import BACKWARD

__all__ = ["VerifiedReplay"]


class _Eager(NamedTuple):
    """What is left of an eager forward until its backward. outputs: those with a gradient."""

    inputs: list[Tensor]
    outputs: list[Tensor]
    queue: WgradQueue | None


class VerifiedReplay(Replay):
    """Replays graphs and compares what they make with what their segments make eagerly.

    shared: what layers share, without its tensors.
    rng: the streams that segments draw from; None: torch's default generators.

    `wanted`: whether the next forward is compared; its backward is if the forward was.

    GraphError naming the span, the microbatch and the first tensor that differs. Replayed hooks are called
    once, after the comparison.
    """

    def __init__(
        self, spans: Sequence[Sequence[CapturedSpan]], shared: TreeSpec, rng: RandomStreams | None
    ) -> None:
        self._spans, self._shared, self._rng, self.wanted = spans, shared, rng, True
        self._eager: dict[Key, _Eager] = {}

    def forward(self, slot: ReplaySlot, captured: Captured, static: Sequence[Tensor]) -> Tensors:
        if not self.wanted:
            return super().forward(slot, captured, static)
        span = self._run(slot)
        _wait(static)
        inputs = [x.detach().clone().requires_grad_(needs) for x, needs in zip(static, captured.needs)]
        streams, before = random_states(self._rng), SpanSnapshot(span)
        made = super().forward(slot, captured, static)
        drawn, after = (
            random_states(self._rng),
            SpanSnapshot(span),
        )  # a fused loss has gradients in its forward
        restore_random_states(self._rng, streams)
        before.restore()
        queue = None if captured.queue is None else WgradQueue()
        with torch.enable_grad(), suspended_hooks(span), defer_wgrad(queue):
            tensors, others = span.through(tuple(inputs), self._shared)
        expected = made_by((*tensors, *others), inputs)
        for i, pair in enumerate(zip(made, expected, strict=True)):
            _compare(slot, f"output {i}", *pair)
        for name, state in random_states(self._rng).items():
            _compare(slot, f"random stream {name!r}", drawn[name], state)
        _compare_states(slot, after)
        outputs = [output for output in expected if output.requires_grad]
        self._eager[slot.key] = _Eager(inputs, outputs, queue)
        return made

    def backward(self, slot: ReplaySlot, captured: Captured, grads: Sequence[Tensor]) -> list[Tensor | None]:
        eager = self._eager.get(slot.key)
        if eager is None:
            return super().backward(slot, captured, grads)

        def eagerly() -> None:
            given = [grad for grad, there in zip(grads, captured.grad_mask) if there]
            roots = [output for output, there in zip(eager.outputs, captured.grad_mask) if there]
            torch.autograd.backward(roots, [grad.clone() for grad in given])
            if eager.queue is not None and slot.kind == BACKWARD:
                WgradQueue.run(eager.queue.take())

        assert captured.backward is not None
        _wait(grads)
        visited = captured.backward.visited
        replay = functools.partial(super().backward, slot, captured, grads)
        own = self._both(slot, visited, replay, eagerly)
        if slot.kind == BACKWARD or eager.queue is None:
            del self._eager[slot.key]
        for i, (given, grad) in enumerate(zip(eager.inputs, own, strict=True)):
            _compare(slot, f"the gradient of input {i}", grad, given.grad)
        return own

    def weights(self, slot: ReplaySlot, captured: Captured) -> None:
        eager = self._eager.pop(slot.key, None)
        if eager is None or eager.queue is None:
            super().weights(slot, captured)
            return
        assert captured.weight is not None
        tasks, replay = eager.queue.take(), functools.partial(super().weights, slot, captured)
        self._both(slot, captured.weight.visited, lambda: replay() or [], lambda: WgradQueue.run(tasks))

    def _run(self, slot: ReplaySlot) -> CapturedSpan:
        return self._spans[slot.step.chunk][slot.span]

    def _both(
        self,
        slot: ReplaySlot,
        visited: Sequence[nn.Parameter],
        replay: Callable[[], list[Tensor | None]],
        eagerly: Callable[[], None],
    ) -> list[Tensor | None]:
        span = self._run(slot)
        before = SpanSnapshot(span, visited)
        own = replay()
        after = SpanSnapshot(span, visited)
        before.restore()
        with torch.enable_grad(), suspended_hooks(span):
            eagerly()
        _compare_states(slot, after)
        return own


def _wait(tensors: Sequence[Tensor]) -> None:
    """Wait for all streams: some may add to what is put back, such as counts in an exchange."""
    if any(tensor.is_cuda for tensor in tensors):
        torch.cuda.synchronize()


def _compare_states(slot: ReplaySlot, replayed: SpanSnapshot) -> None:
    """Compare what a replay left with what is there now, and put the former back."""
    for name, now in replayed.now().items():
        _compare(slot, name, replayed.values[name], now)
    replayed.restore()


def _compare(slot: ReplaySlot, what: str, graph: Tensor | None, eager: Tensor | None) -> None:
    if graph is None and eager is None:
        return
    if graph is None or eager is None:
        difference = (
            f"{'nothing' if graph is None else 'a tensor'}, eagerly {'nothing' if eager is None else 'one'}"
        )
    elif graph.shape != eager.shape or graph.dtype != eager.dtype:
        difference = f"{tuple(graph.shape)} {graph.dtype}, eagerly {tuple(eager.shape)} {eager.dtype}"
    elif torch.equal(_bits(graph), _bits(eager)):
        return
    else:
        far = (graph.detach().double() - eager.detach().double()).abs().max()
        difference = f"up to {float(far):.3g} from what its segments make eagerly"
    raise GraphError(f"graphs: the {slot.name}: {what} is {difference}")


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)
