"""The activation stash inside graphs: steps through them are eager steps with an all-to-all, bit for bit.

Every step begins with NaN in the whole ring, and the graphs with NaN in what their pools give out again.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from layout_tools import MOE_4, Layout, assert_same_layout, train_layout
from marks import exhaustive, full

from fastmp.distributed.grid import RankGrid
from fastmp.distributed.groups import ParallelGroups
from fastmp.ops.stash import HEAD, HIGH_WATER, OVERFLOWED, TAIL
from fastmp.testing.ranks import run_ranks

MOE_2 = replace(MOE_4, num_layers=2)
FEW = {"microbatches": 2}


def stashed(layout, rows):
    moe = replace(layout.config.moe, dispatcher="symmetric")
    return replace(layout, config=replace(layout.config, moe=moe), stash=rows)


def steps_case(rank, world, grid, layout, steps, options):
    groups = ParallelGroups.create(RankGrid(world_size=world, **grid))
    ordinary = train_layout(layout, groups, graphs=False, steps=steps)
    eager = train_layout(stashed(layout, 4000), groups, graphs=False, steps=steps)
    assert_same_layout(eager, ordinary, in_order=False)
    graphed = train_layout(stashed(layout, 4000), groups, graphs=True, steps=steps, **options)
    assert_same_layout(graphed, ordinary, in_order=False)
    assert graphed.manager.num_graphs == graphed.manager.plan.num_graphs > 0
    if layout.options.get("recompute"):
        assert not graphed.stash.rings
        return
    states = [trained.stash.state for trained in (eager, graphed)]
    assert all(state[OVERFLOWED] == 0 and state[HEAD] == state[TAIL] for state in states)
    assert states[0][HIGH_WATER] == states[1][HIGH_WATER] > 0
    # A ring of exactly so many rows is enough, however often entries begin at row 0 again.
    rows = int(states[0][HIGH_WATER])
    snug = train_layout(stashed(layout, 2 * rows), groups, graphs=True, steps=steps, **options)
    assert_same_layout(snug, ordinary, in_order=False)
    assert snug.stash.state[OVERFLOWED] == 0


CASES = {
    "short": (2, {"ep": 2}, Layout(replace(MOE_4, num_layers=1), **FEW), 4, {}),
    "pipeline": (4, {"pp": 2, "ep": 2}, Layout(MOE_2), 5, {}),
    "verified": (2, {"ep": 2}, Layout(MOE_2, **FEW), 6, {"verify_every": 1}),
    "long": (2, {"ep": 2}, Layout(MOE_2, **FEW), 20, {}),
    "zero bubble": (4, {"pp": 2, "ep": 2}, Layout(MOE_2, schedule="zero_bubble"), 6, {}),
    "virtual stages": (4, {"pp": 2, "ep": 2}, Layout(MOE_4, vpp=2), 6, {}),
    "recomputed": (2, {"ep": 2}, Layout(MOE_2, **FEW, options={"recompute": True}), 6, {}),
    "tensor": (4, {"tp": 2, "ep": 2}, Layout(MOE_2, **FEW, sequence_parallel=True), 6, {}),
    "expert tensor": (4, {"ep": 2, "etp": 2}, Layout(MOE_2, **FEW), 6, {}),
    "experts only": (2, {"ep": 2}, Layout(MOE_2, **FEW), 6, {"scope": ("moe",)}),
}
QUICK = ("short",)
FULL_SET = ("pipeline", "verified", "recomputed", "tensor", "experts only")
OTHERS = [name for name in CASES if name not in QUICK + FULL_SET]


@pytest.mark.parametrize("name", [*QUICK, *full(FULL_SET), *exhaustive(OTHERS)])
def test_steps_with_a_stash_are_those_of_an_all_to_all(name):
    run_ranks(steps_case, *CASES[name], timeout=280)
