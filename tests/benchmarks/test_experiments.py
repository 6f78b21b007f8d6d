"""Experiments for a GPU, at tiny sizes on a CPU."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import experiments

TINY = ["--device", "cpu", "--tiny"]


def test_every_experiment_runs_and_says_what_it_decides(tmp_path, capsys):
    out = tmp_path / "out.json"
    assert experiments.main([*TINY, "--out", str(out)]) == 0
    printed, found = capsys.readouterr().out, json.loads(out.read_text())["experiments"]
    assert [*found] == [experiment.__name__ for experiment in experiments.EXPERIMENTS]
    for name, made in found.items():
        assert made["predicted"].startswith("Predicted") and "Decides: " in made["predicted"], name
        assert made["measured"] and "raised" not in dict(made["measured"]), made
        assert f"{name}. {made['predicted']}" in printed


def test_one_that_raises_costs_only_itself_and_those_that_were_made_are_kept(monkeypatch, tmp_path, capsys):
    def broken(bench):
        """Predicted: nothing. Decides: nothing."""
        yield "first", "1 us"
        raise ValueError("no kernel\nand more")

    def second(bench):
        """Predicted: something. Decides: something."""
        yield "first", "2 us"

    monkeypatch.setattr(experiments, "EXPERIMENTS", (broken, second))
    command = [*TINY, "--out", str(tmp_path / "out.json")]
    assert experiments.main(command) == 0
    found = json.loads((tmp_path / "out.json").read_text())["experiments"]
    assert found["broken"]["measured"] == [["first", "1 us"], ["raised", "ValueError: no kernel"]]
    assert found["second"]["measured"] == [["first", "2 us"]]
    capsys.readouterr()
    assert experiments.main(command) == 0 and not capsys.readouterr().out
    with pytest.raises(SystemExit):
        experiments.main(["no_such", *TINY])
    assert "unknown no_such; choose from broken, second" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert experiments.main([]) == 2 and "no GPU" in capsys.readouterr().err
