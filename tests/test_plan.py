"""`fastmp plan`: the JSON and the text of it, and one line for each mistake."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from fastmp import cli, plan
from fastmp.parallel.grid import RankGrid

LAYOUT = ["--world-size", "16", "--tp", "4", "--pp", "2"]
DENSE = ["tp", "cp", "dp", "pp", "mp", "embedding"]
EXPERT = ["etp", "ep", "edp", "pp"]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert plan.main(list(arguments)) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def test_json_has_every_group_of_both_grids(capsys):
    table = json.loads(run(capsys, "groups", *LAYOUT, "--ep", "4", "--etp", "1", "--json"))
    grid = RankGrid(world_size=16, tp=4, pp=2, ep=4, etp=1)
    assert table == {
        "dense": {name: grid.ranks(name) for name in DENSE},
        "expert": {name: grid.ranks(name) for name in EXPERT},
    }
    assert list(table["dense"]) == DENSE and list(table["expert"]) == EXPERT
    assert table["expert"]["edp"][0] == [0, 4]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--world_size", "16", "--tp", "4", "--pp", "2"],
        ["groups", "--world_size=16", "--tp=4", "--pp=2"],
        [*LAYOUT, "--dp", "2", "--order", "tp-cp-ep-dp-pp"],
    ],
)
def test_spellings_of_the_same_layout(capsys, arguments):
    assert run(capsys, *arguments, "--json") == run(capsys, "groups", *LAYOUT, "--json")


def test_the_order_is_obeyed(capsys):
    table = json.loads(run(capsys, *LAYOUT, "--order", "dp-tp-cp-ep-pp", "--json"))
    assert table["dense"]["dp"][0] == [0, 1]


def test_people_read_the_groups(capsys):
    text = run(capsys, "groups", *LAYOUT)
    assert "16 ranks = tp 4 x cp 1 x dp 2 x pp 2 (dense)" in text
    assert "[0-3] [4-7] [8-11] [12-15]" in text
    assert "[0,4] [1,5] [2,6] [3,7] [8,12] [9,13] [10,14] [11,15]" in text
    assert "[0-3,8-11] [4-7,12-15]" in text
    assert "every rank alone" in text


def test_a_large_world_stays_readable(capsys):
    text = run(capsys, "--world-size", "65536", "--tp", "8", "--pp", "16")
    assert max(map(len, text.splitlines())) < 160
    assert "8192 x 8" in text and "[65528-65535]" in text


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--world-size", "16", "--tp", "3"], "world_size 16 is not a multiple of tp 3 x cp 1 x pp 1 = 3"),
        (["--world-size", "16", "--order", "tp-xp"], "unknown axis 'xp'"),
        (["--tp", "2"], "--world-size"),
        (["--world-size", "many"], "many"),
        (["--world-size", "16", "--tq", "2"], "--tq"),
        (["layers", "--world-size", "16"], "layers"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(capsys, arguments, part):
    try:
        status = plan.main(arguments)
    except SystemExit as leaving:
        status = leaving.code
    captured = capsys.readouterr()
    assert (status, captured.out) == (2, "")
    assert captured.err.startswith("fastmp plan: ") and captured.err.count("\n") == 1
    assert part in captured.err


def test_the_command_line_reaches_it(capsys):
    assert cli.main(["plan", "groups", *LAYOUT]) == 0
    assert "16 ranks" in capsys.readouterr().out


def test_planning_does_not_import_torch():
    code = (
        "import sys; from fastmp.cli import main; main(sys.argv[1:]); "
        "sys.exit(bool({'torch', 'numpy'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", code, "plan", *LAYOUT]
    assert subprocess.run(command, stdout=subprocess.DEVNULL).returncode == 0
