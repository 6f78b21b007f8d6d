"""The chapter of predictions: a floor that is not counted, or does not fit what is committed, is not held."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fastmp.plan.hardware import GPUS
from tools.prove import predictions
from tools.prove.claims import Claim

FILE = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "predicted_h100.json"


def held():
    return [each.held for each in predictions.claims() if isinstance(each, Claim)]


def test_floors_are_counted_and_fit_what_is_committed(monkeypatch):
    assert held() == [True] * (1 + len([*FILE.parent.glob("predicted_*.json")]))
    monkeypatch.setattr(predictions, "counted", lambda: [predictions.Floor("one", "rope", 0, 0, (0.0,) * 4)])
    assert held()[0] is False


def test_a_floor_is_bytes_or_flops_over_a_rate():
    found = {each.case: each for each in predictions.counted()}
    adamw = found["adamw"]
    assert adamw.bytes == pytest.approx(28 << 20, rel=0.01)  # gradient, copy, three states both ways
    assert adamw.microseconds[1] == pytest.approx(adamw.bytes / GPUS["h100"].memory_bandwidth * 1e6)
    product = found["grouped large"]
    assert product.flops == 2 * 128 * 255 * 4096 * 7168 and product.microseconds[1] > 1900


@pytest.mark.parametrize("column", ["bytes", "floor_ms", "ms", "of_floor"])
def test_a_committed_figure_that_is_changed_is_found(column):
    found = json.loads(FILE.read_text())
    row = next(row for row in found["rows"] if row["floor_of"] == "copy")
    row[column] *= 0.9
    assert [*predictions.contradictions(found["predicted"], found["rows"])] == [row["item"]]


def test_without_the_sources_they_are_not_shown(tmp_path):
    (claim,) = predictions._committed(tmp_path)
    assert claim.held is None
