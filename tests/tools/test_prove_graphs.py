"""The chapter of graphs: without a fault, or where a check says nothing, claims are not held."""

from __future__ import annotations

import pytest
import torch

from fastmp.schedule.buffer_plan import plan_buffers
from tools.prove import graphs
from tools.prove.claims import Claim


def held():
    return [each.held for each in graphs.claims() if isinstance(each, Claim)]


def test_without_a_fault_nothing_is_caught(monkeypatch):
    numbers = [torch.ones(())] * (graphs.STEPS + 1)
    monkeypatch.setattr(graphs, "one_buffer", plan_buffers)
    monkeypatch.setattr(graphs, "train", lambda *_, **options: numbers)
    assert held() == [True, *[False] * 4, True, False]


@pytest.mark.full
def test_a_broken_plan_is_caught_and_harms_where_it_is_not():
    assert held() == [True] * 7


@pytest.mark.full
def test_graphs_that_compute_something_else_are_not_held(monkeypatch):
    train = graphs.train

    def shifted(planner, **options):
        numbers = train(planner, **options)
        return [each + 1e-15 for each in numbers] if planner is plan_buffers else numbers

    monkeypatch.setattr(graphs, "train", shifted)
    assert held() == [True] * 5 + [False, True]
