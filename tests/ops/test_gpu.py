"""Every op on a GPU against float64 on NaN-poisoned memory; what of the benchmarks needs no GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from fastmp.ops import OPS
from fastmp.testing.ops import check_op

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _benchmarks_importable(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ("triton", "cuda", "reference"))
@pytest.mark.parametrize("op", sorted(OPS))
def test_op_on_gpu(op, backend):
    if backend not in OPS[op].implementations:
        pytest.skip(f"{op} has no {backend} implementation here")
    for result in check_op(op, "cuda", backend=backend):
        assert result.ok, f"{result}"


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ("triton", "cuda"))
def test_bias_gradient_is_deterministic_on_gpu(backend):
    run = OPS["bias_gelu_backward"].implementations.get(backend)
    if run is None:
        pytest.skip(f"bias_gelu_backward has no {backend} implementation here")
    generator = torch.Generator("cuda").manual_seed(0)
    x, grad = (torch.randn(4096, 3072, device="cuda", generator=generator) for _ in range(2))
    first = run(grad, x, x[0], "tanh")
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(first, run(grad, x, x[0], "tanh"), strict=True))


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements_on_gpu():
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GiB of free GPU memory")
    x = torch.zeros(1 << 16, (1 << 15) + 64, device="cuda", dtype=torch.bfloat16)
    x[-1] = 1
    y = torch.ops.fastmp.bias_gelu(x, None, "tanh")
    assert y[-1].float().sub(0.8412).abs().max() < 1e-2 and not y[:-1].any()
    target = torch.full((len(x),), x.shape[1] - 1, device="cuda")
    stats = torch.ops.fastmp.cross_entropy_stats(x, target, 0, x.shape[1], False)
    assert stats[-1].tolist() == pytest.approx([1.0, x.shape[1], 1.0])


def test_gpu_check_without_gpu(monkeypatch, capsys):
    from benchmarks import gpu_check

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_check.main([]) == 2
    message = capsys.readouterr().err
    assert message == "gpu_check: no GPU: torch.cuda.is_available() is False\n"


def test_gpu_check_runs_on_the_cpu_at_small_sizes():
    """The same code, timed by CPU time: every op is right and has a time, and the result is JSON."""
    from benchmarks import bench_activation, gpu_check

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
    cases = [lambda: bench_activation.bias_gelu_case(16, 256, "tanh", torch.float32, "cpu")]
    result["as_used"] = gpu_check.as_used("cpu", sizes, [_without_compile(case) for case in cases], copy_gbs)
    rivals = {row["rival"]: row for row in result["as_used"]}
    assert rivals["torch eager"]["over_eager"] == 1.0 and set(rivals) == {"fastmp", "torch eager"}
    assert json.loads(json.dumps(result, default=str))["environment"]["commit"]
    assert len(gpu_check.report(result)) >= 3 + len(result["kernels"])


def _without_compile(make):
    def made():
        case = make()
        del case.rivals["torch.compile"]
        return case

    return made


def test_correctness_rows_tell_a_wrong_implementation(monkeypatch):
    from benchmarks import gpu_check

    entry = OPS["bias_gelu"]
    wrong = {"triton": lambda x, bias, form: x + 1, "reference": entry.implementations["reference"]}
    monkeypatch.setitem(entry.implementations, "triton", wrong["triton"])
    monkeypatch.setattr(gpu_check, "OPS", {"bias_gelu": entry})
    rows = gpu_check.correctness("cpu")
    assert not any(row["ok"] for row in rows if row["backend"] == "triton")
    assert all(row["ok"] for row in rows if row["backend"] == "reference")


def test_event_clock_sums_short_steps(monkeypatch):
    """Times between far events are float32: a step of 10 us an hour after the start must not be lost."""
    from benchmarks import measure

    now = iter([0.0, 3.6e6, 3.6e6 + 0.01])

    class Event:
        def __init__(self, enable_timing):
            self.at = next(now)

        record = synchronize = lambda self: None

        def elapsed_time(self, end):
            return torch.tensor(end.at - self.at, dtype=torch.float32).item()

    monkeypatch.setattr(torch.cuda, "Event", Event)
    clock = measure.EventClock()
    clock()
    start = clock()
    assert clock() - start == pytest.approx(1e-5, rel=1e-3)


def test_statistics_of_times():
    from benchmarks.measure import in_turn, num_copies, num_rounds, speedup, summarize

    assert summarize([3.0, 1.0, 2.0, 5.0, 4.0]) == {"ms": 3.0, "p20": 2.0, "p80": 4.0, "min": 1.0}
    assert speedup([1.0, 2.0, 1.0], [3.0, 2.0, 2.0]) == 2.0
    order = []
    in_turn({name: lambda name=name: order.append(name) or 1.0 for name in "ab"}, 2)
    assert order == ["a", "b", "b", "a"]
    assert num_copies(1 << 30) == 2 and num_copies(1 << 20) == 16 and num_copies(60 << 20) == 3
    assert num_rounds(4 << 30) == 1 and num_rounds(512 << 20) == 4 and num_rounds(1 << 20) == 20


def test_goals_are_those_of_the_page_size():
    from benchmarks import bench_activation, cpu_goals

    goal = cpu_goals.Goal("bias_gelu", "float32", "forward", "fastmp", 4.0, 2.0)
    case = _without_compile(lambda: bench_activation.bias_gelu_case(8, 16, "tanh", torch.float32, "cpu"))()
    case.rivals["torch.compile"] = case.rivals["torch eager"]
    for huge_pages, wanted in ((True, 4.0), (False, 2.0)):
        (outcome,) = cpu_goals.measure(case, [goal], huge_pages, rounds=2, bandwidth=1e10)
        assert outcome.wanted == wanted and outcome.factor > 0
    slow = cpu_goals.Outcome(goal, "x", 4.0, ours_ms=1.0, eager_ms=5.0, compile_ms=0.5, floor_ms=0.1)
    assert not slow.ok and "FAIL" in slow.line()
    assert cpu_goals.Outcome(goal, "x", 4.0, ours_ms=1.0, eager_ms=5.0, compile_ms=1.5, floor_ms=0.1).ok
    assert sys.modules["benchmarks.cpu_goals"] is cpu_goals
