"""The rivals of a benchmark compute the same: outputs, gradients, losses of a few steps, on a tiny shape."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import report
from benchmarks.goals import H200_GOALS

ROOT = Path(__file__).resolve().parents[2]
NAMES = sorted(path.stem for path in (ROOT / "benchmarks").glob("bench_*.py"))


def tensors(result):
    return [result] if isinstance(result, torch.Tensor) else [t for part in result for t in tensors(part)]


def results(work, rival):
    """Return the results of a rival on inputs of its own: some overwrite theirs."""
    case = work.case(work.tiny, torch.float32, "cpu")
    if "step" in work.directions:
        step = case.step(rival)
        return [step().clone() for _ in range(3)]
    direction = "both" if "both" in work.directions else work.directions[0]
    found = [tensor.detach() for tensor in tensors(case.results(rival, direction)())]
    narrow = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu)
    return [tensor.float() if tensor.dtype in narrow else tensor.clone() for tensor in found]


QUICK = ("bench_cross_entropy", "bench_grouped_mm", "bench_norm")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.full) for name in NAMES]
)
def test_rivals_agree(name):
    module = importlib.import_module(f"benchmarks.{name}")
    for work in (work for work in module.WORKLOADS if work.tiny is not None):
        case = work.case(work.tiny, torch.float32, "cpu")
        if case.random:
            continue
        reference = "torch eager" if "torch eager" in case.rivals else list(case.rivals)[-1]
        expected = results(work, reference)
        for rival in case.rivals:
            if rival == reference or "compile" in rival:  # compiling takes seconds, and is torch's affair
                continue
            for value, want in zip(results(work, rival), expected, strict=True):
                torch.testing.assert_close(value, want, rtol=2e-4, atol=2e-5, check_dtype=False)


def test_every_family_names_its_rivals_and_goals_rightly():
    for name in NAMES:
        module = importlib.import_module(f"benchmarks.{name}")
        works = {work.name: work for work in module.WORKLOADS}
        assert all(work.cpu and work.cuda for work in works.values()), name
        for goal in getattr(module, "GOALS", ()):
            work = works[goal.workload]
            assert {goal.rival, goal.over} <= set(work.rivals) and goal.direction in work.directions, goal
            assert getattr(torch, goal.dtype) in (*work.dtypes, torch.float32), goal


def test_a_gpu_run_would_speak_to_every_goal():
    """The names of ops, workloads and rivals in the goals of `benchmarks.report` are those timed here."""

    def timing(case, workload, direction, rival):
        return report.Timing(case, workload, "bfloat16", direction, rival, 1.0, 0.9, "copy", 0, 1, 1)

    timings = []
    for module in (importlib.import_module(f"benchmarks.{name}") for name in NAMES):
        shapes = getattr(module, "SHAPES", {})
        timings += [timing(f"{op} {list(s)}", op, "kernel", "triton") for op in shapes for s in shapes[op]]
        for work in module.WORKLOADS:
            timings += [
                timing(f"{work.name} {list(shape)} bfloat16", work.name, direction, rival)
                for shape in work.cuda
                for direction in work.directions
                for rival in work.rivals
            ]
    forward = [replace(t, ms=0.5) if t.direction == "forward" else t for t in timings]
    silent = {goal.what for goal in H200_GOALS if goal.worst(forward) is None}
    assert silent <= (set() if "bench_linear_cross_entropy" in NAMES else {"linear + cross-entropy"})
