"""Learning rates: numbers worked out by hand, torch's schedulers, and what holds for any configuration."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, SequentialLR
from train_tools import Samples

from fastmp.config import GPTConfig, GraphConfig, OptimizerConfig, TrainConfig
from fastmp.distributed.groups import ParallelGroups
from fastmp.distributed.rng import RngTracker
from fastmp.nn import Placement
from fastmp.nn.gpt import GPT
from fastmp.optim.lr_schedule import learning_rate, learning_rates
from fastmp.training.plot import plot_learning_rates
from fastmp.training.trainer import Trainer

CONFIG = GPTConfig(num_layers=1, hidden_size=32, num_heads=4, vocab_size=131, max_seq_len=32)
SCHEDULES = ("cosine", "linear", "wsd", "constant")


def rates(steps, total_steps=12, **options):
    """The rates of `steps` steps; by default lr 1e-3 after 4 steps, and min_lr 1e-4 from step 12 on."""
    config = OptimizerConfig(**{"lr": 1e-3, "min_lr": 1e-4, "warmup_steps": 4, **options})
    return [learning_rate(step, config, total_steps) for step in range(steps)]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"schedule": "cosine"}, {6: 1e-4 + 9e-4 * (1 + math.sqrt(0.5)) / 2, 8: 5.5e-4}),
        ({"schedule": "linear"}, {6: 7.75e-4, 8: 5.5e-4, 11: 2.125e-4}),
        ({"schedule": "wsd", "decay_steps": 4}, {8: 1e-3, 9: 5.5e-4, 11: 1e-3 - 9e-4 * math.sqrt(0.75)}),
        (
            {"schedule": "wsd"},
            {9: 1e-3, 10: 1e-3 - 9e-4 * math.sqrt(1 / 3)},
        ),  # three steps: a fifth, rounded up
        ({"schedule": "wsd", "decay_steps": 99}, {4: 1e-3, 6: 5.5e-4}),  # from the end of warm-up
    ],
    ids=lambda value: " ".join(map(str, value.values())) if "schedule" in value else "",
)
def test_values_worked_out_by_hand(options, expected):
    got = rates(14, **options)
    assert got[:5] == pytest.approx([2.5e-4, 5e-4, 7.5e-4, 1e-3, 1e-3], rel=1e-15)
    assert {step: got[step] for step in expected} == pytest.approx(expected, rel=1e-14)
    assert got[12] == got[13] == 1e-4


def test_constant_has_no_end():
    assert rates(40, schedule="constant", min_lr=9.0)[3:] == [1e-3] * 37


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_equals_torch_schedulers(schedule):
    warmup, total, decay, peak, floor = 7, 60, 20, 3e-4, 3e-5
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=peak)
    parts = {
        "cosine": [CosineAnnealingLR(optimizer, T_max=total - warmup, eta_min=floor)],
        "linear": [LinearLR(optimizer, 1.0, floor / peak, total_iters=total - warmup)],
        "wsd": [LinearLR(optimizer, 1.0, 1.0), LambdaLR(optimizer, minus_sqrt)],
        "constant": [LinearLR(optimizer, 1.0, 1.0)],
    }[schedule]
    first = LinearLR(optimizer, start_factor=1 / warmup, total_iters=warmup - 1)
    whole = SequentialLR(optimizer, [first, *parts], milestones=[warmup, total - decay][: len(parts)])
    config = OptimizerConfig(
        lr=peak,
        min_lr=floor,
        warmup_steps=warmup,
        schedule=schedule,
        decay_steps=decay if schedule == "wsd" else None,
    )
    for step in range(total + 1):
        assert learning_rate(step, config, total) == pytest.approx(whole.get_last_lr()[0], rel=1e-12), step
        optimizer.step()
        whole.step()


def minus_sqrt(step, decay=20, lowest=0.1):
    """The factor of transformers' `get_wsd_schedule` with decay_type "1-sqrt", min_lr_ratio `lowest`."""
    return lowest + (1 - lowest) * (1 - math.sqrt(min(step / decay, 1.0)))


@st.composite
def configurations(draw):
    schedule, lr = draw(st.sampled_from(SCHEDULES)), draw(st.floats(1e-8, 10.0))
    decay_steps = draw(st.none() | st.integers(1, 300)) if schedule == "wsd" else None
    return OptimizerConfig(
        lr=lr,
        min_lr=lr * draw(st.floats(0.0, 1.0)),
        schedule=schedule,
        warmup_steps=draw(st.integers(0, 60)),
        decay_steps=decay_steps,
    )


@given(config=configurations(), total=st.integers(1, 200))
def test_any_schedule_rises_then_falls_between_its_bounds(config, total):
    got = [learning_rate(step, config, total) for step in range(total + 2)]
    warmup, ulp = min(config.warmup_steps, total), 4e-16 * config.lr
    assert 0.0 < got[0] and max(got) <= config.lr
    assert got[:warmup] == sorted(got[:warmup])
    assert all(after <= before + ulp for before, after in pairwise(got[warmup:]))
    assert all(rate >= config.min_lr - ulp for rate in got[warmup:])
    assert got[total:] == [config.lr if config.schedule == "constant" else config.min_lr] * 2
    if warmup < total:
        assert got[warmup] == max(got) == config.lr  # no update before it has more, and it is reached


@given(config=configurations(), decaying=st.integers(2, 200))
def test_the_rate_falls_no_faster_than_its_curve_does_anywhere(config, decaying):
    total = config.warmup_steps + decaying
    got = [learning_rate(step, config, total) for step in range(config.warmup_steps, total + 1)]
    steps = (
        min(decaying, config.decay_steps or math.ceil(total / 5)) if config.schedule == "wsd" else decaying
    )
    shape = {"cosine": math.pi / 2 / steps, "linear": 1 / steps, "wsd": math.sqrt(1 / steps), "constant": 0.0}
    most = (config.lr - config.min_lr) * shape[config.schedule] * (1 + 1e-9) + 1e-15 * config.lr
    assert max(before - after for before, after in pairwise(got)) <= most


def test_wsd_is_the_same_in_runs_of_any_length_until_it_decays():
    short, long = (rates(20, total, schedule="wsd", decay_steps=5) for total in (25, 80))
    assert short == long
    assert rates(25, 25, schedule="wsd", decay_steps=5)[21] < long[19]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"schedule": "wds"}, "schedule must be one of cosine, linear, wsd, constant, got 'wds'"),
        ({"schedule": "wsd", "decay_steps": 0}, "decay_steps must be positive, got 0"),
        (
            {"decay_steps": 7},
            "decay_steps is of schedule 'wsd' only, got decay_steps 7 and schedule 'cosine'",
        ),
        (
            {"schedule": "linear", "min_lr": 2.0},
            "need 0 <= min_lr <= lr and lr > 0, got min_lr 2.0 and lr 0.001; set both",
        ),
        ({"schedule": "constant", "lr": 0.0}, "lr must be positive, got 0.0"),
    ],
    ids=lambda value: "" if isinstance(value, str) else " ".join(value),
)
def test_wrong_values_are_named(change, said):
    with pytest.raises(ValueError) as raised:
        OptimizerConfig(**change)
    assert str(raised.value) == f"OptimizerConfig: {said}"


@pytest.mark.parametrize(("step", "total"), [(-1, 10), (0, 0)])
def test_a_step_that_is_not_there(step, total):
    with pytest.raises(ValueError, match=f"learning_rate: need .*, got step {step} of total_steps {total}"):
        learning_rate(step, OptimizerConfig(), total)


def test_the_picture_draws_every_curve(tmp_path):
    import matplotlib.image

    optimizers = {name: OptimizerConfig(schedule=name) for name in SCHEDULES}
    out = plot_learning_rates(optimizers, 100, tmp_path / "rates.png", title="rates")
    image = matplotlib.image.imread(out)[..., :3]
    for colour in ("3b6fb6", "c4572e", "5b8c5a", "8a5aa8"):
        rgb = [int(colour[i : i + 2], 16) / 255 for i in (0, 2, 4)]
        assert (abs(image - rgb).max(-1) < 0.02).sum() > 1000, colour


class Poisoned(Samples):
    """Samples whose loss is multiplied by NaN in some steps; the factor is part of the batch."""

    steps = ()

    def batch(self, step, *place):
        factor = math.nan if step in self.steps else 1.0
        return {**super().batch(step, *place), "factor": torch.tensor(factor, dtype=torch.float64)}


def poisoned_trainer(graphs=None, bad=(), groups=ParallelGroups.alone(), dtype=torch.float64, **options):
    rng = RngTracker(3)
    model = GPT(CONFIG, Placement(groups, rng=rng, dtype=dtype))
    data = Poisoned(2)
    data.steps = bad

    def loss(model, batch):
        losses = model.loss(batch["tokens"], batch["targets"])
        return losses.sum() * batch["factor"], (batch["targets"] != -100).sum()

    config = TrainConfig(steps=40, global_batch_size=4, eval_interval=0, **options)
    optimizer = OptimizerConfig(lr=3e-3, warmup_steps=2, schedule="linear")
    return Trainer(model, data, loss, config, optimizer=optimizer, graphs=graphs, groups=groups, rng=rng)


@pytest.mark.parametrize("scope", [None, "full_step"])
def test_skipped_steps_do_not_advance_the_schedule(tmp_path, scope):
    """Bitwise the run without these steps, also when resumed between two skipped ones."""
    graphs = scope and GraphConfig(enabled=True, scope=(scope,))
    bad, good = (2, 5, 6), [0, 1, 3, 4, 7]
    trainer = poisoned_trainer(graphs, bad, run_dir=str(tmp_path))
    seen = []
    for step in range(8):
        if step == 6:
            trainer.save()
            trainer = poisoned_trainer(graphs, bad, run_dir=str(tmp_path))
            assert trainer.resume()
        seen.append(trainer.train_step().lr.item())
    config = trainer.optimizer_config
    updates = [0, 1, 2, 2, 3, 4, 4, 4]
    assert seen == [learning_rate(update, config, 40) for update in updates]
    clean = poisoned_trainer()
    for step in good:
        clean.step = step
        clean.train_step()
    pairs = zip(trainer.model.parameters(), clean.model.parameters(), strict=True)
    assert all(map(torch.equal, *zip(*pairs)))


def test_a_table_of_rates_has_the_rate_of_every_update():
    for schedule in SCHEDULES:
        config = OptimizerConfig(lr=1e-3, min_lr=1e-4, warmup_steps=4, schedule=schedule)
        table = learning_rates(config, 12)
        expected = [learning_rate(step, config, 12) for step in range(20)]
        assert [table[min(step, len(table) - 1)] for step in range(20)] == expected
    assert len(learning_rates(replace(config, schedule="constant"), 10**15)) == 5
    with pytest.raises(ValueError, match=r"learning_rates: a schedule of 1000000000 steps .*schedule const"):
        learning_rates(replace(config, schedule="cosine"), 10**9)
