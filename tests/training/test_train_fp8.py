"""Training in FP8: it learns, quantises weights once a step, and saves master weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from feature_table import FEATURES, FP8, one_rank, with_moe
from graphed_trainers import CONFIG as GRAPHED
from trainer_tools import (
    make_trainer,
    run,
)

from fastmp.config import CheckpointConfig, GraphConfig
from fastmp.cuda_graphs.function_graph import FunctionGraph

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES = FEATURES["fp8"].options
SMALL = with_moe(replace(GRAPHED, hidden_size=32, num_heads=2, num_layers=2), expert_ffn_hidden_size=32)


def test_quantises_and_learns():
    quantised = one_rank("fp8")
    exact = run(make_trainer(**SIZES | {"fp8": None}), len(quantised[0]))
    assert 0 < abs(exact[0][0][0] - quantised[0][0][0]) < 0.05
    for name, value in quantised[2].items():
        difference = (value - exact[2][name]).norm() / exact[2][name].norm()
        assert 1e-4 < difference < (0.5 if "router" in name else 0.25), name
    curve = run(make_trainer(**SIZES), 12)[0]
    assert curve[-1][0] < curve[0][0] - 0.5


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
    trainer = make_trainer(
        config=SMALL, fp8=FP8, graphs=GraphConfig(enabled=True, warmup=1, scope=("full_step",))
    )
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
