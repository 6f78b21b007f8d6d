"""The chapter of faults: a fault that does not show, and one of our own, are not held."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fastmp.ops import grouped_mm
from tools.prove import faults
from tools.prove.claims import Claim


def held(claims):
    return [each.held for each in claims if isinstance(each, Claim)]


def test_a_rank_without_a_number_is_not_held(monkeypatch):
    ranks = [(0.5, 0.0, torch.zeros(1)), (0.5, float("nan"), torch.zeros(1))]
    monkeypatch.setattr(faults, "run_ranks", lambda *_: ranks)
    assert held(faults._smoothing()) == [True, False] * 2


def test_rows_that_nobody_writes(monkeypatch):
    assert held(faults._rows()) in ([True, True], [None, True])
    monkeypatch.setattr(faults, "grouped_mm", unwritten)
    assert held(faults._rows())[1] is False
    monkeypatch.setattr(F, "grouped_mm", lambda x, w, offs: grouped_mm(x, w.transpose(1, 2), offs))
    assert held(faults._rows())[0] is None  # another torch may write all rows
    monkeypatch.delattr(F, "grouped_mm")
    assert held(faults._rows())[0] is None


def unwritten(x, w, offsets):
    """A product whose rows from the last offset on are what memory held."""
    y, rows = grouped_mm(x, w, offsets), torch.arange(len(x))[:, None]
    return torch.where(rows < offsets[-1], y, y + x[:, :1] * torch.nan)


@pytest.mark.full
def test_all_three_are_held():
    assert held(faults.claims()) in ([True] * 8, [True] * 4 + [None] + [True] * 3)


@pytest.mark.full
def test_faults_of_our_own_are_not_held(monkeypatch):
    def by_shard(logits, target, *, group, label_smoothing):
        return faults._smooth(logits.log_softmax(-1), logits.log_softmax(-1), target % logits.shape[-1])

    monkeypatch.setattr(faults, "vocab_parallel_cross_entropy", by_shard)
    assert held(faults._smoothing()) == [True, False, True, False]
    monkeypatch.setattr(faults, "planned_order", lambda rank, world: (faults.fixed_order(rank, world), 16))
    assert held(faults._messages()) == [True, False]
