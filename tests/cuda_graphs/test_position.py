"""A replay that is not the next one of the plan is an error that names both."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from fastmp.cuda_graphs.errors import GraphError
from fastmp.cuda_graphs.position import Position
from fastmp.schedule.schedule import BACKWARD, FORWARD

# Two chunks of two spans, a microbatch each: forwards of chunk 0, of chunk 1, then their backwards.
PLAN = [
    *((FORWARD, 0, span) for span in (0, 1)),
    *((FORWARD, 1, span) for span in (0, 1)),
    *((BACKWARD, chunk, span) for chunk in (1, 0) for span in (1, 0)),
]


def position(at=0):
    """A position in front of replay `at` of `PLAN`."""
    slots = []
    for kind, chunk, span in PLAN:
        step = SimpleNamespace(chunk=chunk, microbatch=5, unit="chunk")
        name = f"{kind} of chunk {chunk}, span {span}"
        slots.append(
            SimpleNamespace(
                kind=kind, span=span, step=step, name=name, key=(5, chunk, span), flight=0, lane=0, bundle=0
            )
        )
    graph_set = SimpleNamespace(
        slots=slots, graphs_of=[set()], done=set(), live_grads={}, drop=lambda bundles: None
    )
    made = Position(graph_set, [[SimpleNamespace(name=f"span{span}") for span in (0, 1)]] * 2)
    for kind, chunk, span in PLAN[:at]:
        made.expect(chunk, span, (kind,), 5)
    return made


def test_a_whole_plan_in_its_order():
    made = position(len(PLAN))
    assert made.peek() is None
    with pytest.raises(GraphError, match="but the end of the step was planned"):
        made.expect(0, 0, (FORWARD,))


@pytest.mark.parametrize(
    ("at", "asked"),
    [
        (0, (0, 1, (FORWARD,), None)),  # the forward of a later span
        (1, (0, 0, (FORWARD,), None)),  # of an earlier one
        (0, (1, 0, (FORWARD,), None)),  # of another chunk
        (0, (0, 0, (BACKWARD,), None)),  # backward where a forward is planned
        (4, (1, 1, (FORWARD,), None)),  # and the other way round
        (4, (1, 1, (BACKWARD,), 6)),  # of another microbatch
    ],
)
def test_any_other_replay_is_an_error_and_the_position_stays(at, asked):
    made = position(at)
    kind, chunk, span = PLAN[at]
    planned = rf"is about to run, but the {kind} of chunk {chunk}, span {span} was planned"
    with pytest.raises(GraphError, match=planned):
        made.expect(*asked)
    assert made.expect(chunk, span, (kind,), 5).span == span


def test_the_next_forward_is_of_the_chunk_that_asks():
    assert position(0).next_forward(0).span == 0
    assert position(0).next_forward(1) is None
    assert position(2).next_forward(1).span == 0 and position(2).next_forward(0) is None
    assert position(4).next_forward(1) is None  # a backward
    assert position(len(PLAN)).next_forward(0) is None
