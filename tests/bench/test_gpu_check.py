"""The GPU check, at sizes and on implementations that a CPU has."""

from __future__ import annotations

import json

import torch

from fastmp.ops import OPS


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    from benchmarks import gpu_check

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_check.main([]) == 2
    message = capsys.readouterr().err
    assert message == "gpu_check: no GPU: torch.cuda.is_available() is False\n"


def test_it_runs_on_the_cpu_at_small_sizes(tiny_case):
    """The same code, timed by CPU time: every op is right and has a time, and the result is JSON."""
    from benchmarks import gpu_check

    sizes = gpu_check.Sizes(
        shapes=dict.fromkeys(OPS, ((16, 256),)),
        dtypes=(torch.float32,),
        bandwidth_bytes=1 << 22,
        gemm=64,
        replays=2,
        rounds=2,
    )
    result = {"environment": gpu_check.environment("cpu"), "correctness": [], "ok": True}
    result["ceilings"] = gpu_check.ceilings("cpu", sizes)
    copy_gbs = result["ceilings"]["copy_gbs"]
    assert copy_gbs > 0
    result["kernels"] = gpu_check.kernel_times("cpu", sizes, lambda op: ["reference"], copy_gbs)
    result["as_used"] = gpu_check.as_used("cpu", sizes, [lambda: tiny_case], copy_gbs)
    rivals = {row["rival"]: row for row in result["as_used"]}
    assert rivals["torch eager"]["over_eager"] == 1.0 and set(rivals) == {"fastmp", "torch eager"}
    assert json.loads(json.dumps(result, default=str))["environment"]["commit"]
    assert len(gpu_check.report(result)) >= 3 + len(result["kernels"])


def test_correctness_rows_tell_a_wrong_implementation(monkeypatch):
    from benchmarks import gpu_check

    entry = OPS["bias_gelu"]
    wrong = {"triton": lambda x, bias, form: x + 1, "reference": entry.implementations["reference"]}
    monkeypatch.setitem(entry.implementations, "triton", wrong["triton"])
    monkeypatch.setattr(gpu_check, "OPS", {"bias_gelu": entry})
    rows = gpu_check.correctness("cpu")
    assert not any(row["ok"] for row in rows if row["backend"] == "triton")
    assert all(row["ok"] for row in rows if row["backend"] == "reference")
