"""The GPU check, at sizes and on implementations that a CPU has."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import report
from fastmp.ops import OPS


@pytest.fixture
def sizes():
    from benchmarks import gpu_check

    return gpu_check.Sizes(
        shapes=dict.fromkeys(OPS, ((16, 256),)),
        dtypes=(torch.float32,),
        bandwidth_bytes=1 << 22,
        gemm=64,
        replays=2,
        rounds=2,
    )


@pytest.fixture
def one_family(monkeypatch):
    """The check of bias-GeLU alone."""
    from benchmarks import bench_activation, correct, gpu_check

    monkeypatch.setattr(correct, "families", lambda: ["activation"])
    monkeypatch.setattr(gpu_check, "families", lambda: [bench_activation])


@pytest.fixture
def listed(tiny_case):
    from benchmarks.cases import Workload

    return [(Workload("tiny", lambda dtype, device: tiny_case, ((),), ()), ())]


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    from benchmarks import gpu_check

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_check.main([]) == 2
    message = capsys.readouterr().err
    assert message == "gpu_check: no GPU: torch.cuda.is_available() is False\n"


@pytest.mark.full
def test_a_whole_run(sizes, one_family, listed, tmp_path):
    """The same code on a CPU, by CPU time: everything is right and has a time, and the result is JSON."""
    from benchmarks import gpu_check

    result = json.loads(json.dumps(gpu_check.check("cpu", sizes, listed=listed), default=str))
    assert result["ok"] and not result["dropped"] and result["sanitizer"] == []
    checked = result["correctness"]
    assert {row["op"] for row in checked if "op" in row} == {"bias_gelu", "bias_gelu_backward"}
    assert [row["dtype"] for row in checked if row.get("function") == "bias_gelu"] == [
        "float64",
        "float32",
        "bfloat16",
        "float16",
    ]
    assert result["ceilings"]["copy_gbs"] > 0 and result["ceilings"]["gemm_tflops"]["bfloat16"] > 0
    kernels = {row["op"]: row for row in result["kernels"]}
    assert kernels["bias_gelu"]["backend"] == "reference" and kernels["bias_gelu_backward"]["of_floor"] > 0
    assert kernels["bias_gelu"]["extra_bytes"] == 2 * 16 * 256 * 4  # what the reference holds besides y
    rows = [(row["direction"], row["rival"]) for row in result["functions"]]
    assert rows == [(d, r) for d in ("both", "forward") for r in ("fastmp", "torch eager")]
    assert len(gpu_check.report(result)) >= 5 + len(result["kernels"]) + len(rows)
    (tmp_path / "out.json").write_text(json.dumps(result))
    read = report.read(tmp_path / "out.json")
    assert len(read.timings) == len(kernels) + len(rows) and "extra memory" in report.markdown([read])


def test_what_the_time_budget_leaves_no_room_for_is_named(sizes, one_family, listed):
    from benchmarks import gpu_check
    from benchmarks.measure import Ceilings

    over = gpu_check.Budget(0)
    ceilings = Ceilings(1.0, {})
    assert not list(gpu_check.kernel_rows("cpu", sizes, lambda op: ["reference"], ceilings, over))
    assert not list(gpu_check.function_rows("cpu", sizes, listed, ceilings, over))
    assert over.dropped == [
        "kernel bias_gelu [16, 256] float32",
        "kernel bias_gelu_backward [16, 256] float32",
        "tiny [] float32 both",
        "tiny [] float32 forward",
    ]
    assert gpu_check.report({"environment": gpu_check.environment("cpu"), "dropped": over.dropped})[-1] == (
        "no time left for: tiny [] float32 forward"
    )


def test_what_cannot_be_timed_is_a_row_and_the_others_go_on(sizes, one_family, listed, monkeypatch, tmp_path):
    from benchmarks import bench_activation, gpu_check
    from benchmarks.cases import Workload

    arguments = bench_activation.arguments

    def failing(op, *rest):
        if op == "bias_gelu":
            raise RuntimeError("a launch that fails\nwith a long story")
        return arguments(op, *rest)

    ops = ("bias_gelu", "bias_gelu_backward")
    checked = [{"op": op, "backend": "reference", "ok": True} for op in ops]
    monkeypatch.setattr(gpu_check, "correctness", lambda *_: checked)
    monkeypatch.setattr(bench_activation, "arguments", failing)
    broken = Workload("broken", lambda dtype, device: 1 / 0, ((),), ())
    saved, result = [], {}
    options = {"listed": [(broken, ()), *listed], "result": result}
    gpu_check.check("cpu", sizes, **options, save=lambda: saved.append(json.dumps(result, default=str)))
    assert not result["ok"]
    assert result["kernels"][0]["raised"].startswith("RuntimeError: a launch that fails")
    assert [row["op"] for row in result["kernels"]] == ["bias_gelu", "bias_gelu_backward"]
    assert [row.get("raised", "") for row in result["functions"]] == [
        "ZeroDivisionError: division by zero"
    ] * 2 + [""] * 4
    assert len(saved) == 2 + 2 + 6 and json.loads(saved[0])["correctness"] == checked
    lines = gpu_check.report(result)
    assert [line.partition(":")[0] for line in lines if line.startswith("RAISED bias")] == [
        "RAISED bias_gelu [16, 256] float32"
    ]
    gpu_check.write(result, tmp_path / "out.json")
    assert len(report.read(tmp_path / "out.json").timings) == 1 + 4


def test_first_shapes_are_timed_before_second_ones(monkeypatch):
    from benchmarks import bench_activation, bench_cross_entropy, gpu_check

    monkeypatch.setattr(gpu_check, "families", lambda: [bench_activation, bench_cross_entropy])
    shapes = [(op, shape) for _, op, shape in gpu_check.kernels(gpu_check.Sizes())]
    firsts = [(op, f.SHAPES[op][0]) for f in (bench_activation, bench_cross_entropy) for op in f.SHAPES]
    assert shapes[: len(firsts)] == firsts and len(set(shapes)) == len(shapes)
    assert [work.name for work, _ in gpu_check.workloads("cuda")][:2] == ["bias_gelu", "cross_entropy"]


@pytest.mark.full
def test_every_op_can_be_timed(sizes):
    """With the arguments of its benchmark, but small."""
    from benchmarks import gpu_check
    from benchmarks.measure import Ceilings

    timed = set()
    for family, op, shape in gpu_check.kernels(gpu_check.Sizes()):
        small = tuple(min(length, 16) for length in shape)
        options = (family, op, small, torch.float32, "cpu", sizes, ["reference"], Ceilings(1.0, {}))
        if op not in timed:
            (row,) = gpu_check._kernel_rows(*options)
            assert row["bytes"] > 0 and row["flops"] >= 0 and row["ms"] > 0 and row["extra_bytes"] >= 0
            timed.add(op)
    assert timed == {op for op in OPS if OPS[op].traffic is not None}


def test_a_family_that_dies_or_hangs_is_a_row(monkeypatch, tmp_path):
    from benchmarks import correct, gpu_check

    monkeypatch.setattr(correct, "families", lambda: ["no_such_family"])
    (row,) = gpu_check.correctness("cpu", 100, tmp_path)
    assert not row["ok"] and row["raised"].startswith("status 2: ") and "no_such_family" in row["raised"]
    monkeypatch.setattr(correct, "families", lambda: ["activation"])
    (row,) = gpu_check.correctness("cpu", 0.1, tmp_path)
    assert not row["ok"] and row["raised"] == "not done after 0 s"


def test_a_wrong_implementation_is_told(monkeypatch):
    from benchmarks import correct

    entry = OPS["bias_gelu"]
    monkeypatch.setitem(entry.implementations, "triton", lambda x, bias, form: x + 1)
    monkeypatch.setattr(correct, "BACKENDS", ("triton", "reference"))
    monkeypatch.setattr(correct, "backends", lambda op, device: ("triton", "reference")[op != "bias_gelu" :])
    rows = correct.check_ops("activation", "cpu")
    assert {row["backend"] for row in rows if not row["ok"]} == {"triton"}
    assert all(row["ok"] for row in rows if row["backend"] == "reference")


def test_a_wrong_function_is_told(monkeypatch):
    from benchmarks import correct
    from fastmp.testing.samples import activation

    (right,) = activation.FUNCTIONS
    monkeypatch.setattr(correct, "DTYPES", (torch.float32,))

    def slightly_off(x, bias, approximate):
        return right.call(x, bias, approximate=approximate) * 1.001

    monkeypatch.setattr(activation, "FUNCTIONS", (replace(right, call=slightly_off),))
    (row,) = correct.check_functions("activation", "cpu", draws=2)
    assert not row["ok"] and row["error"] > row["bound"] and row["wrong_draws"] == [0, 1]
    monkeypatch.setattr(activation, "FUNCTIONS", (replace(right, call=lambda *a, **k: 1 / 0),))
    (row,) = correct.check_functions("activation", "cpu", draws=1)
    assert not row["ok"] and row["raised"] == "ZeroDivisionError: division by zero"


def test_touching_runs_every_implementation_and_nothing_else():
    from benchmarks import correct

    assert sorted(correct.touch("activation", "cpu")) == [
        "bias_gelu reference",
        "bias_gelu_backward reference",
    ]


SANITIZER = """#!/bin/sh
echo "========= COMPUTE-SANITIZER"
case "$*" in
*racecheck*) echo "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)";;
*initcheck*) sleep 60;;
*) echo "========= Invalid __global__ read of size 16 bytes"
   echo "=========     at stats_kernel+0x2f0"
   echo "========= ERROR SUMMARY: 1 error"; exit 86;;
esac
"""


def test_the_sanitizer_is_run_and_understood(monkeypatch, tmp_path):
    from benchmarks import sanitizer

    path = tmp_path / "compute-sanitizer"
    path.write_text(SANITIZER)
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    start = time.monotonic()
    memcheck, racecheck, initcheck = sanitizer.run(tmp_path, tmp_path, seconds=2)
    assert time.monotonic() - start < 30
    assert memcheck["errors"] == 1 and not memcheck["ok"]
    assert memcheck["first"][:2] == [
        "Invalid __global__ read of size 16 bytes",
        "at stats_kernel+0x2f0",
    ]
    assert racecheck == {"tool": "racecheck", "errors": 0, "ok": True}
    assert not initcheck["ok"] and initcheck["raised"].startswith("out of time")
    monkeypatch.setattr(sanitizer, "find", lambda: None)
    assert sanitizer.run(tmp_path, tmp_path, seconds=1) == []
    line = sanitizer.command("racecheck")
    assert line[:3] == ["compute-sanitizer", "--tool", "racecheck"] and "--touch" in line


def test_what_is_stuck_is_given_up_and_what_there_is_is_written(tmp_path):
    program = """
import sys, time, threading
from pathlib import Path
from benchmarks import gpu_check
result = {"environment": {}, "ok": True, "dropped": []}
threading.Timer(0.2, gpu_check.give_up, (result, Path(sys.argv[1]))).start()
time.sleep(100)
"""
    out = tmp_path / "out.json"
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-c", program, str(out)]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1 and "something is stuck" in done.stderr
    result = json.loads(out.read_text())
    assert not result["ok"] and result["dropped"] == ["all that followed: something was stuck"]


@pytest.mark.gpu
def test_every_function_on_a_gpu():
    from benchmarks import correct

    rows = [row for family in correct.families() for row in correct.check_functions(family, "cuda")]
    assert not [row for row in rows if not row["ok"]]
