"""The trace of an estimated step: its schema, and sums equal to the plan's."""

from __future__ import annotations

import json
from collections import Counter, defaultdict

import pytest
from pytest import approx

from fastmp.apps import cli
from fastmp.config import (
    DataConfig,
    GPTConfig,
    MoEConfig,
    OptimizerConfig,
    ParallelConfig,
    Recipe,
    TrainConfig,
)
from fastmp.plan import traffic
from fastmp.plan.hardware import GPUS
from fastmp.plan.layout import make_schedule
from fastmp.plan.memory import memory
from fastmp.plan.shapes import shapes_of
from fastmp.plan.step_gaps import estimated_step, gaps
from fastmp.plan.step_time import IDLE, ONCE, step_time
from fastmp.plan.step_trace import step_trace

H100 = GPUS["h100"]
MOE = MoEConfig(num_experts=8, top_k=2, expert_ffn_hidden_size=512)


def recipe(moe=None, micro=1, **layout):
    model = GPTConfig(
        num_layers=8, hidden_size=512, num_heads=8, vocab_size=8192, max_seq_len=512, moe=moe
    )  # fmt: skip
    return Recipe(
        model=model,
        parallel=ParallelConfig(**layout),
        data=DataConfig(seq_len=512, micro_batch_size=micro),
        optimizer=OptimizerConfig(),
        train=TrainConfig(global_batch_size=32, dtype="bfloat16"),
    )


CASES = {
    "one rank": (recipe(), 1),
    "tp and recomputation": (recipe(tp=2, recompute=True), 4),
    "1f1b": (recipe(pp=4, tp=2), 8),
    "interleaved": (recipe(pp=2, vpp=2), 4),
    "zero-bubble": (recipe(pp=4, schedule="zero_bubble"), 8),
    "experts": (recipe(MOE, ep=4), 4),
    "experts overlapped": (recipe(MOE, ep=2, pp=2, vpp=2, overlap_experts=True), 4),
    "dualpipe_v": (recipe(MOE, ep=2, pp=2, vpp=2, schedule="dualpipe_v", overlap_experts=True), 4),
}


def cases(function):
    return pytest.mark.parametrize(("found", "ranks"), CASES.values(), ids=CASES)(function)


@cases
def test_slices_add_up_to_the_plan(found, ranks):
    trace, estimate = step_trace(found, ranks, H100), step_time(found, ranks, H100)
    own = trace["otherData"]["fastmp"]
    sums = defaultdict(float)
    for event in trace["traceEvents"]:
        if event.get("cat") == "estimate" and event["pid"] == own["slowest"]:
            sums[event["args"]["phase"], event["args"]["what"]] += event["dur"] / 1e6
    assert own["seconds"] == approx(estimate.seconds)
    parts = {key: took for key, took in estimate.parts.items() if took > 1e-12}
    assert sums == {key: approx(took, rel=1e-6, abs=1e-9) for key, took in parts.items()}
    assert all(row.gap == 0 for row in gaps(estimated_step(trace), estimated_step(trace)))


@cases
def test_schema(found, ranks):
    """Chrome's: complete slices that do not overlap on a thread, names of threads, and counters."""
    trace = json.loads(json.dumps(step_trace(found, ranks, H100)))
    assert trace["displayTimeUnit"] == "ms"
    threads, last = set(), defaultdict(float)
    for event in trace["traceEvents"]:
        assert event["ph"] in "XMC" and isinstance(event["pid"], int)
        if event["ph"] == "M" and event["name"] == "thread_name":
            threads.add((event["pid"], event["tid"]))
        if event["ph"] == "X":
            place = event["pid"], event["tid"]
            assert place in threads and event["dur"] > 0
            if event["cat"] == "estimate":
                assert event["ts"] >= last[place] - 1e-6
                last[place] = event["ts"] + event["dur"]
    grid = shapes_of(found, ranks).grid
    assert {pid for pid, _ in threads} == set(range(grid.pp))


@cases
def test_collectives_have_the_bytes_of_the_plan(found, ranks):
    shapes, sums = shapes_of(found, ranks), Counter()
    for event in step_trace(found, ranks, H100)["traceEvents"]:
        if event.get("cat") == "estimate" and event["args"].get("phase") != "once a step":
            sums[event["args"]["what"]] += event["args"].get("bytes", 0)
    wanted = traffic.embedding(shapes).sent(False) + traffic.loss(shapes).forward
    for _ in found.model.layers:
        wanted += traffic.layer(shapes).sent(found.parallel.recompute)
    wanted = {group: n * shapes.num_microbatches for group, n in wanted.items() if n}
    assert {what: n for what, n in sums.items() if n} == wanted


@cases
def test_process_groups_are_communication_to_trace_diff(found, ranks):
    trace, estimate = step_trace(found, ranks, H100), step_time(found, ranks, H100)
    named = {what for _, what in estimated_step(trace).parts}
    compute = {"GEMMs", "attention", "quantisers", "other kernels", "host"}
    once = {what for phase, what in estimate.parts if phase == ONCE}
    groups = {what for phase, what in estimate.parts if phase != ONCE} - compute
    once = {"idle" if what == IDLE else what for what in once}  # as of a measured step
    assert named <= compute | once | {f"communication, {group}" for group in groups}
    assert {f"communication, {group}" for group in groups} <= named


@cases
def test_memory_counters_reach_the_memory_of_the_plan(found, ranks):
    shapes, most, last = shapes_of(found, ranks), Counter(), {}
    for event in step_trace(found, ranks, H100)["traceEvents"]:
        if event["ph"] == "C":
            assert min(event["args"].values()) >= 0
            most[event["pid"]] = max(most[event["pid"]], sum(event["args"].values()))
            last[event["pid"]] = event["args"]["activations"]
    assert not any(last.values())  # nothing is left at the end
    schedule = make_schedule(found.parallel, shapes.num_microbatches)
    for rank, own in enumerate(memory(found, shapes, schedule.orders())):
        kept = own.total - own.loss - own.exchange
        if found.parallel.recompute:
            assert 0.5 * kept < most[rank] <= kept  # a layer that is run again is not in it
        else:
            assert most[rank] == kept


def test_command_writes_it(tmp_path, capsys):
    out = tmp_path / "step.json"
    arguments = ["plan", "time", "configs/gpt-small.toml", "--world-size", "2", "--tp", "2"]
    assert cli.main([*arguments, "--trace", str(out)]) == 0
    assert f"trace     {out}" in capsys.readouterr().out
    trace = json.loads(out.read_text())
    assert estimated_step(trace).seconds > 0
    assert cli.main([*arguments, "--trace", str(tmp_path / "none" / "step.json")]) == 2
    assert "cannot be written" in capsys.readouterr().err
