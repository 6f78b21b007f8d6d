"""One training step through the graphs of a variant: what is not captured yet is captured, the rest is
replayed, each in its place in the plan.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import gt

import torch
from torch import Tensor, nn
from torch.autograd import Function, Variable

from fastmp.graphs import pieces
from fastmp.graphs.errors import CaptureError, GraphError
from fastmp.graphs.pieces import Piece, hooks_aside
from fastmp.graphs.variant import (
    Backend,
    Captured,
    Gradients,
    Graph,
    Slot,
    Variant,
    Weak,
    copies_of,
    copy_together,
)
from fastmp.graphs.verify import Verifier
from fastmp.nn.segment import Link, Tensors, run_links
from fastmp.ops.wgrad import WgradQueue, current_queue, defer_wgrad
from fastmp.parallel.schedule import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD
from fastmp.profiling import region

__all__ = ["GraphedStep"]

Key = tuple[int, int, int]  # microbatch, chunk, run
_BACKWARDS = (BACKWARD, BACKWARD_INPUT)


class GraphedStep:
    """Where a training step is in its plan, and what its runs do there.

    runs: the captured pieces of each chunk. verifier: what holds replays against eager segments, if anything.
    """

    def __init__(
        self,
        variant: Variant,
        runs: Sequence[Sequence[Piece]],
        backend: Backend,
        verifier: Verifier | None,
    ) -> None:
        self._variant, self._runs, self._backend, self._verifier = variant, runs, backend, verifier
        self._anchor = torch.zeros((), requires_grad=True)  # gives a run a backward, if no input does
        self._accumulates = self._anchor.expand(()).grad_fn.next_functions[0][0]  # as those of parameters do
        self._cursor, self._round, self._in_capture, self._ended = 0, -1, False, False
        self._in_flight: set[Key] = set()  # forwards whose backward has not been
        self._eagerly: set[Key] = set()
        self._aliased = False  # outputs of the last run
        # Gradients that backwards of this round left at capture, by address. They are held, as those of a
        # replay are, so that autograd does not add others to them in place.
        self._left: dict[int, Tensor] = {}
        # By run and by graph: modules, and parameters, with hooks that run by hand.
        self._hooked: dict[tuple[int, int], list[nn.Module]] = {}
        self._by_hand: dict[int, tuple[list[pieces.Hooked], list[pieces.Hooked]]] = {}  # at once, late
        self._late: dict[pieces.Hooked, None] = {}

    def end(self) -> None:
        """The step is over, perhaps in the middle."""
        self._ended, self._cursor = True, len(self._variant.slots)
        self._left.clear()
        if self._round >= 0:
            self._variant.drop(self._round)

    def run(
        self, chunk: int, number: int, run: Piece, tensors: Tensors, shared: set[int]
    ) -> tuple[Tensors, Tensors]:
        """What run `number` of a chunk hands on, and what its layers return beside, as `run_links`; storages
        that later replays write to are added to `shared`."""
        slot, variant = self._expect(chunk, number, (FORWARD,)), self._variant
        if not variant.takes(chunk, number, tensors):
            self._eagerly.add(slot.key)
            pieces.call_pre_hooks(run.begins)
            landed = [tensor.data_ptr() in slot.addresses for tensor in tensors]
            tensors = tuple([t.clone() if has else t for t, has in zip(tensors, landed)])
            return run_links(run.links, tensors, run.call)
        self.call_pre_hooks(chunk, number)
        made = _through(self, slot, variant.shapes[chunk, number].keeps, self._anchor, *tensors)
        captured = variant.captured[slot.graph]
        shared |= captured.places
        self._aliased = captured.aliased
        if len(made) < len(captured.outputs):
            own = iter(made)
            made = tuple(tensors[o] if isinstance(o, int) else next(own) for o in captured.outputs)
        return made[: captured.num_tensors], made[captured.num_tensors :]

    def replays(self, chunk: int) -> bool:
        """Whether the next forward of a chunk is one of graphs that are there."""
        slot = self._next()
        if slot is None or slot.kind != FORWARD or slot.step.chunk != chunk:
            return False
        return self._variant.graphs_of[slot.round] <= self._variant.done

    def skip(self, chunk: int) -> None:
        """All of the next forward of a chunk, and what belongs to it, runs eagerly."""
        slot = self._next()
        if slot is not None and slot.kind == FORWARD and slot.step.chunk == chunk:
            runs = range(len(self._runs[chunk]))
            self._eagerly |= {(slot.step.microbatch, chunk, run) for run in runs}

    def between(
        self, chunk: int, number: int, piece: Piece, tensors: Tensors, shared: set[int]
    ) -> tuple[Tensors, Tensors]:
        """What runs eagerly before run `number`. It may leave its first tensor in the static input of the
        run, if the forward of that is what comes next: then nobody holds it."""
        slot = self._next()
        lands = slot is not None and slot.kind == FORWARD and (slot.step.chunk, slot.run) == (chunk, number)
        versions = [tensor._version for tensor in tensors] if self._aliased else []
        out = slot.static[0].detach() if lands and piece.links[-1].segment.lands else None
        if out is not None:
            shared.add(out.untyped_storage().data_ptr())
        made = run_links(piece.links, tensors, piece.call, out=out)
        if versions and versions != [tensor._version for tensor in tensors]:
            raise GraphError(
                f"graphs: {piece.name!r} writes to a tensor in place that the graph before it has returned "
                "twice, or has not copied from its input; write to a copy"
            )
        return made

    def call_pre_hooks(self, chunk: int, number: int) -> None:
        hooked = self._hooked.get((chunk, number))
        if hooked is None:
            called = self._variant.shapes[chunk, number].calls
            hooked = self._hooked[chunk, number] = [module for module in called if module._forward_pre_hooks]
        pieces.call_pre_hooks(hooked)

    def _call_grad_hooks(self, slot: Slot, gradients: Gradients) -> None:
        by_hand = self._by_hand.get(slot.graph)
        if by_hand is None:
            hooked = pieces.hooks_by_hand(gradients.reached)
            own = self._runs[slot.step.chunk][slot.run]
            runs = [run for runs in self._runs for run in runs if run is not own] if hooked else []
            others = {param for run in runs for param in run.parameters}
            late = [each for each in hooked if each[1] in others]
            by_hand = self._by_hand[slot.graph] = [each for each in hooked if each not in late], late
        now, late = by_hand
        pieces.call_grad_hooks(now)
        if late:
            if not self._late:
                Variable._execution_engine.queue_callback(self._call_late_hooks)
            self._late.update(dict.fromkeys(late))

    def _call_late_hooks(self) -> None:
        """Of parameters that another run may add to in this backward, which is over now."""
        late = list(self._late)
        self._late.clear()
        pieces.call_grad_hooks(late)

    def forward_graph(self, slot: Slot, inputs: Tensors) -> tuple[Tensors, Captured]:
        """What the run of `slot` makes of `inputs`."""
        static = slot.fill(inputs)
        self._in_flight.add(slot.key)
        with region(slot.region):
            if self._in_capture:
                captured, made = self._capture_forward(slot, static)
                self._variant.captured[slot.graph] = captured
                self._variant.done.add(slot.graph)
                return made, captured
            captured = self._variant.captured[slot.graph]
            if self._verifier is None or not self._verifier.wanted:
                return self._replayed(captured), captured
            needs = [needs for _, needs in self._variant.shapes[slot.step.chunk, slot.run].inputs]
            made = self._verifier.forward(
                slot,
                self._runs[slot.step.chunk][slot.run],
                [buffer.detach().clone().requires_grad_(need) for buffer, need in zip(static, needs)],
                lambda: self._replayed(captured),
                split=captured.queue is not None,
            )
            return made, captured

    @staticmethod
    def _replayed(captured: Captured) -> Tensors:
        captured.forward.replay()
        return tuple([each() for each in captured.outputs if not isinstance(each, int)])

    def _capture_forward(self, slot: Slot, static: list[Tensor]) -> tuple[Captured, Tensors]:
        chunk, number = slot.step.chunk, slot.run
        run, shapes = self._runs[chunk][number], self._variant.shapes[chunk, number]
        inputs = [buffer.detach().requires_grad_(needs) for buffer, (_, needs) in zip(static, shapes.inputs)]
        queue = None if current_queue() is None else WgradQueue()
        graph = self._backend.graph(watched=shapes.watched)
        versions = [buffer._version for buffer in static]
        pieces.renew_accumulators(run.parameters)
        begun: list[Link] = []
        aside = hooks_aside(run)
        with self._capturing(slot, begun), torch.enable_grad(), aside, defer_wgrad(queue), graph.capture():
            tensors, others = run_links(run.links, tuple(inputs), run.call, begun=begun)
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
        )
        if self._variant.plan.chunks[chunk][number].gradients is None:
            captured.live, captured.kept = [], []
        return captured, tuple(output.detach() for output in made)

    def backward_graph(self, forward: Slot, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradients of the inputs of a forward; those of its parameters are added where they belong."""
        if self._ended:
            raise GraphError(f"graphs: the backward of the {forward.name} comes after its step is over")
        if forward.key not in self._in_flight:
            raise GraphError(f"graphs: the backward of the {forward.name} runs twice")
        captured = self._variant.captured[forward.graph]
        planned = self._variant.plan.chunks[forward.step.chunk][forward.run].gradients
        if planned is None and all(grad is None for grad in grads):  # eager code has made none
            return [None] * len(forward.static)
        if captured.trained and not torch._C._will_engine_execute_node(self._accumulates):
            raise GraphError(
                f"graphs: gradients of some tensors alone are asked for behind the {forward.name}, whose "
                "graph makes those of all parameters; use backward() without inputs="
            )
        self._in_flight.remove(forward.key)
        slot = self._expect(forward.step.chunk, forward.run, _BACKWARDS, forward.step.microbatch)
        grads = [grad for grad, needed in zip(grads, captured.differentiable) if needed]
        in_place = self._left_by_graphs(slot, grads) if captured.backward is None else []
        for place in in_place:
            self._variant.read_in_place(slot.graph, place, grads[place])
        given = [grad is not None for grad in grads]
        astray = slot.astray(grads) if slot.in_place else []
        if astray:
            grads, kept = self._make_room(slot, astray, grads)
        static = slot.fill(grads)
        with region(slot.region):
            if captured.backward is None:
                captured.given = given
                own = self._capture_backward(slot, captured, list(static))
                self._variant.done.add(slot.graph)
                for place in in_place:  # whose memory was kept so far
                    self._variant.read_in_place(slot.graph, place, self._backend.weak(grads[place])())
            elif given != captured.given and (
                captured.backward.parameters or any(map(gt, given, captured.given))
            ):
                raise GraphError(
                    f"graphs: other outputs get a gradient in the {slot.name} than when it was captured; use "
                    "every output alike in all steps"
                )
            else:
                own = self._replay_backward(slot, captured, static)
        if astray:  # others may read there what the other graph has left
            copy_together([static[place] for place in astray], kept)
        if slot.kind == BACKWARD_INPUT:
            queue = current_queue()
            if queue is None:
                raise GraphError(
                    f"graphs: the {slot.name} defers weight gradients; run it inside "
                    "fastmp.ops.wgrad.defer_wgrad(queue)"
                )
            queue.put(self._anchor, functools.partial(self._weight_graph, slot, captured))
        return own

    def _left_by_graphs(self, slot: Slot, grads: Sequence[Tensor | None]) -> list[int]:
        """Which gradients came here from another graph without a copy, through whatever runs eagerly."""
        found = []
        for place, (buffer, grad) in enumerate(zip(slot.static, grads, strict=True)):
            if grad is None or grad.data_ptr() not in self._left or grad.is_conj() or grad.is_neg():
                continue
            if (grad.shape, grad.dtype, grad.stride()) == (buffer.shape, buffer.dtype, buffer.stride()):
                del self._left[grad.data_ptr()]  # one reader: it is written to where a step differs
                found.append(place)
        return found

    @staticmethod
    def _make_room(
        slot: Slot, astray: Sequence[int], grads: Sequence[Tensor | None]
    ) -> tuple[list[Tensor | None], list[Tensor]]:
        """Copies of the gradients, some of which may lie where others have to go; and of what lies there."""
        if slot.kind != BACKWARD:  # the backward of the weights reads there as well, later
            raise GraphError(
                f"graphs: a gradient comes to the {slot.name} in another way than when it was captured; "
                "where backwards are split, eager segments must do alike in all steps"
            )
        return [grad if grad is None else grad.clone() for grad in grads], [
            slot.static[place].clone() for place in astray
        ]

    def _replay_backward(self, slot: Slot, captured: Captured, static: list[Tensor]) -> list[Tensor | None]:
        gradients = captured.backward
        if self._verifier is None or slot.key not in self._verifier:
            own = self._replay_gradients(gradients)
        else:
            given = [grad if there else None for grad, there in zip(static, captured.given)]
            piece = self._runs[slot.step.chunk][slot.run]
            work = functools.partial(self._replay_gradients, gradients)
            own = self._verifier.backward(slot, piece, given, work)
        self._call_grad_hooks(slot, gradients)
        return own

    def _replay_gradients(self, gradients: Gradients) -> list[Tensor | None]:
        gradients.graph.replay()
        if gradients.parameters:
            self._add_gradients(gradients)
        return [each and each() for each in gradients.inputs]

    def _capture_backward(self, slot: Slot, captured: Captured, static: list[Tensor]) -> list[Tensor | None]:
        def work() -> None:
            roots = [i for i, given in enumerate(captured.given) if given]
            torch.autograd.backward([captured.live[i] for i in roots], [static[i] for i in roots])
            storages = {each.untyped_storage().data_ptr() for each in static}
            for each in captured.static:
                if each.grad is not None and each.grad.untyped_storage().data_ptr() in storages:
                    each.grad = each.grad.clone()
            if captured.queue is not None and slot.kind == BACKWARD:
                WgradQueue.run(captured.queue.take())

        captured.backward = self._capture_gradients(slot, captured.forward, work)
        own = [each.grad for each in captured.static]
        self._left = {grad.data_ptr(): grad for grad in own if grad is not None}
        captured.backward.inputs = [None if grad is None else self._backend.weak(grad) for grad in own]
        for each in captured.static:
            each.grad = None  # a graph may hold on to what it reads
        captured.live, captured.kept, captured.static = [], [], []
        return own

    def _weight_graph(self, forward: Slot, captured: Captured) -> None:
        slot = self._expect(forward.step.chunk, forward.run, (BACKWARD_WEIGHT,), forward.step.microbatch)
        with region(slot.region):
            if captured.weight is None:
                tasks = captured.queue.take()
                captured.weight = self._capture_gradients(
                    slot, captured.forward, lambda: WgradQueue.run(tasks)
                )
                self._variant.done.add(slot.graph)
                return
            work = functools.partial(self._replay_gradients, captured.weight)
            if self._verifier is None or slot.key not in self._verifier:
                work()
            else:
                self._verifier.weights(slot, self._runs[slot.step.chunk][slot.run], work)
        self._call_grad_hooks(slot, captured.weight)

    def _capture_gradients(self, slot: Slot, forward: Graph, work: Callable[[], None]) -> Gradients:
        """The graph of `work`, which accumulates gradients of parameters."""
        run = self._runs[slot.step.chunk][slot.run]
        before = [(param, param.grad) for param in run.parameters]
        for param in run.parameters:
            param.grad = None
        graph = self._backend.graph(forward)
        try:
            with self._capturing(slot), torch.enable_grad(), hooks_aside(run) as reached, graph.capture():
                work()
            if not self._backend.runs_at_capture:
                graph.replay()
            made = [(param, param.grad) for param, _ in before if param.grad is not None]
        finally:
            for param, grad in before:
                param.grad = grad
        weak = [(param, self._backend.weak(grad)) for param, grad in made]
        gradients = Gradients(graph, [], weak, reached)
        self._add_gradients(gradients)
        self._call_grad_hooks(slot, gradients)
        return gradients

    @contextmanager
    def _capturing(self, slot: Slot, begun: Sequence[Link] = ()) -> Iterator[None]:
        """Whatever a capture raises becomes a CaptureError that says where; `begun`: segments until then.
        Weights that autocast keeps in another dtype are of the graph, or of what is outside."""
        torch.clear_autocast_cache()
        try:
            yield
        except Exception as error:
            segment = f", segment {begun[-1].full_name!r}" if begun else ""
            raise CaptureError(
                f"graphs: capture of the {slot.name}{segment}: {error}; "
                "fastmp.graphs.explain(model, *inputs) lists all that cannot be captured"
            ) from error
        finally:
            torch.clear_autocast_cache()

    @staticmethod
    @torch.no_grad()
    def _add_gradients(gradients: Gradients) -> None:
        """Gradients of parameters become theirs: copies, for the next replay writes where they lie."""
        sums: tuple[list[Tensor], list[Tensor]] = [], []
        for param, grad in gradients.parameters:
            if param.grad is None:
                param.grad = grad().clone()
            else:
                sums[0].append(param.grad)
                sums[1].append(grad())
        if sums[0]:
            torch._foreach_add_(*sums)

    def _next(self) -> Slot | None:
        """What the plan has next, but for what runs eagerly."""
        slots = self._variant.slots
        while self._cursor < len(slots) and self._eagerly and slots[self._cursor].key in self._eagerly:
            self._cursor += 1
        return slots[self._cursor] if self._cursor < len(slots) else None

    def _expect(self, chunk: int, run: int, kinds: tuple[str, ...], microbatch: int | None = None) -> Slot:
        """The next replay of the plan; GraphError if it is not the one that is to run now."""
        slot = self._next()
        if (
            slot is None
            or slot.run != run
            or slot.kind not in kinds
            or slot.step.chunk != chunk
            or (microbatch is not None and microbatch != slot.step.microbatch)
        ):
            which = "" if microbatch is None else f" of microbatch {microbatch}"
            planned = "the end of the step" if slot is None else f"the {slot.name}"
            raise GraphError(
                f"graphs: the {kinds[0]}{which} of chunk {chunk}, run {self._runs[chunk][run].name!r}, "
                f"is about to run, but {planned} was planned"
            )
        if slot.round != self._round:
            variant = self._variant
            if self._round >= 0:
                variant.drop(self._round)
            self._round = slot.round
            self._in_capture = not variant.graphs_of[slot.round] <= variant.done
            self._left.clear()
        self._cursor += 1
        return slot


class _Through(Function):
    """A run between the tensors of a step. Parameters are no inputs: they would cost more than the replay."""

    @staticmethod
    def forward(ctx, step, slot, copies, anchor, *inputs):
        made, captured = step.forward_graph(slot, inputs)
        ctx.step, ctx.slot = step, slot
        ctx.set_materialize_grads(False)
        # A leaf, or a parameter behind a view, would keep the gradient as its own.
        ctx.copied = range(len(inputs)) if copies else [i for i, each in enumerate(inputs) if each.is_leaf]
        if not all(captured.differentiable):
            ctx.mark_non_differentiable(*[t for t, has in zip(made, captured.differentiable) if not has])
        return made

    @staticmethod
    def backward(ctx, *grads):
        if torch.is_grad_enabled():
            raise GraphError(f"graphs: the backward of the {ctx.slot.name} cannot be differentiated again")
        own = ctx.step.backward_graph(ctx.slot, grads)
        copied = [i for i in ctx.copied if own[i] is not None]
        for i, copy in zip(copied, copies_of([own[i] for i in copied])):
            own[i] = copy
        return None, None, None, None, *own


# As `_Through.apply`, but for its looking through all arguments for what torch.func has wrapped.
_through = super(Function, _Through).apply
