"""Training in FP8: the same numbers on every layout and in graphs, weights quantised once a step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from graphed_trainers import CONFIG as GRAPHED
from graphed_trainers import run as run_graphed
from marks import full
from trainer_tools import (
    MICRO_BATCH,
    OPTIMIZER,
    check_as_one_rank,
    make_groups,
    make_trainer,
    run,
    run_layout,
)

from fastmp.config import CheckpointConfig, GPTConfig, GraphConfig, MoEConfig, ParallelConfig
from fastmp.config.precision import Fp8Recipe
from fastmp.cuda_graphs.function_graph import FunctionGraph
from fastmp.distributed.groups import ParallelGroups
from fastmp.testing.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("one_thread")

FP8 = Fp8Recipe(32)  # whose blocks divide small models
CONFIG = GPTConfig(
    **{"num_layers": 4, "hidden_size": 64, "num_heads": 4, "vocab_size": 131, "max_seq_len": 16},
    init_std=0.1,
    activation="swiglu",
    ffn_hidden_size=128,
    dense_layers=(0,),
    moe=MoEConfig(num_experts=4, expert_ffn_hidden_size=64, shared_expert_ffn_hidden_size=64),
)
SIZES = {"config": CONFIG, "global_batch_size": 2 * MICRO_BATCH, "fp8": FP8}
STEPS = 2
LAYOUTS = {
    "tp, sp, ep": (2, {"tp": 2, "ep": 2, "etp": 1, "sequence_parallel": True}),
    "pp, zero bubble": (2, {"pp": 2, "schedule": "zero_bubble"}),
    "tp": (2, {"tp": 2}),
    "dp": (2, {}),
    "etp": (2, {"etp": 2}),
    "cp": (2, {"cp": 2}),
    "pp, vpp": (2, {"pp": 2, "vpp": 2}),
    "pp, on a v": (2, {"pp": 2, "vpp": 2, "schedule": "dualpipe_v"}),
    "recompute": (2, {"ep": 2, "recompute": True}),
    "tp, sp, zero bubble": (4, {"tp": 2, "pp": 2, "sequence_parallel": True, "schedule": "zero_bubble"}),
    "ep, etp": (4, {"ep": 2, "etp": 2}),
    "all": (8, {"tp": 2, "pp": 2, "ep": 2, "etp": 1, "sequence_parallel": True}),
}
QUICK = ("tp, sp, ep", "pp, zero bubble")


@pytest.fixture(scope="module")
def one_rank():
    return run(make_trainer(**SIZES), STEPS)


def test_quantises_and_learns(one_rank):
    exact = run(make_trainer(**SIZES | {"fp8": None}), STEPS)
    assert 0 < abs(exact[0][0][0] - one_rank[0][0][0]) < 0.05
    for name, value in one_rank[2].items():
        difference = (value - exact[2][name]).norm() / exact[2][name].norm()
        assert 1e-4 < difference < (0.5 if "router" in name else 0.25), name
    curve = run(make_trainer(**SIZES), 12)[0]
    assert curve[-1][0] < curve[0][0] - 0.5


@pytest.mark.parametrize("name", [*QUICK, *full([name for name in LAYOUTS if name not in QUICK])])
def test_every_layout_is_one_rank(one_rank, name):
    """Losses, norm and every gradient to 1e-10, replicas bitwise equal."""
    world, sizes = LAYOUTS[name]
    results = run_layout(world, ParallelConfig(**sizes), STEPS, **SIZES)
    check_as_one_rank(results, one_rank)


def muon_and_evaluation(layout, groups=ParallelGroups.alone()):
    """Return the losses of two steps with Muon, then those of an evaluation and of a step after it."""
    optimizer = replace(OPTIMIZER, name="muon")
    trainer = make_trainer(groups, layout, **SIZES, optimizer=optimizer)
    losses = [trainer.train_step().loss.item() for _ in range(STEPS)]
    return [*losses, trainer.evaluate().loss, trainer.train_step().loss.item()]


@pytest.mark.parametrize("sizes", [{"tp": 2}, *full([{}, {"pp": 2}, {"ep": 2}])], ids=str)
def test_muon_and_evaluations_are_those_of_one_rank(sizes):
    layout = ParallelConfig(**sizes)

    def rank_main(rank, world_size):
        return muon_and_evaluation(layout, make_groups(world_size, layout))

    want = torch.tensor(muon_and_evaluation(ParallelConfig()))
    assert want[-1] < want[0]
    for found in run_ranks(rank_main, 2, timeout=120):
        torch.testing.assert_close(torch.tensor(found), want, rtol=0, atol=1e-9)


LAYERS = GraphConfig(enabled=True, warmup=1)
GRAPHS = {"layers": LAYERS, **{scope: replace(LAYERS, scope=(scope,)) for scope in ("full", "full_step")}}
SMALL = replace(
    GRAPHED, hidden_size=32, num_heads=2, moe=replace(GRAPHED.moe, expert_ffn_hidden_size=32), num_layers=2
)


def graphs_case(rank, world, layout, graphs, dispatcher):
    groups = make_groups(world, layout)
    moe = replace(SMALL.moe, dispatcher=dispatcher, **({"activation_stash": 0.0} if graphs else {}))
    made = []
    for some in (None, graphs):
        config = replace(SMALL, moe=SMALL.moe if some is None else moe)
        made.append(run_graphed(some, groups, layout, config, 8, fp8=FP8))
    (eager, _), (found, manager) = made
    assert len(eager) == len(found) and all(map(torch.equal, eager, found))
    return manager is not None


@pytest.mark.parametrize(
    ("scope", "dispatcher"),
    [
        ("layers", "alltoall"),
        ("full_step", "symmetric"),
        *full([("full", "symmetric"), ("layers", "symmetric")]),
    ],
)
def test_graphs_are_bitwise_eager(scope, dispatcher):
    assert all(run_ranks(graphs_case, 2, ParallelConfig(ep=2), GRAPHS[scope], dispatcher, timeout=120))


def test_quantises_weights_once_a_step():
    trainer = make_trainer(**SIZES)
    kernels = {}
    for step in range(2):
        with torch.profiler.profile() as profile:
            trainer.train_step()
        kernels[step] = {event.key: event.count for event in profile.key_averages()}
    weights = sum(len(m.fp8) for m in trainer.model.modules() if isinstance(getattr(m, "fp8", None), dict))
    assert weights == 4 * 2 + 2 + 3 * (2 + 2)  # attention; a dense layer; experts and shared experts
    assert [each["fastmp::quantize_weight"] for each in kernels.values()] == [weights, weights]


def test_a_replayed_update_makes_copies_stale(monkeypatch):
    """On a GPU no version counter sees what a replay writes."""
    trainer = make_trainer(config=SMALL, fp8=FP8, graphs=GRAPHS["full_step"])
    call, seen = FunctionGraph.__call__, []
    monkeypatch.setattr(FunctionGraph, "__call__", lambda *given: seen.append(call(*given)) or seen[-1])
    trainer.train_step()
    layer = next(module for module in trainer.model.modules() if getattr(module, "fp8", None))
    (name, copies), *_ = layer.fp8.items()
    weight = getattr(layer, name)
    copies.refresh(weight)
    before = copies.forward.q.float()

    def replayed(*given):
        weight.data.neg_()
        return seen[-1]

    monkeypatch.setattr(FunctionGraph, "__call__", replayed)
    trainer.train_step()
    copies.refresh(weight)
    assert before.any() and torch.equal(copies.forward.q.float(), -before)


@pytest.mark.parametrize("saved_in", [None, FP8], ids=["dtype", "fp8"])
def test_checkpoints_are_those_of_master_weights(saved_in, tmp_path):
    """A run in one precision resumes in the other, with the numbers that it would have had."""
    options = SIZES | {"checkpoint": CheckpointConfig(), "run_dir": str(tmp_path)}
    first = make_trainer(**options | {"fp8": saved_in})
    first.train_step()
    first.save()
    other = make_trainer(seed=99, **options | {"fp8": FP8 if saved_in is None else None})
    assert other.resume() and other.step == 1
    for name, tensor in first.model.state_dict().items():
        assert torch.equal(tensor, other.model.state_dict()[name]), name
    if saved_in is not None:  # the first trainer goes on in the other precision, too
        for module in first.model.modules():
            if getattr(module, "fp8", None):
                module.fp8 = {}
                module._forward_pre_hooks.clear()
        first.optimizer.gather.wait()
        assert first.train_step().loss == other.train_step().loss
    else:
        assert other.train_step().loss != first.train_step().loss


def overlapped_case(rank, world):
    layout = ParallelConfig(ep=2)
    made = [
        run(make_trainer(make_groups(world, layout), layout, overlap_experts=overlapped, **SIZES), 2)
        for overlapped in (False, True)
    ]
    (curve, counts, grads, *_), (found, found_counts, found_grads, *_) = made
    assert curve == found and counts == found_counts
    assert all(torch.equal(found_grads[name], grads[name]) for name in grads)


@pytest.mark.full
def test_overlapped_exchanges_change_no_bit():
    run_ranks(overlapped_case, 2, timeout=120)
