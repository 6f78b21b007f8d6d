"""The simulator beside theory, a longest path and torch's schedules; what deadlocks, what is malformed."""

from __future__ import annotations

import math
import time
from functools import cache
from itertools import pairwise, product

import pytest
import torch.distributed.pipelining.schedules as torch_schedules
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pipeline_tools import accepted_schedules, accepted_sizes, schedules_of

from fastmp.config.specs import PLACEMENTS
from fastmp.schedule.schedule import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    Schedule,
    Step,
)
from fastmp.schedule.simulate import Costs, simulate
from fastmp.schedule.stage_map import StageMap

F00, B00 = Step(FORWARD, 0, 0), Step(BACKWARD, 0, 0)
I00, W00 = Step(BACKWARD_INPUT, 0, 0), Step(BACKWARD_WEIGHT, 0, 0)


def test_the_example():
    run = simulate(Schedule(4, 8, vpp=2).orders())  # a forward takes 1, a backward 2
    assert run.makespan == 8 * 2 * 3 + 3 * 3 and run.busy == (48.0,) * 4
    assert run.bubble == 3 / (8 * 2)
    assert run.peak_activations == (11, 9, 7, 5)
    assert run.timeline(3)[0] == (3, F00, 3.0, 4.0)
    assert run.timeline(0)[-1] == (0, Step(BACKWARD, 7, 0), 55.0, 57.0)


@settings(max_examples=200)
@given(planned=accepted_schedules(), p2p=st.sampled_from([0.0, 0.25]))
def test_every_accepted_order_ends_within_its_memory(planned, p2p):
    run = simulate(planned.orders(), Costs(p2p=p2p), placement=planned.placement)
    assert (run.num_microbatches, run.vpp) == (planned.num_microbatches, planned.vpp)
    assert run.peak_activations == tuple(planned.peak_in_flight(rank) for rank in range(planned.pp))


@settings(max_examples=200)
@given(sizes=accepted_sizes(), forward=st.integers(1, 4), backward=st.integers(1, 8))
def test_the_bubble_of_1f1b_is_that_of_theory(sizes, forward, backward):
    pp, num_microbatches, vpp, _ = sizes
    run = simulate(Schedule(*sizes).orders(), Costs(forward, backward, 0))
    assert run.makespan == (num_microbatches * vpp + pp - 1) * (forward + backward)
    assert math.isclose(run.bubble, (pp - 1) / (num_microbatches * vpp), abs_tol=1e-12)


@settings(max_examples=200)
@given(sizes=accepted_sizes(), times=st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4)))
def test_the_bubble_of_zero_bubble_is_that_of_theory(sizes, times):
    """(pp - 1) max(F, I, F + I - W): with equal times no more than the last rank waits for its first step."""
    pp, num_microbatches, vpp, _ = sizes
    assume(num_microbatches >= pp)
    forward, inputs, weight = times
    run = simulate(Schedule(*sizes, "zero_bubble").orders(), Costs(*times))
    work = num_microbatches * vpp * sum(times)
    assert run.makespan == work + (pp - 1) * max(forward, inputs, forward + inputs - weight)


@pytest.mark.full
@settings(max_examples=100)
@given(sizes=accepted_sizes(), hidden=st.sampled_from([0.0, 0.5, 1.0]), p2p=st.sampled_from([0.0, 0.25]))
def test_with_overlap_every_order_ends_within_its_memory_and_no_later(sizes, hidden, p2p):
    pp, num_microbatches, vpp, _ = sizes
    schedule, costs = Schedule(*sizes, overlap=True), Costs(p2p=p2p, hidden=hidden)
    run = simulate(schedule.orders(), costs, pairs=schedule.all_pairs())
    assert run.peak_activations == tuple(schedule.peak_in_flight(rank) for rank in range(pp))
    path = run.critical_path
    assert path[0].start == 0.0 and path[-1].end == run.makespan
    assert all(after.start - before.end in (0.0, p2p) for before, after in pairwise(path))
    for rank in range(pp):
        assert run.busy[rank] == 3 * num_microbatches * vpp - hidden * len(schedule.pairs(rank))
        for i in schedule.pairs(rank):
            forward, backward = run.timeline(rank)[i : i + 2]
            assert forward[2:] == backward[2:] and forward.end - forward.start == 3 - hidden
            assert forward.step[1:] != backward.step[1:]
    if p2p == 0.0:
        assert run.makespan <= (num_microbatches * vpp + pp - 1) * 3  # of 1F1B


def test_what_cannot_run_at_once_is_refused():
    with pytest.raises(
        ValueError, match=r"rank 0 step 0, forward .* cannot overlap with the next one, backward"
    ):
        simulate([[F00, B00]], pairs=[[0]])
    orders = Schedule(2, 2, overlap=True).orders()
    with pytest.raises(
        ValueError, match=r"deadlock: rank 0 waits in step 2, backward of microbatch 0 chunk 0"
    ):
        simulate(orders, pairs=[[1], [1]])  # each has, in a pair, what the other needs before its own
    with pytest.raises(ValueError, match="cost hidden must be 0 or more, got -1"):
        simulate(orders, Costs(hidden=-1))


def test_messages_and_unequal_stages_take_their_time():
    run = simulate(
        Schedule(2, 1).orders(), Costs(forward=[1, 5], backward_input=[2, 3], backward_weight=0, p2p=0.5)
    )
    assert [e[2:] for e in (*run.timeline(0), *run.timeline(1))] == [(0, 1), (10, 12), (1.5, 6.5), (6.5, 9.5)]
    assert run.bubble == (2 * 12 - 11) / 11
    one_rank = simulate(Schedule(1, 2, vpp=2).orders(), Costs(p2p=9.0))
    assert one_rank.bubble == 0 and one_rank.makespan == 12  # no message leaves the rank


def test_forward_only():
    forwards = [
        [step for step in Schedule(4, 8, vpp=2).order(rank) if step.kind == FORWARD] for rank in range(4)
    ]
    run = simulate(forwards, forward_only=True)
    assert run.makespan == 16 + 3 and run.peak_activations == (1,) * 4
    with pytest.raises(ValueError, match="step 1, backward of microbatch 0 chunk 0: is not a forward"):
        simulate([[F00, B00]], forward_only=True)


def plain(steps: tuple[tuple[Step, ...], ...], stages: StageMap, times: dict[str, float], p2p: float):
    """End of every step by the longest path to it, in plain recursion; None where that goes in circles."""
    place = {}
    for rank, mine in enumerate(steps):
        for i, step in enumerate(mine):
            kind = {BACKWARD: BACKWARD_INPUT}.get(step.kind, step.kind)
            place[kind, step.microbatch, stages.stage(rank, step.chunk)] = (rank, i)
    open_calls = set()

    def arrival(kind: str, microbatch: int, stage: int, rank: int) -> float:
        source, i = place[kind, microbatch, stage]
        return end(source, i) + (p2p if source != rank else 0.0)

    @cache
    def end(rank: int, i: int) -> float:
        if (rank, i) in open_calls:
            raise RecursionError
        open_calls.add((rank, i))
        step = steps[rank][i]
        stage = stages.stage(rank, step.chunk)
        start = end(rank, i - 1) if i else 0.0
        if step.kind == FORWARD and stage:
            start = max(start, arrival(FORWARD, step.microbatch, stage - 1, rank))
        if step.kind in (BACKWARD, BACKWARD_INPUT) and stage < stages.last:
            start = max(start, arrival(BACKWARD_INPUT, step.microbatch, stage + 1, rank))
        open_calls.discard((rank, i))
        return start + times[step.kind]

    try:
        return [[end(rank, i) for i in range(len(mine))] for rank, mine in enumerate(steps)]
    except RecursionError:
        return None


@st.composite
def any_orders(draw: st.DrawFn) -> tuple[tuple[tuple[Step, ...], ...], StageMap]:
    """Complete orders of 1 to 3 ranks, most of them by swapping steps of good ones; many deadlock."""
    pp, vpp, num_microbatches = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.integers(1, 4))
    ranks, name = [], draw(st.sampled_from(schedules_of(vpp)))
    stages = StageMap(pp, vpp, draw(st.sampled_from(PLACEMENTS)))
    for steps in map(list, Schedule(pp, num_microbatches, vpp, name=name, check=False).orders()):
        for i in draw(st.lists(st.integers(0, len(steps) - 2), max_size=6)):
            if steps[i][1:] != steps[i + 1][1:]:  # a microbatch keeps its own turn
                steps[i : i + 2] = steps[i + 1], steps[i]
        ranks.append(tuple(steps))
    return tuple(ranks), stages


@settings(max_examples=500)
@given(drawn=any_orders(), p2p=st.sampled_from([0.0, 1.0, 2.5]))
def test_any_orders_take_their_longest_path(drawn, p2p):
    steps, stages = drawn
    times = {FORWARD: 3, BACKWARD_INPUT: 2, BACKWARD_WEIGHT: 4, BACKWARD: 6}
    placement, expected = stages.placement, plain(steps, stages, times, p2p)
    if expected is None:
        with pytest.raises(
            ValueError, match=r"^simulate: deadlock: rank \d waits in step \d+, (forward|backward)"
        ):
            simulate(steps, Costs(3, 2, 4, p2p), placement=placement)
        return
    run = simulate(steps, Costs(3, 2, 4, p2p), placement=placement)
    assert list(run.ends) == expected
    check_critical_path(run, p2p)


def check_critical_path(run, p2p):
    path = run.critical_path
    assert path[0].start == 0 and path[-1].end == run.makespan
    spent = sum(event.end - event.start for event in path)
    for before, event in pairwise(path):
        gap = event.start - before.end
        if before.rank == event.rank and gap == 0:
            continue
        assert math.isclose(gap, p2p, abs_tol=1e-9)
        spent += gap
        assert before.rank != event.rank and before.step.microbatch == event.step.microbatch
        stages = [run.stages.stage(e.rank, e.step.chunk) for e in (before, event)]
        assert stages[1] - stages[0] == (1 if event.step.kind == FORWARD else -1)
    assert math.isclose(spent, run.makespan)


def test_why_orders_are_refused():
    """Up to 6 ranks and 12 microbatches, each refused one deadlocks or stalls; no accepted one does."""
    deadlocks = slower = refused = 0
    for pp, vpp, num_microbatches, group_size in product(range(2, 7), (2, 3, 4), range(1, 13), range(1, 9)):
        sizes = (pp, num_microbatches, vpp, group_size)
        best = (num_microbatches * vpp + pp - 1) * 3.0
        try:
            steps, fine = Schedule(*sizes).orders(), True
        except ValueError:
            steps, fine = Schedule(*sizes, check=False).orders(), False
        refused += not fine
        try:
            makespan = simulate(steps).makespan
        except ValueError as error:
            assert not fine and "deadlock" in str(error)
            deadlocks += 1
        else:
            assert fine == (makespan == best)
            slower += makespan > best
    assert (refused, deadlocks, slower) == (996, 378, 618)


def test_a_deadlock_names_who_waits_for_whom():
    with pytest.raises(ValueError, match="deadlock") as caught:
        simulate(Schedule(4, 8, 2, 3, check=False).orders())
    assert str(caught.value) == (
        "simulate: deadlock: rank 0 waits in step 21, forward of microbatch 7 chunk 1, for the forward of "
        "microbatch 7 chunk 0 on rank 3; rank 3 waits in step 22, backward of microbatch 3 chunk 0, for the "
        "backward of microbatch 3 chunk 1 on rank 0"
    )


def test_a_long_circle_is_shortened():
    chunk_1_first = [Step(kind, 0, chunk) for chunk in (1, 0) for kind in (FORWARD, BACKWARD)]
    with pytest.raises(
        ValueError, match=r"deadlock: rank 0 waits in step 0, .*; and 2 more ranks$"
    ) as caught:
        simulate([chunk_1_first] * 10)
    assert str(caught.value).count("waits") == 8


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([], "no ranks"),
        ([[F00, B00], []], "rank 1 has no steps"),
        ([[F00, "backward"]], "rank 0 step 1, 'backward': is not a Step"),
        ([[F00, ["backward", 0, 0]]], r"rank 0 step 1, \['backward', 0, 0\]: is not a Step"),
        (
            [[Step("send", 0, 0)]],
            "rank 0 step 0, send of microbatch 0 chunk 0: kinds are forward, backward, ",
        ),
        (
            [[F00, B00, Step(FORWARD, -1, 0)]],
            "step 2, forward of microbatch -1 chunk 0: microbatch must be an",
        ),
        ([[F00, B00, Step(FORWARD, 1, 0.5)]], "step 2, forward of microbatch 1 chunk 0.5: chunk must be an"),
        ([[F00, B00], [F00, F00, B00]], "rank 1 step 1, forward of microbatch 0 chunk 0: has run as step 0"),
        ([[B00, F00]], "rank 0 step 0, backward of microbatch 0 chunk 0: its forward has not run"),
        ([[F00, B00, B00]], "step 2, backward of microbatch 0 chunk 0: has run backward before"),
        ([[F00, I00, W00, W00]], "step 3, backward_weight of microbatch 0 chunk 0: has run backward before"),
        (
            [[F00, W00, I00]],
            "step 1, backward_weight of microbatch 0 chunk 0: its backward_input has not run",
        ),
        ([[F00, I00, B00]], "step 2, backward of microbatch 0 chunk 0: its backward_weight is to come"),
        ([[F00, I00]], "step 0, forward of microbatch 0 chunk 0: its backward_weight is missing"),
        ([[F00, B00], [F00]], "rank 1 step 0, forward of microbatch 0 chunk 0: its backward is missing"),
        (
            [Schedule(2, 3).order(0), Schedule(2, 2).order(1)],
            "rank 0 step 3, forward of microbatch 2 chunk 0: rank 1 does not run this microbatch",
        ),
        (
            [Schedule(2, 2).order(0), Schedule(2, 3).order(1)],
            "rank 1 step 4, forward of microbatch 2 chunk 0: rank 0 does not",
        ),
        ([[Step(FORWARD, 1, 0), Step(BACKWARD, 1, 0)]], "no rank has the forward of microbatch 0 chunk 0"),
    ],
)
def test_a_malformed_order_names_the_step(steps, message):
    with pytest.raises(ValueError, match=rf"^simulate: .*{message}"):
        simulate(steps)


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        (Costs(p2p=-1), "cost p2p must be 0 or more, got -1"),
        (Costs(forward=math.nan), "cost forward of stage 0 must be 0 or more, got nan"),
        (Costs(backward_weight=[1, 1, -2, 1]), "cost backward_weight of stage 2 must be 0 or more, got -2"),
        (Costs(backward_input=[1, 2]), "cost backward_input has 2 values for 4 stages"),
    ],
)
def test_costs_that_are_none(costs, message):
    with pytest.raises(ValueError, match=message):
        simulate(Schedule(2, 2, vpp=2).orders(), costs)


def test_a_thousand_stages():
    steps = Schedule(1024, 64).orders()
    began = time.process_time()
    run = simulate(steps, Costs(p2p=0.5))
    assert len(run.critical_path) >= 2 * 1024
    assert time.process_time() - began < 5.0
    assert run.bubble > 1023 / 64 and run.peak_activations[0] == 64
    assert simulate(steps).bubble == 1023 / 64
    with pytest.raises(ValueError, match="deadlock") as caught:
        simulate(Schedule(256, 257, 2, 255, check=False).orders())
    assert len(str(caught.value)) < 2000


KINDS = {
    torch_schedules.FORWARD: FORWARD,
    torch_schedules.FULL_BACKWARD: BACKWARD,
    torch_schedules.BACKWARD_INPUT: BACKWARD_INPUT,
    torch_schedules.BACKWARD_WEIGHT: BACKWARD_WEIGHT,
}


def torch_schedule(name: str, pp: int, num_microbatches: int, vpp: int):
    """A schedule of torch.distributed.pipelining without ranks: its slots, None if empty, and group size."""
    made = object.__new__(getattr(torch_schedules, name))
    made._num_stages = made.pp_group_size = pp
    made._n_microbatches, made.n_local_stages = num_microbatches, vpp
    if name == "Schedule1F1B":
        slots = made._get_pipeline_order()
        ranks = [[a for a in slots[rank] if a and a.computation_type in KINDS] for rank in range(pp)]
        for i, action in enumerate(ranks[-1]):  # listed one too high, unlike what torch then runs
            if action.computation_type == torch_schedules.FORWARD:
                ranks[-1][i] = action._replace(microbatch_index=action.microbatch_index - 1)
        return ranks, pp
    made.number_of_rounds = max(1, num_microbatches // pp)
    made.microbatches_per_round = num_microbatches // made.number_of_rounds
    made.pipeline_order = {rank: made._calculate_single_rank_operations(rank) for rank in range(pp)}
    return [made.pipeline_order[rank] for rank in range(pp)], made.microbatches_per_round


def torch_slots(ranks, pp: int, vpp: int):
    """When each action runs by torch's own account, in slots as long as any step: None where a rank idles."""
    made = object.__new__(torch_schedules.ScheduleInterleavedZeroBubble)
    made.pp_group_size = pp
    made.pipeline_order = {rank: [a for a in actions if a] for rank, actions in enumerate(ranks)}
    return made._add_bubbles_to_actions(pp * vpp)


TORCH = [
    ("Schedule1F1B", "1f1b", 4, 8, 1),
    ("Schedule1F1B", "1f1b", 5, 5, 1),
    *(
        (name, schedule, *sizes)
        for name, schedule in (
            ("ScheduleInterleaved1F1B", "1f1b"),
            ("ScheduleInterleavedZeroBubble", "zero_bubble"),
        )
        for sizes in ((4, 8, 2), (2, 6, 3), (4, 10, 2), (3, 4, 2), (4, 4, 3), (8, 24, 2))
    ),
]


@pytest.mark.parametrize(("name", "schedule", "pp", "num_microbatches", "vpp"), TORCH)
def test_torch_has_the_same_orders_and_bubbles(name, schedule, pp, num_microbatches, vpp):
    slots, group_size = torch_schedule(name, pp, num_microbatches, vpp)
    torch_orders = tuple(
        tuple(Step(KINDS[a.computation_type], a.microbatch_index, a.stage_index // pp) for a in rank if a)
        for rank in slots
    )
    ours = Schedule(pp, num_microbatches, vpp, group_size, schedule).orders()
    assert ours == torch_orders
    actions = {rank: [a for a in row if a] for rank, row in enumerate(slots)}
    torch_schedules._validate_schedule(actions, pp, pp * vpp, num_microbatches)
    torch_schedules._add_send_recv(actions, lambda stage: stage % pp, pp * vpp)  # raises on a deadlock
    if schedule == "1f1b":  # every action one slot
        run = simulate(ours, Costs(1, 1, 0))
        timed = torch_slots(slots, pp, vpp)
        assert [[i for i, a in enumerate(timed[rank]) if a] for rank in range(pp)] == list(run.starts)
    else:  # the slots that torch pads its orders to
        assert {len(row) for row in slots} == {simulate(ours, Costs(1, 1, 1)).makespan}
