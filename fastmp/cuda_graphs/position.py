"""Track the position of a training step in its plan."""

from __future__ import annotations

from collections.abc import Sequence

from fastmp.cuda_graphs.errors import GraphError
from fastmp.cuda_graphs.graph_set import GraphSet, Key, ReplaySlot
from fastmp.cuda_graphs.partition import CapturedSpan
from fastmp.schedule.schedule import FORWARD

__all__ = ["Position"]


class Position:
    """The next replay of a plan during one training step.

    eager: forwards (microbatch, chunk, span) that run eagerly in this step, with their backwards.
    """

    def __init__(self, graph_set: GraphSet, spans: Sequence[Sequence[CapturedSpan]]) -> None:
        self._graph_set, self._spans = graph_set, spans
        self._next = 0
        self._on_lane: dict[int, ReplaySlot] = {}  # a replay of the flight that is on each lane
        self._capturing: set[int] = set()  # lanes whose flight is being captured
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
        before = self._on_lane.get(slot.lane)
        if before is None or before.flight != slot.flight:
            self._begin_flight(slot, before)
        self._next += 1
        return slot

    def captures(self, slot: ReplaySlot) -> bool:
        """Return True if the graphs of the flight that `slot` is of are being captured."""
        return slot.lane in self._capturing

    def go_on(self, number: int) -> None:
        """Continue at replay `number` of a step in which nothing was captured."""
        self._next = number

    def _begin_flight(self, slot: ReplaySlot, before: ReplaySlot | None) -> None:
        graph_set = self._graph_set
        if before is not None:
            graph_set.drop([before.bundle])
        self._on_lane[slot.lane] = slot
        self._capturing.discard(slot.lane)
        if not graph_set.graphs_of[slot.bundle] <= graph_set.done:
            self._capturing.add(slot.lane)

    def end(self) -> None:
        """End the step, which may be incomplete."""
        self._next = len(self._graph_set.slots)
        self._graph_set.live_grads.clear()
        self._graph_set.drop(slot.bundle for slot in self._on_lane.values())
