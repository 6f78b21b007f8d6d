"""A job that stands still, or loses a rank, ends soon with the right report and leaves no process behind."""

from __future__ import annotations

import json
import re

import pytest
from hangs import SCENARIOS, run_scenario

from fastmp.apps.cli import main
from fastmp.apps.hang import explain
from fastmp.watchdog.records import RankRecord

QUICK = {("killed", 2, 1), ("stopped", 2, 1)}
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    "scenario",
    [
        pytest.param(s, id=s.name, marks=() if (s.fault, s.world_size, s.rank) in QUICK else pytest.mark.full)
        for s in SCENARIOS
    ],
)
def test_the_report_is_right_and_the_job_ends(scenario, tmp_path):
    outcome = run_scenario(scenario, tmp_path)
    assert outcome.problems(scenario) == [], outcome
    if outcome.report is None:  # only slow, or suspended
        assert not (tmp_path / "hang").exists()
        return
    again = explain(tmp_path)
    assert again.startswith(outcome.report["text"])
    if "sleeps" in scenario.fault:  # its stack shows where
        stacks = (tmp_path / "hang" / f"rank-{scenario.rank:05d}.stacks").read_text()
        assert "in _fault" in stacks
    flights = list((tmp_path / "hang").glob("*.flight.json"))
    assert flights and all("entries" in json.loads(path.read_text())[0] for path in flights)


def test_the_command_prints_the_report_or_what_can_be_known_without_one(tmp_path, capsys):
    (tmp_path / "hang").mkdir()
    assert main(["hang", str(tmp_path)]) == 1 and "nothing in" in capsys.readouterr().out
    for rank, time in enumerate((100.0, 160.0)):
        record = RankRecord(rank, "a", 9, step=4, phase="data").as_json()
        content = {"beat": 1, "time": time, "machine": ["m", 0], "record": record}
        (tmp_path / "hang" / f"rank-{rank:05d}.json").write_text(json.dumps(content))
    (tmp_path / "hang" / "rank-00000.stacks").write_text("Thread 1")
    assert main(["hang", str(tmp_path / "hang")]) == 0
    said = capsys.readouterr().out
    assert (
        "no rank has written a hang report" in said and "rank 0 (host a, process 9), in step 4, data" in said
    )
    assert "rank-00000.stacks" in said


RECORD = RankRecord(0, "a", 9).as_json()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *(("report.json", content) for content in ("{", "[]", "{}", "[" * 100_000)),
        ("rank-00000.json", json.dumps({"time": "now", "record": RECORD})),
        *(
            ("rank-00000.json", json.dumps({"time": 1.0, "record": {**RECORD, **change}}))
            for change in ({"rank": 10**12}, {"rank": "x"}, {"calls": 3}, {"calls": [{}]}, {"other": 1})
        ),
    ],
)
def test_a_file_that_no_rank_wrote_is_one_line(tmp_path, capsys, name, content):
    (tmp_path / name).write_text(content)
    with pytest.raises(SystemExit):
        main(["hang", str(tmp_path)])
    last = capsys.readouterr().err.splitlines()[-1]
    assert re.search(rf"/{name}: (is not|not|must be) ", last), last
