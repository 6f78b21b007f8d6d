"""Track the position of a training step in its plan."""

from __future__ import annotations

from collections.abc import Sequence

from fastmp.cuda_graphs.errors import GraphError
from fastmp.cuda_graphs.graph_set import GraphSet, Key, ReplaySlot
from fastmp.cuda_graphs.partition import CapturedSpan
from fastmp.pipeline.schedule import FORWARD

__all__ = ["Position"]


class Position:
    """The next replay of a plan during one training step.

    capturing: the graphs of the present round are being captured.
    eager: forwards (microbatch, chunk, span) that run eagerly in this step, with their backwards.
    """

    def __init__(self, graph_set: GraphSet, spans: Sequence[Sequence[CapturedSpan]]) -> None:
        self._graph_set, self._spans = graph_set, spans
        self._next, self._round = 0, -1
        self.capturing = False
        self.eager: set[Key] = set()

    def peek(self) -> ReplaySlot | None:
        """Return the next replay that does not run eagerly; None at the end of the step."""
        slots = self._graph_set.slots
        while self._next < len(slots) and self.eager and slots[self._next].key in self.eager:
            self._next += 1
        return slots[self._next] if self._next < len(slots) else None

    def next_forward(self, chunk: int) -> ReplaySlot | None:
        """Return the next replay if it is a forward of `chunk`, else None."""
        slot = self.peek()
        return slot if slot is not None and slot.kind == FORWARD and slot.step.chunk == chunk else None

    def expect(
        self, chunk: int, span: int, kinds: tuple[str, ...], microbatch: int | None = None
    ) -> ReplaySlot:
        """Advance to the next replay and return it; GraphError if another one is about to run."""
        slot = self.peek()
        if (
            slot is None
            or slot.span != span
            or slot.kind not in kinds
            or slot.step.chunk != chunk
            or (microbatch is not None and microbatch != slot.step.microbatch)
        ):
            which = "" if microbatch is None else f" of microbatch {microbatch}"
            unit = self._graph_set.slots[0].step.unit
            planned = "the end of the step" if slot is None else f"the {slot.name}"
            raise GraphError(
                f"graphs: the {kinds[0]}{which} of {unit} {chunk}, span {self._spans[chunk][span].name!r}, "
                f"is about to run, but {planned} was planned; run the steps in the `order` of the manager"
            )
        if slot.round != self._round:
            self._begin_round(slot.round)
        self._next += 1
        return slot

    def go_on(self, number: int) -> None:
        """Continue at replay `number` of a step in which nothing was captured."""
        self._next = number
        self._round = self._graph_set.slots[number - 1].round if number else -1

    def _begin_round(self, number: int) -> None:
        graph_set = self._graph_set
        if self._round >= 0:
            graph_set.drop(self._round)
        self._round = number
        self.capturing = not graph_set.graphs_of[number] <= graph_set.done
        graph_set.live_grads.clear()

    def end(self) -> None:
        """End the step, which may be incomplete."""
        self._next = len(self._graph_set.slots)
        self._graph_set.live_grads.clear()
        if self._round >= 0:
            self._graph_set.drop(self._round)
