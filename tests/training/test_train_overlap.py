"""Exchanges of experts beside another microbatch's compute: in the planned order, and where they fit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from train_tools import SHARED_EXPERT, Samples
from trainer_tools import make_groups, make_trainer

from fastmp.config import ParallelConfig, TrainConfig
from fastmp.nn import overlap
from fastmp.nn.gpt import GPT
from fastmp.pipeline.executor import Executor
from fastmp.pipeline.runner import Pipeline
from fastmp.schedule.schedule import Schedule
from fastmp.testing.ranks import run_ranks
from fastmp.training.language import token_loss
from fastmp.training.trainer import Trainer

pytestmark = pytest.mark.usefixtures("one_thread")

CONFIG = replace(SHARED_EXPERT, dropout=0.1)


@pytest.mark.full
def test_a_forward_runs_beside_the_backward_before_it():
    def rank_main(rank, world_size):
        ran, range_of = [], Executor._range

        def note(executor, now, span):
            if span.segments is not None:
                ran.append((now.op, span.name.split(" to ")[0]))
            return range_of(executor, now, span)

        layout = ParallelConfig(ep=2)
        groups = make_groups(world_size, layout)
        trainer = make_trainer(groups, layout, config=CONFIG, dtype=torch.float32, overlap_experts=True)
        Executor._range = note
        trainer.train_step()
        return ran

    ran, same = run_ranks(rank_main, 2)
    assert ran == same
    runs = [
        f"{layer}.{part}" for layer in range(4) for part in ("attention", "dispatch", "experts", "combine")
    ]
    assert ran[:16] == [("forward", name) for name in runs]
    beside = ran[16 : 16 + 16 + 24]  # 16 parts forward, 16 back, 8 of weights
    assert [name for kind, name in beside if kind == "forward"] == runs
    assert [name for kind, name in beside if kind in ("backward", "dgrad")] == runs[::-1]
    assert beside[:5] == [
        ("backward", "3.combine"),
        ("forward", "0.attention"),
        ("dgrad", "3.experts"),
        ("forward", "0.dispatch"),
        ("backward", "3.dispatch"),
    ]
    rest = ran[-24:]
    assert [name for kind, name in rest if kind in ("backward", "dgrad")] == runs[::-1]
    assert rest[:3] == [("backward", "3.combine"), ("dgrad", "3.experts"), ("wgrad", "3.experts")]


def test_evaluation_is_as_ever_and_what_does_not_go_with_it_is_refused():
    layers = GPT(CONFIG).layers
    overlap.OverlappedLayers([layers])
    x_SBH = torch.randn(8, 2, CONFIG.hidden_size, requires_grad=True)
    assert torch.equal(layers.eval()(x_SBH)[0], layers.run((x_SBH,), {})[0])
    with pytest.raises(ValueError, match="layers are run in parts, which recompute=True does not know"):
        overlap.OverlappedLayers([GPT(CONFIG, recompute=True).layers])
    model, train = GPT(CONFIG), TrainConfig(steps=1, global_batch_size=4, eval_interval=0)
    with pytest.raises(
        ValueError, match="overlap_experts needs a model whose layers are a LayerChain; Linear"
    ):
        Trainer(torch.nn.Linear(2, 2), Samples(4), token_loss, train, overlap_experts=True)
    with pytest.raises(ValueError, match="has no exchange to overlap: no layer sends rows"):
        Trainer(model, Samples(4), token_loss, train, overlap_experts=True)
    with pytest.raises(ValueError, match="pairs of overlapped steps need overlap="):
        schedule = Schedule(1, 2, overlap=True)
        Pipeline([model], schedule.orders(), group=None, inputs=id, loss=id, pairs=schedule.all_pairs())
