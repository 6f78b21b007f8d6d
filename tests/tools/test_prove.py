"""`python -m tools.prove`: what is not held is said and makes the status 1, and what cannot be shown is
never held.
"""

from __future__ import annotations

import json
import math
import platform
import resource
import sys
from types import ModuleType

import pytest

from tools.prove import __main__ as command
from tools.prove.claims import Claim, Table
from tools.prove.run import ENDS, run_chapter

GOOD = Claim.at_most("an error", 0.5, 1)
BAD = Claim.at_most("an error", 2.0, 1)
ABSENT = Claim.not_shown("a kernel", "Triton is not installed")


def chapter(monkeypatch, said, error=None):
    """A chapter "made" that yields what is `said`, then raises."""

    def claims():
        yield from said
        if error is not None:
            raise error

    module = ModuleType("tools.prove.made", "Made.\n\nOf nothing | at all.")
    module.claims = claims
    monkeypatch.setitem(sys.modules, "tools.prove.made", module)
    monkeypatch.setattr(command, "CHAPTERS", {"made": {}})
    monkeypatch.setattr(command, "_in_a_process", run_chapter)


@pytest.mark.parametrize(
    ("said", "status", "verdict"),
    [
        ([GOOD, GOOD], 0, "2 claims: 2 held"),
        ([GOOD, BAD], 1, "2 claims: 1 held, 1 NOT HELD"),
        ([GOOD, ABSENT], 0, "2 claims: 1 held, 1 not shown"),
        ([], 0, "0 claims: none"),
    ],
)
def test_a_claim_that_is_not_held_is_status_1(said, status, verdict, monkeypatch, tmp_path, capsys):
    table = Table("Figures", ("a", "b"), [[1, 0.123456], [2, "x|y"]])
    chapter(monkeypatch, [*said, table])
    assert command.main(["--out", str(tmp_path / "new")]) == status
    printed, page = capsys.readouterr().out, (tmp_path / "new" / "prove.md").read_text()
    assert verdict in printed and f"**{verdict}**" in page
    assert "## Made\n\nOf nothing | at all.\n" in page and "| 1 | 0.123 |\n| 2 | x/y |\n" in page
    found = json.loads((tmp_path / "new" / "prove.json").read_text())
    assert found["good"] is (status == 0) and found["machine"]["cores"] >= 1
    assert [each["held"] for each in found["chapters"][0]["claims"]] == [each.held for each in said]
    assert platform.node() not in json.dumps(found["machine"])


def test_a_chapter_that_raises_is_not_held(monkeypatch, tmp_path, capsys):
    chapter(monkeypatch, [GOOD], ZeroDivisionError("by nothing"))
    assert command.main(["--out", str(tmp_path)]) == 1
    assert f"NOT HELD   {ENDS}: ZeroDivisionError: by nothing" in capsys.readouterr().out


def test_a_chapter_whose_process_dies_is_not_held(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(command, "CHAPTERS", {"kernels": {}})
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert command.main(["--out", str(tmp_path)]) == 1
    assert f"NOT HELD   {ENDS}: status 1 (status 0)" in capsys.readouterr().out


def test_wrong_options_are_status_2(tmp_path, capsys):
    (tmp_path / "file").touch()
    for options in (["--only", "kernel"], ["--out", str(tmp_path / "file" / "below")]):
        with pytest.raises(SystemExit) as caught:
            command.main(options)
        assert caught.value.code == 2 and capsys.readouterr().err.startswith("python -m tools.prove: ")


def test_claims():
    assert not Claim.at_most("nan", math.nan, 1).held and not Claim.more_than("nan", math.nan, 1).held
    assert not Claim.all_of("nothing", 0, 0).held and Claim.all_of("all", 2, 2).held
    wrong = Claim.all_of("some", 1, 5, ["a", "b", "c", "d"])
    assert not wrong.held and wrong.found == "1 of 5: a; b; c; and 1 more"
    assert ABSENT.held is None


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
def test_the_whole_command_in_five_minutes_on_two_cores(tmp_path):
    """In processor time, which other work on the machine does not lengthen as much as the clock's."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert command.main(["--out", str(tmp_path)]) == 0
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime - before.ru_utime < 2 * 300
    found = json.loads((tmp_path / "prove.json").read_text())
    assert [each["name"] for each in found["chapters"]] == [*command.CHAPTERS]
    assert all(len(each["claims"]) > 2 for each in found["chapters"])
    assert "NOT HELD" not in (tmp_path / "prove.md").read_text()
