"""Training through graphs on any layout is eager training, bit for bit, with the graphs that formulas say.

Losses, gradients, evaluations and parameters of twenty steps, and the order of the collectives of a step.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from layout_tools import DENSE_4, MOE_4, SOME, Layout, assert_same, train

from fastmp.parallel.collectives import group_rank, group_size
from fastmp.parallel.grid import RankGrid
from fastmp.parallel.groups import ParallelGroups
from fastmp.parallel.schedule import peak_in_flight
from fastmp.testing import run_ranks

DENSE_2, MOE_2 = (replace(config, num_layers=2) for config in (DENSE_4, MOE_4))
SEQUENCE, RECOMPUTED = {"sequence_parallel": True}, {"recompute": True}
SHARDED = {**RECOMPUTED, "shard_recompute_input": True}
ZERO_BUBBLE = "zero_bubble"
ATTENTION = ("attention",)


def whole(scope, groups):
    """Whether layers are captured whole."""
    return scope is None and (groups is None or group_size(groups.ep) == 1)


def num_runs(layout, scope, groups):
    """Of a chunk: one where all can be captured, else one a layer."""
    pp = 1 if groups is None else group_size(groups.pp)
    return 1 if whole(scope, groups) else layout.config.num_layers // (pp * layout.vpp)


def check_counts(layout, scope, groups, manager):
    pp, rank = (1, 0) if groups is None else (group_size(groups.pp), group_rank(groups.pp))
    runs, plan = num_runs(layout, scope, groups), manager.plan
    peak = peak_in_flight(rank, pp, layout.microbatches, layout.vpp, None, layout.schedule)
    kinds = 3 if layout.schedule == ZERO_BUBBLE else 2
    turns = layout.microbatches * layout.vpp if peak > 1 else 1  # one after the other they share graphs
    assert plan.num_graphs == kinds * runs * turns
    assert plan.inputs() == peak * runs
    assert manager.static_bytes == plan.nbytes


def ranks_case(rank, world, grid, cases):
    groups = ParallelGroups.create(RankGrid(world_size=world, **grid)) if world > 1 else None
    collectives = []
    for layout, scopes in cases:
        eager = train(layout, groups, graphs=False)
        for scope in scopes:
            graphed = train(layout, groups, graphs=True, scope=scope)
            in_turn = "recompute" in layout.options and not whole(scope, groups)  # part by part of a layer
            assert_same(graphed, eager, in_order=not in_turn)
            check_counts(layout, scope, groups, graphed.manager)
            collectives.append([each.split()[0] for each in graphed.collectives])
    return (0 if groups is None else group_rank(groups.pp)), collectives


def compare(world, grid, *cases):
    seen = run_ranks(ranks_case, world, grid, cases, timeout=300)
    for stage, collectives in seen:
        assert collectives == next(own for other, own in seen if other == stage)


def test_pipelines():
    both, three = (None, ATTENTION), (None, ATTENTION, SOME)
    compare(
        2,
        {"pp": 2},
        (Layout(DENSE_4), both),
        (Layout(DENSE_4, vpp=2), both),
        (Layout(MOE_4, vpp=2), three),
    )


def test_pipelines_with_split_backwards_and_recomputation():
    compare(
        2,
        {"pp": 2},
        (Layout(DENSE_4, schedule=ZERO_BUBBLE), (ATTENTION,)),
        (Layout(MOE_4, schedule=ZERO_BUBBLE), (None, SOME)),
        (Layout(DENSE_4, schedule=ZERO_BUBBLE, options=RECOMPUTED), (None, ATTENTION)),
        (Layout(MOE_4, vpp=2, options=RECOMPUTED), (None, SOME)),
        (Layout(DENSE_4, schedule=ZERO_BUBBLE, own_buffers=False), (None,)),
        (Layout(MOE_4, vpp=2, own_buffers=False), (SOME,)),
    )


@pytest.mark.parametrize("config", (DENSE_2, MOE_2), ids=("dense", "experts"))
def test_tensor_parallel(config):
    part = ATTENTION if config.moe is None else SOME
    compare(
        2,
        {"tp": 2},
        (Layout(config, microbatches=2), (None,)),
        (Layout(config, microbatches=2, options=SEQUENCE), (None, part)),
        (Layout(config, microbatches=2, options=SHARDED), (None, part) if config.moe is None else (part,)),
    )


def test_data_parallel():
    compare(2, {}, (Layout(DENSE_2), (None,)), (Layout(MOE_2), (SOME,)))


def test_expert_parallel():
    compare(
        2,
        {"ep": 2},
        (Layout(MOE_2), (None, ATTENTION, SOME)),
        (Layout(MOE_2, microbatches=2, options=RECOMPUTED), (None, SOME)),
    )


def test_expert_and_tensor_parallel():
    compare(
        4,
        {"tp": 2, "ep": 2},
        (Layout(MOE_2, microbatches=2), (None,)),
        (Layout(MOE_2, microbatches=2, options={**SEQUENCE, **RECOMPUTED}), (None,)),
    )


def test_interleaved_pipeline_with_tensor_parallel():
    compare(4, {"pp": 2, "tp": 2}, (Layout(MOE_4, vpp=2, options=SEQUENCE), (None,)))


def memory_case(rank, world):
    groups = ParallelGroups.create(RankGrid(world_size=2, pp=2))
    managers = [train(Layout(DENSE_4, m, vpp=2), groups, graphs=True, steps=4).manager for m in (8, 32)]
    return [(each.static_bytes, each.plan.nbytes, each.backend.nbytes) for each in managers]


def test_memory_follows_the_pipeline_and_not_the_microbatches():
    for few, many in run_ranks(memory_case, 2):
        assert few[0] == few[1] == many[0] == many[1]
        assert few[2] <= many[2] <= 1.03 * few[2]
