"""Measurements of the benchmarks and the rows of their tables, on a CPU and at small sizes."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import cpu_goals, peers, report
from benchmarks.bench_activation import WORKLOADS
from benchmarks.cases import EAGER, CpuGoal, Workload, families, is_first, sweep
from benchmarks.conftest import _compare, is_quick
from benchmarks.measure import (
    Ceilings,
    extra_bytes,
    in_turn,
    measure_ceilings,
    num_copies,
    num_rounds,
    speedup,
    summarize,
)

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def ceilings():
    return Ceilings(copy_gbs=10.0, gemm_tflops={"float32": 0.1})


def test_statistics_of_times():
    assert summarize([3.0, 1.0, 2.0, 5.0, 4.0]) == {"ms": 3.0, "p20": 2.0, "p80": 4.0, "min": 1.0}
    assert speedup([1.0, 2.0, 1.0], [3.0, 2.0, 2.0]) == 2.0
    order = []
    in_turn({name: lambda name=name: order.append(name) or 1.0 for name in "ab"}, 2)
    assert order == ["a", "b", "b", "a"]
    assert {len(times) for times in in_turn({"a": float, "b": float}, 9, seconds=0).values()} == {3}
    assert num_copies(1 << 30) == 2 and num_copies(1 << 20) == 16 and num_copies(60 << 20) == 3
    assert num_rounds(4 << 30) == 1 and num_rounds(512 << 20) == 4 and num_rounds(1 << 20) == 20


def test_a_floor_is_the_larger_of_two_times(ceilings):
    assert ceilings.floor(10**7, 0, torch.float32) == (pytest.approx(1.0), "copy")
    assert ceilings.floor(10**7, 2 * 10**8, torch.float32) == (pytest.approx(2.0), "matrix products")
    assert ceilings.floor(10**7, 10**12, torch.float64)[1] == "copy"  # no rate was measured for it


def test_ceilings_are_measured():
    measured = measure_ceilings("cpu", copy_bytes=1 << 22, gemm_size=64)
    assert measured.copy_gbs > 0 and set(measured.gemm_tflops) == {"float32", "bfloat16"}
    assert all(rate > 0 for rate in measured.gemm_tflops.values())


def test_extra_bytes_are_what_a_call_holds_beyond_what_it_returns():
    x = torch.ones(1 << 18)  # 1 MiB
    saved = x.clone().requires_grad_()
    for call, expected in (
        (lambda: x.exp(), 0),
        (lambda: x.exp().sin(), 1),
        (lambda: x.exp().sin().sum(), 2),
        (lambda: x.sin_(), 0),
        (lambda: torch.autograd.grad(saved.exp().sum(), saved), 1),  # exp saves what it returns
    ):
        assert extra_bytes(call, "cpu") == pytest.approx(expected * x.nbytes, abs=64)


def test_every_rival_has_a_row_with_all_columns(tiny_case, ceilings):
    from benchmarks.compare import compare

    for direction, floor in (("forward", tiny_case.forward_bytes), ("both", tiny_case.costs("both")[0])):
        compared = compare(tiny_case, direction, ceilings, "cpu", rounds=3)
        assert set(compared.rows) == {"fastmp", "torch eager"} and not compared.failed
        for row in compared.rows.values():
            assert row.timing == "CPU time" and len(row.times_ms) == 3 and row.ms == min(row.times_ms)
            assert row.best_peer == "torch eager" and row.extra_bytes >= 0
            assert row.bytes == floor and row.of_floor == pytest.approx(floor / 1e7 / row.ms)
        ours, eager = compared.rows["fastmp"], compared.rows["torch eager"]
        assert eager.over_peer == eager.over_eager == 1.0
        assert ours.over_peer == ours.over_eager == pytest.approx(eager.ms / ours.ms)
        assert ours.flops == eager.flops == 16 * 256 * (9 if direction == "forward" else 9 + 18)
        assert "times_ms" not in ours.columns() and json.dumps(ours.columns())


def test_a_rival_that_raises_has_a_reason_in_place_of_a_row(tiny_case, ceilings):
    from benchmarks.compare import compare

    def broken():
        raise RuntimeError("no kernel image\nand more")

    tiny_case.rivals["Liger"] = broken
    compared = compare(tiny_case, "both", ceilings, "cpu", rounds=1)
    assert compared.failed == {"Liger": "RuntimeError: no kernel image"}
    assert set(compared.rows) == {"fastmp", "torch eager"}


def test_peers_say_why_they_are_absent(monkeypatch):
    assert peers.peer(peers.LIGER, "liger_kernel.ops:X", "cpu") is None
    assert peers.why_absent(peers.LIGER) == "Liger runs on a GPU only"
    monkeypatch.setattr(peers, "installed", lambda name: None)
    assert peers.peer(peers.QUACK, "quack:rmsnorm", "cuda") is None
    assert peers.why_absent(peers.QUACK) == "quack is not installed (pip install quack-kernels)"
    monkeypatch.setattr(peers, "installed", lambda name: "1.0")
    assert peers.peer(peers.TE, "json:nothing_of_this_name", "cuda") is None
    assert "Transformer Engine 1.0 has no json:nothing_of_this_name" in peers.why_absent(peers.TE)
    assert peers.peer(peers.TE, "json:dumps", "cuda") is json.dumps
    assert peers.why_absent(f"{peers.QUACK} as Megatron") == peers.why_absent(peers.QUACK)
    assert peers.why_absent("loop on streams", "cpu") == "loop on streams is timed on a GPU only"
    assert peers.why_absent("loop on streams", "cuda") == "loop on streams does not run at this shape"


def test_only_the_first_shape_and_dtype_run_by_default():
    work = Workload("x", lambda *a: None, cpu=((1,), (2,)), cuda=((3,),), rivals=("fastmp", "torch eager"))
    cases = [parameter.values[0] for parameter in sweep((work,), "cpu")]
    assert len(cases) == 2 * 2 * 2 * 2 and sum(map(is_first, cases)) == 2 * 2
    assert [c.args[1:3] for c in cases if is_first(c)] == [((1,), torch.float32)] * 4
    cases = [parameter.values[0] for parameter in sweep((work,), "cuda")]
    assert [c.args[1:3] for c in cases if is_first(c)] == [((3,), torch.bfloat16)] * 4


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_default_set_has_every_family(device):
    """The first workload of each, with all of its rivals; a fifth of what `--full` runs at most."""
    quick, every = 0, 0
    for name, family in families().items():
        swept = sweep(family.WORKLOADS, device)
        chosen = [case for case in swept if is_quick(case.values[0], case.values[2], family)]
        assert bool(chosen) == bool(family.WORKLOADS), name
        if chosen:
            work = family.WORKLOADS[0]
            assert [c.values[1:] for c in chosen] == [(rival, work.directions[-1]) for rival in work.rivals]
        quick, every = quick + len(chosen), every + len(swept)
    assert quick < every / 5


def test_goals_are_those_of_the_page_size_and_of_memory(tiny_case, ceilings, tmp_path):
    goal = CpuGoal("bias_gelu", "float32", "forward", "fastmp", 4.0, 2.0)
    tiny_case.rivals["torch.compile"] = tiny_case.rivals["torch eager"]
    for huge_pages, wanted in ((True, 4.0), (False, 2.0)):
        (outcome,) = cpu_goals.measure(tiny_case, [goal], huge_pages, rounds=2, ceilings=ceilings)
        assert outcome.wanted == wanted and outcome.factor > 0 and outcome.over_compile > 0
    described = {"device": "x", "goals": [outcome.record()]}
    (tmp_path / "out.json").write_text(json.dumps(described))
    read = report.read(tmp_path / "out.json")
    assert [timing.rival for timing in read.timings] == ["fastmp", "torch eager", "torch.compile"]
    ours = replace(outcome.ours, ms=1.0, extra_bytes=10)
    other, compiled = replace(outcome.other, ms=5.0, extra_bytes=99), replace(outcome.other, ms=1.5)
    made = cpu_goals.Outcome(goal, "x", 4.0, ours, other, compiled)
    assert made.ok and made.factor == 5.0
    slower = replace(made, compile=replace(compiled, ms=0.5))
    assert not slower.ok and "FAIL" in slower.line()
    assert replace(slower, compile=None).ok  # nobody compiles an optimizer step
    larger = replace(made, goal=replace(goal, extra_bytes=0.1))
    assert not larger.ok and "0.101 of its extra bytes (goal 0.1)" in larger.line()
    assert replace(larger, other=replace(other, extra_bytes=100)).ok


def test_goals_that_were_measured_are_kept_where_a_later_one_ends_the_process(
    tiny_case, ceilings, tmp_path, monkeypatch
):
    measured = []

    def measure(case, goals, *rest):
        if measured:
            raise KeyboardInterrupt
        measured.extend(cpu_goals_measure(case, goals, *rest))
        return measured

    cpu_goals_measure = cpu_goals.measure
    goal = CpuGoal("bias_gelu", "float32", "forward", "fastmp", 4.0, 2.0)
    work = Workload("bias_gelu", lambda dtype, device: tiny_case, ((),), ((),))
    monkeypatch.setattr(cpu_goals, "measure", measure)
    monkeypatch.setattr(cpu_goals, "measure_ceilings", lambda device: ceilings)
    monkeypatch.setattr(cpu_goals, "goals_by_case", lambda: [(work, (), "float32", [goal])] * 2)
    with pytest.raises(KeyboardInterrupt):
        cpu_goals.main(["--out", str(tmp_path / "out.json"), "--rounds", "2"])
    assert len(report.read(tmp_path / "out.json").goals) == 1


BENCH = """
from benchmarks.bench_activation import bias_gelu_case
from benchmarks.cases import EAGER, LIGER, OURS, Workload
def make(*arguments):
    case = bias_gelu_case(*arguments)
    del case.rivals["torch.compile"]
    return case

SHAPES = ((8, 16, "tanh"), (8, 32, "tanh"))
WORKLOADS = [Workload(name, make, SHAPES, (), (OURS, EAGER, LIGER)) for name in ("tiny", "second")]
"""
FORMS = """
from benchmarks.bench_checkpoint import test_save  # pedantic rounds of a function
from benchmarks.bench_pipeline import test_runner
from benchmarks.bench_schedule import test_order  # rounds that pytest-benchmark calibrates
"""
KILLED = """
def test_outlives_the_time_limit():
    time.sleep(3)

def test_is_killed():
    os.kill(os.getpid(), signal.SIGKILL)
"""


def pytest_of(folder, *options, **settings):
    """Run the benchmarks in a folder; the process ends itself where one of them says so."""
    command = [sys.executable, "-m", "pytest", "-p", "benchmarks.conftest", "--rootdir", str(folder)]
    command += ["-c", str(folder / "pytest.ini"), "-ra", *options, str(folder)]
    (folder / "pytest.ini").write_text("[pytest]\ntimeout = 2\ntimeout_method = thread\n")
    # pytest-benchmark measures nothing where it finds itself among several workers
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.full
def test_a_run_that_is_killed_leaves_its_results(tmp_path):
    """And the time limit of tests is none of benchmarks."""
    (tmp_path / "bench_tiny.py").write_text(BENCH)
    (tmp_path / "bench_unlucky.py").write_text("import os, signal, time" + KILLED)
    done = pytest_of(tmp_path)
    assert done.returncode == -signal.SIGKILL and "Timeout" not in done.stdout + done.stderr
    read = report.read(tmp_path / ".benchmarks" / "last.json")
    assert [timing.rival for timing in read.timings] == ["fastmp", "torch eager"]
    assert "bias_gelu tanh" in report.markdown([read]) and read.ceilings["copy_gbs"] > 0


def test_benchmarks_of_each_form_run_and_a_table_is_printed_and_written_as_json(tmp_path):
    (tmp_path / "bench_tiny.py").write_text(FORMS + BENCH)
    short = ("--benchmark-only", "--benchmark-max-time=0.01", "--benchmark-min-rounds=2")
    done = pytest_of(tmp_path, *short, "--benchmark-json", str(tmp_path / "out.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "5 passed, 1 skipped, 45 deselected" in done.stdout
    assert "SKIPPED" in done.stdout and "Liger is timed on a GPU only" in done.stdout
    assert report.markdown([report.read(tmp_path / ".benchmarks" / "last.json")]) in done.stdout
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["environment"]["versions"]["torch"] == torch.__version__
    assert result["ceilings"]["copy_gbs"] > 0 and "node" not in result["machine_info"]
    entries = result["benchmarks"]
    assert all(0 < entry["stats"]["min"] <= entry["stats"]["mean"] < 5 for entry in entries)
    rows = [entry["extra_info"] for entry in entries if "rival" in entry["extra_info"]]
    assert {(row["rival"], row["direction"]) for row in rows} == {
        (rival, "both") for rival in ("fastmp", "torch eager")
    }
    assert len(entries) == 5 and len(report.read(tmp_path / "out.json").timings) == 2
    for info in rows:
        assert info["of_floor"] > 0 and math.isfinite(info["over_peer"]) and info["extra_bytes"] >= 0


def uncapturable():
    raise RuntimeError("operation not permitted when stream is capturing")


def test_like_is_set_against_like_where_a_rival_cannot_be_captured(tiny_case, ceilings, monkeypatch):
    """On a GPU; here the times of graphs and of calls are given."""
    from benchmarks import compare

    seconds = {"fastmp": (1.0, 2.0), "torch eager": (3.0, 5.0), "Liger": (None, 8.0)}
    copies = []

    def run(kind):
        def made(calls, rounds=1):
            copies.append(len(calls))
            if (time := calls[0]()[kind]) is None:
                uncapturable()
            return lambda: time

        return made

    case = replace(tiny_case, again=lambda seed: case, rivals=dict.fromkeys(seconds, lambda: None))
    monkeypatch.setattr(type(case), "both", lambda self, name: lambda: seconds[name])
    for name, stand_in in (
        ("GraphRun", run(0)),
        ("EventRun", run(1)),
        ("extra_bytes", lambda call, device: 0),
        ("_all_flops", lambda case, direction, name: 0),
    ):
        monkeypatch.setattr(compare, name, stand_in)
    monkeypatch.setattr(type(case), "results", lambda self, name, direction: self.both(name))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    rows = compare.compare(case, "both", ceilings, "cuda", rounds=3).rows
    assert {name: (row.timing, row.ms, row.called_ms) for name, row in rows.items()} == {
        "fastmp": ("CUDA graph", 1.0, 2.0),
        "torch eager": ("CUDA graph", 3.0, 5.0),
        "Liger": ("CUDA events", 8.0, 8.0),
    }
    assert rows["fastmp"].best_peer == "torch eager" and rows["fastmp"].over_peer == 3.0
    assert rows["Liger"].over_eager == 5 / 8  # both as called
    assert set(copies) == {16}  # of a case that would fit the cache sixteen times and more
    case.capturable = False
    rows = compare.compare(case, "both", ceilings, "cuda", rounds=3).rows
    assert {row.timing for row in rows.values()} == {"CUDA events"} and rows["fastmp"].over_peer == 2.5


@pytest.mark.gpu
@pytest.mark.alone
def test_rivals_are_timed_in_graphs_on_a_gpu():
    from benchmarks.compare import compare

    case = WORKLOADS[0].case((256, 1024, "tanh"), torch.bfloat16, "cuda")
    waits = case.rivals["torch eager"]
    case.rivals = {name: case.rivals[name] for name in ("fastmp", "torch eager")}
    case.again = None  # another case has no such rival
    case.rivals["waits"] = lambda: waits() if torch.ones(1, device="cuda").item() else None
    ceilings = measure_ceilings("cuda", copy_bytes=1 << 26, gemm_size=1024)
    for direction in ("forward", "both", "forward"):  # a capture that failed leaves nothing behind
        rows = compare(case, direction, ceilings, "cuda", rounds=5).rows
        assert rows["fastmp"].timing == rows["torch eager"].timing == "CUDA graph"
        assert rows["waits"].timing == "CUDA events"
        assert 0 < rows["fastmp"].ms <= rows["fastmp"].called_ms
        assert torch.cuda.current_stream() == torch.cuda.default_stream()


def test_a_rival_is_built_after_the_comparison(tiny_case):
    """One that cannot be built is skipped, and its tensors are not there while rivals are timed."""
    events = []

    def of(case, direction):
        events.append("compared")
        row = SimpleNamespace(columns=lambda: {"ms": 1.0})
        return SimpleNamespace(rows={EAGER: row}, failed={"broken": "RuntimeError: no such kernel"})

    def built(rival):
        events.append(f"built {rival}")
        if rival == "broken":
            raise RuntimeError("no such kernel")
        return lambda: None

    tiny_case.rivals["broken"], tiny_case.forward = print, built
    benchmark = SimpleNamespace(enabled=True, extra_info={}, pedantic=lambda call, rounds: call())
    run = _compare.__wrapped__(benchmark, SimpleNamespace(of=of))
    with pytest.raises(pytest.skip.Exception, match="no such kernel"):
        run(tiny_case, "broken", "forward")
    assert events == ["compared"] and benchmark.skipped
    run(tiny_case, EAGER, "forward")
    assert events[1:] == ["compared", f"built {EAGER}"] and not benchmark.skipped
