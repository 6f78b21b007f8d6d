"""Experts over ranks inside graphs: steps through them are eager steps with an all-to-all, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
from layout_tools import MOE_4, Layout, assert_same_layout, train_layout
from marks import full

from fastmp.distributed.collectives import group_size
from fastmp.distributed.grid import RankGrid
from fastmp.distributed.groups import ParallelGroups
from fastmp.testing.ranks import run_ranks

MOE_2 = replace(MOE_4, num_layers=2)
FEW = {"microbatches": 2}
RECOMPUTED = {"options": {"recompute": True}}
EXCHANGED = ("moe",)


def shared(layout):
    config = layout.config
    return replace(layout, config=replace(config, moe=replace(config.moe, dispatcher="symmetric")))


def steps_case(rank, world, grid, layout, scopes, steps):
    groups = ParallelGroups.create(RankGrid(world_size=world, **grid))
    ordinary = train_layout(layout, groups, graphs=False, steps=steps)
    eager = train_layout(shared(layout), groups, graphs=False, steps=steps)
    assert_same_layout(eager, ordinary, in_order=False)
    for scope in scopes:
        graphed = train_layout(shared(layout), groups, graphs=True, scope=scope, steps=steps)
        assert_same_layout(graphed, eager)
        assert not any(name == "all_to_all" for name, _ in graphed.collectives)
        runs = 1 if scope is None else layout.config.num_layers // (group_size(groups.pp) * layout.vpp)
        assert [len(chunk) for chunk in graphed.manager.captured_spans] == [runs] * layout.vpp
        assert graphed.manager.num_graphs == graphed.manager.plan.num_graphs > 0


@pytest.mark.parametrize(
    ("world", "grid", "layout", "scopes", "steps"),
    [
        (2, {"ep": 2}, Layout(replace(MOE_4, num_layers=1), **FEW), (None,), 4),
        *full(
            [
                (2, {"ep": 2}, Layout(MOE_2, **FEW), (None, EXCHANGED), 20),
                (2, {"ep": 2}, Layout(MOE_2, **FEW, **RECOMPUTED), (None, EXCHANGED), 6),
                (4, {"tp": 2, "ep": 2}, Layout(MOE_2, **FEW, sequence_parallel=True), (EXCHANGED,), 6),
                (4, {"pp": 2, "ep": 2}, Layout(MOE_4, vpp=2), (None,), 6),
            ]
        ),
    ],
    ids=("short", "experts", "recomputed", "tensor", "pipeline"),
)
def test_steps_with_experts_in_graphs_are_eager_ones(world, grid, layout, scopes, steps):
    run_ranks(steps_case, world, grid, layout, scopes, steps, timeout=200)
