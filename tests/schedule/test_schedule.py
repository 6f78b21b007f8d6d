"""Orders of all schedules: the published ones step by step, and what holds for every accepted size."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import given, settings
from pipeline_tools import accepted_schedules

from fastmp.schedule.schedule import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    Schedule,
    Step,
    integers,
    with_loss,
)

# fmt: off
PP4_VPP2_M8_RANK0 = [
    1, 1, 1, 1, 2, 2, 2, 2, 1, 1,
    1, -2, 1, -2, 2, -2, 2, -2, 2, -1, 2, -1,
    -1, -1, -2, -2, -2, -2, -1, -1, -1, -1,
]
# fmt: on


def test_the_order_everybody_quotes():
    rank0 = Schedule(4, 8, vpp=2).order(0)
    assert integers(rank0) == PP4_VPP2_M8_RANK0
    assert rank0[0] == Step("forward", 0, 0) and rank0[11] == Step("backward", 0, 1)
    assert rank0[-1] == ("backward", 7, 0)
    assert [Schedule(4, 8, vpp=2).warmup(rank) for rank in range(4)] == [10, 8, 6, 4]
    assert [Schedule(4, 8, vpp=2).peak_in_flight(rank) for rank in range(4)] == [11, 9, 7, 5]


def test_without_a_pipeline_each_forward_is_followed_by_its_backward():
    assert Schedule(1, 3).order(0) == tuple(
        Step(kind, m, 0) for m in range(3) for kind in (FORWARD, BACKWARD)
    )
    assert (Schedule(1, 3).warmup(0), Schedule(1, 3).peak_in_flight(0)) == (0, 1)


def test_1f1b():
    assert [Schedule(4, 8).warmup(rank) for rank in range(4)] == [3, 2, 1, 0]
    assert [Schedule(4, 8).peak_in_flight(rank) for rank in range(4)] == [4, 3, 2, 1]
    assert integers(Schedule(4, 4).order(2)) == [1, 1, -1, 1, -1, 1, -1, -1]
    assert [s.microbatch for s in Schedule(4, 4).order(2)] == [0, 1, 0, 2, 1, 3, 2, 3]


def test_with_overlap_one_more_forward_comes_first_and_pairs_are_of_different_microbatches():
    schedule = Schedule(1, 3, overlap=True)
    assert integers(schedule.order(0)) == [1, 1, -1, 1, -1, -1]
    assert [*schedule.pairs(0)] == [1, 3] and schedule.peak_in_flight(0) == 2
    interleaved = Schedule(4, 8, vpp=2, overlap=True)
    assert [interleaved.warmup(rank) for rank in range(4)] == [11, 9, 7, 5]
    assert [interleaved.peak_in_flight(rank) for rank in range(4)] == [12, 10, 8, 6]
    assert [Schedule(4, 8, overlap=True).warmup(rank) for rank in range(4)] == [7, 5, 3, 1]
    assert not Schedule(4, 4, overlap=True).pairs(0) and not Schedule(4, 8).pairs(0)


def test_fewer_microbatches_than_warmup():
    assert integers(Schedule(8, 2).order(0)) == [1, 1, -1, -1]
    assert (Schedule(8, 2).warmup(0), Schedule(8, 2).peak_in_flight(0)) == (2, 2)
    assert integers(Schedule(2, 2, vpp=3).order(0)) == [1, 1, 2, 2, 3, 3, -3, -3, -2, -2, -1, -1]


def test_the_table():
    whole = [(m, c) for first in (0, 4) for c in (0, 1) for m in range(first, first + 4)]
    assert Schedule(4, 8, 2).table() == tuple(whole)
    short = Schedule(3, 5, 2, check=False).table()
    assert short == ((0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1), (3, 0), (4, 0), (3, 1), (4, 1))


def test_zero_bubble_puts_weights_off_rank_by_rank():
    def letters(rank: int) -> str:
        return "".join({FORWARD: "F", BACKWARD_INPUT: "I", BACKWARD_WEIGHT: "W"}[s.kind] for s in steps[rank])

    steps = Schedule(4, 6, name="zero_bubble").orders()
    assert letters(0) == "FFF" + "FIW" * 3 + "IW" * 3
    assert letters(1) == "FF" + "FI" + "FIW" * 3 + "IW" * 2 + "W"
    assert letters(3) == "FI" * 3 + "FIW" * 3 + "WWW"
    assert [s.microbatch for s in steps[3] if s.kind == BACKWARD_WEIGHT] == list(range(6))
    assert [Schedule(4, 6, name="zero_bubble").peak_in_flight(rank) for rank in range(4)] == [4] * 4
    with pytest.raises(ValueError, match=r"step 4, backward_input of microbatch 0 chunk 0, has no integer"):
        integers(steps[0])


@settings(max_examples=300)
@given(planned=accepted_schedules())
def test_every_forward_has_its_backward(planned):
    whole, split = (FORWARD, BACKWARD), (FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)
    allowed = {"1f1b": {whole}, "zero_bubble": {split}, "dualpipe_v": {whole, split}}[planned.name]
    every = {(m, c) for m in range(planned.num_microbatches) for c in range(planned.vpp)}
    for rank, steps in enumerate(planned.orders()):
        assert steps == planned.order(rank)
        kinds = defaultdict(tuple)
        for step in steps:  # forward, then its backwards in turn
            kinds[step.microbatch, step.chunk] += (step.kind,)
        assert kinds.keys() == every and set(kinds.values()) <= allowed


@settings(max_examples=300)
@given(planned=accepted_schedules())
def test_a_warm_up_ends_with_the_first_backward(planned):
    """How much is then in flight: see `test_every_accepted_order_ends_within_its_memory`."""
    pp, number, vpp = planned.pp, planned.num_microbatches, planned.vpp
    for rank, steps in enumerate(planned.orders()):
        first_backward = next(i for i, step in enumerate(steps) if step.kind != FORWARD)
        beside = planned.name != "dualpipe_v" or (rank == pp - 1 and number > pp)
        assert first_backward == min(planned.warmup(rank) + beside, number * vpp)
        if planned.name == "zero_bubble":
            assert planned.peak_in_flight(rank) <= pp + (vpp - 1) * min(planned.group_size, number)
        if planned.name == "dualpipe_v":
            assert planned.peak_in_flight(rank) <= min(2 * pp + 1, 2 * number)
            assert number < 2 * pp or planned.peak_in_flight(rank) == 2 * pp + 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"group_size": 3}, "group_size 3 is less than pp 4"),
        (
            {"num_microbatches": 10},
            "num_microbatches 10 leaves a last group of 2 for group_size 4, fewer",
        ),
        ({"num_microbatches": 3}, "num_microbatches 3 leaves a last group of 3 for group_size 4"),
        ({"num_microbatches": 0}, "num_microbatches must be a positive integer, got 0"),
        ({"vpp": 1.5}, "vpp must be a positive integer, got 1.5"),
        ({"pp": True}, "pp must be a positive integer, got True"),
        ({"group_size": -4}, "group_size must be a positive integer, got -4"),
        (
            {"name": "zero_bubble", "overlap": True},
            "overlap is of 1f1b and dualpipe_v, got 'zero_bubble', whose backwards are two steps each",
        ),
        ({"name": "gpipe"}, "unknown schedule 'gpipe'; choose from 1f1b, zero_bubble, dualpipe_v"),
        ({"name": "dualpipe_v", "vpp": 1}, "dualpipe_v needs vpp 2, got 1; use --vpp 2"),
        (
            {"name": "dualpipe_v", "group_size": 4},
            "dualpipe_v has no microbatch groups, got group_size 4; leave it out",
        ),
    ],
)
def test_refused(arguments, message):
    with pytest.raises(ValueError, match=rf"^Schedule: {re.escape(message)}"):
        Schedule(**{"pp": 4, "num_microbatches": 8, "vpp": 2, **arguments})


@pytest.mark.parametrize("function", [Schedule.order, Schedule.warmup, Schedule.peak_in_flight])
@pytest.mark.parametrize("rank", [-1, 4, 1.0])
def test_a_rank_outside_the_pipeline(function, rank):
    with pytest.raises(ValueError, match=rf"rank must be in \[0, 4\), the pipeline ranks, got {rank}"):
        function(Schedule(4, 8), rank)


def test_a_group_size_is_no_matter_with_one_chunk():
    assert Schedule(4, 7, group_size=2).order(1) == Schedule(4, 7).order(1)
    split = Schedule(4, 7, group_size=5, name="zero_bubble")
    assert split.order(1) == replace(split, group_size=None).order(1)


def test_the_loss_is_one_more_chunk_behind_the_last_one():
    steps = Schedule(2, 2, 2).order(1)
    assert [*integers(with_loss(steps, 1))] == [1, 1, 2, 3, -3, -2, 2, 3, -3, -2, -1, -1]
    split = [str(step) for step in with_loss(Schedule(2, 1, name="zero_bubble").order(1), 0)]
    kinds = (FORWARD, 0), (FORWARD, 1), (BACKWARD, 1), (BACKWARD_INPUT, 0), (BACKWARD_WEIGHT, 0)
    assert split == [f"{kind} of microbatch 0 chunk {chunk}" for kind, chunk in kinds]
