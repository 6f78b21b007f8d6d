"""Steps whose tokens did not fit run again: bit for bit those of a run by all-to-all."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from graphed_trainers import CONFIG, make_graphed
from marks import full
from trainer_tools import make_groups

from fastmp.config import GraphConfig, ParallelConfig
from fastmp.testing.ranks import run_ranks

STEPS = 6
ROOM = {"dispatcher": "symmetric", "symmetric_capacity": 1.35, "symmetric_overflow": "rerun"}


def run(groups, layout, graphs, **moe):
    """All numbers of some steps, which of these were run again, and the trainer."""
    config = replace(CONFIG, moe=replace(CONFIG.moe, **moe))
    trainer = make_graphed(graphs, groups, layout, config, steps=STEPS)
    seen, again = [], []
    for _ in range(STEPS):
        result = trainer.train_step()
        assert result.dropped_pairs == 0
        seen += [result.loss, result.aux_loss, result.grad_norm, result.expert_counts]
        again.append(bool(trainer._rerun.note))
        trainer._rerun.note = ""
    seen += [tensor.detach().clone() for tensor in trainer.model.state_dict().values()]
    return seen, again, trainer


def rerun_case(rank, world, layout, graphs):
    groups = make_groups(world, layout)
    ordinary, never, _ = run(groups, layout, None)
    found, again, trainer = run(groups, layout, graphs, **ROOM)
    assert not any(never) and len(found) == len(ordinary) and all(map(torch.equal, found, ordinary))
    assert graphs is None or trainer.graphs.num_graphs == trainer.graphs.plan.num_graphs > 0
    return again


@pytest.mark.parametrize(
    ("layout", "graphs"),
    [
        (ParallelConfig(ep=2), None),
        *full(
            [
                (ParallelConfig(ep=2), GraphConfig(enabled=True, warmup=1)),
                (ParallelConfig(ep=2, pp=2), None),
            ]
        ),
    ],
    ids=("eager", "graphs", "pipeline"),
)
def test_steps_that_do_not_fit_are_those_of_an_all_to_all(layout, graphs):
    again = run_ranks(rerun_case, 2 * layout.pp, layout, graphs)
    assert all(each == again[0] for each in again) and 0 < sum(again[0]) < STEPS, again


def refused_case(rank, world):
    groups = make_groups(world, ep=2)
    whole = GraphConfig(enabled=True, scope=("full_step",))
    with pytest.raises(ValueError, match=r'symmetric_overflow "rerun" looks at each step .* "full_step"'):
        run(groups, ParallelConfig(ep=2), whole, **ROOM)


@pytest.mark.full
def test_a_step_in_one_graph_cannot_be_run_again():
    run_ranks(refused_case, 2)
