"""The chapter of layouts: a number that is not that of one rank, or a step of another kind, is not held."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from tools.prove import layouts
from tools.prove.claims import Claim
from tools.prove.parity import Pipeline, difference


def held():
    return [each.held for each in layouts.claims() if isinstance(each, Claim)]


def test_twelve_layouts_use_every_axis_and_option():
    assert len(layouts.LAYOUTS) == 12 == len({each.name for each in layouts.LAYOUTS})
    named = ("tp", "cp", "pp", "dp", "ep", "etp", "edp")
    axes = Counter(axis for each in layouts.LAYOUTS for axis in named if getattr(each.grid, axis) > 1)
    options = {name for each in layouts.LAYOUTS for name in each.run}
    assert len(axes) == 7 and min(axes.values()) >= 2, axes
    assert {"sequence_parallel", "recompute", "vpp", "schedule", "shard"} <= options


def test_a_difference_is_seen():
    one = torch.ones(3, dtype=torch.float64)
    assert difference(one, one) == 0 and difference(one + 1e-6, one) == pytest.approx(5e-7, rel=1e-3)
    for other in (one[:2], one.float(), one * math.nan):
        assert difference(other, one) == math.inf


@pytest.mark.full
def test_a_gradient_that_is_wrong_on_one_layout_is_not_held(monkeypatch):
    train = Pipeline.train

    def weighed(pipeline, batches):
        if pipeline.group is None:  # all but pipelines
            batches = [(tokens, targets.roll(1, -1)) for tokens, targets in batches]
        return train(pipeline, batches)

    monkeypatch.setattr(layouts, "LAYOUTS", layouts.LAYOUTS[:3])
    monkeypatch.setattr(Pipeline, "train", weighed)
    assert held() == [False, False, True]


@pytest.mark.full
def test_all_twelve_are_held():
    assert held() == [True] * 12
