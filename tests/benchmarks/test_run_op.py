"""A single op for a profiler: its calls, and the Nsight command of `benchmarks/profile.sh`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import run_op

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", ["bias_gelu_backward", "bias_gelu"])
def test_an_op_runs_between_start_and_stop(name, capsys):
    options = ["--shape", "16", "256", "--dtype", "float32", "--times", "2", "--device", "cpu"]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        assert run_op.main([name, *options, "--backend", "reference"]) == 0
    ranges = [event for event in seen.events() if event.name == f"fastmp.run_op.{name}"]
    assert len(ranges) == 2
    assert capsys.readouterr().out == f"{name} [16, 256] float32 on cpu, reference: 2 times\n"


def test_a_workload_runs_forward_and_backward():
    call, shape = run_op.find("linear_cross_entropy", (8, 16, 64), torch.float32, "cpu", None)
    dhidden, dweight = call()
    assert shape == (8, 16, 64) and dhidden.shape == (8, 16) and dweight.shape == (64, 16)


def test_an_unknown_op_names_the_known_ones(capsys):
    with pytest.raises(SystemExit):
        run_op.main(["bias_glue"])
    assert "no op or workload 'bias_glue'; there are " in capsys.readouterr().err


def shell(*arguments, **variables):
    environment = {**os.environ, "PYTHON": sys.executable, **variables}
    command = [ROOT / "benchmarks" / "profile.sh", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_the_script_prints_the_command_and_runs_it(tmp_path):
    ncu = tmp_path / "ncu"
    ncu.write_text('#!/bin/sh\necho "ran with $#: $*"\n')
    ncu.chmod(0o755)
    done = shell("bias_gelu", "--shape", "16", "256", NCU=str(ncu), OUT=str(tmp_path / "out"))
    assert done.returncode == 0
    printed, ran = done.stdout.splitlines()
    assert printed.split()[0] == str(ncu) and "--profile-from-start off" in printed
    assert ran.endswith(f"{sys.executable} -m benchmarks.run_op bias_gelu --shape 16 256")


def test_the_script_without_ncu_says_so_and_prints_the_command():
    done = shell("bias_gelu", NCU="no-such-ncu")
    assert done.returncode == 1 and "-m benchmarks.run_op bias_gelu" in done.stdout
    assert done.stderr == "profile.sh: no-such-ncu is not on the PATH; the command above runs where it is\n"
    assert shell().returncode == 2
