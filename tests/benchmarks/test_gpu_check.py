"""The GPU check, at sizes and on implementations that a CPU has."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import replace

import pytest
import torch

from benchmarks import bench_adamw, compare, correct, gpu_check, gpu_recipes, gpu_rows, report, sanitizer
from benchmarks.cases import Workload, families
from benchmarks.measure import Ceilings, extra_bytes
from fastmp.config.recipe import parse_arguments
from fastmp.ops import OPS
from fastmp.testing import functions as testing_functions
from fastmp.testing.ops import DTYPES


@pytest.fixture
def ceilings():
    return Ceilings(1.0, {"bfloat16": 1.0})


@pytest.fixture
def described():
    return {"device": "a CPU", "versions": {"torch": "2.13.0"}, "commit": "0123456789ab", "sources": "abc"}


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_check.main([]) == 2
    message = capsys.readouterr().err
    assert message == "gpu_check: no GPU: torch.cuda.is_available() is False\n"


@pytest.mark.full
def test_a_whole_run(tmp_path, capsys):
    """The same code on a CPU: everything is right and has a CPU time, and a second run has nothing to do."""
    out = tmp_path / "out.json"
    command = ["--device", "cpu", "--tiny", "--families", "activation", "--out", str(out), "--seconds", "200"]
    assert gpu_check.main(command) == 0
    result = json.loads(out.read_text())
    assert result["ok"] and result["left"] == [] and result["sanitizer"] == []
    checked = result["correctness"]
    assert {row["op"] for row in checked if "op" in row} == {"bias_gelu", "bias_gelu_backward"}
    assert len([row for row in checked if row.get("function") == "bias_gelu"]) == 4
    assert result["ceilings"]["copy_gbs"] > 0 and result["ceilings"]["graph_node_us"] > 0
    kernels = {row["op"]: row for row in result["kernels"]}
    assert kernels["bias_gelu"]["backend"] == "reference" and kernels["bias_gelu_backward"]["of_floor"] > 0
    (trained,) = result["recipes"]
    assert trained["recipe"] == "dense-1b" and trained["steps"] == 3 and trained["tokens_per_second"] > 0
    assert trained["kernels"][0][1] > 0 and trained["kernels_ms"] > 0 and trained["span_ms"] > 0
    rows = [(row["direction"], row["rival"]) for row in result["functions"]]
    rivals = ("fastmp", "torch eager", "torch.compile")
    assert rows == [(way, rival) for way in ("both", "forward") for rival in rivals]
    read = report.read(out)
    assert len(read.timings) == len(kernels) + len(rows) and "extra memory" in report.markdown([read])
    start, before = time.monotonic(), out.read_text()
    assert gpu_check.main(command) == 0
    assert out.read_text() == before and time.monotonic() - start < 20


# A process that times nothing: it makes a row of each item, dies at one, and hangs at another.
TIMER = """
import json, os, sys, time
job = json.load(sys.stdin)
def tell(**message): print(json.dumps(message), flush=True)
if not job["items"]: tell(ceilings={"copy_gbs": 1.0, "gemm_tflops": {}})
for item in job["items"]:
    shape = ", ".join(map(repr, item["shape"]))
    key = f"{item['phase']} {item['name']} [{shape}] bfloat16"
    tell(begin=key)
    tell(row={"op": item["name"], "backend": "reference", "shape": item["shape"], "ms": 1.0})
    if item["name"] == sys.argv[1]: sys.exit("an illegal address")
    if item["name"] == sys.argv[2]: time.sleep(60)
    tell(end=key)
"""


def test_everything_is_compiled_before_by_several_processes(monkeypatch, described, tmp_path, ceilings):
    """The shapes of one op in one process, and what is timed first compiled first."""
    tells = "import sys; open(sys.argv[1], 'a').write(sys.stdin.read() + chr(10))"
    monkeypatch.setattr(gpu_check, "COMMAND", (sys.executable, "-c", tells, str(tmp_path / "jobs")))
    timing = gpu_check.Timing(gpu_check.begin(None, described), gpu_check.Budget(60), tmp_path, lambda: None)
    listed = gpu_rows.items(["kernels"], ["rope", "norm"])
    timing.compile(gpu_rows.Job("cpu", tuple(listed), ceilings), 3)
    jobs = [gpu_rows.Job.decode(line) for line in (tmp_path / "jobs").read_text().splitlines()]
    assert len(jobs) == 3 and all(job.compile_only for job in jobs)
    assert sorted(item.key for job in jobs for item in job.items) == sorted(item.key for item in listed)
    for job in jobs:
        assert list(job.items) == [item for item in listed if item in job.items]
        assert not {i.name for i in job.items} & {
            i.name for other in jobs if other != job for i in other.items
        }


@pytest.fixture
def timer(monkeypatch):
    """Replaces the process that times: timer(dies at, hangs at)."""
    return lambda *names: monkeypatch.setattr(gpu_check, "COMMAND", (sys.executable, "-c", TIMER, *names))


CHOSEN = {"phases": ["kernels"], "only": ["activation", "rope"], "tiny": True}


def test_a_process_that_dies_costs_one_item(timer, described):
    timer("bias_gelu_backward", "none")
    saved, result = [], gpu_check.begin(None, described)
    gpu_check.check("cpu", result, **CHOSEN, save=lambda: saved.append(json.dumps(result)))
    rows = [(row["op"], row.get("raised", "")) for row in result["kernels"]]
    assert rows == [
        ("bias_gelu", ""),
        ("bias_gelu_backward", ""),
        ("bias_gelu_backward", "status 1: an illegal address"),
        ("rope", ""),
        ("rope_", ""),
    ]
    assert not result["ok"] and result["left"] == [] and len(result["done"]) == 4
    # after each row the file is whole and says what is left
    left = [len(json.loads(one)["left"]) for one in saved]
    assert left[0] == 4 and left == sorted(left, reverse=True) and left[-1] == 0


@pytest.mark.full
def test_what_there_is_no_time_for_is_left_and_made_by_the_next_call(timer, described, tmp_path, monkeypatch):
    timer("none", "rope")
    out, result = tmp_path / "out.json", gpu_check.begin(None, described)
    start = time.monotonic()
    gpu_check.check("cpu", result, **CHOSEN, seconds=2.0)
    assert time.monotonic() - start < 20
    assert [key.split()[1] for key in result["left"]] == ["rope", "rope_"] and result["ok"]
    gpu_check.write(result, out)
    assert (
        "2 left, the first is kernels rope"
        in gpu_check.report(json.loads(out.read_text()) | {"kernels": []})[-1]
    )
    # It goes on from the file, and makes the row again that had not been finished.
    timer("none", "none")
    again = gpu_check.begin(out, described)
    gpu_check.check("cpu", again, **CHOSEN)
    assert [row["op"] for row in again["kernels"]] == ["bias_gelu", "bias_gelu_backward", "rope", "rope_"]
    assert again["left"] == [] and again["ok"]
    # What takes as long as that each time is given up.
    monkeypatch.setattr(gpu_check, "_STUCK", 0.5)
    timer("none", "rope")
    stuck = gpu_check.begin(None, described)
    gpu_check.check("cpu", stuck, **CHOSEN, seconds=2.0)
    assert stuck["kernels"][-1]["raised"].startswith("not done after") and not stuck["ok"]
    assert [key.split()[1] for key in stuck["left"]] == ["rope_"]


@pytest.mark.parametrize(
    "change", [{"device": "another"}, {"sources": "abd"}, {"versions": {"torch": "2.14"}}]
)
def test_rows_of_other_sources_or_devices_are_not_kept(change, described, tmp_path):
    out = tmp_path / "out.json"
    gpu_check.write(gpu_check.begin(None, described) | {"done": ["kernels rope"]}, out)
    assert gpu_check.begin(out, described)["done"] == ["kernels rope"]
    assert gpu_check.begin(out, {**described, "commit": "other"})["done"] == ["kernels rope"]
    before = out.read_text()
    assert gpu_check.begin(out, {**described, **change})["done"] == []
    assert not out.exists() and (tmp_path / "out.json.before").read_text() == before
    out.write_text("not JSON")
    assert gpu_check.begin(out, described)["done"] == []


def test_sources_are_those_of_the_product_and_the_benchmarks(tmp_path, monkeypatch):
    (tmp_path / "fastmp").mkdir()
    (tmp_path / "fastmp" / "a.py").write_text("1")
    monkeypatch.setattr(gpu_check, "ROOT", tmp_path)
    before = gpu_check.sources()
    (tmp_path / "notes").write_text("2")
    assert gpu_check.sources() == before
    (tmp_path / "fastmp" / "a.py").write_text("2")
    assert gpu_check.sources() != before


def test_first_shapes_and_important_peers_come_first():
    listed = gpu_rows.items()
    assert len({item.key for item in listed}) == len(listed)
    firsts = [item for item in listed if item.shape == _shapes(item)[0]]
    assert listed[: len(firsts)] == firsts
    assert list(dict.fromkeys(item.family for item in firsts))[:4] == list(gpu_rows.FIRST)
    assert {item.phase for item in listed[:3]} == {"functions"}
    assert {item.family for item in gpu_rows.items(["kernels"], ["norm"])} == {"norm"}
    assert {item.name for item in listed if item.phase == "kernels"} == {
        op for module in families().values() for op in getattr(module, "SHAPES", ())
    }
    job = gpu_rows.Job("cpu", tuple(listed), wrong=(("rope", "cuda"),), tiny=True)
    assert gpu_rows.Job.decode(job.encode()) == job


def _shapes(item) -> tuple:
    return item.module.SHAPES[item.name] if item.phase == "kernels" else item.work.cuda


@pytest.mark.full
def test_every_op_can_be_timed(ceilings):
    listed = gpu_rows.items(["kernels"], tiny=True)
    for item in listed:
        (row,) = gpu_rows.rows(item, gpu_rows.Job("cpu", (item,), ceilings, tiny=True))
        assert row["bytes"] > 0 and row["flops"] >= 0 and row["ms"] > 0 and row["extra_bytes"] >= 0
    assert {item.name for item in listed} == {op for op in OPS if OPS[op].traffic is not None}


def test_a_kernel_that_is_wrong_at_the_timed_shape_is_not_timed(monkeypatch, ceilings):
    entry = OPS["bias_gelu"]

    def off(x, bias, form):
        y = entry.implementations["reference"](x, bias, form).clone()
        y.view(-1)[: y.numel() // 256] = 0  # a tile that nobody has written
        return y

    monkeypatch.setattr(correct, "BACKENDS", ("triton", "cuda", "broken", "off", "reference"))
    monkeypatch.setitem(entry.implementations, "off", off)
    monkeypatch.setitem(entry.implementations, "broken", lambda *_: 1 / 0)
    item = gpu_rows.Item("kernels", "activation", "bias_gelu", (16, 256))
    broken, wrong, right = gpu_rows.rows(item, gpu_rows.Job("cpu", (item,), ceilings, tiny=True))
    assert broken["backend"] == "broken" and broken["raised"] == "ZeroDivisionError: division by zero"
    assert wrong["backend"] == "off" and wrong["raised"].startswith("wrong at this shape: error ")
    assert right["backend"] == "reference" and right["ms"] > 0
    known = gpu_rows.Job(
        "cpu", (item,), ceilings, wrong=(("bias_gelu", "off"), ("bias_gelu", "broken")), tiny=True
    )
    assert [row["backend"] for row in gpu_rows.rows(item, known)] == ["reference"]


def test_a_function_that_is_wrong_at_the_timed_shape_is_not_timed(monkeypatch, tiny_case, ceilings):
    rivals = dict(tiny_case.rivals)
    make = lambda dtype, device: replace(tiny_case, rivals=dict(rivals))  # noqa: E731
    work = Workload("tiny", make, ((),), ((),))
    monkeypatch.setattr(gpu_rows.Item, "work", work)
    item = gpu_rows.Item("functions", "activation", "tiny", ())
    job = gpu_rows.Job("cpu", (item,), ceilings, tiny=True)
    pairs = [(way, rival) for way in ("both", "forward") for rival in rivals]
    assert [(row["direction"], row["rival"]) for row in gpu_rows.rows(item, job)] == pairs
    rivals["fastmp wrong"] = lambda: 1.2 * rivals["fastmp"]()
    rivals["fastmp broken"] = lambda: 1 / 0
    wrong, broken, *rest = gpu_rows.rows(item, job)
    assert wrong["rival"] == "fastmp wrong" and "differs from torch eager by 2.0e-01" in wrong["raised"]
    assert broken["raised"] == "ZeroDivisionError: division by zero"
    assert [(row["direction"], row["rival"]) for row in rest] == pairs
    monkeypatch.setattr(tiny_case, "random", True)  # where rivals draw numbers, results say nothing
    assert "fastmp wrong" in {row["rival"] for row in gpu_rows.rows(item, job) if "ms" in row}
    monkeypatch.setattr(gpu_rows.Item, "work", replace(work, make=lambda *_: 1 / 0))
    assert list(gpu_rows.rows(item, job)) == [{**item.what, "raised": "ZeroDivisionError: division by zero"}]


@pytest.mark.full
def test_adamw_of_the_largest_size_fits_into_the_memory_of_an_h100(monkeypatch, ceilings):
    """At 1e9 elements, by the bytes an element takes: 60 of 80 GB, the rest is for torch and its caches."""
    few, many = 1 << 16, 1_000_000_000
    item = gpu_rows.Item("functions", "adamw", "adamw", (few,))
    assert max(item.work.cuda) == (many,)
    monkeypatch.setattr(bench_adamw, "compiled", lambda function: function)  # whose memory is more
    monkeypatch.setattr(compare, "extra_bytes", lambda call, device: 0)  # profilers do not nest
    monkeypatch.setattr(gpu_rows, "rms_difference", lambda value, want: 0.0)  # in parts at a large size
    rows = []
    most = extra_bytes(
        lambda: rows.extend(gpu_rows.rows(item, gpu_rows.Job("cpu", (item,), ceilings))), "cpu"
    )
    assert [row["rival"] for row in rows if "ms" in row] == list(item.work.rivals)
    assert most / few * many < 60e9


def test_a_job_tells_what_it_does(ceilings):
    """An item's output or error is in its row; compiling alone makes no rows."""
    item = gpu_rows.Item("kernels", "activation", "bias_gelu", (16, 256))
    broken = gpu_rows.Item("kernels", "activation", "no such op", (16, 256))
    told: list[dict] = []
    gpu_rows.work(gpu_rows.Job("cpu", (broken, item), ceilings, tiny=True), told.append)
    kinds = [next(iter(message)) for message in told]
    assert kinds == ["begin", "row", "end"] * 2 and "raised" in told[1]["row"] and "ms" in told[4]["row"]
    told.clear()
    gpu_rows.work(gpu_rows.Job("cpu", (broken, item), compile_only=True), told.append)
    assert [next(iter(message)) for message in told] == ["begin", "end"] * 2


@pytest.mark.full
def test_a_family_that_dies_is_a_row_and_one_that_hangs_is_left(tmp_path):
    ((family, (row,), ended),) = gpu_check.correctness("cpu", ["no_such_family"], 100, tmp_path)
    assert family == "no_such_family" and not row["ok"] and ended
    assert row["raised"].startswith("status 2: ") and "no_such_family" in row["raised"]
    assert list(gpu_check.correctness("cpu", ["activation"], 0.1, tmp_path)) == [("activation", [], False)]


# A process that checks a family: its second row never comes, or it dies before it.
CHECKER = """
import json, pathlib, sys, time
family, _, _, _, out = sys.argv[1:]
with open(out, "w") as file:
    print(json.dumps({"op": family, "ok": True}), file=file, flush=True)
    if family == "hangs": file.write('{"op": "half a'), file.flush(), time.sleep(60)
    if family == "dies": sys.exit("an illegal address")
    print(json.dumps({"end": [family]}), file=file)
"""


def test_rows_of_a_family_that_is_cut_are_kept(monkeypatch, tmp_path):
    """Rows of a family that died are kept as well; the next call checks only a family that was cut."""
    monkeypatch.setattr(gpu_check, "CHECK", (sys.executable, "-c", CHECKER))
    found = {
        name: rest for name, *rest in gpu_check.correctness("cpu", ["hangs", "dies", "ends"], 1, tmp_path)
    }
    assert list(found)[-1] == "hangs"
    row = {family: {"family": family, "op": family, "ok": True} for family in found}
    died = {"family": "dies", "ok": False, "raised": "status 1: an illegal address"}
    assert found["ends"] == [[row["ends"]], True] and found["dies"] == [[row["dies"], died], True]
    assert found["hangs"] == [[row["hangs"]], False]


def test_a_family_that_was_cut_is_checked_again(monkeypatch, described):
    rows = [{"family": "activation", "op": "bias_gelu", "ok": True}]
    monkeypatch.setattr(correct, "families", lambda: ["activation"])
    for ended, left in ((False, ["correctness activation"]), (True, [])):

        def checks(device, names, *limits, ended=ended):
            return [(name, rows, ended) for name in names]

        monkeypatch.setattr(gpu_check, "correctness", checks)
        result = gpu_check.begin(None, described)
        for _ in range(2):  # and its rows are not there twice
            gpu_check.check("cpu", result, phases=["correctness"])
            assert result["correctness"] == rows and result["left"] == left and result["ok"]


def test_kernels_are_compiled_before_they_are_checked(monkeypatch, capfd, tmp_path):
    tells = "import sys; print(sys.argv[1:], file=open(sys.argv[1], 'w'))"
    monkeypatch.setattr(gpu_check, "PRECOMPILE", (sys.executable, "-c", tells, str(tmp_path / "told")))
    gpu_check.compile_checks(["norm", "rope"], 60, tmp_path)
    assert "'--phase', 'correctness', '--families', 'norm', 'rope'" in (tmp_path / "told").read_text()
    assert not capfd.readouterr().err
    for program, reason in (("import time; time.sleep(60)", "stopped after 1 s: "), ("sys", "1: NameError")):
        monkeypatch.setattr(gpu_check, "PRECOMPILE", (sys.executable, "-c", program))
        gpu_check.compile_checks(["norm"], 1, tmp_path)
        assert f"not all kernels were compiled beforehand: {reason}" in capfd.readouterr().err


def test_a_wrong_implementation_is_told(monkeypatch):
    entry = OPS["bias_gelu"]
    monkeypatch.setitem(entry.implementations, "triton", lambda x, bias, form: x + 1)
    monkeypatch.setattr(correct, "BACKENDS", ("triton", "reference"))
    monkeypatch.setattr(correct, "backends", lambda op, device: ("triton", "reference")[op != "bias_gelu" :])
    rows = list(correct.check_ops("activation", "cpu"))
    assert {row["backend"] for row in rows if not row["ok"]} == {"triton"}
    assert all(row["ok"] for row in rows if row["backend"] == "reference")


def test_a_wrong_function_is_told(monkeypatch):
    found = testing_functions.families()
    activation = found["activation"]
    (right,) = activation.functions

    def slightly_off(x, bias, approximate):
        return right.call(x, bias, approximate=approximate) * 1.001

    wrong = replace(activation, functions=(replace(right, call=slightly_off),))
    monkeypatch.setitem(found, "activation", wrong)
    (row,) = correct.check_functions("activation", "cpu", 2, (torch.float32,))
    assert not row["ok"] and row["error"] > row["bound"] and row["wrong_draws"] == [0, 1]
    wrong = replace(activation, functions=(replace(right, call=lambda *a, **k: 1 / 0),))
    monkeypatch.setitem(found, "activation", wrong)
    (row,) = correct.check_functions("activation", "cpu", 1, (torch.float32,))
    assert not row["ok"] and row["raised"] == "ZeroDivisionError: division by zero"


def test_touching_runs_every_implementation_and_nothing_else():
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
    path = tmp_path / "compute-sanitizer"
    path.write_text(SANITIZER)
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    start = time.monotonic()
    memcheck, racecheck, initcheck = sanitizer.run(tmp_path, tmp_path, seconds=2)
    assert time.monotonic() - start < 30
    assert memcheck["errors"] == 1 and not memcheck["ok"]
    assert memcheck["first"][:2] == ["Invalid __global__ read of size 16 bytes", "at stats_kernel+0x2f0"]
    assert racecheck == {"tool": "racecheck", "errors": 0, "ok": True}
    assert not initcheck["ok"] and initcheck["raised"].startswith("out of time")
    monkeypatch.setattr(sanitizer, "find", lambda: None)
    assert sanitizer.run(tmp_path, tmp_path, seconds=1) == []
    line = sanitizer.command("racecheck", families=["norm"])
    assert line[:3] == ["compute-sanitizer", "--tool", "racecheck"] and "--touch" in line
    assert line[-1] == "norm"
    assert "kernel_substring=scatter_kernel" not in line
    assert "kernel_substring=scatter_kernel" in sanitizer.command("initcheck")


FAMILIES = [name for name in correct.families() if correct.functions(name)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_function_on_a_gpu(family, dtype):
    rows = correct.check_functions(family, "cuda", dtypes=(dtype,))
    assert not [row for row in rows if not row["ok"]]


def test_figures_of_a_recipe_leave_out_its_first_steps():
    rates = {step: 1.0 if step <= 10 else 100.0 + step for step in range(1, 61)}
    records = [{"kind": "run"}] + [
        {"kind": "train", "step": step, "tokens_per_second": rate, "memory_bytes": step, "loss": 60.0 - step}
        for step, rate in rates.items()
    ]
    found = gpu_recipes.summary(records)
    assert found == {"steps": 50, "tokens_per_second": 135.5, "memory_bytes": 60, "loss": 0.0}


def test_a_recipe_that_cannot_be_trained_is_a_row(tmp_path):
    row = gpu_recipes.train("no-such-recipe", tmp_path, 100.0)
    assert row["raised"].startswith("status 2: ") and "no-such-recipe" in row["raised"]


@pytest.mark.parametrize("name", gpu_recipes.RECIPES)
def test_the_options_of_a_recipe_are_understood(name):
    recipe = parse_arguments(gpu_recipes.command(name)[1:])
    assert recipe.train.steps == gpu_recipes.STEPS
    if name in gpu_recipes.PROFILED:
        assert recipe.train.profile == "torch" and recipe.model.hidden_size == recipe.data.seq_len / 2 == 2048


def test_kernels_of_a_trace_are_summed_by_name():
    events = [
        {"cat": "kernel", "name": "gemm", "ts": 0.0, "dur": 2000.0},
        {"cat": "kernel", "name": "norm", "ts": 3000.0, "dur": 500.0},
        {"cat": "kernel", "name": "gemm", "ts": 5000.0, "dur": 1000.0},
        {"cat": "cpu_op", "name": "aten::mm", "ts": 0.0, "dur": 9000.0},
        {"cat": "ac2g", "name": "arrow", "ts": 0.0},
    ]
    found = gpu_recipes.kernel_table(events)
    assert found == {"kernels": [["gemm", 3.0], ["norm", 0.5]], "kernels_ms": 3.5, "span_ms": 6.0}
    assert gpu_recipes.kernel_table(events[3:])["kernels"] == [["aten::mm", 9.0]]
    assert gpu_recipes.kernel_table([]) == {}
