"""Layouts of `benchmarks.one_gpu` on CPU ranks agree with one rank; a case that does not is named."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from benchmarks import one_gpu
from fastmp.testing import ranks

WHOLE = one_gpu.Result(torch.ones(3), {"a": torch.ones(2), "b": torch.ones(2)}, 0, None)


@pytest.fixture(autouse=True)
def short(monkeypatch, one_thread):
    monkeypatch.setattr(one_gpu, "STEPS", 4)
    monkeypatch.setattr(one_gpu, "lacks_gpus", lambda world_size: "a test")


def test_a_case_is_as_one_rank(tmp_path, capsys):
    out = tmp_path / "rows.json"
    assert one_gpu.main(["--only", "ep symmetric", "--mode", "full_step", "--out", str(out)]) == 0
    (row,) = json.loads(out.read_text())["cases"]
    assert row["ok"] and row["graphs"] > 0 and 0 < row["error"] < 1e-12
    assert "on CPU ranks: a test" in (text := capsys.readouterr().out) and "1 of 1 cases are" in text


def test_new_processes_can_run_every_case():
    assert all(ranks._pickled(one_gpu.train, (case.config, case.layout, "eager")) for case in one_gpu.CASES)


@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks", (2, 4))
def test_all_cases_are_as_one_rank(monkeypatch, ranks):
    monkeypatch.setattr(one_gpu, "STEPS", 8)
    assert one_gpu.main(["--ranks", str(ranks)]) == 0


def test_a_case_that_differs_and_one_that_fails_are_named(monkeypatch, capsys):
    train = one_gpu.train

    def wrong(rank, world_size, config, layout, mode):
        if layout.tp == 2 and rank == 1:
            raise KeyError("on purpose")
        result = train(rank, world_size, config, layout, mode)
        if layout.pp == 2 and rank == 0:
            next(iter(result.gradients.values()))[0] += 1e-9
        return result

    monkeypatch.setattr(one_gpu, "train", wrong)
    monkeypatch.setattr(one_gpu, "CASES", [c for c in one_gpu.CASES if c.name in ("dp", "tp sp", "pp")])
    assert one_gpu.main(["--mode", "eager"]) == 1
    text, errors = capsys.readouterr()
    assert "ok   2 ranks  dp " in text and "FAIL 2 ranks  pp  " in text and "1 of 3 cases are" in text
    assert "failed, " in text and "rank 1 of 2 raised" in text and "KeyError: 'on purpose'" in errors


@pytest.mark.parametrize(
    ("gradients", "expected"),
    [
        (WHOLE.gradients, 0.0),
        ({"a": torch.ones(2)}, torch.inf),
        (WHOLE.gradients | {"a": torch.ones(3)}, torch.inf),
        (WHOLE.gradients | {"a": torch.tensor([1.0, torch.nan])}, torch.inf),
        (WHOLE.gradients | {"b": torch.tensor([1.0, 2.0])}, 0.5),
    ],
)
def test_a_difference(gradients, expected):
    assert one_gpu.difference([WHOLE._replace(gradients=gradients)], WHOLE) == expected
    halves = [WHOLE._replace(gradients={name: WHOLE.gradients[name]}) for name in "ab"]
    assert one_gpu.difference(halves, WHOLE) == 0.0


def test_a_capture_that_failed_is_no_agreement(monkeypatch):
    case = replace(one_gpu.CASES[0], ranks=1)
    for failed, ok in ((None, False), ("no memory", False)):
        result = WHOLE._replace(failure=failed)
        monkeypatch.setattr(one_gpu, "run_ranks", lambda *_, result=result, **__: [result])
        assert one_gpu.run(case, "graphs", WHOLE, "cpu")["ok"] is ok
        assert one_gpu.run(case, "eager", WHOLE, "cpu")["ok"] is (failed is None)


def test_a_name_that_no_case_has(capsys):
    with pytest.raises(SystemExit):
        one_gpu.main(["--only", "nothing"])
    assert "no case contains 'nothing'; the cases: dp, tp sp," in capsys.readouterr().err
