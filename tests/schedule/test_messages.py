"""Messages follow from orders: both ends agree on their order, and nothing deadlocks however sends behave."""

from __future__ import annotations

import pytest

from fastmp.config.specs import PLACEMENTS
from fastmp.schedule.messages import forward_orders, rank_programs
from fastmp.schedule.schedule import BACKWARD, BACKWARD_INPUT, FORWARD, Schedule, Step
from fastmp.schedule.simulate import simulate
from fastmp.schedule.stage_map import StageMap

# pp, microbatches, vpp, group size, schedule
SHAPES = [
    (pp, microbatches, vpp, None, schedule)
    for pp in (1, 2, 3, 4, 8)
    for vpp in (1, 2, 3)
    for microbatches in (pp, 2 * pp, 4 * pp)
    for schedule in ("1f1b", "zero_bubble")
] + [(pp, number, 2, None, "dualpipe_v") for pp in (1, 2, 3, 4, 8) for number in (1, pp, 2 * pp, 3 * pp + 1)]
SHAPES += [
    (4, 6, 1, None, "1f1b"),
    (2, 12, 2, 4, "1f1b"),
    (3, 9, 2, 5, "1f1b"),
    (2, 1, 1, None, "zero_bubble"),
]


def plans(pp, microbatches, vpp, group_size, schedule):
    planned = Schedule(pp, microbatches, vpp, group_size, schedule)
    return rank_programs(planned.orders(), placement=planned.placement)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_both_ends_post_in_the_same_order(shape):
    programs = plans(*shape)
    posted = [[message for post in p.posts for message in post] for p in programs]
    for rank, messages in enumerate(posted):
        assert messages == sorted(messages)
        for peer in range(rank):
            between = [{m.source, m.target} == {rank, peer} for m in messages]
            there = [m for m in posted[peer] if {m.source, m.target} == {rank, peer}]
            assert [m for m, ours in zip(messages, between, strict=True) if ours] == there
    tags = {m: tag for p in programs for m, tag in p.tags.items()}
    assert len(set(tags.values())) == len(tags)
    assert all(p.tags[m] == tags[m] for p in programs for m in p.tags)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_nothing_deadlocks_where_transfers_wait_for_each_other(shape):
    """Every rank does its posts and steps one by one, and waits in each post until the other side is in its
    own: what a backend may do whose transfers of one rank run in a row."""
    programs = plans(*shape)
    lines = []
    for p in programs:
        line = []
        for i, post in enumerate(p.posts):
            line += [{message} for message in post]
            line += [p.steps[i]] if i < len(p.steps) else []
        lines.append(line)
    places, done = [0] * len(lines), set()
    while True:
        heads = [line[place] if place < len(line) else None for line, place in zip(lines, places)]
        ready = [m for head in heads if isinstance(head, set) for m in head]
        met = {m for m in ready if ready.count(m) == 2}
        moved = False
        for rank, head in enumerate(heads):
            if isinstance(head, set):
                head -= met
                done |= met
            if isinstance(head, Step) or head == set():
                places[rank] += 1
                moved = True
        if not moved and not met:
            break
    assert [len(line) for line in lines] == places


@pytest.mark.parametrize(("schedule", "placement"), [("1f1b", "looped"), ("dualpipe_v", "v")])
def test_a_step_runs_after_its_message(schedule, placement):
    stages = StageMap(2, 2, placement)
    for rank, p in enumerate(plans(2, 5 if placement == "v" else 4, 2, None, schedule)):
        there = set()
        for step, post in zip(p.steps, p.posts):
            there |= {m[3:] for m in post if m.target == rank}
            stage = stages.stage(rank, step.chunk)
            if step.kind == FORWARD and stage and stages.rank(stage - 1) != rank:
                assert (FORWARD, stage - 1, step.microbatch) in there
            if step.kind in (BACKWARD, BACKWARD_INPUT) and stage < 3 and stages.rank(stage + 1) != rank:
                assert (BACKWARD, stage + 1, step.microbatch) in there
        assert all(m.source != m.target for post in p.posts for m in post)


def test_messages_travel_while_other_steps_run():
    """Interleaved, the second half of the warm-up leaves a step between a message and its use."""
    first = plans(4, 8, 2, None, "1f1b")[1]
    early = 0
    for i, post in enumerate(first.posts[:-1]):
        step = first.steps[i]
        needed = {(step.microbatch, step.chunk * 4)}
        early += sum((m.microbatch, m.stage) not in needed for m in post if m.target == 1)
    assert early >= 8


def test_forwards_alone_take_any_number_of_microbatches():
    for pp, vpp, number in [(1, 1, 1), (2, 2, 3), (4, 2, 5), (3, 1, 2), (4, 3, 1)]:
        for placement in PLACEMENTS:
            every = forward_orders(StageMap(pp, vpp, placement), number)
            for program in rank_programs(every, forward_only=True, placement=placement):
                assert len(program.steps) == number * vpp


@pytest.mark.parametrize(("pp", "number"), [(1, 3), (2, 1), (4, 8), (5, 7)])
def test_forwards_on_a_v_end_when_the_last_microbatch_can(pp, number):
    run = simulate(forward_orders(StageMap(pp, 2, "v"), number), forward_only=True, placement="v")
    assert run.makespan == 2 * (number - 1) + 2 * pp


def test_orders_that_cannot_run_are_refused():
    forward, backward = Step("forward", 0, 0), Step("backward", 0, 0)
    with pytest.raises(ValueError, match="rank 1 step 0, backward of microbatch 0 chunk 0: its forward has"):
        rank_programs([[forward, backward], [backward, forward]])
    with pytest.raises(ValueError, match="deadlock"):
        crossed = [Step("forward", 0, 1), forward, backward, Step("backward", 0, 1)]
        rank_programs([crossed, crossed])
