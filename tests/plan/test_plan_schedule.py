"""`fastmp plan schedule`: orders as text and JSON, the picture, and one line for each mistake."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from fastmp.apps import cli, plan
from fastmp.plan.schedule_plot import draw
from fastmp.schedule.schedule import Schedule, Step, integers
from fastmp.schedule.simulate import simulate

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "pipeline.md").read_text()
EXAMPLE = ["schedule", "--pp", "4", "--vpp", "2", "--num-microbatches", "8"]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert plan.main(list(arguments)) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def test_people_read_each_rank_on_a_line(capsys):
    lines = run(capsys, *EXAMPLE).splitlines()
    assert lines[0] == "1f1b: pp 4 x vpp 2, 8 microbatches in groups of 4"
    assert lines[1].startswith("bubble 0.1875 of the work: ranks idle 15.8% of 57, while a forward takes 1,")
    assert lines[2] == "critical path: 38 steps take 57, messages 0"
    assert lines[4] == (
        "rank 0  warm-up 10  peak 11   1 1 1 1 2 2 2 2 1 1 1 -2 1 -2 2 -2 2 -2 2 -1 2 -1 "
        "-1 -1 -2 -2 -2 -2 -1 -1 -1 -1"
    )
    assert len(lines) == 4 + 4
    assert lines[7].startswith("rank 3  warm-up 4   peak 5    1 1 1 1 2 -2 2")


def test_json(capsys):
    facts = json.loads(run(capsys, *EXAMPLE, "--json"))
    assert list(facts) == ["orders", "warmup", "peak_in_flight", "bubble"]
    assert facts["orders"] == [integers(order) for order in Schedule(4, 8, vpp=2).orders()]
    assert (facts["warmup"], facts["peak_in_flight"]) == ([10, 8, 6, 4], [11, 9, 7, 5])
    assert facts["bubble"] == 3 / 16


def test_split_backwards_are_lists_in_json(capsys):
    facts = json.loads(run(capsys, *EXAMPLE, "--schedule", "zero_bubble", "--json"))
    steps = tuple(tuple(Step(*step) for step in order) for order in facts["orders"])
    assert steps == Schedule(4, 8, vpp=2, name="zero_bubble").orders()
    assert facts["orders"][0][0] == ["forward", 0, 0]
    assert (facts["warmup"], facts["peak_in_flight"], facts["bubble"]) == ([7, 6, 5, 4], [8] * 4, 3 / 48)


def test_costs_count(capsys):
    times = ["--forward", "2", "--backward-input", "3", "--backward-weight", "1", "--p2p", "0.5"]
    text = run(capsys, "schedule", "--pp=2", "--num_microbatches=2", *times)
    assert (
        "ranks idle" in text and "of 19, while a forward takes 2, its backward 3 + 1, a message 0.5" in text
    )
    assert "critical path: 6 steps take 18, messages 1" in text


def test_a_large_schedule_stays_readable(capsys):
    text = run(capsys, "schedule", "--pp", "1024", "--num-microbatches", "128", "--schedule", "zero_bubble")
    lines = text.splitlines()
    assert len(lines) == 4 + 33 and max(map(len, lines)) < 500
    assert lines[-2] == "..." and lines[-1].startswith("rank 1023  warm-up 0   peak 128  1 -1i 1 -1i")


@pytest.mark.parametrize(("schedule", "ending"), [("1f1b", "png"), ("zero_bubble", "svg")])
def test_the_picture(capsys, tmp_path, schedule, ending):
    picture = tmp_path / f"schedule.{ending}"
    text = run(capsys, *EXAMPLE, "--schedule", schedule, "--plot", str(picture))
    assert text == run(capsys, *EXAMPLE, "--schedule", schedule)
    assert picture.read_bytes()[:6] == {"png": b"\x89PNG\r\n", "svg": b"<?xml "}[ending]


def test_every_box_has_its_place_and_colour(tmp_path, monkeypatch):
    from matplotlib.collections import PolyCollection
    from matplotlib.figure import Figure

    seen = {}
    monkeypatch.setattr(Figure, "savefig", lambda figure, out, **_: seen.update(figure=figure))
    simulation = simulate(Schedule(4, 8, vpp=2).orders())
    draw([simulation.timeline(rank) for rank in range(4)], tmp_path / "a.svg", title="a title")
    (axes,) = seen["figure"].axes
    groups = [c for c in axes.collections if isinstance(c, PolyCollection)]
    drawn = {
        (round(y.mean()), round(x.min(), 6), round(x.max(), 6), group.get_facecolor().tobytes())
        for group in groups
        for path in group.get_paths()
        for x, y in [path.vertices.T]
    }
    assert {box[:3] for box in drawn} == {
        e[:1] + e[2:] for rank in range(4) for e in simulation.timeline(rank)
    }
    assert len({box[3] for box in drawn}) == len(groups) == 4  # forward and backward of two chunks
    assert sorted(text.get_text() for text in axes.texts) == sorted(
        str(m) for m in range(8) for _ in range(16)
    )
    assert axes.get_title(loc="left") == "a title"


def test_steps_that_take_no_time_are_drawn(tmp_path):
    free = ["--forward=0", "--backward-input=0", "--backward-weight=0", f"--plot={tmp_path / 'x.svg'}"]
    for more in ([], ["--overlap", "--p2p=1"]):
        assert plan.main(["schedule", "--pp=3", "--num-microbatches=8", *free, *more]) == 0
        assert (tmp_path / "x.svg").stat().st_size > 1000


def test_without_matplotlib_a_picture_is_refused_and_text_is_not(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert plan.main([*EXAMPLE, "--plot", str(tmp_path / "a.png")]) == 2
    assert "matplotlib is missing" in capsys.readouterr().err
    assert run(capsys, *EXAMPLE).startswith("1f1b")


def test_the_page_on_pipelines_shows_what_is_printed(capsys):
    blocks = re.findall(r"```\n\$ fastmp (plan .*)\n((?:.*\n)*?)```", PAGE)
    assert blocks
    for command, expected in blocks:
        assert cli.main(shlex.split(command)) == 0
        assert capsys.readouterr().out == expected
    codes = re.findall(r"```python\n(from fastmp.*?)```", PAGE, re.DOTALL)
    for code, printed in zip(
        codes, ("41.6\n25.6\n", "F0.0 F0.1 F0.2 F0.3 F1.0 B0.3", "60.5 0.2604"), strict=True
    ):
        exec(code, {})
        assert capsys.readouterr().out.startswith(printed)


@pytest.mark.full
def test_the_page_on_pipelines_has_the_table_of_the_benchmark():
    from benchmarks.bench_schedule import bubbles

    assert "\n".join(bubbles()) in PAGE


def test_the_page_on_pipelines_shows_a_deadlock():
    with pytest.raises(ValueError) as caught:
        simulate(Schedule(4, 8, 2, 3, check=False).orders())
    assert str(caught.value) in " ".join(PAGE.split())
