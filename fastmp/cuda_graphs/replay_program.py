"""The replays of a training step as a flat program, which C++ runs once all graphs of a step are captured.

The program is data: for each graph what it reads and leaves, for each replay of the plan which graph comes
next, over which buffers. csrc/replay does what it says and decides nothing: where a step differs from the
program, the rest of the step is left to `GraphedStep`, which goes on or says what is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastmp.cuda_graphs.executor import GraphedStep
from fastmp.cuda_graphs.graph_set import Captured, Gradients, GraphSet, Key, Slot
from fastmp.cuda_graphs.partition import Part, Run
from fastmp.nn.segment import Tensors
from fastmp.pipeline.schedule import BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD
from fastmp.profiling import region, shows_in_nsight

__all__ = ["REPLAY", "FlatBackward", "FlatForward", "FlatSlot", "FlatStep", "Program", "program_of"]


def _module() -> ModuleType | None:
    try:
        from fastmp import _replay as module
    except ImportError:
        return None
    return module if module.torch_version == torch.__version__.partition("+")[0] else None


REPLAY = _module()  # None where it is not built for this torch: then `GraphedStep` runs all steps

_KINDS = {FORWARD: 0, BACKWARD_WEIGHT: 2}  # any other is a backward: 1


class FlatForward(NamedTuple):
    """The graph of a forward.

    launch: replays it. expected: of each input shape, dtype, strides, whether it requires a gradient, and its
        `TensorSpec`, without strides where any input that is not dense will do.
    made: what the graph makes, where it leaves it. outputs: of the run, in order: the number of an input
        that is handed on, or -1 for the next one of `made`. The first `num_tensors` are for the next segment.
    differentiable: for each of `made`, whether it has a gradient. places: the addresses of their storages.
    aliased: whether two of them, or one and an input, share a storage.
    kept: whether code before the run may keep the gradients of its inputs: they are copied.
    leaves: whether the chain returns what the run makes. copied: for each of `made`, whether as a copy.
    trained: whether parameters of the run require a gradient. reached: whether a gradient comes at all.
    """

    launch: Callable[[], None]
    expected: list[tuple[Any, ...]]
    made: list[Tensor]
    outputs: list[int]
    num_tensors: int
    differentiable: list[bool]
    places: set[int]
    aliased: bool
    kept: bool
    leaves: bool
    copied: list[bool]
    trained: bool
    reached: bool


class FlatBackward(NamedTuple):
    """The graph of a backward.

    given: for each output with a gradient, whether it gets one. gradients: of the inputs, where they are.
    """

    launch: Callable[[], None]
    given: list[bool]
    gradients: list[Tensor | None]


class FlatSlot(NamedTuple):
    """A replay of the plan.

    kind: 0 a forward, 1 a backward, 2 the gradients of weights. graph: its number among those of its kind.
    forward: the number of the replay whose backward it is, or its own.
    static: where the graph reads. in_place: for each of these, whether another graph writes there.
    """

    kind: int
    chunk: int
    run: int
    graph: int
    forward: int
    static: list[Tensor]
    in_place: list[bool]
    region: str


class Program:
    """The program of a graph set, and for each graph in it whose it is.

    compiled: what C++ runs. forwards: chunk and run of each graph of a forward. backwards: for each graph of
    a backward one of its slots, and what it makes.
    """

    def __init__(self, graph_set: GraphSet, parts: Sequence[Sequence[Part]]) -> None:
        assert REPLAY is not None
        self.forwards: list[tuple[int, int]] = []
        self.backwards: list[tuple[Slot, Gradients]] = []
        numbers: dict[int, int] = {}  # of a graph among those of its kind
        begun: dict[Key, int] = {}  # the replay that is the forward of each key
        forwards, backwards, slots = list[FlatForward](), list[FlatBackward](), list[FlatSlot]()
        for index, slot in enumerate(graph_set.slots):
            forward = begun.setdefault(slot.key, index)
            captured = graph_set.captured[graph_set.slots[forward].graph]
            kind = _KINDS.get(slot.kind, 1)
            if slot.graph not in numbers:
                numbers[slot.graph] = (len(forwards), len(backwards), 0)[kind]
                if kind == 0:
                    self.forwards.append((slot.step.chunk, slot.run))
                    forwards.append(_forward(graph_set, slot, captured, parts[slot.step.chunk]))
                elif kind == 1:
                    gradients = captured.backward
                    assert gradients is not None
                    self.backwards.append((slot, gradients))
                    left = [each and each() for each in gradients.inputs]
                    backwards.append(FlatBackward(gradients.graph.launch, captured.given, left))
            in_place = [place in slot.in_place for place in range(len(slot.static))]
            graph = numbers[slot.graph]
            slots.append(FlatSlot(kind, *slot.key[1:], graph, forward, slot.static, in_place, slot.region))
        self.compiled = REPLAY.Program(forwards, backwards, slots)


def program_of(graph_set: GraphSet, parts: Sequence[Sequence[Part]]) -> Program | None:
    """The program of `graph_set`, made once all of its graphs are captured; None: Python runs its steps."""
    if REPLAY is None or len(graph_set.done) < graph_set.plan.num_graphs:
        return None
    if graph_set.program is None:
        graph_set.program = Program(graph_set, parts)
    return graph_set.program


def _forward(graph_set: GraphSet, slot: Slot, captured: Captured, parts: Sequence[Part]) -> FlatForward:
    chunk, run = slot.step.chunk, slot.run
    made = [each() for each in captured.outputs if not isinstance(each, int)]
    return FlatForward(
        launch=captured.forward.launch,
        expected=graph_set.expected[chunk, run],
        made=made,
        outputs=[each if isinstance(each, int) else -1 for each in captured.outputs],
        num_tensors=captured.num_tensors,
        differentiable=captured.differentiable,
        places=captured.places,
        aliased=captured.aliased,
        kept=graph_set.observed[chunk, run].keeps,
        leaves=isinstance(parts[-1], Run) and run + 1 == sum(isinstance(part, Run) for part in parts),
        copied=[graph_set.copies_out(tensor) for tensor in made],
        trained=captured.trained,
        reached=graph_set.plan.chunks[chunk][run].gradients is not None,
    )


class FlatStep(GraphedStep):
    """One training step through a program. What it does not say is done as in any `GraphedStep`."""

    def __init__(self, program: Program, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        before = [bool(self._hooks.modules(*place)) for place in program.forwards]
        after = [self._goes_on(*each) for each in program.backwards]
        assert REPLAY is not None
        self._flat = REPLAY.Step(program.compiled, self._anchor, before, after, shows_in_nsight())

    def _goes_on(self, slot: Slot, gradients: Gradients) -> bool:
        """Whether there is something to do behind the replay of a backward."""
        hooked = any(self._hooks.of_gradients(slot.graph, gradients.reached))
        return hooked or bool(gradients.parameters) or slot.kind == BACKWARD_INPUT

    def _leave(self) -> None:
        """Leave the program: the rest of the step goes on in Python, where it stands."""
        flat, self._flat = self._flat, None
        if flat is not None:
            self._position.go_on(flat.next)
            self._aliased = flat.aliased
            self._in_flight = {self._graph_set.slots[index].key for index in flat.leave()}

    def end(self) -> None:
        self._leave()
        super().end()

    def replays(self, chunk: int) -> bool:
        self._leave()
        return super().replays(chunk)

    def skip(self, chunk: int) -> None:
        self._leave()
        super().skip(chunk)

    def run(
        self, chunk: int, number: int, run: Run, tensors: Tensors, overwritten: set[int]
    ) -> tuple[Tensors, Tensors]:
        if self._flat is not None:
            made = self._flat.forward(self, chunk, number, tuple(tensors), overwritten)
            if made is not None:
                return made
            self._leave()
        return super().run(chunk, number, run, tensors, overwritten)

    @property
    def aliased(self) -> bool:
        return super().aliased if self._flat is None else bool(self._flat.aliased)

    def _next_forward(self, chunk: int) -> Slot | None:
        if self._flat is None:
            return super()._next_forward(chunk)
        slots, number = self._graph_set.slots, self._flat.next
        slot = slots[number] if number < len(slots) else None
        return slot if slot is not None and slot.kind == FORWARD and slot.step.chunk == chunk else None

    def _next_weights(self, forward: Slot) -> Slot:
        if self._flat is not None:
            slots, number = self._graph_set.slots, self._flat.next
            slot = slots[number] if number < len(slots) else None
            if slot is not None and slot.key == forward.key and slot.kind == BACKWARD_WEIGHT:
                self._flat.pass_over()
                return slot
            self._leave()
        return super()._next_weights(forward)

    # What C++ asks for, by the number of a replay.

    def before(self, number: int) -> None:
        """Call the hooks before a forward."""
        slot = self._graph_set.slots[number]
        self._hooks.before_forward(slot.step.chunk, slot.run)

    def launch(self, number: int, replay: Callable[[], None]) -> None:
        """Replay under a name."""
        with region(self._graph_set.slots[number].region):
            replay()

    def after(self, number: int, forward: int) -> None:
        """Do what remains behind the replay of the backward of `forward`."""
        slots = self._graph_set.slots
        slot, captured = slots[number], self._graph_set.captured[slots[forward].graph]
        assert captured.backward is not None
        self._replay.accumulate(captured.backward)
        self._hooks.after_gradients(slot.graph, slot.kind, captured.backward.reached)
        self._defer_weights(slot, captured)

    def gradients(self, forward: int, grads: list[Tensor | None]) -> list[Tensor | None]:
        """What the program does not say: the gradients of the inputs of a forward."""
        self._leave()
        return self.backward_graph(self._graph_set.slots[forward], grads)
