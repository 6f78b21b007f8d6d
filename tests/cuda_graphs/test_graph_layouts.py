"""Training through graphs on any layout is eager training, bit for bit, with the graphs that formulas say.

Losses, gradients, evaluations and parameters of eight or twenty steps, and the order of the collectives of
a step.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from layout_tools import DENSE_4, MOE_4, SOME, STEPS, Layout, assert_same_layout, train_layout
from marks import full

from fastmp.distributed.collectives import group_rank, group_size
from fastmp.distributed.grid import RankGrid
from fastmp.distributed.groups import ParallelGroups
from fastmp.schedule.schedule import Schedule
from fastmp.schedule.scope import layer_groups
from fastmp.testing.ranks import run_ranks

DENSE_2, MOE_2 = (replace(config, num_layers=2) for config in (DENSE_4, MOE_4))
RECOMPUTED = {"recompute": True}
SHARDED = {**RECOMPUTED, "shard_recompute_input": True}
ZERO_BUBBLE = "zero_bubble"
ATTENTION = ("attention",)


def whole(scope, groups):
    """Whether layers are captured whole."""
    return scope is None and group_size(groups.ep) == 1


def num_runs(layout, scope, groups):
    """The runs of a chunk: one where all can be captured, else one a layer."""
    pp = group_size(groups.pp)
    return 1 if whole(scope, groups) else layout.config.num_layers // (pp * layout.vpp)


def check_counts(layout, scope, groups, manager):
    pp, rank = group_size(groups.pp), group_rank(groups.pp)
    runs, plan = num_runs(layout, scope, groups), manager.plan
    peak = Schedule(pp, layout.microbatches, layout.vpp, None, layout.schedule).peak_in_flight(rank)
    kinds = 3 if layout.schedule == ZERO_BUBBLE else 2
    assert plan.num_lanes == peak and (peak > 1 or plan.num_graphs == kinds * runs)
    assert kinds * runs * peak <= plan.num_graphs <= kinds * runs * peak * layout.vpp
    assert plan.inputs() == peak * runs
    assert manager.static_bytes == plan.nbytes


def ranks_case(rank, world, grid, cases, steps):
    groups = ParallelGroups.create(RankGrid(world_size=world, **grid))
    collectives = []
    for layout, scopes in cases:
        eager = train_layout(layout, groups, graphs=False, steps=steps)
        for scope in scopes:
            graphed = train_layout(layout, groups, graphs=True, scope=scope, steps=steps)
            in_turn = "recompute" in layout.options and not whole(scope, groups)  # part by part of a layer
            assert_same_layout(graphed, eager, in_order=not in_turn)
            check_counts(layout, scope, groups, graphed.manager)
            collectives.append([name for name, _ in graphed.collectives])
    return group_rank(groups.pp), collectives


def compare(steps, world, grid, *cases):
    seen = run_ranks(ranks_case, world, grid, cases, steps, timeout=300)
    for stage, collectives in seen:
        assert collectives == next(own for other, own in seen if other == stage)


PIPELINE, TENSOR, EXPERT = {"pp": 2}, {"tp": 2}, {"ep": 2}
FEW = {"microbatches": 2}
ALL, NONE = (None, ATTENTION, SOME), (None,)

CASES = {
    "interleaved": (2, PIPELINE, (Layout(DENSE_4, vpp=2), NONE), (Layout(MOE_4, vpp=2), (None, SOME))),
    "split backwards": (
        *(2, PIPELINE, (Layout(MOE_4, schedule=ZERO_BUBBLE), (SOME,))),
        (Layout(DENSE_4, schedule=ZERO_BUBBLE, options=RECOMPUTED), (ATTENTION,)),
    ),
    "tensor": (
        *(2, TENSOR, (Layout(DENSE_2, **FEW, sequence_parallel=True), (None, ATTENTION))),
        (Layout(MOE_2, **FEW, sequence_parallel=True), (SOME,)),
        (Layout(DENSE_2, **FEW, options=SHARDED), (ATTENTION,)),
    ),
    "data": (2, {}, (Layout(DENSE_2), NONE), (Layout(MOE_2), (SOME,))),
    "experts": (2, EXPERT, (Layout(MOE_2), ALL), (Layout(MOE_2, **FEW, options=RECOMPUTED), NONE)),
    "experts and tensor": (
        *(4, {**TENSOR, **EXPERT}),
        (Layout(MOE_2, **FEW, sequence_parallel=True, options=RECOMPUTED), NONE),
    ),
}
MORE = {
    "pipelines": (
        *(2, PIPELINE, (Layout(DENSE_4), (None, ATTENTION)), (Layout(DENSE_4, vpp=2), (ATTENTION,))),
        (Layout(MOE_4, vpp=2), (ATTENTION,)),
        (Layout(MOE_4, vpp=2, options=RECOMPUTED), (None, SOME)),
        (Layout(MOE_4, vpp=2, own_buffers=False), (SOME,)),
    ),
    "split backwards": (
        *(2, PIPELINE, (Layout(DENSE_4, schedule=ZERO_BUBBLE), (ATTENTION,))),
        (Layout(MOE_4, schedule=ZERO_BUBBLE), NONE),
        (Layout(DENSE_4, schedule=ZERO_BUBBLE, options=RECOMPUTED), NONE),
        (Layout(DENSE_4, schedule=ZERO_BUBBLE, own_buffers=False), NONE),
    ),
    "tensor": (
        *(2, TENSOR, (Layout(DENSE_2, **FEW), NONE), (Layout(MOE_2, **FEW), NONE)),
        (Layout(MOE_2, **FEW, sequence_parallel=True), NONE),
        (Layout(DENSE_2, **FEW, options=SHARDED), NONE),
        (Layout(MOE_2, **FEW, options=SHARDED), (SOME,)),
    ),
    "experts": (2, EXPERT, (Layout(MOE_2, **FEW, options=RECOMPUTED), (SOME,))),
    "experts and tensor": (4, {**TENSOR, **EXPERT}, (Layout(MOE_2, **FEW), NONE)),
    "interleaved, tensor": (4, {**PIPELINE, **TENSOR}, (Layout(MOE_4, vpp=2, sequence_parallel=True), NONE)),
}


@pytest.mark.parametrize("steps", [*full([8]), pytest.param(STEPS, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_steps_through_graphs_are_eager_ones(case, steps):
    compare(steps, *case)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", MORE.values(), ids=MORE)
def test_steps_on_more_layouts(case):
    compare(STEPS, *case)


def memory_case(rank, world):
    groups = ParallelGroups.create(RankGrid(world_size=2, pp=2))
    managers = [
        train_layout(Layout(DENSE_4, m, vpp=2), groups, graphs=True, steps=4).manager for m in (8, 32)
    ]
    return [(each.static_bytes, each.plan.nbytes, each.backend.nbytes) for each in managers]


@pytest.mark.full
def test_memory_follows_the_pipeline_and_not_the_microbatches():
    for few, many in run_ranks(memory_case, 2):
        assert few[0] == few[1] == many[0] == many[1]
        assert few[2] <= many[2] <= 1.03 * few[2]


@pytest.mark.parametrize(
    "layout",
    [
        Layout(MOE_2, **FEW, options=RECOMPUTED),
        Layout(DENSE_2, **FEW, schedule=ZERO_BUBBLE),
        *full([Layout(DENSE_4, vpp=2), Layout(MOE_2, **FEW)]),
    ],
    ids=lambda layout: f"{layout.schedule}, vpp {layout.vpp}, {layout.options}",
)
def test_a_layer_in_a_run_of_its_own_is_the_same_layer(layout):
    """As where gradients are communicated beside replays; with dropout, with recomputation too."""
    groups = ParallelGroups.alone()
    eager = train_layout(layout, groups, graphs=False, steps=4)
    graphed = train_layout(layout, groups, graphs=True, span_size=1, steps=4)
    assert_same_layout(graphed, eager)
    assert [len(chunk) for chunk in graphed.manager.captured_spans] == [2] * layout.vpp
    assert all(len(run.layers) == 1 for chunk in graphed.manager.captured_spans for run in chunk)


def test_groups_of_layers_are_full_from_the_last_one_on():
    assert layer_groups([1, 5, 1, 2, 3], 3) == [3, 2, 1, 1, 0]
    assert layer_groups([4, 4], None) == [0, 0] and layer_groups([], 3) == []
