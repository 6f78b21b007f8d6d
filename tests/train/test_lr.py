"""The learning rate schedule, against numbers worked out by hand and against torch's schedulers."""

from __future__ import annotations

import math

import pytest
import torch

from fastmp.train.lr import warmup_cosine

SHAPE = {"peak": 1e-3, "warmup_steps": 4, "total_steps": 12, "floor": 1e-4}


def test_values_worked_out_by_hand():
    got = [warmup_cosine(step, **SHAPE) for step in range(14)]
    assert got[:4] == pytest.approx([2.5e-4, 5e-4, 7.5e-4, 1e-3], rel=1e-15)
    assert got[4] == pytest.approx(1e-3, rel=1e-15)  # the cosine starts at the peak
    assert got[8] == pytest.approx((1e-3 + 1e-4) / 2, rel=1e-15)  # half way down
    assert got[6] == pytest.approx(1e-4 + 9e-4 * (1 + math.sqrt(0.5)) / 2, rel=1e-15)
    assert got[12] == got[13] == 1e-4


def test_equals_torch_schedulers():
    warmup, total, peak, floor = 7, 60, 3e-4, 3e-5
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=peak)
    schedule = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1 / warmup, total_iters=warmup - 1),
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=total - warmup, eta_min=floor),
        ],
        milestones=[warmup],
    )
    for step in range(total + 1):
        mine = warmup_cosine(step, peak=peak, warmup_steps=warmup, total_steps=total, floor=floor)
        assert mine == pytest.approx(schedule.get_last_lr()[0], rel=1e-12), step
        optimizer.step()
        schedule.step()


def test_no_warmup_starts_at_the_peak_and_all_warmup_never_falls():
    assert warmup_cosine(0, peak=2.0, warmup_steps=0, total_steps=10) == 2.0
    rates = [warmup_cosine(step, peak=2.0, warmup_steps=10, total_steps=10, floor=2.0) for step in range(12)]
    assert rates == sorted(rates)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"warmup_steps": 13}, "warmup_steps 13"),
        ({"warmup_steps": -1}, "warmup_steps -1"),
        ({"floor": 2e-3}, "floor 0.002"),
        ({"floor": -1.0}, "floor -1.0"),
        ({"step": -1}, "step must not be negative, got -1"),
    ],
)
def test_errors_name_the_value(change, named):
    with pytest.raises(ValueError, match=named):
        warmup_cosine(**{"step": 0, **SHAPE, **change})
