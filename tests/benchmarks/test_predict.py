"""The predictions that are committed are those that the command makes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_rows, predict
from benchmarks.predict import MACHINES, NODE_US, Step
from fastmp.ops import rms_norm

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
AGAIN = "python -m benchmarks.predict, and commit benchmarks/results/predicted_*.json"


def committed_and_made(items):
    """Pairs of {(item, direction, rival): row}, a pair a machine, of the items only.

    Another release of torch may run other kernels between our ops, and 2.10 cannot count attention where
    heads share keys: there only kernels alone are made and compared.
    """
    committed = [json.loads((RESULTS / f"predicted_{name}.json").read_text()) for name in predict.MACHINES]
    release = ".".join(torch.__version__.split(".")[:2])
    alike = all(there["predicted"]["torch"] == release for there in committed)
    items = [item for item in items if alike or item.phase == "kernels"]
    asked = {item.key for item in items}
    texts = predict.predicted([*predict.MACHINES.values()], items)
    for there, made in zip(committed, map(json.loads, texts), strict=True):
        assert not alike or made["predicted"] == there["predicted"], AGAIN
        yield [
            {
                (r["item"], r.get("direction"), r.get("rival")): r
                for r in content["rows"]
                if r["item"] in asked
            }
            for content in (there, made)
        ]


@pytest.mark.full
def test_committed_predictions_are_those_of_this_tree():
    for there, made in committed_and_made(gpu_rows.items()):
        assert there == made and made, AGAIN
    names = {item.key for item in gpu_rows.items()}
    for path in RESULTS.glob("predicted_*.json"):
        assert {row["item"] for row in json.loads(path.read_text())["rows"]} <= names, AGAIN


def test_expectations_are_those_of_ops():
    assert predict.SHARES.keys() | predict.LEAST_US.keys() <= predict.OPS.keys()


def test_a_prediction_is_the_floor_over_the_share_or_the_least_time():
    machine = MACHINES["h200"]
    large = Step("large", 4_300_000_000, 0, 2, 0.5, 0.0)
    assert large.ms(machine) == pytest.approx(2.0)
    products = Step("products", 1, 788_000_000_000, 1, 0.8, 0.0)
    assert products.ms(machine) == pytest.approx(1.25)
    assert Step("small", 1, 0, 1, 0.5, 10.0).ms(machine) == pytest.approx(0.01)
    assert Step("launches", 1, 0, 3, 0.5, 0.0).ms(machine) == pytest.approx(3 * NODE_US / 1e3)


def test_steps_are_our_ops_and_kernels_of_torch():
    with predict.without_data():
        x, weight = torch.randn(64, 128, requires_grad=True), torch.ones(128, requires_grad=True)
        with predict.Steps() as counted:
            y = (2 * rms_norm(x, weight)).view(32, 256)
            torch.autograd.grad(y, (x, weight), torch.ones_like(y))
    found = [(step.name.removeprefix("aten::"), step.launches) for step in counted.found]
    # the gradient of the weight is summed by a kernel of its own
    assert found == [("rms_norm", 1), ("mul", 1), ("ones_like", 1), ("mul", 1), ("rms_norm_backward", 2)]
