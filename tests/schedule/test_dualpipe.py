"""DualPipeV: any number of microbatches ends, and takes no longer and no more memory than torch's order."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch.distributed.pipelining.schedules as torch_schedules
from hypothesis import given, settings
from hypothesis import strategies as st

from fastmp.schedule.schedule import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Schedule, Step
from fastmp.schedule.simulate import Costs, simulate
from fastmp.schedule.stage_map import StageMap

COMPUTATION = torch_schedules._ComputationType
KINDS = {
    COMPUTATION.FORWARD: FORWARD,
    COMPUTATION.FULL_BACKWARD: BACKWARD,
    COMPUTATION.BACKWARD_INPUT: BACKWARD_INPUT,
    COMPUTATION.BACKWARD_WEIGHT: BACKWARD_WEIGHT,
}


def planned(pp: int, number: int, **options) -> Schedule:
    return Schedule(pp, number, 2, name="dualpipe_v", **options)


def run_of(schedule: Schedule, costs: Costs | None = None):
    return simulate(schedule.orders(), costs, pairs=schedule.all_pairs(), placement=schedule.placement)


def torch_run(pp: int, number: int, costs: Costs, overlap: bool):
    """The simulation of torch's orders."""
    made, orders, pairs = SimpleNamespace(pp_group_size=pp, _n_microbatches=number), [], []
    for rank in range(pp):
        actions = torch_schedules.ScheduleDualPipeV._calculate_single_rank_operations(made, rank)
        groups = [action.sub_actions or (action,) for action in actions]
        steps = [
            Step(KINDS[a.computation_type], a.microbatch_index, a.stage_index) for g in groups for a in g
        ]
        orders.append([step._replace(chunk=step.chunk // pp) for step in steps])
        starts = [sum(map(len, groups[:i])) for i in range(len(groups))]
        pairs.append([start for start, group in zip(starts, groups) if len(group) > 1])
    return simulate(orders, costs, pairs=pairs if overlap else (), placement="v")


def test_the_order_of_four_ranks():
    letters = {FORWARD: "F", BACKWARD: "B", BACKWARD_INPUT: "I", BACKWARD_WEIGHT: "W"}
    schedule = planned(4, 8, overlap=True)
    found = [
        " ".join("|".join(f"{letters[s.kind]}{s.chunk}" for s in group) for group in schedule.together(rank))
        for rank in range(4)
    ]
    assert found[0] == (
        "F0 F0 F0 F0 F0 F0 F0 F1 I1 W1 F1 I1 W1 F1 I1 W1 F1 F0|B1 F1|B0 B1 F1|B0 B1 F1|B0 B1 F1|B0 "
        "B1 I0 W0 I0 W0 I0 W0 I0 W0"
    )
    assert found[3] == (
        "F0 F1 F0 F1 F0 F1 F0 F1 F0|B1 F1|B0 F0|B1 F1|B0 F0|B1 F1|B0 F0|B1 F1|B0 "
        "B1 B0 B1 B0 I1 I0 I1 I0 W1 W0 W1 W0"
    )
    assert schedule.stages.stages(0) == (0, 7) and schedule.stages.stages(3) == (3, 4)
    assert [schedule.peak_in_flight(rank) for rank in range(4)] == [9] * 4
    assert [schedule.warmup(rank) for rank in range(4)] == [8] * 4
    alone = planned(4, 8)
    assert alone.orders() == schedule.orders() and not any(alone.all_pairs())


@settings(max_examples=50)
@given(pp=st.integers(1, 12), number=st.integers(1, 40), p2p=st.sampled_from([0.0, 0.25]))
def test_any_number_of_microbatches_ends(pp, number, p2p):
    """With or without overlap; with equal times ranks idle pp - 1 on average, as with zero bubble."""
    for overlap in (False, True):
        schedule = planned(pp, number, overlap=overlap)
        run = run_of(schedule, Costs(p2p=p2p))
        assert max(run.peak_activations) == min(2 * pp + 1, 2 * number)
        for rank in range(pp):
            for i in schedule.pairs(rank):
                forward, backward = run.timeline(rank)[i : i + 2]
                assert forward[2:] == backward[2:] and forward.step.microbatch > backward.step.microbatch
                assert forward.step.chunk != backward.step.chunk
        if p2p == 0.0 and not overlap and number >= 2 * pp:
            assert run.makespan == 6 * number + pp - 1


COSTS = [Costs(), Costs(1, 2, 1), Costs(1, 1.5, 0.5), Costs(hidden=1.0), Costs(1, 1.2, 0.8, hidden=0.7)]


@pytest.mark.parametrize("costs", COSTS, ids=str)
def test_it_is_no_worse_than_torchs(costs):
    for pp, times in ((2, 2), (3, 3), (4, 2), (4, 5), (8, 2), (8, 4)):
        overlap = costs.hidden > 0
        ours, theirs = (
            run_of(planned(pp, pp * times, overlap=overlap), costs),
            torch_run(pp, pp * times, costs, overlap),
        )
        # The last rank pairs its first backward, which torch's runs alone: for some costs a little later.
        assert ours.makespan <= theirs.makespan * (1.005 if overlap else 1.0)
        assert max(ours.peak_activations) <= max(theirs.peak_activations)


@pytest.mark.parametrize("pp", [2, 4, 8, 16])
def test_it_overlaps_more_in_less_memory_than_interleaved_1f1b(pp):
    for times in (2, 4, 8):
        interleaved = Schedule(pp, pp * times, 2, overlap=True)
        for hidden in (0.5, 1.0):
            ours, other = (
                run_of(each, Costs(hidden=hidden))
                for each in (planned(pp, pp * times, overlap=True), interleaved)
            )
            assert ours.makespan <= other.makespan
            assert max(ours.peak_activations) == 2 * pp + 1 < max(other.peak_activations) == 3 * pp


def test_stages_on_a_v_and_looped():
    for pp in (1, 2, 5):
        for vpp in (1, 2, 3):
            for placement in ("looped", "v"):
                stages = StageMap(pp, vpp, placement)
                every = [stages.stages(rank) for rank in range(pp)]
                assert sorted(stage for own in every for stage in own) == list(range(pp * vpp))
                for rank, own in enumerate(every):
                    assert [(stages.rank(s), stages.chunk(s)) for s in own] == [(rank, c) for c in range(vpp)]
                    assert stages.of_rank(range(pp * vpp), rank) == list(own)
    assert StageMap(4, 2, "v").ends_meet and StageMap(1).ends_meet
    assert not StageMap(4, 2).ends_meet and not StageMap(4, 3, "v").ends_meet
    assert StageMap(4, 2, "v").without_parameters([1, 1, 1, 0, 0, 1, 1, 1]) == [3]
    assert StageMap(4, 2).without_parameters([0, 1, 1, 0, 0, 0, 1, 0]) == []
    with pytest.raises(ValueError, match="expected placement 'looped' or 'v', got 'w'"):
        StageMap(2, 2, "w")
