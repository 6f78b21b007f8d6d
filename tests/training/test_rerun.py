"""Void steps run again: bit for bit those of a run by all-to-all."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from graphed_trainers import CONFIG, make_graphed
from marks import exhaustive, full
from trainer_tools import make_groups

from fastmp.config import GraphConfig, ParallelConfig
from fastmp.nn.moe.activation_stash import ActivationStash
from fastmp.nn.moe.layer import MoELayer
from fastmp.testing.ranks import run_ranks
from fastmp.training import trainer as trainer_module
from fastmp.training.step_counters import StepCounters

ROOM = {"dispatcher": "symmetric", "symmetric_overflow": "rerun", "activation_stash": 0.0}
LAYERS = GraphConfig(enabled=True, warmup=1)
FULL, STEP = (replace(LAYERS, scope=(scope,)) for scope in ("full", "full_step"))
EP = ParallelConfig(ep=2)
PIPELINE = ParallelConfig(ep=2, pp=2)


def run(groups, layout, graphs, steps, before_step=lambda step: None, **moe):
    """All numbers of some steps, the notes about them, and the trainer."""
    config = replace(CONFIG, moe=replace(CONFIG.moe, **moe))
    trainer = make_graphed(graphs, groups, layout, config, steps=steps)
    seen, notes = [], []
    for step in range(steps):
        before_step(step)
        result = trainer.train_step()
        assert result.dropped_pairs == 0
        seen += [result.loss, result.aux_loss, result.grad_norm, result.expert_counts]
        notes.append(trainer._steps.rerun.note)
    seen += [tensor.detach().clone() for tensor in trainer.model.state_dict().values()]
    return seen, notes, trainer


def assert_all_captured(graphs, manager):
    if graphs is STEP:
        assert manager.num_graphs == 2
        assert "of the step up to its sums" in manager.describe() and "of the update" in manager.describe()
    elif graphs is not None:
        assert manager.num_graphs == manager.plan.num_graphs > 0


def rerun_case(rank, world, layout, graphs, capacity, steps):
    groups = make_groups(world, layout)
    ordinary, never, _ = run(groups, layout, None, steps)
    found, notes, trainer = run(groups, layout, graphs, steps, symmetric_capacity=capacity, **ROOM)
    assert not any(never) and len(found) == len(ordinary) and all(map(torch.equal, found, ordinary))
    assert_all_captured(graphs, trainer.graphs)
    assert all("did not fit; the step was rerun" in note for note in notes if note)
    return [bool(note) for note in notes]


@pytest.mark.parametrize(
    ("layout", "graphs"),
    [(EP, None), *full([(EP, LAYERS), (EP, FULL), (EP, STEP), (PIPELINE, None), (PIPELINE, STEP)])],
    ids=("eager", "layers", "full", "full_step", "pipeline", "pipeline-full_step"),
)
@pytest.mark.parametrize(("capacity", "steps"), [(1.35, 6), *exhaustive([(0.9, 20)])], ids=("some", "all"))
def test_steps_that_do_not_fit_are_those_of_an_all_to_all(layout, graphs, capacity, steps):
    again = run_ranks(rerun_case, 2 * layout.pp, layout, graphs, capacity, steps, timeout=180)
    assert all(each == again[0] for each in again), again
    if capacity < 1:
        assert sum(again[0]) == steps
    else:
        assert 0 < sum(again[0]) < steps


def attach(chunks, groups):
    """Attach a stash of 20 rows to the layers, before their counters are collected."""
    stash = ActivationStash(lambda balanced, capacity: 20)
    layers = [module for chunk in chunks for module in chunk.modules() if isinstance(module, MoELayer)]
    for layer in layers if layers[0].moe.dispatcher == "symmetric" else ():
        layer.stash = stash
    return StepCounters(chunks, groups)


def stash_case(rank, world, graphs, grows, steps):
    groups = make_groups(world, ep=2)
    ordinary, *_ = run(groups, EP, None, steps)
    trainer_module.StepCounters = attach
    if not grows:
        StepCounters.grow = lambda self: []
    found, notes, trainer = run(groups, EP, graphs, steps, dispatcher="symmetric")
    assert all(map(torch.equal, found, ordinary))
    assert_all_captured(graphs, trainer.graphs)
    return notes, trainer._steps.work.counters.stashes[0].rows


SCOPES = [STEP, *full([None, LAYERS, FULL])]


@pytest.mark.parametrize("graphs", SCOPES, ids=lambda graphs: str(graphs and graphs.scope))
def test_a_stash_that_overflows_grows(graphs):
    (notes, rows), other = run_ranks(stash_case, 2, graphs, True, 8, timeout=180)
    assert (notes, rows) == other and rows > 20
    assert "the activation stash grows from 20 to" in notes[0] and "did not fit into the stash" in notes[0]
    assert ("graphs are captured again" in notes[0]) == (graphs is not None)
    assert not any(notes[5:])


@pytest.mark.parametrize(
    "graphs",
    [*full([STEP]), *exhaustive([None, LAYERS, FULL])],
    ids=lambda graphs: str(graphs and graphs.scope),
)
def test_a_stash_that_always_overflows_leaves_all_steps_to_all_to_all(graphs):
    (notes, rows), other = run_ranks(stash_case, 2, graphs, False, 20, timeout=240)
    assert (notes, rows) == other and rows == 20
    assert all("did not fit into the stash; the step was rerun" in note for note in notes)
