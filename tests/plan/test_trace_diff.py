"""Measured and estimated steps as tables, and their gaps."""

from __future__ import annotations

import json

import pytest
from pytest import approx

from fastmp.apps.trace_diff import main
from fastmp.plan.step_gaps import COMMUNICATION, IDLE, ONCE, consumer, estimated_step, gaps, measured_step


def slice_(name, start, took, cat="cpu_op", tid=1, **args):
    return {"ph": "X", "cat": cat, "name": name, "pid": 0, "tid": tid, "ts": start, "dur": took, "args": args}


def range_(phase, start, took):
    return slice_(f"fastmp.training.{phase}", start, took, "user_annotation")


ON_CPU = [
    range_("forward", 0, 100),
    slice_("fastmp.segment.MoELayer.mlp", 10, 80, "user_annotation"),
    slice_("aten::linear", 20, 30),
    slice_("aten::copy_", 25, 5),  # inside of a GEMM, for which it copies
    slice_("fastmp.collective.all_to_all", 60, 20, "user_annotation"),
    slice_("c10d::alltoall_base_", 61, 2),
    slice_("aten::add", 85, 4),
    range_("backward", 100, 60),
    slice_("fastmp::grouped_mm_dgrad", 110, 40),
    range_("optimizer", 170, 30),
    slice_("aten::mul", 175, 5),
    slice_("aten::mm", 20, 500, tid=2),  # of another thread
]


def test_operators_of_a_cpu_count_once():
    step = measured_step({"traceEvents": ON_CPU})
    assert step.seconds == approx(200e-6) == sum(step.parts.values())
    wanted = {
        ("forward", "host"): 20 + 26,  # around the segment, and in it
        ("forward", "GEMMs"): 30,
        ("forward", COMMUNICATION): 20,
        ("forward", "other kernels"): 4,
        ("backward", "host"): 20,
        ("backward", "GEMMs"): 40,
        (ONCE, "optimizer"): 30,
        (ONCE, IDLE): 10,
    }
    assert step.parts == {key: approx(took * 1e-6) for key, took in wanted.items()}


ON_GPU = [
    range_("forward", 0, 10),
    slice_("cudaLaunchKernel", 1, 1, "cuda_runtime", correlation=1),
    slice_("cudaLaunchKernel", 3, 1, "cuda_runtime", correlation=2),
    range_("backward", 10, 10),
    slice_("cudaLaunchKernel", 12, 1, "cuda_runtime", tid=7, correlation=3),  # of autograd's thread
    range_("optimizer", 20, 300),
    slice_("nvjet_hsh_128x256", 50, 100, "kernel", correlation=1),
    slice_(
        "ncclDevKernel_SendRecv",
        120,
        80,
        "kernel",
        tid=9,
        correlation=2,
        **{"Process Group Description": "fastmp:ep"},
    ),
    slice_("flash_bwd_kernel", 200, 60, "kernel", correlation=3),
]


def test_kernels_belong_to_the_phase_that_launched_them():
    step = measured_step({"traceEvents": ON_GPU})
    assert step.seconds == approx(320e-6) == sum(step.parts.values())
    assert step.parts["forward", "GEMMs"] == approx(100e-6)
    assert step.parts["forward", "communication, ep"] == approx(50e-6)  # 30 of 80 are behind the GEMM
    assert step.parts["backward", "attention"] == approx(60e-6)
    assert step.parts[ONCE, IDLE] == approx(110e-6)


def test_kernels_of_nsys_have_steps_that_end_with_the_optimizer():
    names = ["gemm", "adamw_", "adamw_", "gemm", "ncclDevKernel_AllReduce", "adamw_"]
    rows = [
        {"Start (ns)": 1000 * i, "Duration (ns)": 500, "Name": name, "Strm": 7}
        for i, name in enumerate(names)
    ]
    step = measured_step(rows)
    assert step.seconds == approx(5500e-9 / 2) == sum(step.parts.values())
    assert step.parts[ONCE, "GEMMs"] == approx(500e-9)
    assert step.parts[ONCE, "optimizer"] == approx(750e-9)


def test_kernels_that_run_at_once_count_once():
    copy = slice_("Memcpy HtoD", 60, 40, "gpu_memcpy", tid=8, correlation=1)  # behind the GEMM, to its end
    also = slice_("ncclDevKernel_AllReduce", 150, 30, "kernel", tid=10, correlation=2)  # with the other one
    later = slice_("elementwise", 140, 20, "kernel", correlation=1)  # ends 10 after the GEMM
    step = measured_step({"traceEvents": [*ON_GPU, copy, also, later]})
    assert step.seconds == approx(320e-6) == sum(step.parts.values())
    assert step.parts["forward", "GEMMs"] == approx(100e-6)
    assert step.parts["forward", "other kernels"] == approx(10e-6)
    assert step.parts["forward", "communication, ep"] == approx(40e-6)
    assert step.parts["forward", COMMUNICATION] == approx(0.0)


def test_steps_of_nsys_have_buckets_and_servers_several_gpus():
    names = [
        "gemm",
        "adamw_kernel",
        "ncclDevKernel_AllGather",
        "copy",
        "adamw_kernel",
        "gemm",
        "adamw_kernel",
    ]
    rows = [
        {"Start (ns)": 1000 * i + gpu, "Duration (ns)": 500, "Name": name, "Device": f"H100 ({gpu})"}
        for i, name in enumerate(names)
        for gpu in range(2)
    ]
    step = measured_step(rows)
    assert step.seconds == approx(6500e-9 / 2) == sum(step.parts.values())
    assert step.parts[ONCE, "optimizer"] == approx(750e-9)
    assert step.parts[ONCE, "GEMMs"] == approx(500e-9)


def estimate(*parts, seconds=100e-6):
    slices = [
        {**slice_(what, 0, took, "estimate"), "args": {"phase": phase, "what": what, "group": what == "ep"}}
        for phase, what, took in parts
    ]
    return {
        "traceEvents": [*slices, {**slices[0], "pid": 1}],
        "otherData": {"fastmp": {"slowest": 0, "seconds": seconds}},
    }


PARTS = (
    ("forward", "GEMMs", 20),
    ("forward", "ep", 5),
    ("backward of inputs", "GEMMs", 30),
    ("backward of weights", "GEMMs", 25),
    ("once a step", "optimizer", 20),
)


def test_gaps_are_ranked_and_add_up():
    step = estimated_step(estimate(*PARTS))
    assert step.parts["backward", "GEMMs"] == approx(55e-6)
    found = gaps(step, measured_step({"traceEvents": ON_CPU}))
    assert sum(row.gap for row in found) == approx(100e-6)
    assert [abs(row.gap) for row in found] == sorted((abs(row.gap) for row in found), reverse=True)
    (sent,) = [row for row in found if row.what == COMMUNICATION]  # gloo tells no group
    assert (sent.estimated, sent.measured) == approx((5e-6, 20e-6))
    named = gaps(step, measured_step({"traceEvents": ON_GPU}))
    (sent,) = [row for row in named if row.what == "communication, ep"]
    assert (sent.estimated, sent.measured) == approx((5e-6, 50e-6))


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("sm90_xmma_gemm_bf16bf16_bf16f32", "GEMMs"),
        ("_grouped_mm_kernel", "GEMMs"),
        ("aten::addmm", "GEMMs"),
        ("void flash_fwd_kernel<...>", "attention"),
        ("quantize_rows_kernel", "quantisers"),
        ("ncclDevKernel_AllGather_RING_LL", COMMUNICATION),
        ("exchange_push", COMMUNICATION),
        ("vectorized_elementwise_kernel", None),
    ],
)
def test_names_of_kernels(name, what):
    assert consumer(name) == what


def test_command(tmp_path, capsys):
    measured, estimated = tmp_path / "profile.json", tmp_path / "step.json"
    measured.write_text(json.dumps({"traceEvents": ON_CPU}))
    estimated.write_text(json.dumps(estimate(*PARTS)))
    assert main([str(measured), str(estimated)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "a step    measured 0.2 ms, estimated 0.1 ms: 2.00 of the estimate"
    assert lines[3].split() == ["host", "(forward)", "0.000", "0.046", "+0.046", "+23.0%"]
    assert main([str(measured), str(estimated), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["measured"] == approx(2 * facts["estimated"])


def test_a_trace_that_is_too_large_says_what_to_do(tmp_path, capsys):
    measured = tmp_path / "profile.json"
    with measured.open("wb") as file:
        file.truncate((1 << 31) + 1)
    assert main([str(measured), str(measured)]) == 2
    assert f"{(1 << 31) + 1} bytes, at most {1 << 31}); profile fewer steps" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("measured", "message"),
    [
        ("{", "profile.json: not JSON"),
        ("{}", "neither of torch.profiler"),
        ('{"traceEvents": []}', "no range fastmp.training.optimizer"),
        (json.dumps({"traceEvents": [*ON_CPU, {**ON_CPU[0], "pid": 1}]}), "has several processes"),
        ('[{"Name": "gemm"}]', 'rows without "Start (ns)"'),
        ("[]", "have none of AdamW"),
        ('{"traceEvents": [{"ph": "X", "dur": 1, "cat": "kernel"}]}', "no range fastmp.training.optimizer"),
        (json.dumps({"traceEvents": [*ON_CPU, {"ph": "X", "dur": 1, "cat": "kernel"}]}), "another form"),
    ],
)
def test_other_files_are_errors_of_one_line(measured, message, tmp_path, capsys):
    (tmp_path / "profile.json").write_text(measured)
    (tmp_path / "step.json").write_text(json.dumps(estimate(*PARTS)))
    assert main([str(tmp_path / "profile.json"), str(tmp_path / "step.json")]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert main([str(tmp_path / "none.json"), str(tmp_path / "step.json")]) == 2
    assert "cannot be read" in capsys.readouterr().err
