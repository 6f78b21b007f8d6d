"""Capture the graphs of spans during a training step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from fastmp.cuda_graphs.backends.interface import Backend, Graph, Weak
from fastmp.cuda_graphs.errors import CaptureError
from fastmp.cuda_graphs.graph_set import Captured, Gradients, GraphSet, ReplaySlot
from fastmp.cuda_graphs.hooks import suspended_hooks
from fastmp.cuda_graphs.partition import CapturedSpan
from fastmp.cuda_graphs.restore import repeatable_backward
from fastmp.nn.segment import BoundSegment, Tensors
from fastmp.ops.wgrad import WgradQueue, current_queue, defer_wgrad
from fastmp.schedule.schedule import BACKWARD

__all__ = ["Capture", "renew_accumulators"]


class Capture:
    """Captures forwards, backwards and weight gradients of spans, and does their work.

    Captures are on the capture stream of the backend; each method returns what a replay would.

    repeatable: keep the autograd graph of a backward, which can then run eagerly if its capture fails.

    Raises:
        CaptureError: a capture raised; the message names the span, the segment and the microbatch.
    """

    def __init__(
        self, graph_set: GraphSet, spans: Sequence[Sequence[CapturedSpan]], backend: Backend, repeatable: bool
    ) -> None:
        self._graph_set, self._spans, self._backend = graph_set, spans, backend
        self._repeatable = repeatable

    def forward(self, slot: ReplaySlot, static: list[Tensor]) -> Tensors:
        """Capture the forward of a span over `static`, the buffers of its inputs; return the new outputs."""
        chunk, number = slot.step.chunk, slot.span
        span, trace = self._spans[chunk][number], self._graph_set.traces[chunk, number]
        inputs = [buffer.detach().requires_grad_(needs) for buffer, (_, needs) in zip(static, trace.inputs)]
        queue = None if current_queue() is None else WgradQueue()
        versions = [buffer._version for buffer in static]
        renew_accumulators(span.parameters)
        begun: list[BoundSegment] = []
        with (
            _explained(slot, begun),
            torch.enable_grad(),
            suspended_hooks(span),
            defer_wgrad(queue),
            self._captured(slot, None, trace.draws) as graph,
        ):
            tensors, others = span.through(tuple(inputs), self._graph_set.shared, begun)
            if versions != [buffer._version for buffer in static]:
                raise CaptureError("it writes to an input, of which a replay has a copy; write to a copy")
        if not self._backend.runs_at_capture:
            graph.replay()
        outputs: list[Weak | int] = []
        made: list[Tensor] = []
        for output in (*tensors, *others):
            given = [i for i, each in enumerate(inputs) if each is output]
            outputs.append(given[0] if given else self._backend.weak(output))
            made += [] if given else [output]
        differentiable = [output.requires_grad for output in made]
        live = [output for output in made if output.requires_grad]
        places = [output.untyped_storage().data_ptr() for output in made]
        storages = {buffer.untyped_storage().data_ptr() for buffer in static}
        captured = Captured(
            *(graph, outputs, len(tensors), differentiable, live, made, inputs, queue, set(places)),
            aliased=len({*places, *storages}) < len(places) + len(storages),
            trained=bool(span.parameters),
            needs=[needs for _, needs in trace.inputs],
        )
        if self._graph_set.plan.chunks[chunk][number].gradients is None:
            captured.live, captured.kept = [], []
        self._graph_set.captured[slot.graph] = captured
        self._graph_set.done.add(slot.graph)
        return tuple(output.detach() for output in made)

    def backward(self, slot: ReplaySlot, captured: Captured, grads: list[Tensor]) -> list[Tensor | None]:
        """Capture the backward of a span over `grads`, the static buffers of its output gradients."""

        def work() -> None:
            captured.backpropagate(grads, keep=self._repeatable)
            storages = {each.untyped_storage().data_ptr() for each in grads}
            for each in captured.static:
                if each.grad is not None and each.grad.untyped_storage().data_ptr() in storages:
                    each.grad = each.grad.clone()
            if captured.queue is not None and slot.kind == BACKWARD:
                WgradQueue.run(captured.queue.take())

        kept = repeatable_backward(captured.live, self._backend.runs_at_capture)
        with kept if self._repeatable else nullcontext():
            gradients = self._gradients(slot, captured.forward, work)
        own = [each.grad for each in captured.static]
        self._graph_set.live_grads = {grad.data_ptr(): grad for grad in own if grad is not None}
        self._graph_set.live_grads_of = slot.readers
        gradients.inputs = [None if grad is None else self._backend.weak(grad) for grad in own]
        captured.forget()  # the graph itself holds what it reads
        captured.backward = gradients
        return own

    def weights(self, slot: ReplaySlot, captured: Captured, work: Callable[[], None]) -> None:
        """Capture `work`, which computes the deferred weight gradients of a span."""
        captured.weight = self._gradients(slot, captured.forward, work)

    @contextmanager
    def _captured(self, slot: ReplaySlot, forward: Graph | None, draws: Any = None) -> Iterator[Graph]:
        graph = self._backend.graph(forward, draws, pool=slot.pool)
        with graph.capture():
            yield graph

    def _gradients(self, slot: ReplaySlot, forward: Graph, work: Callable[[], None]) -> Gradients:
        """Capture `work`, which accumulates gradients of parameters, in a graph of its own."""
        span = self._spans[slot.step.chunk][slot.span]
        before = [(param, param.grad) for param in span.parameters]
        for param in span.parameters:
            param.grad = None
        try:
            with (
                _explained(slot),
                torch.enable_grad(),
                suspended_hooks(span) as visited,
                self._captured(slot, forward) as graph,
            ):
                work()
            if not self._backend.runs_at_capture:
                graph.replay()
            made = [(param, param.grad) for param, _ in before if param.grad is not None]
        finally:
            for param, grad in before:
                param.grad = grad
        weak = [(param, self._backend.weak(grad)) for param, grad in made]
        gradients = Gradients(graph, [], weak, visited)
        gradients.accumulate()
        self._graph_set.done.add(slot.graph)
        return gradients


@contextmanager
def _explained(slot: ReplaySlot, begun: Sequence[BoundSegment] = ()) -> Iterator[None]:
    """Turn an exception inside into a CaptureError that names the slot and the last segment in `begun`.

    The autocast weight cache is cleared before and after: a cached weight would lie in graph memory.
    """
    torch.clear_autocast_cache()
    try:
        yield
    except Exception as error:
        segment = f", segment {begun[-1].full_name!r}" if begun else ""
        raise CaptureError(
            f"graphs: capture of the {slot.name}{segment}: {error}; "
            "fastmp.cuda_graphs.explain(model, *inputs) lists all that cannot be captured"
        ) from error
    finally:
        torch.clear_autocast_cache()


@torch.no_grad()
def renew_accumulators(params: Sequence[nn.Parameter]) -> None:
    """Replace the AccumulateGrad nodes of `params`.

    Such a node runs on the stream on which it was created, and lives as long as any autograd graph that
    refers to it, such as that of an earlier loss. A captured backward needs nodes created in its own forward.
    Assigning data of another dtype, for a moment, drops the old node.
    """
    for param in params:
        data = param.data
        other = torch.float32 if data.dtype != torch.float32 else torch.float64
        param.data = torch.empty(0, dtype=other, device=data.device)
        param.data = data
