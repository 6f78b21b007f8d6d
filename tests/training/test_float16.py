"""A scaled loss: in float64 the same training bit for bit; in float16 a scale that is found, and learning."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from marks import full
from train_tools import DENSE, EXPERTS
from trainer_tools import make_groups, make_trainer

from fastmp.config import ParallelConfig
from fastmp.optim.loss_scaler import LossScaler
from fastmp.optim.named_params import named_parameters
from fastmp.testing.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("one_thread")


def scaled(trainer, **options):
    trainer.scaler = LossScaler(**options)
    trainer._steps.work = replace(trainer._steps.work, scaler=trainer.scaler)
    return trainer


def train(trainer, steps):
    results = [trainer.train_step() for _ in range(steps)]
    numbers = [
        (r.loss.item(), r.grad_norm.item(), None if r.aux_loss is None else r.aux_loss.item())
        for r in results
    ]
    return numbers, {name: p.detach().clone() for name, p in named_parameters(trainer.runner.chunks)}


def compare(rank, world_size, layout, config):
    groups = make_groups(world_size, layout)
    plain, scales = (make_trainer(groups, layout, config=config) for _ in range(2))
    scaled(scales, growth_interval=2)
    expected, got = train(plain, 4), train(scales, 4)
    assert scales.scaler.scale.item() == 2.0**18
    assert got[0] == expected[0]
    for name, tensor in got[1].items():
        assert torch.equal(tensor, expected[1][name]), name


@pytest.mark.parametrize(
    ("world_size", "layout", "config"),
    [
        (1, ParallelConfig(), DENSE),
        (2, ParallelConfig(pp=2, vpp=2, schedule="zero_bubble"), EXPERTS),
        *full(
            [
                (1, ParallelConfig(), EXPERTS),
                (2, ParallelConfig(pp=2), DENSE),
                (2, ParallelConfig(tp=2, sequence_parallel=True), EXPERTS),
                (2, ParallelConfig(ep=2), EXPERTS),
                (2, ParallelConfig(cp=2), DENSE),
            ]
        ),
    ],
)
def test_a_scale_that_is_a_power_of_two_changes_no_bit(world_size, layout, config):
    run_ranks(compare, world_size, layout, config)


def test_float16_finds_its_scale_and_learns(tmp_path):
    trainer = make_trainer(config=DENSE, dtype=torch.float16, run_dir=str(tmp_path), max_skipped_steps=2)
    scaled(trainer, init_scale=2.0**24)  # far too high: more overflows than max_skipped_steps
    losses = []
    for _ in range(30):
        losses.append(trainer.train_step().loss.item())
        trainer._read_skipped(None)  # as in `train`, which ends a run after max_skipped_steps
    skipped = int(trainer.optimizer.skipped_steps)
    assert 2 < skipped < 20 and trainer.scaler.scale.item() == 2.0 ** (24 - skipped)
    assert losses[-1] < 0.75 * losses[0]
