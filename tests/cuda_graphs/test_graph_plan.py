"""Plans of graphs and buffers: as many as is in flight, and nothing is lost while it is needed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastmp.schedule.buffer_plan import (
    Lease,
    SpanSpec,
    TensorSpec,
    plan_buffers,
)
from fastmp.schedule.buffer_plan import plan_errors as problems
from fastmp.schedule.schedule import BACKWARD, FORWARD, Schedule, Step
from fastmp.schedule.scope import captured_segments

HIDDEN = TensorSpec((4, 2, 8), "bfloat16")
INDICES = TensorSpec((8, 2), "int32")
FRONT = SpanSpec("attention to preprocess", (HIDDEN,), (HIDDEN,))
BACK = SpanSpec("mlp", (HIDDEN, INDICES), (HIDDEN,))
ROUTER = SpanSpec("attention to router", (HIDDEN,), (HIDDEN, HIDDEN))


def chunks(vpp, *runs):
    return [runs] * vpp


@pytest.mark.parametrize("num_microbatches", (8, 32))
def test_buffers_follow_what_is_in_flight(num_microbatches):
    plans = [
        plan_buffers(Schedule(4, num_microbatches, 2).order(rank), chunks(2, FRONT, FRONT))
        for rank in range(4)
    ]
    assert [own.inputs(HIDDEN) for own in plans] == [22, 18, 14, 10]
    assert [len(own.buffers) - own.inputs() for own in plans] == [1] * 4  # gradients
    lanes = [own.num_lanes for own in plans]
    assert lanes == [Schedule(4, num_microbatches, 2).peak_in_flight(rank) for rank in range(4)]
    if num_microbatches > 8:  # each lane holds both chunks in turn
        assert [own.num_graphs for own in plans] == [2 * 2 * 2 * most for most in lanes]
    assert [own.nbytes for own in plans] == [(n + 1) * 128 for n in (22, 18, 14, 10)]


def test_graphs_of_one_rank():
    runs = chunks(1, FRONT, BACK)
    in_turn = plan_buffers(Schedule(1, 4).order(0), runs)
    assert in_turn.num_graphs == 2 * 2 and in_turn.inputs(HIDDEN) == 2 and in_turn.inputs(INDICES) == 1
    assert [replay.graph for replay in in_turn.replays] == [0, 1, 2, 3] * 4
    assert [replay.span for replay in in_turn.replays] == [0, 1, 1, 0] * 4
    forwards = [Step(FORWARD, i, 0) for i in range(4)]
    overlapping = plan_buffers([*forwards, *(Step(BACKWARD, i, 0) for i in range(4))], runs)
    assert overlapping.num_graphs == 2 * 2 * 4 and overlapping.inputs(HIDDEN) == 2 * 4
    pipeline = plan_buffers(Schedule(4, 32).order(1), runs)
    assert pipeline.num_graphs == 2 * 2 * 3 and pipeline.inputs(HIDDEN) == 2 * 3


def test_split_backwards_hold_inputs_and_gradients_until_their_weights_are_done():
    for rank in range(4):
        own = plan_buffers(Schedule(4, 8, name="zero_bubble").order(rank), chunks(1, FRONT))
        assert own.num_graphs == 3 * 4 and own.num_lanes == 4
        assert own.inputs() == Schedule(4, 8, name="zero_bubble").peak_in_flight(rank)
        assert rank < len(own.buffers) - own.inputs() <= 4  # deferred weight gradients


def test_microbatches_of_a_lane_share_graphs():
    pair = [Step(FORWARD, 0, 0), Step(BACKWARD, 0, 0)]
    both = [Step(FORWARD, 1, 0), Step(FORWARD, 2, 0), Step(BACKWARD, 1, 0), Step(BACKWARD, 2, 0)]
    again = [step._replace(microbatch=step.microbatch + 3) for step in (*pair, *both)]
    own = plan_buffers([*pair, *both, *again], chunks(1, FRONT))
    assert [replay.graph for replay in own.replays] == [0, 1, 0, 2, 1, 3] * 2
    assert [replay.buffers for replay in own.replays[:6]] == [replay.buffers for replay in own.replays[6:]]


def test_rounds_share_buffers_where_runs_need_different_numbers_of_them():
    own = plan_buffers(Schedule(1, 3).order(0), chunks(1, ROUTER, FRONT)).replays
    buffers = [replay.buffers for replay in own]
    assert [replay.graph for replay in own] == [0, 1, 2, 3] * 3 and buffers == buffers[:4] * 3


@given(
    pp=st.integers(1, 5),
    vpp=st.integers(1, 3),
    groups=st.integers(1, 3),
    schedule=st.sampled_from(("1f1b", "zero_bubble")),
    runs=st.lists(st.lists(st.sampled_from((FRONT, BACK, ROUTER)), max_size=3), min_size=3, max_size=3),
)
def test_nothing_is_lost_while_it_is_needed(pp, vpp, groups, schedule, runs):
    for rank in range(pp):
        own = plan_buffers(Schedule(pp, pp * groups, vpp, name=schedule).order(rank), runs[:vpp])
        assert not list(problems(own))
        alike = plan_buffers(
            Schedule(pp, pp * groups, vpp, name=schedule).order(rank), chunks(vpp, FRONT, FRONT)
        )
        assert alike.inputs() == 2 * Schedule(pp, pp * groups, vpp, name=schedule).peak_in_flight(rank)
        seen = {}
        for replay in own.replays:  # a graph has its span and its buffers for good
            what = (replay.step.kind, replay.step.chunk, replay.span, replay.buffers)
            assert seen.setdefault(replay.graph, what) == what


@given(pp=st.integers(1, 4), vpp=st.integers(1, 3), groups=st.integers(1, 3))
def test_two_steps_at_once_share_no_buffer(pp, vpp, groups):
    """An order has the forward of a pair first: it holds its buffers before the backward gives up its own."""
    schedule = Schedule(pp, pp * groups, vpp, overlap=True)
    for rank in range(pp):
        order = schedule.order(rank)
        own = plan_buffers(order, chunks(vpp, FRONT, BACK))
        assert not list(problems(own))
        held = {step: {b for r in own.replays if r.step == step for b in r.buffers} for step in order}
        for forward, backward in (order[i : i + 2] for i in schedule.pairs(rank)):
            first = Step(FORWARD, *backward[1:])  # whose inputs the backward reads, too
            assert held[forward].isdisjoint(held[backward] | held[first])


@given(data=st.data(), rank=st.integers(0, 2), schedule=st.sampled_from(("1f1b", "zero_bubble")))
def test_a_lease_cut_short_is_found(data, rank, schedule):
    own = plan_buffers(Schedule(3, 6, 2, name=schedule).order(rank), chunks(2, FRONT, BACK))
    long = [i for i, lease in enumerate(own.leases) if lease.last > lease.first]
    i = data.draw(st.sampled_from(long))
    leases = list(own.leases)
    leases[i] = leases[i]._replace(last=leases[i].last - 1)
    found = list(problems(replace(own, leases=tuple(leases))))
    assert len(found) == 1 and f"buffer {leases[i].buffer} is not held from the " in found[0]


def test_a_buffer_that_is_reused_too_early_is_found():
    own = plan_buffers(Schedule(2, 4).order(0), chunks(1, FRONT))
    first, second = (replay.buffers[0] for replay in own.replays[:2])
    replays = [
        replay._replace(buffers=tuple(first if buffer == second else buffer for buffer in replay.buffers))
        for replay in own.replays
    ]
    leases = [Lease(first if lease.buffer == second else lease.buffer, *lease[1:]) for lease in own.leases]
    found = list(problems(replace(own, replays=tuple(replays), leases=tuple(leases))))
    span = "chunk 0, span 'attention to preprocess'"
    assert found[0] == (
        f"buffer 0 is still needed by the backward of microbatch 0 {span} when the forward of microbatch 1 "
        f"{span} writes to it"
    )


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([(FORWARD, 0, 0)], "the backward of microbatch 0 chunk 0 is missing"),
        ([(BACKWARD, 0, 0)], "step 0, backward of microbatch 0 chunk 0, has no forward before it"),
        (
            [(FORWARD, 0, 1)],
            "step 0, forward of microbatch 0 chunk 1, is of a chunk that does not exist; the plan has 1",
        ),
        ([(FORWARD, 0, 0)] * 2, "step 1, forward of microbatch 0 chunk 0, is there twice"),
        (
            [(FORWARD, 0, 0), ("backward_weight", 0, 0)],
            "step 1, backward_weight of microbatch 0 chunk 0, has no backward_input before it",
        ),
        ([("forwards", 0, 0)], "step 0, forwards of microbatch 0 chunk 0, has an unknown kind"),
    ],
)
def test_orders_that_cannot_be(steps, message):
    with pytest.raises(ValueError, match=f"graphs: {message}"):
        plan_buffers(steps, chunks(1, FRONT))


def test_unknown_dtypes():
    with pytest.raises(ValueError, match="unknown dtype 'float31'"):
        _ = TensorSpec((1,), "float31").nbytes


def test_scopes():
    front = {"attention": True, "router": True, "preprocess": True, "shared_experts": True}
    alone = front | dict.fromkeys(("dispatch", "experts", "combine"), True)
    divided = front | dict.fromkeys(("dispatch", "experts", "combine"), False)
    assert captured_segments(None, alone) == captured_segments(["full"], alone) == set(alone)
    assert captured_segments(None, divided) == set(front)
    told = divided | {"preprocess": False}  # by other hosts, how many tokens there are
    assert captured_segments(None, told) == {"attention", "router"}
    assert captured_segments(["attn", "mlp"], alone) == {"attention"}
    assert captured_segments(["moe"], alone) == set(alone) - {"attention"}
    assert captured_segments(["moe_router", "moe_preprocess"], divided) == set(front) - {"attention"}
    assert captured_segments(["experts", "shared_experts"], alone) == {"experts", "shared_experts"}
    for scope in ("moe", "full"):
        message = f"scope '{scope}' cannot be captured, because dispatch, experts, combine must run eagerly"
        with pytest.raises(ValueError, match=message + r' \(not with moe.dispatcher "symmetric"'):
            captured_segments(["attn", scope], divided)
    with pytest.raises(
        ValueError, match="because preprocess, dispatch, experts, combine must run eagerly; wi"
    ):
        captured_segments(["moe"], told)
    with pytest.raises(ValueError, match="a scope with experts, combine needs 'shared_experts' as well"):
        captured_segments(["experts", "combine"], alone)
    with pytest.raises(ValueError, match="a scope with shared_experts needs 'preprocess' as well"):
        captured_segments(["router", "shared_experts"], divided)
    with pytest.raises(ValueError, match=r"scope \['mlp'\] names no segment; choose from \['attention'"):
        captured_segments(["mlp"], divided)
