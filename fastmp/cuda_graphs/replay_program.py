"""Compile the replays of a training step into a replay program, which C++ runs once all graphs are captured.

The program is data: for each graph its inputs and outputs, for each replay of the plan the graph and its
static buffers. csrc/replay executes it and decides nothing: where a step differs from the program,
`StepExecutor` continues the step in Python or raises the error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from fastmp.cuda_graphs.executor import StepExecutor
from fastmp.cuda_graphs.graph_set import Captured, Gradients, GraphSet, Key, ReplaySlot
from fastmp.cuda_graphs.partition import CapturedSpan, Span
from fastmp.nn.segment import Tensors
from fastmp.ops.core.built import load_for_this_torch
from fastmp.profiling import region, shows_in_nsight
from fastmp.schedule.schedule import BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD

__all__ = [
    "REPLAY", "BackwardEntry", "ForwardEntry", "ProgramExecutor", "ReplayProgram", "SlotEntry", "program_of",
]  # fmt: skip


# without it `StepExecutor` runs all steps in Python
REPLAY, REPLAY_ABSENT = load_for_this_torch("_replay", "replay", "ReplayProgram")

_KINDS = {FORWARD: 0, BACKWARD_WEIGHT: 2}  # any other is a backward: 1


class ForwardEntry(NamedTuple):
    """The graph of a forward.

    launch: replays the graph.
    expected: for each input (shape, dtype, strides, requires_grad, `TensorSpec`); a spec without strides also
        accepts inputs that are not dense.
    made: the new outputs, as aliases of the graph's memory.
    output_sources: for each output of the span, the number of the input it passes on, or -1 for the next one
        of `made`. The first `num_tensors` outputs are for the next segment, the others are auxiliary.
    differentiable: for each of `made`, true if it gets a gradient.
    storages: the addresses of the storages of `made`.
    aliased: two of `made`, or one and an input, share a storage.
    may_alias_grads: code before the span may keep the gradients of its inputs, so they leave as copies.
    is_last: the chain returns the outputs of this span. copied_out: for each of `made`, if as a copy.
    trained: parameters of the span require a gradient.
    has_backward: gradients reach the span.
    """

    launch: Callable[[], None]
    expected: list[tuple[Any, ...]]
    made: list[Tensor]
    output_sources: list[int]
    num_tensors: int
    differentiable: list[bool]
    storages: set[int]
    aliased: bool
    may_alias_grads: bool
    is_last: bool
    copied_out: list[bool]
    trained: bool
    has_backward: bool


class BackwardEntry(NamedTuple):
    """The graph of a backward.

    grad_mask: for each differentiable output, true if it gets a gradient.
    input_grads: the gradients of the inputs, as aliases of the graph's memory; None: no gradient.
    """

    launch: Callable[[], None]
    grad_mask: list[bool]
    input_grads: list[Tensor | None]


class SlotEntry(NamedTuple):
    """A replay of the plan.

    kind: 0 forward, 1 backward, 2 weight gradients. graph: its number among the graphs of its kind.
    forward: the number of the replay whose backward this is, or its own.
    static: the buffers that the graph reads. in_place: for each buffer, true if another graph writes it.
    """

    kind: int
    chunk: int
    span: int
    graph: int
    forward: int
    static: list[Tensor]
    in_place: list[bool]
    region: str


class ReplayProgram:
    """The replay program of a graph set.

    compiled: the C++ object. forwards: (chunk, span) of each forward graph. backwards: for each backward
    graph one of its slots, and its gradients.
    """

    def __init__(self, graph_set: GraphSet, spans: Sequence[Sequence[Span]]) -> None:
        assert REPLAY is not None
        self.forwards: list[tuple[int, int]] = []
        self.backwards: list[tuple[ReplaySlot, Gradients]] = []
        numbers: dict[int, int] = {}  # of a graph among those of its kind
        begun: dict[Key, int] = {}  # the replay that is the forward of each key
        forwards, backwards, slots = list[ForwardEntry](), list[BackwardEntry](), list[SlotEntry]()
        for index, slot in enumerate(graph_set.slots):
            forward = begun.setdefault(slot.key, index)
            captured = graph_set.captured[graph_set.slots[forward].graph]
            kind = _KINDS.get(slot.kind, 1)
            if slot.graph not in numbers:
                numbers[slot.graph] = (len(forwards), len(backwards), 0)[kind]
                if kind == 0:
                    self.forwards.append((slot.step.chunk, slot.span))
                    forwards.append(_forward(graph_set, slot, captured, spans[slot.step.chunk]))
                elif kind == 1:
                    gradients = captured.backward
                    assert gradients is not None
                    self.backwards.append((slot, gradients))
                    input_grads = [each and each() for each in gradients.inputs]
                    backwards.append(BackwardEntry(gradients.graph.launch, captured.grad_mask, input_grads))
            in_place = [place in slot.in_place for place in range(len(slot.static))]
            graph = numbers[slot.graph]
            slots.append(SlotEntry(kind, *slot.key[1:], graph, forward, slot.static, in_place, slot.region))
        self.compiled = REPLAY.ReplayProgram(forwards, backwards, slots)


def program_of(graph_set: GraphSet, spans: Sequence[Sequence[Span]]) -> ReplayProgram | None:
    """Return the program of `graph_set`, made once all of its graphs are captured; None: run it in Python."""
    if REPLAY is None or len(graph_set.done) < graph_set.plan.num_graphs:
        return None
    if graph_set.program is None:
        graph_set.program = ReplayProgram(graph_set, spans)
    return graph_set.program


def _forward(
    graph_set: GraphSet, slot: ReplaySlot, captured: Captured, spans: Sequence[Span]
) -> ForwardEntry:
    chunk, span = slot.step.chunk, slot.span
    made = [each() for each in captured.outputs if not isinstance(each, int)]
    num_captured = sum(isinstance(each, CapturedSpan) for each in spans)
    return ForwardEntry(
        launch=captured.forward.launch,
        expected=graph_set.expected[chunk, span],
        made=made,
        output_sources=[each if isinstance(each, int) else -1 for each in captured.outputs],
        num_tensors=captured.num_tensors,
        differentiable=captured.differentiable,
        storages=captured.storages,
        aliased=captured.aliased,
        may_alias_grads=graph_set.traces[chunk, span].may_alias_grads,
        is_last=isinstance(spans[-1], CapturedSpan) and span + 1 == num_captured,
        copied_out=[graph_set.copies_out(tensor) for tensor in made],
        trained=captured.trained,
        has_backward=graph_set.plan.chunks[chunk][span].gradients is not None,
    )


class ProgramExecutor(StepExecutor):
    """One training step through a replay program; anything else falls back to `StepExecutor`."""

    def __init__(self, program: ReplayProgram, *positional: Any, **options: Any) -> None:
        super().__init__(*positional, **options)
        before = [bool(self._hooks.modules(*place)) for place in program.forwards]
        after = [self._has_epilogue(*each) for each in program.backwards]
        assert REPLAY is not None
        self._program: Any = REPLAY.StepReplay(
            program.compiled, self._anchor, before, after, shows_in_nsight()
        )

    def _has_epilogue(self, slot: ReplaySlot, gradients: Gradients) -> bool:
        """Return True if `after_backward` has work after the replay of this backward."""
        hooked = any(self._hooks.of_gradients(slot.graph, gradients.visited))
        return hooked or bool(gradients.parameters) or slot.kind == BACKWARD_INPUT

    def _leave(self) -> None:
        """Leave the program: the rest of the step continues in Python from the current position."""
        program, self._program = self._program, None
        if program is not None:
            self._position.go_on(program.next)
            self._aliased = program.aliased
            self._in_flight = {self._graph_set.slots[index].key for index in program.leave()}

    def end(self) -> None:
        self._leave()
        super().end()

    def replays(self, chunk: int) -> bool:
        self._leave()
        return super().replays(chunk)

    def skip(self, chunk: int) -> None:
        self._leave()
        super().skip(chunk)

    def run_captured_span(
        self, chunk: int, number: int, span: CapturedSpan, tensors: Tensors, overwritten: set[int]
    ) -> tuple[Tensors, Tensors]:
        if self._program is not None:
            made = self._program.forward(self, chunk, number, tuple(tensors), overwritten)
            if made is not None:
                return made
            self._leave()
        return super().run_captured_span(chunk, number, span, tensors, overwritten)

    @property
    def aliased(self) -> bool:
        return super().aliased if self._program is None else bool(self._program.aliased)

    def _next_forward(self, chunk: int) -> ReplaySlot | None:
        if self._program is None:
            return super()._next_forward(chunk)
        slots, number = self._graph_set.slots, self._program.next
        slot = slots[number] if number < len(slots) else None
        return slot if slot is not None and slot.kind == FORWARD and slot.step.chunk == chunk else None

    def _next_weights(self, forward: ReplaySlot) -> ReplaySlot:
        if self._program is None:
            return super()._next_weights(forward)
        self._position.go_on(self._program.next)
        slot = super()._next_weights(forward)
        self._program.pass_over()
        return slot

    # Callbacks of csrc/replay, by the number of a replay.

    def before_forward(self, number: int) -> None:
        """Call the forward pre-hooks of a span."""
        slot = self._graph_set.slots[number]
        self._hooks.before_forward(slot.step.chunk, slot.span)

    def launch(self, number: int, replay: Callable[[], None]) -> None:
        """Replay inside a named region, for Nsight."""
        with region(self._graph_set.slots[number].region):
            replay()

    def after_backward(self, number: int, forward: int) -> None:
        """Accumulate gradients, call their hooks and defer weight gradients after a backward of `forward`."""
        slots = self._graph_set.slots
        slot, captured = slots[number], self._graph_set.captured[slots[forward].graph]
        assert captured.backward is not None
        if captured.backward.parameters:
            captured.backward.accumulate()
        self._hooks.after_gradients(slot.graph, slot.kind, captured.backward.visited)
        self._defer_weights(slot, captured)

    def input_gradients(self, forward: int, grads: list[Tensor | None]) -> list[Tensor | None]:
        """Fall back to Python for the input gradients of `forward`."""
        self._leave()
        return self.backward_graph(self._graph_set.slots[forward], grads)
