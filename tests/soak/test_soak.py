"""The soak scripts at a size that takes seconds."""

from __future__ import annotations

import json
import os
import random
import time

import damaged
import inputs
import kills
import memory
import nonfinite
import pytest
import reshard
import restarts
import soak

from fastmp.training.checkpoint import collective_load


def test_damaged_and_hostile_inputs_are_refused_by_name():
    outcome = inputs.run(quick=True)
    assert not outcome.failures, "\n".join(outcome.failures)
    assert sum(row["cases"] for row in outcome.rows) > 400


def test_a_reader_that_fails_is_reported_with_its_case(tmp_path, monkeypatch, capsys):
    """A case is read wrongly, another dies and a third hangs; the others go on."""
    monkeypatch.setattr(soak, "RESULTS", tmp_path)
    monkeypatch.setattr(inputs, "SECONDS", 0.5)

    def make(draw, folder):
        path = folder / "number"
        path.write_text(str(draw.random()))
        return path

    def read(path):
        number = numbers.index(path.read_text())
        if number == 2:
            os._exit(3)
        if number == 3:
            time.sleep(60)
        if number == 4:
            raise ValueError("no name of a file")
        if number == 5:
            open("/etc/hostname")
        return "wrong" if number == 1 else ""

    family = inputs.Family("fake", 7, make, read)
    numbers = [str(random.Random(f"fake {number}").random()) for number in range(-1, 7)][1:]
    numbers.append(str(random.Random("fake -1").random()))
    (tmp_path / "case").mkdir()
    row, failures = inputs.run_family(family, 7, tmp_path / "case")
    assert row["failures"] == 5
    assert sorted(failures) == [
        "fake 1: wrong",
        "fake 2: the process hung or died",
        "fake 3: the process hung or died",
        "fake 4: the error does not name the file: ValueError('no name of a file')",
        "fake 5: open /etc/hostname r",
    ]
    assert soak.main("fake", lambda quick: soak.Outcome([row], failures), []) == 1
    assert "FAILED fake 1: wrong" in capsys.readouterr().out
    assert json.loads((tmp_path / "fake.json").read_text())["failures"] == failures


def test_gradients_that_are_not_finite_change_nothing():
    outcome = nonfinite.run(quick=True)
    assert not outcome.failures, "\n".join(outcome.failures)
    assert sum(row["injections"] for row in outcome.rows) == 4


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, ""),
        (
            {0: (True, "step 4: skipped: the gradient of w on rank 1 is not finite", [], "", 0)},
            "finite (True,",
        ),
        ({0: (False, "", [], "", 0)}, "ranks say different things"),
        (
            {0: (False, "step 4: skipped: the gradient of w on rank 1 is not finite", ["v"], "", 0)},
            "finite (False, False), changed (['v']",
        ),
        (
            {1: (False, "step 4: skipped: the gradient of w on rank 1 is not finite", [], "v", 1)},
            "v on rank 1 was",
        ),
    ],
)
def test_a_leak_is_seen(change, said):
    line = "step 4: skipped: the gradient of w on rank 1 is not finite"
    seen = {0: (False, line, [], "", 0), 1: (False, line, [], "w", 1), **change}
    found = nonfinite.judge("dp2, ZeRO shards", nonfinite.Injection(1, 0, 0, 0, "nan"), list(seen.values()))
    assert found.startswith(said) and bool(found) == bool(said)


@pytest.mark.exhaustive
def test_steps_and_jobs_leave_nothing_behind():
    outcome = memory.run(quick=True)
    assert not outcome.failures, "\n".join(outcome.failures)


def test_a_slope_is_that_of_the_floors():
    """Two kilobytes a step are seen through saves that take megabytes for a moment."""
    seen = [10**8 + 2000 * step + (10**7 if step % 20 == 0 else 0) for step in range(2000)]
    assert memory.slope(seen, 500) == pytest.approx(2000, rel=0.02)


@pytest.mark.exhaustive
def test_a_checkpoint_of_any_layout_loads_into_any_other():
    outcome = reshard.run(quick=True)
    assert not outcome.failures, "\n".join(outcome.failures)
    assert sum(row["equal bit for bit"] for row in outcome.rows) == 4


@pytest.mark.full
def test_a_kill_while_saving_loses_nothing():
    outcome = kills.run(quick=True)
    assert not outcome.failures, "\n".join(outcome.failures)
    assert sum(row["kills"] for row in outcome.rows) == 15


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("3 c ", ""),
        ("2 b ", "resumed from step 2, though 3 was saved"),
        ("3 b ", "has other bits after step 3"),
        ("3 c checkpoint: step-00000004 is passed over", "said checkpoint: step-00000004 is passed over"),
    ],
)
def test_a_lost_step_is_seen(tmp_path, line, said):
    (tmp_path / "resumed-0").write_text(line + "\n")
    step, problem = kills.judge(tmp_path, 1, [["_", "a", "b", "c"]], saved=3)
    assert problem.endswith(said) and bool(problem) == bool(said) and (step == 3) == (not said)


@pytest.mark.exhaustive
def test_a_run_that_is_started_again_ends_as_if_nothing_had_been():
    outcome = restarts.run(quick=True)
    assert not outcome.failures, "\n".join(outcome.failures)
    assert sum(row["kills"] for row in outcome.rows) >= 3


def test_a_start_behind_a_saved_step_is_seen():
    saved = (
        "step 3: saved runs/x/checkpoints/step-00000003\nstep 6: saved runs/x/checkpoints/step-00000006.1\n"
    )
    assert restarts.lost(saved + "resumed after step 6\nstep 9: saved runs/x/step-00000009\n") == ""
    assert restarts.lost(saved + "resumed after step 3\n") == "went back to step 3, though 6 was saved"
    none = "no checkpoint in runs/x: starting at step 0\n"
    assert restarts.lost(none + saved) == "" and restarts.lost(saved + none).startswith("went back to step 0")


def test_damaged_and_hostile_checkpoints_are_refused_and_nothing_is_loaded():
    outcome = damaged.run(quick=True)
    assert not outcome.failures, "\n".join(outcome.failures)
    assert sum(row["cases"] for row in outcome.rows) == 470


def test_a_reader_that_checks_nothing_is_found_out(tmp_path, monkeypatch):
    made = damaged.Checkpoints(tmp_path)
    (tmp_path / "case").mkdir()
    flipped = next(each for each in made.families() if each.name == "one bit")
    monkeypatch.setattr(collective_load, "verify", lambda path, manifest, names: None)
    _, failures = inputs.run_family(flipped, 30, tmp_path / "case")
    assert failures and all("a bit that was flipped was not found" in failure for failure in failures)
