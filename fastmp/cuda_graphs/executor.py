"""Execute one training step in Python: capture graphs that are missing, and replay the others."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import gt
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from fastmp.cuda_graphs.backends.interface import Backend
from fastmp.cuda_graphs.capture import Capture
from fastmp.cuda_graphs.errors import CaptureError, GraphError
from fastmp.cuda_graphs.graph_set import Captured, GraphSet, Key, ReplaySlot, copies_of, copy_together
from fastmp.cuda_graphs.hooks import ReplayedHooks, call_pre_hooks, suspended_hooks
from fastmp.cuda_graphs.partition import CapturedSpan, EagerSpan, nodes_behind
from fastmp.cuda_graphs.position import Position
from fastmp.cuda_graphs.replay_verifier import Verifier
from fastmp.cuda_graphs.restore import SpanSnapshot, random_states, restore_random_states
from fastmp.nn.segment import Tensors, run_segments
from fastmp.ops.wgrad import WgradQueue, always_add, current_queue
from fastmp.profiling import region
from fastmp.schedule.schedule import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD

__all__ = ["StepExecutor"]

_BACKWARDS = (BACKWARD, BACKWARD_INPUT)


class StepExecutor:
    """Executes one training step through a graph set, on the current stream.

    spans: the captured spans of each chunk. verifier: compares replays with eager results.
    fallback: after a failed capture, run everything that is not captured eagerly for the rest of the step,
        and keep the error in `failure`. Without it a failed capture raises CaptureError.
    """

    def __init__(
        self,
        graph_set: GraphSet,
        spans: Sequence[Sequence[CapturedSpan]],
        backend: Backend,
        *,
        verifier: Verifier | None = None,
        fallback: bool = False,
    ) -> None:
        self._graph_set, self._spans, self._backend, self._verifier = graph_set, spans, backend, verifier
        self._fallback, self.failure = fallback, None
        self._anchor = torch.zeros((), requires_grad=True)  # an input with a gradient for spans without one
        # Its AccumulateGrad node runs in a backward() if and only if those of parameters do.
        self._accumulates: Any = self._anchor.expand(()).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
        self._position = Position(graph_set, spans)
        self._capture = Capture(graph_set, spans, backend, fallback)
        if graph_set.hooks is None:
            graph_set.hooks = ReplayedHooks(graph_set.traces, spans)
        else:
            graph_set.hooks.begin_step()
        self._hooks = graph_set.hooks
        # A stand-in parameter for all weight gradients that this step defers to a queue.
        hooks, self._deferred = self._hooks, torch.zeros((), requires_grad=True)
        self._deferred.register_post_accumulate_grad_hook(lambda _: hooks.call_deferred())
        self._in_flight: set[Key] = set()  # forwards whose backward has not begun
        self._aliased = False
        self._ended = False

    failure: CaptureError | None

    def end(self) -> None:
        """End the step, which may be incomplete."""
        self._ended = True
        self._position.end()

    def replays(self, chunk: int) -> bool:
        """Return True if the next forward of `chunk` is a pure replay."""
        slot = self._position.next_forward(chunk)
        return slot is not None and self._graph_set.graphs_of[slot.bundle] <= self._graph_set.done

    def skip(self, chunk: int) -> None:
        """Leave out the next forward of a chunk, and its backward: they run eagerly."""
        slot = self._position.next_forward(chunk)
        if slot is not None:
            spans = range(len(self._spans[chunk]))
            self._position.eager |= {(slot.step.microbatch, chunk, span) for span in spans}

    def run_captured_span(
        self, chunk: int, number: int, span: CapturedSpan, tensors: Tensors, overwritten: set[int]
    ) -> tuple[Tensors, Tensors]:
        """Run captured span `number` of a chunk; return what `run_segments` returns.

        overwritten: gets the addresses of storages that later replays overwrite.
        """
        graph_set = self._graph_set
        slot = self._position.expect(chunk, number, (FORWARD,))
        given_up = self.failure is not None and slot.graph not in graph_set.captured
        if given_up or not graph_set.matches(chunk, number, tensors):
            call_pre_hooks(span.begins)
            return self._eagerly(slot, span, tensors)
        self._hooks.before_forward(chunk, number)
        try:
            may_alias_grads = graph_set.traces[chunk, number].may_alias_grads
            made = _through(self, slot, may_alias_grads, self._anchor, *tensors)
        except CaptureError as error:
            self._fail(error)
            with suspended_hooks(span):  # those before the forward have been called
                return self._eagerly(slot, span, tensors)
        captured = graph_set.captured[slot.graph]
        overwritten |= captured.storages
        self._aliased = captured.aliased
        if len(made) < len(captured.outputs):
            own = iter(made)
            made = tuple(tensors[o] if isinstance(o, int) else next(own) for o in captured.outputs)
        return made[: captured.num_tensors], made[captured.num_tensors :]

    def _eagerly(self, slot: ReplaySlot, span: CapturedSpan, tensors: Tensors) -> tuple[Tensors, Tensors]:
        self._position.eager.add(slot.key)
        addresses = {buffer.data_ptr() for buffer in slot.static}
        tensors = tuple([t.clone() if t.data_ptr() in addresses else t for t in tensors])
        return span.through(tensors, self._graph_set.shared)

    def _fail(self, error: CaptureError) -> None:
        if not self._fallback:
            raise error
        self.failure = self.failure or error

    def run_eager_span(
        self,
        chunk: int,
        number: int,
        span: EagerSpan,
        tensors: Tensors,
        shared: Mapping[str, Any],
        overwritten: set[int],
    ) -> tuple[Tensors, Tensors]:
        """Run the eager span before captured span `number`; return as `run_captured_span`.

        If that captured span is the next replay, its static input is free, and the last eager segment may
        write its first output there.
        """
        slot = self._next_forward(chunk)
        out = None
        if slot is not None and slot.span == number and span.links[-1].segment.accepts_out:
            out = slot.static[0].detach()
            overwritten.add(out.untyped_storage().data_ptr())
        with self.unshared(span.name, tensors):
            return run_segments(span.links, tensors, span.call, shared=shared, out=out)

    @property
    def aliased(self) -> bool:
        """True if outputs of the last captured span share storages."""
        return self._aliased

    @contextmanager
    def unshared(self, name: str, tensors: Tensors) -> Iterator[None]:
        """Guard eager code after a captured span: GraphError if it writes in place to aliased outputs."""
        versions = [tensor._version for tensor in tensors] if self.aliased else []
        yield
        if versions and versions != [tensor._version for tensor in tensors]:
            raise GraphError(
                f"graphs: {name!r} writes in place to a tensor that the graph before it returns twice, "
                "or that is an input of that graph; write to a copy"
            )

    def _next_forward(self, chunk: int) -> ReplaySlot | None:
        return self._position.next_forward(chunk)

    def forward_graph(self, slot: ReplaySlot, inputs: Tensors) -> tuple[Tensors, Captured]:
        """Capture or replay the forward of a span over `inputs`; return the new outputs, not copied."""
        static = slot.fill(inputs)
        with region(slot.region):
            if self._position.captures(slot):
                made = self._capture_forward(slot, static)
            else:
                made = self._replay_forward(slot, static)
        self._in_flight.add(slot.key)
        return made, self._graph_set.captured[slot.graph]

    def _replay_forward(self, slot: ReplaySlot, static: list[Tensor]) -> Tensors:
        captured = self._graph_set.captured[slot.graph]
        if self._verifier is None:
            return captured.replay_forward()
        return self._verifier.forward(slot, captured, static)

    def _capture_forward(self, slot: ReplaySlot, static: list[Tensor]) -> Tensors:
        _always_add(self._spans[slot.step.chunk][slot.span].parameters)
        if not self._fallback:
            return self._capture.forward(slot, static)
        start, state = random_states(self._backend.rng), self._state(slot)
        try:
            return self._capture.forward(slot, static)
        except CaptureError:
            restore_random_states(self._backend.rng, start)
            if state is not None:
                state.restore()
            raise

    def _state(self, slot: ReplaySlot) -> SpanSnapshot | None:
        """Return the state to restore after a failed capture; None if captures do no work."""
        if not (self._fallback and self._backend.runs_at_capture):
            return None
        return SpanSnapshot(self._spans[slot.step.chunk][slot.span])

    def backward_graph(self, forward: ReplaySlot, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the input gradients of a forward, not copied; accumulate those of parameters."""
        if torch.is_grad_enabled():
            raise GraphError(f"graphs: the backward of the {forward.name} cannot be differentiated again")
        if self._ended:
            raise GraphError(f"graphs: the backward of the {forward.name} comes after its step is over")
        if forward.key not in self._in_flight:
            raise GraphError(f"graphs: the backward of the {forward.name} runs twice")
        captured = self._graph_set.captured[forward.graph]
        planned = self._graph_set.plan.chunks[forward.step.chunk][forward.span].gradients
        if planned is None and all(grad is None for grad in grads):  # the span is frozen
            return [None] * len(forward.static)
        if captured.trained and not torch._C._will_engine_execute_node(self._accumulates):
            raise GraphError(
                f"graphs: expected backward() without inputs= through the {forward.name}, whose graph "
                "accumulates the gradients of all parameters"
            )
        self._in_flight.remove(forward.key)
        slot = self._position.expect(forward.step.chunk, forward.span, _BACKWARDS, forward.step.microbatch)
        grads = [grad for grad, needed in zip(grads, captured.differentiable) if needed]
        with region(slot.region):
            if captured.backward is None:
                own = self._first_backward(slot, captured, grads)
            else:
                own = self._replay_backward(slot, captured, grads)
        self._defer_weights(slot, captured)
        return own

    def _defer_weights(self, slot: ReplaySlot, captured: Captured) -> None:
        """Queue the weight gradients of a split backward."""
        if slot.kind != BACKWARD_INPUT:
            return
        queue = current_queue()
        if queue is None:
            raise GraphError(
                f"graphs: the {slot.name} defers gradients of weights; run it inside "
                "fastmp.ops.wgrad.defer_wgrad(queue)"
            )
        queue.put(self._deferred, functools.partial(self._weight_graph, slot, captured))

    def _replay_backward(
        self, slot: ReplaySlot, captured: Captured, grads: list[Tensor | None]
    ) -> list[Tensor | None]:
        grad_mask = [grad is not None for grad in grads]
        moved_inputs, kept = slot.moved_inputs(grads) if slot.in_place else [], list[Tensor]()
        if moved_inputs:
            grads, kept = self._stage_gradients(slot, moved_inputs, grads)
        static = slot.fill(grads)
        assert captured.backward is not None
        if grad_mask != captured.grad_mask and (
            captured.backward.parameters or any(map(gt, grad_mask, captured.grad_mask))
        ):
            raise GraphError(
                f"graphs: the set of outputs receiving gradients in the {slot.name} changed since capture, "
                f"from {_numbers(captured.grad_mask)} to {_numbers(grad_mask)}; it must be the same in every "
                "step"
            )
        if self._verifier is None:
            own = captured.backward.replay()
        else:
            own = self._verifier.backward(slot, captured, static)
        self._hooks.after_gradients(slot.graph, slot.kind, captured.backward.visited)
        if moved_inputs:  # other readers of that memory expect the gradient of the other graph
            copy_together([static[place] for place in moved_inputs], kept)
        return own

    @staticmethod
    def _stage_gradients(
        slot: ReplaySlot, moved_inputs: Sequence[int], grads: Sequence[Tensor | None]
    ) -> tuple[list[Tensor | None], list[Tensor]]:
        """Return copies of `grads` and of the replaced buffers, because static buffers are reused."""
        if slot.kind != BACKWARD:  # the weight gradients read the same memory later
            raise GraphError(
                f"graphs: a gradient of the {slot.name} has moved since the graph was captured; with split "
                "backwards, eager segments must pass gradients on in the same way in every step"
            )
        return [grad if grad is None else grad.clone() for grad in grads], [
            slot.static[place].clone() for place in moved_inputs
        ]

    def _first_backward(
        self, slot: ReplaySlot, captured: Captured, grads: list[Tensor | None]
    ) -> list[Tensor | None]:
        """Capture a backward; run it eagerly if that fails, or if another capture has failed."""
        captured.grad_mask = [grad is not None for grad in grads]
        if self.failure is not None:
            return self._backward_eagerly(slot, captured, list(slot.fill(grads)))
        in_place = self._left_by_graphs(slot, grads)
        for place, grad in in_place.items():
            self._graph_set.read_in_place(slot.graph, place, grad)
        _always_add(getattr(node, "variable", None) for node in nodes_behind(captured.live))
        static, state = list(slot.fill(grads)), self._state(slot)
        try:
            own = self._capture.backward(slot, captured, static)
        except CaptureError as error:
            self._fail(error)
            if state is not None:
                state.restore()
            return self._backward_eagerly(slot, captured, static)
        for place, grad in in_place.items():  # release the memory, which was held so far
            self._graph_set.read_in_place(slot.graph, place, self._backend.weak(grad)())
        assert captured.backward is not None
        self._hooks.after_gradients(slot.graph, slot.kind, captured.backward.visited)
        return own

    def _left_by_graphs(self, slot: ReplaySlot, grads: Sequence[Tensor | None]) -> dict[int, Tensor]:
        """Return the gradients still in the output buffers of other graphs, by position."""
        if self._graph_set.live_grads_of != slot.readers:
            self._graph_set.live_grads = {}
        found, left = {}, self._graph_set.live_grads
        for place, (buffer, grad) in enumerate(zip(slot.static, grads, strict=True)):
            if grad is None or grad.data_ptr() not in left or grad.is_conj() or grad.is_neg():
                continue
            if (grad.shape, grad.dtype, grad.stride()) == (buffer.shape, buffer.dtype, buffer.stride()):
                del left[grad.data_ptr()]  # one reader only: a step that differs overwrites it
                found[place] = grad
        return found

    def _backward_eagerly(
        self, slot: ReplaySlot, captured: Captured, grads: list[Tensor]
    ) -> list[Tensor | None]:
        """Run the backward of a captured forward eagerly, with the collectives that other ranks replay."""
        for each in captured.static:
            each.grad = None
        if captured.queue is not None:
            captured.queue.take()  # drop the tasks of a failed capture
        with torch.enable_grad(), captured.forward.eager_backward():
            captured.backpropagate([grad.clone() for grad in grads])
        if captured.queue is not None and slot.kind == BACKWARD:
            WgradQueue.run(captured.queue.take())
        own = [each.grad for each in captured.static]
        captured.forget()
        return own

    def _next_weights(self, forward: ReplaySlot) -> ReplaySlot:
        step = forward.step
        return self._position.expect(step.chunk, forward.span, (BACKWARD_WEIGHT,), step.microbatch)

    def _weight_graph(self, forward: ReplaySlot, captured: Captured) -> None:
        """Compute the deferred weight gradients of `forward`: by a replay, a capture, or eagerly."""
        slot = self._next_weights(forward)
        with region(slot.region):
            if captured.weight is None:
                self._first_weights(slot, captured)
            elif self._verifier is None:
                captured.weight.replay()
            else:
                self._verifier.weights(slot, captured)
        if captured.weight is not None:
            self._hooks.after_gradients(slot.graph, slot.kind, captured.weight.visited)

    def _first_weights(self, slot: ReplaySlot, captured: Captured) -> None:
        """Capture deferred weight gradients; compute them eagerly if that or the backward capture fails."""
        assert captured.queue is not None
        tasks = captured.queue.take()
        if captured.backward is None:  # it ran eagerly
            WgradQueue.run(tasks)
            return
        _always_add(weight for weight, _ in tasks)
        state = self._state(slot)
        try:
            self._capture.weights(slot, captured, lambda: WgradQueue.run(list(tasks)))
        except CaptureError as error:
            self._fail(error)
            if state is not None:
                state.restore()
            WgradQueue.run(tasks)


def _always_add(leaves: Iterable[Tensor | None]) -> None:
    """Prepare parameters for the capture of their gradients: a graph cannot tell the first one of a step."""
    for leaf in leaves:
        always_add(getattr(leaf, "main_grad", None))


def _numbers(mask: Sequence[bool]) -> list[int]:
    return [number for number, has in enumerate(mask) if has]


class _Through(Function):
    """Autograd node of a captured span. Parameters are no inputs: they would cost more than the replay."""

    @staticmethod
    def forward(ctx, step, slot, copies, anchor, *inputs):
        made, captured = step.forward_graph(slot, inputs)
        ctx.step, ctx.slot = step, slot
        ctx.set_materialize_grads(False)
        # A leaf, or a parameter under a view, would keep the gradient without a copy.
        ctx.copied = range(len(inputs)) if copies else [i for i, each in enumerate(inputs) if each.is_leaf]
        if not all(captured.differentiable):
            ctx.mark_non_differentiable(*[t for t, has in zip(made, captured.differentiable) if not has])
        return made

    @staticmethod
    def backward(ctx, *grads):
        own = ctx.step.backward_graph(ctx.slot, grads)
        copied = [i for i in ctx.copied if own[i] is not None]
        for i, copy in zip(copied, copies_of([own[i] for i in copied])):
            own[i] = copy
        return None, None, None, None, *own


# `_Through.apply` without its search for torch.func wrappers, which takes longer than a replay of a graph.
_through = super(Function, _Through).apply
