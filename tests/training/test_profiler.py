"""`fastmp train --profile`: which steps, what is written, and the Nsight commands."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from train_tools import arguments

from fastmp import profiling
from fastmp.apps import train as command
from fastmp.apps import train_main
from fastmp.config import GraphConfig
from fastmp.config.recipe import parse_arguments
from fastmp.plan.step_gaps import IDLE, ONCE, measured_step
from fastmp.training.profiler import StepProfiler, nsight_command, ranges, run_under_nsight


@pytest.mark.parametrize(
    "steps", [["--profile-steps", "2:5"], ["--profile-steps=2:5"], ["--train.profile_steps", "2:5"]]
)
@pytest.mark.parametrize("number", [[], ["--steps", "60"], ["--steps=60"]])
def test_profile_steps_are_a_range(steps, number):
    recipe = parse_arguments(["--profile", "torch", *steps, *number])
    assert recipe.train.profile_steps == (2, 5) and recipe.train.profile == "torch"
    assert recipe.train.steps == (60 if number else 400)


def test_nothing_is_profiled_unless_asked():
    assert parse_arguments([]).train.profile == "none"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--profile-steps", "10:"], "--profile-steps: expected FIRST:LAST as in 10:13, got '10:'"),
        (["--steps=a:b"], "expected a whole number of steps, got 'a:b'; to profile"),
        (["--profile-steps", "13:10"], "must be a range within"),
        (["--steps", "5", "--profile-steps", "5:7"], "must be a range within"),
    ],
)
def test_a_range_that_is_none_or_outside_the_run_is_refused(options, message, capsys):
    with pytest.raises(SystemExit):
        parse_arguments(["--profile", "torch", *options])
    assert message in capsys.readouterr().err


def test_torch_writes_a_trace_of_those_steps_and_says_what_they_took(tmp_path, tokens, capsys):
    options = arguments(tmp_path, tokens, train__eval_interval=0, optimizer__warmup_steps=1)
    assert command.main([*options, "--profile", "torch", "--profile-steps", "2:4"]) == 0
    trace = json.loads((tmp_path / "tiny" / "profile-2-4.json").read_text())
    events = Counter(event["name"] for event in trace["traceEvents"] if event.get("ph") == "X")
    assert events["fastmp.training.optimizer"] == events["fastmp.training.clip"] == 2
    assert events["fastmp.training.forward"] == events["fastmp.training.backward"] == 4  # two microbatches
    assert events["fastmp.segment.TransformerLayer.attention"] == 4
    assert events["fastmp.bias_gelu"] == events["fastmp.bias_gelu_backward"] == 4
    step = measured_step(trace)  # what `fastmp trace diff` reads
    assert sum(step.parts.values()) == pytest.approx(step.seconds)
    assert {("forward", "GEMMs"), ("backward", "GEMMs"), (ONCE, "optimizer")} <= step.parts.keys()
    printed = capsys.readouterr().out
    assert f"profile of steps 2:4: {tmp_path / 'tiny' / 'profile-2-4.json'}" in printed
    assert "  fastmp.training.backward" in printed


@pytest.mark.full
def test_a_recorded_step_is_covered_to_5_percent(tmp_path, tokens):
    """Everything that the step does is in one of the ranges, and so in `fastmp trace diff`."""
    sizes = {"model__hidden_size": 256, "model__num_layers": 4, "model__vocab_size": 8192}
    options = arguments(tmp_path, tokens, train__eval_interval=0, optimizer__warmup_steps=1, **sizes)
    assert command.main([*options, "--profile", "torch", "--profile-steps", "2:4"]) == 0
    step = measured_step(json.loads((tmp_path / "tiny" / "profile-2-4.json").read_text()))
    assert sum(step.parts.values()) == pytest.approx(step.seconds)
    assert step.parts.get((ONCE, IDLE), 0.0) < 0.05 * step.seconds


@pytest.fixture
def cuda_calls(monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("synchronize"))
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: calls.append("start"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: calls.append("stop"))
    yield calls
    profiling.enable_nvtx(False)


@pytest.mark.parametrize(("first", "last"), [(0, 20), (11, 20), (0, 11)])
def test_nsight_captures_between_start_and_stop(cuda_calls, tmp_path, first, last):
    log = SimpleNamespace(note=print, paused=nullcontext)
    profiler = StepProfiler("nsys", (10, 13), tmp_path, log)
    assert profiling._nvtx
    for step in range(first, last):
        profiler(step)
        cuda_calls.append(step)
    profiler(last)
    profiler.close()
    kept = [call for call in cuda_calls if call in ("start", "stop") or call in range(10, 13)]
    between = list(range(max(10, first), min(13, last)))
    assert kept == ["start", *between, "stop"]


def recipe_for(tool, tmp_path):
    arguments = ["--profile", tool, "--profile-steps", "10:13", "--train.run-dir", str(tmp_path / "runs")]
    return arguments, parse_arguments(arguments)


def test_the_commands(tmp_path):
    for tool, option in (("nsys", "--capture-range=cudaProfilerApi"), ("ncu", "--profile-from-start=off")):
        arguments, recipe = recipe_for(tool, tmp_path)
        command = nsight_command(tool, arguments, recipe)
        assert command[:3] == ["env", "FASTMP_PROFILED=1", tool] and option in command
        assert command[-len(arguments) - 3 :] == ["-m", "fastmp", "train", *arguments]
        assert any(part.endswith(f"{tmp_path}/runs/gpt-profile-10-13") for part in command)
        with_graphs = nsight_command(tool, arguments, replace(recipe, graphs=GraphConfig(enabled=True)))
        added = {"nsys": {"--cuda-graph-trace=node"}, "ncu": set()}
        assert set(with_graphs) - set(command) == added[tool]


@pytest.mark.parametrize("tool", ["nsys", "ncu"])
def test_the_first_rank_becomes_the_command(tool, tmp_path, monkeypatch, capsys):
    arguments, recipe = recipe_for(tool, tmp_path)
    became = []
    monkeypatch.setattr(os, "execvp", lambda program, command: became.append((program, command)))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ValueError, match=f"{tool} is not on the PATH"):
        run_under_nsight(arguments, recipe)
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=f"{tool} needs a GPU"):
        run_under_nsight(arguments, recipe)
    assert not became
    assert capsys.readouterr().out.count(f"env FASTMP_PROFILED=1 {tool} ") == 2
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    run_under_nsight(arguments, recipe)
    assert became == [("env", nsight_command(tool, arguments, recipe))] and (tmp_path / "runs").is_dir()


@pytest.mark.parametrize(
    ("variables", "expected"),
    [({}, True), ({"FASTMP_PROFILED": "1"}, False), ({"RANK": "1", "WORLD_SIZE": "2"}, False)],
    ids=["first rank", "already profiled", "another rank"],
)
def test_who_runs_under_nsight(variables, expected, monkeypatch, tmp_path):
    class Stop(Exception):
        pass

    def stop(*arguments, **options):
        raise Stop

    asked = []
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(train_main, "run_under_nsight", lambda *arguments: asked.append(arguments))
    monkeypatch.setattr(train_main, "init", stop)
    with pytest.raises(Stop):
        train_main._job(*reversed(recipe_for("nsys", tmp_path)))
    assert bool(asked) is expected


def test_ranges_of_a_gpu_are_listed_by_their_time_there():
    """torch's profiler has two rows for a range, one of the host and one of the device."""
    cpu, gpu = torch.autograd.DeviceType.CPU, torch.autograd.DeviceType.CUDA
    rows = [
        SimpleNamespace(key=key, count=count, cpu_time_total=host, device_time_total=device, device_type=kind)
        for key, count, host, device, kind in (
            ("fastmp.a", 3, 5000.0, 0.0, cpu),
            ("fastmp.b", 2, 1000.0, 0.0, cpu),
            ("aten::mm", 9, 9000.0, 0.0, cpu),
            ("fastmp.a", 3, 0.0, 2000.0, gpu),
            ("fastmp.b", 2, 0.0, 7000.0, gpu),
        )
    ]
    assert ranges(SimpleNamespace(key_averages=lambda: rows)) == [
        "  fastmp.b     2 x      1.000 ms      7.000 ms on the GPU",
        "  fastmp.a     3 x      5.000 ms      2.000 ms on the GPU",
    ]
    on_host = SimpleNamespace(key_averages=lambda: rows[:3])
    assert [line.split() for line in ranges(on_host)] == [
        ["fastmp.a", "3", "x", "5.000", "ms"],
        ["fastmp.b", "2", "x", "1.000", "ms"],
    ]
