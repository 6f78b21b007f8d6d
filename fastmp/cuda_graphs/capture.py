"""Captures the graphs of runs while a training step goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from fastmp.cuda_graphs.backends.base import Backend, Graph, Weak
from fastmp.cuda_graphs.errors import CaptureError
from fastmp.cuda_graphs.graph_set import Captured, Gradients, GraphSet, Slot
from fastmp.cuda_graphs.hooks import suspended_hooks
from fastmp.cuda_graphs.partition import Run
from fastmp.cuda_graphs.replay import add_gradients
from fastmp.cuda_graphs.restore import repeatable_backward
from fastmp.nn.segment import Link, Tensors
from fastmp.ops.wgrad import WgradQueue, current_queue, defer_wgrad
from fastmp.pipeline.schedule import BACKWARD

__all__ = ["Capture", "renew_accumulators"]


class Capture:
    """Captures what a run does, and does it: each method returns what a replay would have.

    repeatable: a backward whose capture fails can be run eagerly after that. It keeps its autograd graph.

    CaptureError, naming the run, the segment and the microbatch, for whatever a capture raises.
    """

    def __init__(
        self, graph_set: GraphSet, runs: Sequence[Sequence[Run]], backend: Backend, repeatable: bool
    ) -> None:
        self._graph_set, self._runs, self._backend = graph_set, runs, backend
        self._repeatable = repeatable

    def forward(self, slot: Slot, static: list[Tensor]) -> Tensors:
        """Capture the forward of a run over the static buffers that hold its inputs."""
        chunk, number = slot.step.chunk, slot.run
        run, observed = self._runs[chunk][number], self._graph_set.observed[chunk, number]
        inputs = [
            buffer.detach().requires_grad_(needs) for buffer, (_, needs) in zip(static, observed.inputs)
        ]
        queue = None if current_queue() is None else WgradQueue()
        versions = [buffer._version for buffer in static]
        renew_accumulators(run.parameters)
        begun: list[Link] = []
        with (
            _explained(slot, begun),
            torch.enable_grad(),
            suspended_hooks(run),
            defer_wgrad(queue),
            self._captured(None, observed.watched) as graph,
        ):
            tensors, others = run.through(tuple(inputs), self._graph_set.shared, begun)
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
            trained=bool(run.parameters),
            needs=[needs for _, needs in observed.inputs],
        )
        if self._graph_set.plan.chunks[chunk][number].gradients is None:
            captured.live, captured.kept = [], []
        self._graph_set.captured[slot.graph] = captured
        self._graph_set.done.add(slot.graph)
        return tuple(output.detach() for output in made)

    def backward(self, slot: Slot, captured: Captured, grads: list[Tensor]) -> list[Tensor | None]:
        """Capture the backward of a run; `grads` are the static buffers of `captured.given` outputs."""

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
        self._graph_set.left = {grad.data_ptr(): grad for grad in own if grad is not None}
        gradients.inputs = [None if grad is None else self._backend.weak(grad) for grad in own]
        captured.forget()  # a graph may hold on to what it reads
        captured.backward = gradients
        return own

    def weights(self, slot: Slot, captured: Captured, work: Callable[[], None]) -> None:
        """Capture the deferred weight gradients of a run."""
        captured.weight = self._gradients(slot, captured.forward, work)

    @contextmanager
    def _captured(self, forward: Graph | None, watched: Any = None) -> Iterator[Graph]:
        graph = self._backend.graph(forward, watched)
        with graph.capture():
            yield graph

    def _gradients(self, slot: Slot, forward: Graph, work: Callable[[], None]) -> Gradients:
        """The graph of `work`, which accumulates gradients of parameters."""
        run = self._runs[slot.step.chunk][slot.run]
        before = [(param, param.grad) for param in run.parameters]
        for param in run.parameters:
            param.grad = None
        try:
            with (
                _explained(slot),
                torch.enable_grad(),
                suspended_hooks(run) as reached,
                self._captured(forward) as graph,
            ):
                work()
            if not self._backend.runs_at_capture:
                graph.replay()
            made = [(param, param.grad) for param, _ in before if param.grad is not None]
        finally:
            for param, grad in before:
                param.grad = grad
        weak = [(param, self._backend.weak(grad)) for param, grad in made]
        gradients = Gradients(graph, [], weak, reached)
        add_gradients(gradients)
        self._graph_set.done.add(slot.graph)
        return gradients


@contextmanager
def _explained(slot: Slot, begun: Sequence[Link] = ()) -> Iterator[None]:
    """Turn whatever a capture raises into a CaptureError that says where; `begun`: the segments until then.

    Autocast's cache of weights is emptied before and after: a cached weight would belong to the graph.
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
    """Make autograd forget the nodes that accumulate the gradients of `params`.

    Such a node runs on the stream on which it was made, and lives as long as any autograd graph that has it,
    say that of an earlier loss; a captured backward needs nodes that were made in its own forward. Data of
    another dtype, for a moment, drops the old node.
    """
    for param in params:
        data = param.data
        other = torch.float32 if data.dtype != torch.float32 else torch.float64
        param.data = torch.empty(0, dtype=other, device=data.device)
        param.data = data
