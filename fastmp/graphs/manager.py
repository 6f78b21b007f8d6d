"""Captures the static parts of layers and replays them, in the order of a schedule; the rest runs eagerly.

A chain of layers is cut into pieces: maximal runs of segments that can be captured, across the borders of
layers, and what lies between them. The first steps run eagerly, and show which shapes cross the borders; then
`plan` says which graph reads which buffer when. One step is captured while it trains: each graph where it is
first needed, so that graphs share memory exactly as the step itself would free and take it. After that a run
is a copy into its static inputs and a replay, forward and backward.

Values may be overwritten once the step has gone on: what leaves a chain is the caller's own copy. Between two
rounds of a step, where nothing is in flight, memory is free: the graphs of a round are captured all in one
pass, so that what one of them holds is never taken by another.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import gt

import torch
from torch import Tensor, nn
from torch.autograd import Function

from fastmp.graphs import pieces
from fastmp.graphs.errors import CaptureError, GraphError
from fastmp.graphs.pieces import Piece, Shapes, cut, hooks_aside, spec_of
from fastmp.graphs.plan import GraphPlan, RunSpec, TensorSpec, plan
from fastmp.graphs.variant import Backend, Captured, Gradients, Graph, Slot, Variant, Weak
from fastmp.graphs.verify import Verifier
from fastmp.nn.segment import LayerChain, Link, Tensors, run_links
from fastmp.ops.put_off import WeightQueue, putting_off, putting_off_to
from fastmp.parallel.schedule import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Step
from fastmp.profiling import region

__all__ = ["Backend", "Graph", "GraphError", "GraphManager"]

_Key = tuple[int, int, int]
_BACKWARDS = (BACKWARD, BACKWARD_INPUT)

_MOST_DROPS = 4  # rounds that could not be captured in one pass, before their steps run eagerly
_MOST_VARIANTS = 4  # shapes of a step that have graphs; each has static buffers of its own


class GraphManager:
    """Runs the chains of a rank's chunks through graphs, once it has seen them run.

    chains: a `LayerChain` for each chunk; its forward is replaced until `remove`.
    order: the steps of this rank (see `fastmp.parallel.schedule.order`), for the number of microbatches that
        every training step has.
    backend: `RecordingBackend` on a CPU.
    scope: what to capture, see `fastmp.graphs.plan.captured_segments`; None: all that can be.
    warmup: training steps that run eagerly first, one or more; the last of them shows shapes.
    verify_every: every so many steps each run is held against its segments, run eagerly on the same inputs
        and random numbers, bit for bit; 0: never. All ranks alike, for collectives run twice.

    `begin_step()` before each training step. Forwards without gradients or in evaluation mode run eagerly. A
    step whose first shapes are new shows them, and has graphs of its own from the next time on (at most four
    kinds do); a microbatch of other shapes than those of its step runs eagerly. Where the mode of a module or
    what is trained has changed, graphs are captured anew.

    Hooks of modules before their forward, and of parameters after their gradient has been accumulated, run by
    hand at every replay; those of a `GradBuffer` are in the graph. A parameter of two runs gets two
    gradients, where eager autograd adds them up first: the last bits of the sum may differ.

    ValueError for a scope that names no segment. GraphError where forwards and backwards come in another
    order than planned, where a parameter has moved, and where a run is not what its segments are;
    CaptureError where a segment cannot be captured.
    """

    def __init__(
        self,
        chains: Sequence[LayerChain],
        order: Sequence[Step],
        *,
        backend: Backend,
        scope: Sequence[str] | None = None,
        warmup: int = 2,
        verify_every: int = 0,
    ) -> None:
        self.chains, self.order, self.backend = list(chains), tuple(order), backend
        self.warmup, self.verify_every = max(warmup, 1), verify_every
        self._pieces = [cut(chain, scope) for chain in self.chains]
        self._runs = [[piece for piece in chain if piece.captured] for chain in self._pieces]
        self._anchor = torch.zeros((), requires_grad=True)  # gives a run a backward, if no input does
        self._variants: dict[tuple, Variant | None] = {}  # by the first input of a step; None: runs eagerly
        self._modes: tuple[bool, ...] = ()
        self._places: dict[str, tuple[int, int]] = {}
        self._step = -1
        self._verifier: Verifier | None = None
        self._begin()
        for chunk, chain in enumerate(self.chains):
            chain.forward = functools.partial(self._forward, chunk)

    def _begin(self) -> None:
        self._kind: tuple | None = None  # what the first input of the step is; None: not yet seen
        self._seen: dict[tuple[int, int], Shapes] | None = None  # of a step that shows shapes
        self._arrived: dict[tuple[int, int], list[TensorSpec]] = {}  # gradients as they came
        self._even = True
        self._variant: Variant | None = None
        self._cursor, self._round, self._in_capture = 0, -1, False
        self._in_flight: set[_Key] = set()  # forwards whose backward has not been
        self._eagerly: set[_Key] = set()
        # Of this step, by run and by graph: modules, and parameters, with hooks that run by hand.
        self._hooked: dict[tuple[int, int], list[nn.Module]] = {}
        self._by_hand: dict[int, list[pieces.Hooked]] = {}

    @property
    def plan(self) -> GraphPlan | None:
        """Of the first shapes that have one."""
        return next((variant.plan for variant in self._variants.values() if variant is not None), None)

    @property
    def num_graphs(self) -> int:
        """How many are captured."""
        return sum(len(variant.done) for variant in self._variants.values() if variant is not None)

    @property
    def static_bytes(self) -> int:
        """Of all static buffers there are."""
        buffers = [b for variant in self._variants.values() if variant is not None for b in variant.buffers]
        return sum(buffer.numel() * buffer.element_size() for buffer in buffers)

    def describe(self) -> str:
        """For a log."""
        return (
            f"{self.num_graphs} graphs of {sum(map(len, self._runs))} runs of segments, "
            f"{self.static_bytes / 1e6:.2f} MB of static buffers, "
            f"{self.backend.nbytes / 1e6:.2f} MB in a pool"
        )

    def remove(self) -> None:
        """Let the chains run by themselves again, and the graphs go."""
        for chain in self.chains:
            del chain.forward
        self._forget()

    def _forget(self) -> None:
        """All graphs; nothing is in flight."""
        self._variant = None
        self._variants.clear()
        self.backend.reset()

    def begin_step(self) -> None:
        """A training step begins, also where the last one stopped on the way.

        GraphError where a parameter, buffer or main gradient is not where graphs would read or write it.
        """
        if self._variant is not None and self._round >= 0:
            self._variant.drop(self._round)
            if self._variant.drops > _MOST_DROPS:
                self._variants[self._kind] = None
        if self._seen is not None:
            self._make_variant()
        self._begin()
        self._step += 1
        if self._variants:
            if self._modes != pieces.modes(self.chains):
                self._forget()
            else:
                self._check_places()
        due = self.verify_every > 0 and self._step % self.verify_every == 0
        self._verifier = Verifier(self.backend.rng) if due else None

    def _check_places(self) -> None:
        now = pieces.places(self.chains)
        for name, place in self._places.items():
            if now.get(name) != place:
                what = "is gone" if name not in now else "or its main gradient has moved"
                raise GraphError(
                    f"graphs: {name} {what} since graphs were captured, which go by address; change its "
                    "values in place, or make the manager afterwards"
                )

    def _make_variant(self) -> None:
        """Of the step that has shown its shapes, if it came to its end and was even."""
        seen = self._seen
        if not seen or len(seen) < sum(map(len, self._runs)):
            return
        if not self._even:
            self._variants[self._kind] = None
            return
        chunks = [
            [
                RunSpec(run.name, tuple(spec for spec, _ in seen[c, i].inputs), tuple(self._arrived[c, i]))
                for i, run in enumerate(runs)
            ]
            for c, runs in enumerate(self._runs)
        ]
        self._modes, self._places = pieces.modes(self.chains), pieces.places(self.chains)
        self._variants[self._kind] = Variant(plan(self.order, chunks), seen, self._pieces, self._device)

    def _first_seen(self, x: Tensor) -> None:
        """The first forward of the step says which kind of step it is."""
        self._kind, self._device = (spec_of(x), x.requires_grad), x.device
        if self._step < self.warmup - 1:
            return
        if self._kind in self._variants:
            self._variant = self._variants[self._kind]
        elif len(self._variants) < _MOST_VARIANTS:
            self._seen = {}

    def _forward(self, chunk: int, x: Tensor) -> Tensors:
        chain = self.chains[chunk]
        if self._step < 0 or not torch.is_grad_enabled() or not chain.training:
            return type(chain).forward(chain, x)
        if self._kind is None:
            self._first_seen(x)
        if self._variant is None and self._seen is None:
            return type(chain).forward(chain, x)
        tensors, others = (x,), ()
        shared: set[int] = set()  # where graphs have left what they made
        number = 0
        for piece in self._pieces[chunk]:
            if not piece.captured:
                pieces.call_pre_hooks(piece.begins)
                tensors, more = run_links(piece.links, tensors)
            else:
                if self._variant is None:
                    tensors, more = self._observe(chunk, number, piece, tensors)
                else:
                    tensors, more = self._through_graph(chunk, number, piece, tensors, shared)
                number += 1
            others += more
        own = [t.clone() if t.untyped_storage().data_ptr() in shared else t for t in (tensors[0], *others)]
        return tuple(own)

    def _observe(self, chunk: int, number: int, run: Piece, tensors: Tensors) -> tuple[Tensors, Tensors]:
        pieces.call_pre_hooks(run.begins)
        with pieces.calls() as called, self.backend.watch() as watched:
            handed_on, others = run_links(run.links, tensors)
        made = [t for t in (*handed_on, *others) if not any(t is given for given in tensors)]
        made = [t for t in made if t.requires_grad]
        outputs = [spec_of(t) for t in made]
        inputs = [(spec_of(t), t.requires_grad) for t in tensors]
        shapes = Shapes(inputs, outputs, [*run.begins, *called], watched)
        self._even &= self._seen.setdefault((chunk, number), shapes)[:3] == shapes[:3]
        arrived = self._arrived.setdefault((chunk, number), list(outputs))
        for i, output in enumerate(made):
            output.register_hook(functools.partial(pieces.note_spec, arrived, i))
        return handed_on, others

    def _through_graph(
        self, chunk: int, number: int, run: Piece, tensors: Tensors, shared: set[int]
    ) -> tuple[Tensors, Tensors]:
        slot, variant = self._expect(chunk, number, (FORWARD,)), self._variant
        if not variant.takes(chunk, number, tensors):
            self._eagerly.add(slot.key)
            pieces.call_pre_hooks(run.begins)
            return run_links(run.links, tensors)
        self._call_pre_hooks(chunk, number)
        made = _Through.apply(self, slot, variant.copies[chunk][number], self._anchor, *tensors)
        captured = variant.captured[slot.graph]
        shared |= captured.places
        if len(made) < len(captured.outputs):
            own = iter(made)
            made = tuple(tensors[o] if isinstance(o, int) else next(own) for o in captured.outputs)
        return made[: captured.num_tensors], made[captured.num_tensors :]

    def _call_pre_hooks(self, chunk: int, number: int) -> None:
        hooked = self._hooked.get((chunk, number))
        if hooked is None:
            called = self._variant.shapes[chunk, number].calls
            hooked = self._hooked[chunk, number] = [module for module in called if module._forward_pre_hooks]
        pieces.call_pre_hooks(hooked)

    def _call_grad_hooks(self, slot: Slot, gradients: Gradients) -> None:
        by_hand = self._by_hand.get(slot.graph)
        if by_hand is None:
            by_hand = self._by_hand[slot.graph] = pieces.hooks_by_hand(gradients.reached)
        pieces.call_grad_hooks(by_hand)

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
            if self._verifier is None:
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
        queue = None if putting_off_to() is None else WeightQueue()
        graph = self.backend.graph(watched=shapes.watched)
        pieces.renew_accumulators(run.parameters)
        begun: list[Link] = []
        aside = hooks_aside(run)
        with self._capturing(slot, begun), torch.enable_grad(), aside, putting_off(queue), graph.capture():
            links = (begun.append(link) or link for link in run.links)
            tensors, others = run_links(links, tuple(inputs))
        if not self.backend.runs_at_capture:
            graph.replay()
        outputs: list[Weak | int] = []
        made: list[Tensor] = []
        for output in (*tensors, *others):
            given = [i for i, each in enumerate(inputs) if each is output]
            outputs.append(given[0] if given else self.backend.weak(output))
            made += [] if given else [output]
        differentiable = [output.requires_grad for output in made]
        live = [output for output in made if output.requires_grad]
        places = {output.untyped_storage().data_ptr() for output in made}
        captured = Captured(graph, outputs, len(tensors), differentiable, live, inputs, queue, places)
        return captured, tuple(output.detach() for output in made)

    def backward_graph(self, forward: Slot, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradients of the inputs of a forward; those of its parameters are added where they belong."""
        if forward.key not in self._in_flight:
            raise GraphError(f"graphs: the backward of the {forward.name} runs twice")
        self._in_flight.remove(forward.key)
        captured = self._variant.captured[forward.graph]
        slot = self._expect(forward.step.chunk, forward.run, _BACKWARDS, forward.step.microbatch)
        grads = [grad for grad, needed in zip(grads, captured.differentiable) if needed]
        static = slot.fill(grads)
        given = [grad is not None for grad in grads]
        with region(slot.region):
            if captured.backward is None:
                captured.given = given
                own = self._capture_backward(slot, captured, static)
                self._variant.done.add(slot.graph)
            elif given != captured.given and any(map(gt, given, captured.given)):
                raise GraphError(
                    f"graphs: an output gets a gradient in the {slot.name} that had none when it was "
                    "captured; use every output alike in all steps"
                )
            else:
                own = self._replay_backward(slot, captured, static)
        if slot.kind == BACKWARD_INPUT:
            putting_off_to().put_off(self._anchor, functools.partial(self._weight_graph, slot, captured))
        return own

    def _replay_backward(self, slot: Slot, captured: Captured, static: list[Tensor]) -> list[Tensor | None]:
        gradients = captured.backward
        if self._verifier is None:
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
            if captured.queue is not None and slot.kind == BACKWARD:
                WeightQueue.run(captured.queue.take())

        captured.backward = self._capture_gradients(slot, captured.forward, work)
        own = [each.grad for each in captured.static]
        captured.backward.inputs = [None if grad is None else self.backend.weak(grad) for grad in own]
        for each in captured.static:
            each.grad = None  # a graph may hold on to what it reads
        captured.live, captured.static = [], []
        return own

    def _weight_graph(self, forward: Slot, captured: Captured) -> None:
        slot = self._expect(forward.step.chunk, forward.run, (BACKWARD_WEIGHT,), forward.step.microbatch)
        with region(slot.region):
            if captured.weight is None:
                tasks = captured.queue.take()
                captured.weight = self._capture_gradients(
                    slot, captured.forward, lambda: WeightQueue.run(tasks)
                )
                self._variant.done.add(slot.graph)
                return
            work = functools.partial(self._replay_gradients, captured.weight)
            if self._verifier is None:
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
        graph = self.backend.graph(forward)
        with self._capturing(slot), torch.enable_grad(), hooks_aside(run) as reached, graph.capture():
            work()
        if not self.backend.runs_at_capture:
            graph.replay()
        made = [(param, param.grad) for param in run.parameters if param.grad is not None]
        for param, grad in before:
            param.grad = grad
        weak = [(param, self.backend.weak(grad)) for param, grad in made]
        gradients = Gradients(graph, [], weak, reached)
        self._add_gradients(gradients)
        self._call_grad_hooks(slot, gradients)
        return gradients

    @contextmanager
    def _capturing(self, slot: Slot, begun: Sequence[Link] = ()) -> Iterator[None]:
        """Whatever a capture raises becomes a CaptureError that says where; `begun`: segments until then."""
        try:
            yield
        except Exception as error:
            segment = f", segment {begun[-1].full_name!r}" if begun else ""
            raise CaptureError(
                f"graphs: capture of the {slot.name}{segment}: {error}; "
                "fastmp.graphs.explain(model, *inputs) lists all that cannot be captured"
            ) from error

    @staticmethod
    @torch.no_grad()
    def _add_gradients(gradients: Gradients) -> None:
        """Gradients of parameters become theirs: copies, for the next replay writes where they lie."""
        for param, grad in gradients.parameters:
            if param.grad is None:
                param.grad = grad().clone()
            else:
                param.grad.add_(grad())

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
        self._cursor += 1
        return slot


class _Through(Function):
    """A run between the tensors of a step. Parameters are no inputs: they would cost more than the replay."""

    @staticmethod
    def forward(ctx, manager, slot, copies, anchor, *inputs):
        made, captured = manager.forward_graph(slot, inputs)
        ctx.manager, ctx.slot = manager, slot
        ctx.set_materialize_grads(False)
        # A leaf, or a parameter behind a view, would keep the gradient as its own.
        ctx.copies = [copies or each.is_leaf for each in inputs]
        if not all(captured.differentiable):
            ctx.mark_non_differentiable(*[t for t, has in zip(made, captured.differentiable) if not has])
        return made

    @staticmethod
    def backward(ctx, *grads):
        if torch.is_grad_enabled():
            raise GraphError(f"graphs: the backward of the {ctx.slot.name} cannot be differentiated again")
        own = ctx.manager.backward_graph(ctx.slot, grads)
        own = [g.clone() if copies and g is not None else g for g, copies in zip(own, ctx.copies)]
        return None, None, None, None, *own
