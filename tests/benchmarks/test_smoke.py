"""The first look at a GPU: an op a line, on a CPU with its reference."""

from __future__ import annotations

import os
import sys

import pytest
import torch

from fastmp.ops import OPS


@pytest.fixture
def smoke():
    from benchmarks import smoke

    return smoke


def test_every_implementation_of_a_device_has_a_line(smoke, capsys):
    names = smoke.implementations("cuda")
    assert not [name for name in names if name.endswith("/reference")]
    assert {"bias_gelu/triton", "grouped_mm/triton"} <= {*names} or "triton" not in OPS[
        "bias_gelu"
    ].implementations
    assert smoke.implementations("cpu") == [f"{op}/reference" for op in sorted(OPS)]
    assert smoke.main(["bias_gelu/reference", "--device", "cpu"]) == 0
    assert capsys.readouterr().out.startswith("ok     bias_gelu/reference 0.")


def test_a_wrong_one_is_told_and_the_others_are_run(smoke, monkeypatch, capsys):
    right = OPS["bias_gelu"].implementations["reference"]
    monkeypatch.setitem(OPS["bias_gelu"].implementations, "off", lambda *a: right(*a) * 1.1)
    monkeypatch.setitem(OPS["bias_gelu"].implementations, "raises", lambda *a: 1 / 0)
    names = [f"bias_gelu/{name}" for name in ("off", "raises", "reference")]
    assert smoke.main([*names, "--device", "cpu"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [
        [word, name] for word, name in zip(("WRONG", "RAISED", "ok"), names, strict=True)
    ]
    assert smoke.main([names[-1], "--device", "cpu", "--failed"]) == 1


def test_what_comes_after_a_fault_runs_in_a_new_process(smoke, monkeypatch):
    """Every call to a device fails once a kernel has faulted there."""
    commands = []

    def execute(path, command):
        commands.append(command)
        raise SystemExit(1)

    monkeypatch.setattr(os, "execv", execute)
    monkeypatch.setattr(smoke, "usable", lambda device: False)
    monkeypatch.setitem(OPS["bias_gelu"].implementations, "faults", lambda *a: 1 / 0)
    with pytest.raises(SystemExit):
        smoke.main(["bias_gelu/faults", "bias_gelu/reference", "--device", "cpu"])
    again = ["-m", "benchmarks.smoke", "--device", "cpu", "--failed", "bias_gelu/reference"]
    assert commands == [[sys.executable, *again]]


def test_without_a_gpu_it_says_so(smoke, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert smoke.main([]) == 2
    assert capsys.readouterr().err == "smoke: no GPU: torch.cuda.is_available() is False\n"
