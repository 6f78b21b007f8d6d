"""`python -m benchmarks.report`: every kind of result file, what they do not hold, and the picture."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from marks import full

from benchmarks import report
from benchmarks import roofline as picture

ROOT = Path(__file__).resolve().parents[2]
H200 = {
    "device": "NVIDIA H200",
    "capability": "9.0",
    "versions": {"torch": "2.11.0", "triton": "3.6.0"},
    "commit": "0123456789ab",
}
CPU = {"device": "Some CPU", "threads": 2, "versions": {"torch": "2.13.0"}, "commit": "0123456789ab"}
CEILINGS = {"copy_gbs": 4300.0, "gemm_tflops": {"bfloat16": 780.0}, "read_gbs": 4500.0}


def row(**changes):
    """The columns of one rival, as the benchmarks write them."""
    columns = {
        "rival": "fastmp",
        "timing": "CUDA graph",
        "ms": 1.0,
        "called_ms": 1.1,
        "floor_ms": 0.95,
        "floor_of": "copy",
        "of_floor": 0.95,
        "best_peer": "Liger",
        "over_peer": 2.0,
        "over_eager": 5.0,
        "extra_bytes": 1 << 20,
        "bytes": 1 << 30,
        "flops": 1 << 32,
    }
    return columns | changes


def used(workload, direction="both", shape="[8192, 4096]", **changes):
    case = f"{workload} {shape} bfloat16"
    return {"case": case, "workload": workload, "direction": direction, **row(**changes)}


def kernel(op, of_floor, shape=(8192, 4096), **changes):
    what = {"op": op, "shape": shape, "dtype": "bfloat16", "backend": "triton"}
    return {**row(of_floor=of_floor), **what, **changes}


def gpu_check(kernels=(), functions=(), **changes):
    content = {
        "environment": H200,
        "ok": True,
        "correctness": [{"op": "bias_gelu", "ok": True}, {"op": "bias_gelu", "ok": False}],
        "sanitizer": [{"tool": "memcheck", "errors": 0, "ok": True}],
        "ceilings": CEILINGS,
        "kernels": list(kernels),
        "functions": list(functions),
        "left": ["kernels rope [1] bfloat16"],
    }
    return content | changes


def pytest_file(*rows, **changes):
    entries = [{"extra_info": row} for row in rows]
    return {"benchmarks": entries, "environment": CPU, "ceilings": CEILINGS} | changes


def goals_file(ok=True, **goal):
    entry = {
        "goal": {"direction": "both", "rival": "fastmp", "over": "torch eager", "extra_bytes": None, **goal},
        "case": "rms_norm [64, 64] float32",
        "wanted": 4.0,
        "factor": 5.0,
        "ok": ok,
        "ours": row(extra_bytes=10),
        "other": row(rival="torch eager", extra_bytes=100, over_peer=None, best_peer=None),
        "compile": None,
    }
    return {**CPU, "ceilings": CEILINGS, "goals": [entry]}


@pytest.fixture
def saved(tmp_path):
    def save(content, name="result.json"):
        path = tmp_path / name
        path.write_text(json.dumps(content))
        return path

    return save


def state(results, what):
    """{goal: state} of the goals on an H200 named `what`."""
    rows = report.goal_rows(results)
    return {wanted: (measured, state) for _, name, wanted, measured, state in rows if name == what}


@pytest.mark.parametrize("device", [CPU, {**H200, "device": "NVIDIA H100 80GB HBM3"}])
def test_only_devices_in_the_files_have_goals(saved, device):
    result = report.read(saved(gpu_check([kernel("bias_gelu", 0.99)], environment=device)))
    assert report.goal_rows([result]) == [] and "Goals" not in report.markdown([result])
    on_h200 = report.read(saved(gpu_check([kernel("rope_", 0.99)])))
    assert {on for on, *_ in report.goal_rows([result, on_h200])} == {"H200"}
    assert state([on_h200], "bias-GeLU forward") == {"at least 0.95 of sustained": ("", "not measured")}


@pytest.mark.parametrize(("second", "expected"), [(0.96, ("0.96", "met")), (0.90, ("0.9", "missed"))])
def test_a_kernel_goal_holds_on_every_shape_for_the_better_implementation(saved, second, expected):
    kernels = [
        kernel("bias_gelu", 0.97),
        kernel("bias_gelu", second, shape=(2048, 6144)),
        kernel("bias_gelu", 0.5, shape=(2048, 6144), backend="cuda"),
        kernel("bias_gelu", 0.1, dtype="float32"),
    ]
    result = report.read(saved(gpu_check(kernels)))
    assert state([result], "bias-GeLU forward") == {"at least 0.95 of sustained": expected}


def test_goals_of_public_functions(saved):
    name = "linear_cross_entropy"
    functions = [
        used(name, shape="[4096, 4096, 128256]", ms=17.0, of_floor=0.94, extra_bytes=900_000_000),
        used(name, shape="[8192, 4096, 128256]", ms=35.0, of_floor=0.92, extra_bytes=1_200_000_000),
        used(name, shape="[8192, 4096, 128256]", rival="Liger", ms=90.0),
        used("cross_entropy", ms=1.0),
        used("cross_entropy", rival="fastmp in place", ms=0.8),
        used("cross_entropy", rival="as Megatron, compiled", ms=6.0),
        {"case": "x", "direction": "both", "rival": "quack", "raised": "RuntimeError"},
    ]
    result = report.read(saved(gpu_check(functions=functions)))
    assert state([result], "linear + cross-entropy") == {
        "at least 0.93 of sustained": ("0.92", "missed"),
        "at most 17.6 ms": ("17", "met"),
        "at most 1.1 GB extra": ("1.2", "missed"),
    }
    assert state([result], "cross-entropy") == {
        "at least 3.2 x Liger for Megatron": ("", "not measured"),
        "at least 7 x as Megatron, compiled": ("7.5", "met"),
    }


def test_what_was_predicted_stands_beside_what_was_measured(saved, monkeypatch, tmp_path):
    rows = [
        {"op": "rope_", "shape": [8192, 4096], "dtype": "bfloat16", "ms": 0.05},
        {"case": "router [8192, 4096] bfloat16", "direction": "both", "rival": "fastmp", "ms": 2.5},
    ]
    (tmp_path / "results").mkdir()
    file = {"predicted": {"device": "NVIDIA H200"}, "rows": rows}
    (tmp_path / "results" / "predicted_h200.json").write_text(json.dumps(file))
    monkeypatch.setattr(report, "__file__", str(tmp_path / "report.py"))
    measured = gpu_check(
        [kernel("rope_", 0.99), kernel("rope", 0.9)], [used("router"), used("router", rival="x")]
    )
    result = report.read(saved(measured))
    assert [timing.predicted_ms for timing in result.timings] == [0.05, None, 2.5, None]
    table = [line for line in report.markdown([result]).splitlines() if line.startswith("| r")]
    assert [line.rstrip(" |").split(" | ")[-1] for line in table] == ["50.0 us", "1 MiB", "2.500 ms", "1 MiB"]
    another = report.read(saved(measured | {"environment": H200 | {"device": "NVIDIA H100 80GB HBM3"}}))
    assert "predicted" not in report.markdown([another])
    assert report.predictions("NVIDIA H100") == {}


def test_goals_are_of_sustained_rates_and_a_changing_state_is_shown(saved):
    """In a file without these columns, shares are of the best rates, and it says so."""
    state = {"readings": 9, "sm_mhz": [1410, 1980], "watts": [690.2, 690.4], "celsius": None}
    state["throttle"] = {"power cap": 7}
    more = {"of_sustained": 0.98, "modes": [2.5, 2.9], "state": state, "changed": ["two modes: x"]}
    sensors = H200 | {"sensors": "NVML"}
    result = report.read(saved(gpu_check([kernel("bias_gelu", 0.83, **more)], environment=sensors)))
    assert state_of_goal(result) == ("0.98", "met")
    (row,) = [line for line in report.markdown([result]).splitlines() if line.startswith("| bias_gelu [")]
    assert " | 2.500 ms and 2.900 ms | 1.100 ms | 83.0% | 98.0% | " in row
    assert " | 1410 to 1980 MHz, 690 W, power cap, **two modes: x** |" in row
    assert "clocks, power and temperature: NVML" in result.remarks
    assert any(remark.startswith("1 rows in whose rounds") for remark in result.remarks)
    older = report.read(saved(gpu_check([kernel("bias_gelu", 0.83)])))
    assert state_of_goal(older) == ("0.83", "missed") and older.timings[0].state is None
    assert "clocks, power and temperature: not recorded" in older.remarks
    assert any("sustained ones were not measured" in remark for remark in older.remarks)
    assert "98.0%" not in report.markdown([older])


def state_of_goal(result):
    return state([result], "bias-GeLU forward")["at least 0.95 of sustained"]


def test_committed_figures_of_a_gpu_are_still_read():
    result = report.read(ROOT / "benchmarks" / "results" / "h200.json")
    assert len(result.timings) > 200 and {t.of_sustained for t in result.timings} == {None}
    assert "| Liger PR 1369" not in report.markdown([result])  # its cell begins with the time
    assert "18.3 ms, H200, Liger PR 1369" in report.markdown([result])


def test_published_figures_stand_beside_ours(saved, monkeypatch, tmp_path):
    """The time of the same work before one made of a rate; each has a source."""
    assert all(
        figure.source and figure.unit in ("ms", "gbs", "tflops", "tokens/s") for figure in report.published()
    )
    figure = report.Figure(["rope ["], "both", 2000.0, "gbs", "H100", "a page")
    exact = report.Figure(["rope [8, 4]"], "both", 9.0, "ms", "H200", "a paper")
    monkeypatch.setattr(report, "published", lambda: [figure, exact])
    rows = [used("rope"), used("rope", "forward"), used("rope", shape="[8, 4]"), used("rope", rival="Liger")]
    lines = report.markdown([report.read(saved(gpu_check(functions=rows)))]).splitlines()
    cells = [line.split("|")[-2].strip() for line in lines if line.startswith("| rope")]
    assert cells == ["0.537 ms at 2,000 GB/s, H100, a page", "", "9.000 ms, H200, a paper", ""]
    on_cpu = report.read(saved(pytest_file(used("rope"))))
    assert "best published" not in report.markdown([on_cpu])


def test_a_backward_is_both_directions_less_the_forward_one(saved):
    functions = [
        used("rms_norm", direction, rival=rival, ms=ms)
        for rival, direction, ms in (
            ("fastmp", "forward", 1.0),
            ("fastmp", "both", 3.0),
            ("Liger", "forward", 1.0),
            ("Liger", "both", 5.0),
        )
    ]
    result = report.read(saved(gpu_check(functions=functions)))
    assert state([result], "RMSNorm backward") == {"at least 1.5 x Liger": ("2", "met")}


def test_goals_on_a_cpu_are_those_of_the_file(saved):
    plain = report.read(saved(goals_file()))
    memory = report.read(saved(goals_file(ok=False, extra_bytes=0.05), "other.json"))
    rows = [row for row in report.goal_rows([plain, memory]) if row[0] == "CPU"]
    what = "rms_norm [64, 64] float32 forward+backward, fastmp"
    assert rows == [
        ["CPU", what, "at least 4 x torch eager", "5.00", "met"],
        ["CPU", what, "at least 4 x torch eager, at most 0.05 of its extra memory", "5.00, 0.100", "missed"],
    ]


def test_the_tables(saved):
    rows = [used("rope", ms=0.05, floor_of="matrix products"), used("rope", rival="Liger", over_peer=1.0)]
    text = report.markdown(
        [
            report.read(saved(pytest_file(*rows))),
            report.read(saved(gpu_check([kernel("bias_gelu", 0.97)]), "gpu.json")),
            report.read(saved(gpu_check(ceilings={}), "untimed.json")),
        ]
    )
    lines = text.splitlines()
    assert "## Some CPU, 2 threads, torch 2.13.0, commit 0123456789ab" in lines
    assert "## NVIDIA H200, torch 2.11.0, triton 3.6.0, commit 0123456789ab" in lines
    assert "- bfloat16 matrix products 780 TFLOP/s" in lines and "- copy 4300 GB/s" in lines
    assert "- 1 of 2 checks against float64 are right" in lines
    assert "- compute-sanitizer memcheck: 0 errors" in lines
    assert "- 1 left, from kernels rope [1] bfloat16 on" in lines
    cells = "fastmp | 50.0 us | 1.100 ms | 95.0% (matrix products) | 2.00x Liger | 1 MiB |"
    assert f"| rope [8192, 4096] bfloat16 | forward+backward | {cells}" in lines
    assert any(line.startswith("| bias_gelu [8192, 4096] bfloat16 | kernel | triton |") for line in lines)
    assert text.count("Times: not measured.") == 1
    tables = [line for line in lines if line.startswith("|")]
    assert {line.count("|") for line in tables} == {6, 9}  # goals, times


@pytest.mark.parametrize("suffix", [".svg", *full([".png"])])
def test_the_picture(saved, tmp_path, suffix):
    pytest.importorskip("matplotlib")
    rows = [used("rope"), used("rope", rival="Liger", ms=2.0), used("norm", flops=0)]
    rows += [used(f"op{i}", flops=1 << (20 + i)) for i in range(40)]
    results = [
        report.read(saved(pytest_file(*rows))),
        report.read(saved(gpu_check([kernel("bias_gelu", 0.9)], ceilings={"copy_gbs": 9.0}), "gpu.json")),
    ]
    assert all(len(picture._points(result)) <= picture._MAX_POINTS for result in results)
    out = picture.roofline(results, tmp_path / f"pictures/roofline{suffix}")
    content = out.read_bytes()
    assert content.startswith(b"\x89PNG" if suffix == ".png" else b"<?xml")
    assert len(content) > 10_000


def test_what_cannot_be_read_or_drawn_is_named(saved, tmp_path):
    with pytest.raises(ValueError, match=r"nothing\.json: cannot be read"):
        report.read(tmp_path / "nothing.json")
    for content, message in (
        ([], "neither a result of pytest-benchmark nor"),
        ({"benchmarks": [{"extra_info": {}}]}, "holds no benchmark of fastmp"),
        ({"goals": [{"goal": {}}]}, "an older form of cpu_goals"),
    ):
        with pytest.raises(ValueError, match=rf"result\.json: .*{message}"):
            report.read(saved(content))
    (tmp_path / "text.json").write_text("{")
    with pytest.raises(ValueError, match=r"text\.json: not JSON"):
        report.read(tmp_path / "text.json")
    result = report.read(saved(pytest_file(used("rope"), ceilings={})))
    with pytest.raises(ValueError, match="nothing to draw"):
        picture.roofline([result], tmp_path / "x.png")
    with pytest.raises(ValueError, match=r"a picture is a \.png or \.svg file, got x\.pdf"):
        picture.roofline([result], tmp_path / "x.pdf")


def test_the_command(saved, tmp_path, capsys):
    path = str(saved(pytest_file(used("rope"))))
    assert report.main([path]) == 0
    assert capsys.readouterr().out == report.markdown([report.read(path)])
    out = str(tmp_path / "report.md")
    assert report.main([path, "--out", out]) == 0
    assert capsys.readouterr().out == out + "\n" and Path(out).read_text().startswith("# Benchmarks")
    assert report.main([str(tmp_path / "nothing.json")]) == 1
    assert "cannot be read" in capsys.readouterr().err


def test_the_command_needs_no_torch(saved):
    program = "import sys; from benchmarks.report import main; sys.exit(main() or 'torch' in sys.modules)"
    command = [sys.executable, "-c", program, str(saved(goals_file()))]
    subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)


def test_training_runs_and_kernels_of_a_step_are_tables(saved):
    row = {"recipe": "dense-1b", "tokens_per_second": 75400.0, "memory_bytes": 3 << 30, "loss": 1.5}
    row |= {"kernels": [["gemm", 300.0], ["norm", 100.0]], "kernels_ms": 400.0, "span_ms": 435.0}
    rows = [row, {"recipe": "gpt-small", "raised": "status 1"}]
    text = report.markdown([report.read(saved(gpu_check(recipes=rows)))])
    assert "| dense-1b | 75,400 | 3 GiB | 1.5000 |" in text and "| gpt-small | status 1 |  |  |" in text
    assert "### Kernels of a step of dense-1b: 400.0 ms within 435.0 ms" in text
    assert "| gemm | 300.0 ms | 75.0% |" in text and "not measured." not in text


def test_models_of_transformers_are_a_table(saved):
    shared = {"case": "Llama, 128k ids", "dtype": "bfloat16", "by": "fastmp"}
    rows = [
        shared | {"ms": 500.0, "tokens/s": 8192.0, "of eager": 0.5, "peak MiB": 2048.0},
        shared | {"by": "eager", "raised": "OutOfMemoryError: no room"},
    ]
    text = report.markdown([report.read(saved(H200 | {"transformers": "5.23.0", "rows": rows}))])
    published = "6,667 tokens/s, a GPU of 8 x H100, torchtitan, Llama-3.1-8B training in BF16"
    assert f"fastmp | 500.0 ms | 8,192 | 2.00x | 2 GiB | {published} |" in text
    assert "| eager | OutOfMemoryError: no room |" in text
    older = report.read(ROOT / "benchmarks" / "results" / "transformers.json")
    assert "| Qwen3-MoE | float32 | fastmp | 400.3 ms |  | 5.23x |" in report.markdown([older])
