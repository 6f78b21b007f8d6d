"""Who writes what of a checkpoint: planned once, for as many saves as ranks have the same shards."""

from __future__ import annotations

import pickle

import pytest
import torch
from checkpoint_tools import rewrite
from torch.distributed.checkpoint import SavePlan
from torch.distributed.checkpoint.metadata import Metadata

from fastmp.distributed.grid import RankGrid
from fastmp.distributed.groups import ParallelGroups
from fastmp.testing.ranks import run_ranks
from fastmp.training.checkpoint import storage
from fastmp.training.checkpoint.checkpointer import Checkpointer
from fastmp.training.checkpoint.storage import PlansDiffer, ShardedTensorRef, ShardSavePlanner


def state(rank: int, world_size: int, tensors: int, rows: int = 2) -> dict[str, ShardedTensorRef]:
    """An equal shard of each tensor, and a whole one that all ranks have."""
    at, shape = (rank * rows,), (world_size * rows,)
    sharded = {
        f"w{n}": ShardedTensorRef(shape, torch.float32, [(at, torch.ones(rows))]) for n in range(tensors)
    }
    return sharded | {"whole": ShardedTensorRef.whole(torch.ones(5))}


def plan(
    planners: list[ShardSavePlanner], states: list[dict[str, ShardedTensorRef]]
) -> tuple[list[SavePlan], Metadata, int]:
    """Plan a save as the library does; also the bytes that the first rank gets from the others."""
    for planner, own in zip(planners, states, strict=True):
        planner.set_up_planner(own)
    offered = [pickle.dumps(planner.create_local_plan()) for planner in planners]
    central, metadata = planners[0].create_global_plan([pickle.loads(each) for each in offered])
    finished = [planner.finish_plan(each) for planner, each in zip(planners, central, strict=True)]
    return finished, metadata, sum(map(len, offered[1:]))


def written(plans: list[SavePlan]) -> list[list[tuple]]:
    return [[(item.index.fqn, *item.index.offset) for item in each.items] for each in plans]


@pytest.mark.parametrize("world_size", [4, 64])
def test_a_plan_holds_while_ranks_have_the_same_parts(world_size, monkeypatch):
    planners = [ShardSavePlanner() for _ in range(world_size)]
    first, metadata, sent = plan(planners, [state(rank, world_size, 20) for rank in range(world_size)])
    assert sent > 500 * (world_size - 1)
    found = written(first)
    assert [[each for each in own if each[0] != "whole"] for own in found] == [
        [(f"w{n}", 2 * rank) for n in range(20)] for rank in range(world_size)
    ]
    assert sum(own.count(("whole", 0)) for own in found) == 1
    monkeypatch.setattr(storage, "check_tiled", None)  # nothing is looked at again
    again, same, sent = plan(planners, [state(rank, world_size, 20) for rank in range(world_size)])
    assert written(again) == found and same == metadata
    assert sent < 250 * (world_size - 1)


def test_a_rank_with_other_parts_has_all_plan_again():
    planners = [ShardSavePlanner() for _ in range(3)]
    plan(planners, [state(rank, 3, 2) for rank in range(3)])
    changed = [state(rank, 3, 2) for rank in range(3)]
    changed[1]["new"] = ShardedTensorRef.whole(torch.ones(2))
    with pytest.raises(PlansDiffer):
        plan(planners, changed)
    for planner in planners:
        planner.forget()
    again, metadata, _ = plan(planners, changed)
    assert ("new", 0) in written(again)[1] and "new" in metadata.state_dict_metadata
    with pytest.raises(PlansDiffer):  # back to the shards of the first plan, which is gone
        plan(planners, [state(rank, 3, 2) for rank in range(3)])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda own: own.pop("w1"), "w1: its shards have 4 elements"),
        (lambda own: own.update(w1=own["whole"]), "ranks 0 and 2 do not agree on the shape of w1"),
    ],
)
def test_a_plan_is_checked_when_it_is_made(spoil, message):
    states = [state(rank, 3, 2) for rank in range(3)]
    spoil(states[2])
    with pytest.raises(ValueError, match=message):
        plan([ShardSavePlanner() for _ in range(3)], states)


def test_checkpoints_by_a_kept_plan_are_those_by_a_new_one(tmp_path):
    """Of two ranks; the second save goes by the plan of the first, in the third a rank has a tensor more."""

    def rank_main(rank, world_size):
        groups = ParallelGroups.create(RankGrid(world_size=world_size))
        states = [state(rank, 2, 3) for _ in range(3)]
        if rank:
            states[2]["new"] = ShardedTensorRef.whole(torch.ones(4))
        kept = Checkpointer(tmp_path / "kept", groups=groups, keep=3)
        choices, choose = [], storage._choose_writers
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(storage, "_choose_writers", lambda offers: choices.append(1) or choose(offers))
            for step, own in enumerate(states):
                kept.save(step, own, {})
        kept.close()
        for step, own in enumerate(states):
            fresh = Checkpointer(tmp_path / f"fresh-{step}", groups=groups)
            fresh.save(step, own, {})
            fresh.close()
        return len(choices)

    assert run_ranks(rank_main, 2) == [2, 0]
    for step in range(3):
        kept, fresh = (tmp_path / run / f"step-{step:08d}" for run in ("kept", f"fresh-{step}"))
        rewrite(kept, lambda manifest: manifest.update(sequence=0))  # their places in a directory differ
        rewrite(fresh, lambda manifest: manifest.update(sequence=0))
        contents = [{path.name: path.read_bytes() for path in each.iterdir()} for each in (kept, fresh)]
        assert contents[0] == contents[1] and len(contents[0]) == 3
