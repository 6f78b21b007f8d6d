"""Verify replays: compare them bit by bit with their segments, run eagerly on the same inputs and draws."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec

from fastmp.cuda_graphs.backends.interface import RandomStreams
from fastmp.cuda_graphs.errors import GraphError
from fastmp.cuda_graphs.graph_set import Captured, Gradients, Key, ReplaySlot
from fastmp.cuda_graphs.hooks import suspended_hooks
from fastmp.cuda_graphs.partition import CapturedSpan, made_by
from fastmp.cuda_graphs.restore import SpanSnapshot, random_states, restore_random_states
from fastmp.nn.segment import Tensors, may_be_void, rerunning
from fastmp.ops.wgrad import WgradQueue, defer_wgrad
from fastmp.schedule.schedule import BACKWARD

__all__ = ["Verifier"]


class _SavedForward(NamedTuple):
    """An eager forward kept for its backward. outputs: the differentiable ones."""

    inputs: list[Tensor]
    outputs: list[Tensor]
    queue: WgradQueue | None


class Verifier:
    """Replays graphs, and compares outputs, gradients and state with an eager run of their segments.

    Everything runs on the current stream. Replayed hooks are called once, after the comparison.

    Args:
        spans: the captured spans of each chunk.
        shared: the structure of the keywords that all layers share, without its tensors.
        rng: the streams that segments draw from; None: torch's default generators.

    Set `wanted` to False to replay the next forward, and its backward, without a comparison.

    Raises:
        GraphError: a tensor differs; the message names the span, the microbatch and the tensor. With an
            activation stash the error is kept in `difference`, for a step that is not void.
    """

    def __init__(
        self, spans: Sequence[Sequence[CapturedSpan]], shared: TreeSpec, rng: RandomStreams | None
    ) -> None:
        self._spans, self._shared, self._rng, self.wanted = spans, shared, rng, True
        self.difference: GraphError | None = None
        self._eager: dict[Key, _SavedForward] = {}

    def forward(self, slot: ReplaySlot, captured: Captured, static: Sequence[Tensor]) -> Tensors:
        if not self.wanted:
            return captured.replay_forward()
        span = self._span(slot)
        _wait(static)
        inputs = [x.detach().clone().requires_grad_(needs) for x, needs in zip(static, captured.needs)]
        streams, before = random_states(self._rng), SpanSnapshot(span)
        made = captured.replay_forward()
        drawn, after = random_states(self._rng), SpanSnapshot(span)  # a fused loss changes gradients too
        restore_random_states(self._rng, streams)
        before.restore()
        queue = None if captured.queue is None else WgradQueue()
        with torch.enable_grad(), suspended_hooks(span), defer_wgrad(queue), rerunning():
            tensors, others = span.through(tuple(inputs), self._shared)
        expected = made_by((*tensors, *others), inputs)
        with self._comparing(span):
            for i, pair in enumerate(zip(made, expected, strict=True)):
                _compare(slot, f"output {i}", *pair)
            for name, state in random_states(self._rng).items():
                _compare(slot, f"random stream {name!r}", drawn[name], state)
            _compare_states(slot, after)
        after.restore()
        outputs = [output for output in expected if output.requires_grad]
        self._eager[slot.key] = _SavedForward(inputs, outputs, queue)
        return made

    def backward(self, slot: ReplaySlot, captured: Captured, grads: Sequence[Tensor]) -> list[Tensor | None]:
        eager = self._eager.get(slot.key)
        assert captured.backward is not None
        if eager is None:
            return captured.backward.replay()

        def eagerly() -> None:
            reached = [pair for pair, has in zip(zip(eager.outputs, grads), captured.grad_mask) if has]
            torch.autograd.backward([out for out, _ in reached], [grad.clone() for _, grad in reached])
            if eager.queue is not None and slot.kind == BACKWARD:
                WgradQueue.run(eager.queue.take())

        _wait(grads)
        own = self._both(slot, captured.backward, eagerly)
        if slot.kind == BACKWARD or eager.queue is None:
            del self._eager[slot.key]
        with self._comparing(self._span(slot)):
            for i, (x, grad) in enumerate(zip(eager.inputs, own, strict=True)):
                _compare(slot, f"the gradient of input {i}", grad, x.grad)
        return own

    def weights(self, slot: ReplaySlot, captured: Captured) -> None:
        eager = self._eager.pop(slot.key, None)
        assert captured.weight is not None
        if eager is None or eager.queue is None:
            captured.weight.replay()
            return
        tasks = eager.queue.take()
        self._both(slot, captured.weight, lambda: WgradQueue.run(tasks))

    @contextmanager
    def _comparing(self, span: CapturedSpan) -> Iterator[None]:
        """Keep the first difference inside where a stash, on any rank, may have made the step void."""
        try:
            yield
        except GraphError as error:
            if not may_be_void({link.layer for link in span.links}):
                raise
            self.difference = self.difference or error

    def _span(self, slot: ReplaySlot) -> CapturedSpan:
        return self._spans[slot.step.chunk][slot.span]

    def _both(
        self, slot: ReplaySlot, gradients: Gradients, eagerly: Callable[[], None]
    ) -> list[Tensor | None]:
        """Replay `gradients`, compute them again `eagerly` from the same state, and compare the state."""
        span = self._span(slot)
        before = SpanSnapshot(span, gradients.visited)
        own = gradients.replay()
        after = SpanSnapshot(span, gradients.visited)
        before.restore()
        with torch.enable_grad(), suspended_hooks(span):
            eagerly()
        with self._comparing(span):
            _compare_states(slot, after)
        after.restore()
        return own


def _wait(tensors: Sequence[Tensor]) -> None:
    """Synchronise the device: another stream may still add to the state that is restored."""
    if any(tensor.is_cuda for tensor in tensors):
        torch.cuda.synchronize()


def _compare_states(slot: ReplaySlot, replayed: SpanSnapshot) -> None:
    """Compare the state after a replay with the present state."""
    for name, now in replayed.now().items():
        _compare(slot, name, replayed.values[name], now)


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
