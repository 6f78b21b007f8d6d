"""`fastmp plan step`: the list of a rank as text and JSON, and one line for a mistake."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fastmp.apps import plan
from fastmp.plan.step_report import describe_step
from fastmp.schedule.buffer_plan import Lease, TensorSpec
from fastmp.schedule.checks import check_program
from fastmp.schedule.lanes import Flight
from fastmp.schedule.program import Instruction, Program, Span
from fastmp.schedule.stage_map import StageMap

ROOT = Path(__file__).parents[2]
EXAMPLE = ["step", str(ROOT / "configs" / "moe-small.toml"), "--world-size=4", "--pp=2", "--ep=2", "--rank=0"]
EXAMPLE += ["--data.micro-batch-size=2", "--graphs.enabled"]


def run(capsys, *arguments):
    assert plan.main([*EXAMPLE, *arguments]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def test_people_read_an_instruction_on_a_line(capsys):
    assert run(capsys) == (ROOT / "tests" / "golden" / "plan-step.txt").read_text()


def test_json_has_the_same_list(capsys):
    lines, facts = run(capsys).splitlines()[1:], json.loads(run(capsys, "--json"))
    assert [line.split()[1] for line in lines] == [now["op"] for now in facts["instructions"]]
    assert [span["segments"] for span in facts["spans"]] == [None, [0, 3], [3, 6], [6, 9], [9, 12], None]
    assert (facts["rank"], facts["pp"], facts["regions"], len(facts["buffers"])) == (0, 2, [], 7)
    assert {lease["buffer"] for lease in facts["leases"]} == {*range(7)}
    assert all(facts["instructions"][lease["first"]]["buffers"] for lease in facts["leases"])
    assert [flight["lane"] for flight in facts["flights"]] == [0, 1, 0, 1]


def tuples(values):
    """Return JSON with tuples for its lists."""
    if isinstance(values, dict):
        return {name: tuples(value) for name, value in values.items()}
    return tuple(map(tuples, values)) if isinstance(values, list) else values


def from_json(text):
    """Return the program of `--json`: everything that its check and its printed list need."""
    facts = tuples(json.loads(text))
    rows = {"instructions": Instruction, "flights": Flight, "buffers": TensorSpec, "leases": Lease}
    return Program(
        facts["rank"],
        StageMap(facts["pp"], facts["vpp"], facts["placement"]),
        tuple(Span(**each | {"segments": (s := each["segments"]) and range(*s)}) for each in facts["spans"]),
        regions=tuple(range(*each) for each in facts["regions"]),
        **{name: tuple(kind(**each) for each in facts[name]) for name, kind in rows.items()},
    )


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--vpp=2", "--parallel.schedule=dualpipe_v", "--parallel.overlap-experts"],
        ["--parallel.schedule=zero_bubble", "--graphs.scope=full", "--dispatcher=symmetric"],
        ["--graphs.scope=full_step", "--dispatcher=symmetric", "--parallel.no-recompute"],
    ],
)
def test_the_program_can_be_read_from_json(capsys, options):
    programs = [from_json(run(capsys, *options, f"--rank={rank}", "--json")) for rank in range(2)]
    check_program(programs)
    for rank, program in enumerate(programs):
        assert [*describe_step(program)] == run(capsys, *options, f"--rank={rank}").splitlines()


def test_without_graphs_a_chunk_is_one_span(capsys):
    text = run(capsys, "--graphs.no-enabled", "--vpp=2", "--rank=1")
    assert text.startswith("rank 1 of pp 2: 57 instructions, 3 spans, 0 graphs, 0 buffers, 0 lanes\n")
    assert "forward  m0 chunk 1\n" in text and "backward m0 loss\n" in text


def test_a_whole_step_is_in_two_graphs_if_the_host_decides(capsys):
    options = ["--graphs.scope=full_step", "--dispatcher=symmetric", "--parallel.no-recompute"]
    lines = run(capsys, *options).splitlines()
    at = next(i for i, line in enumerate(lines) if " decide " in line)
    assert lines[0].endswith(" 1 span, 2 graphs, 0 buffers, 0 lanes") and "graph" not in lines[at]
    assert all(line.endswith("graph 0") for line in lines[6:at]) and "zero" in lines[5]
    assert all(line.endswith("graph 1") for line in lines[at + 1 :]) and len(lines[at + 1 :]) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rank=2"], "rank must be in [0, 2), the pipeline ranks, got 2"),
        (
            ["--graphs.scope=full"],
            "graphs: scope 'full' cannot be captured, because dispatch, experts, combine",
        ),
    ],
)
def test_a_mistake_is_one_line(capsys, options, message):
    assert plan.main([*EXAMPLE, *options]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith(f"fastmp plan step: {message}")
