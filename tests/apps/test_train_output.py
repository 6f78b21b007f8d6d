"""`fastmp train` where its log cannot be written: it trains and saves all the same."""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys

import pytest
from train_tools import ROOT, arguments, losses

from fastmp.apps.train import main

pytestmark = pytest.mark.usefixtures("one_thread")


def trained(directory, tokens, redirected, launcher=(), **variables):
    """Train for three steps, with the output of bash's `redirected`; return the status and stderr."""
    options = arguments(directory, tokens, train__steps=3, checkpoint__interval=3)
    command = shlex.join([sys.executable, "-m", "fastmp", *launcher, "train", *options])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **variables}
    line = f"set -o pipefail; {command} {redirected}"
    done = subprocess.run(["bash", "-c", line], env=environment, cwd=ROOT, capture_output=True, text=True)
    return done.returncode, done.stderr


def check_saved(directory):
    assert [step for step, _ in losses(directory / "tiny")] == [1, 2, 3]
    assert (directory / "tiny" / "checkpoints" / "latest").read_text().strip() == "step-00000003"


@pytest.mark.full
def test_a_log_on_a_full_disk(tmp_path, tokens):
    status, said = trained(tmp_path, tokens, ">/dev/full")
    assert (status, len(said.splitlines())) == (0, 1) and "No space left on device" in said
    check_saved(tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("redirected", [">/dev/full 2>&1", ">&- 2>&-", "| head -1"])
@pytest.mark.parametrize("launcher", [(), ("launch", "-n", "2")])
def test_a_log_that_nothing_takes(redirected, launcher, tmp_path, tokens):
    status, said = trained(tmp_path, tokens, redirected, launcher)
    assert status == 0 and "Traceback" not in said
    check_saved(tmp_path)


@pytest.mark.full
def test_a_directory_in_letters_that_the_locale_lacks(tmp_path, tokens):
    assert trained(tmp_path / "läufe-語", tokens, "", PYTHONIOENCODING="ascii") == (0, "")
    check_saved(tmp_path / "läufe-語")


@pytest.mark.parametrize("full", [True, False])
def test_a_process_without_streams(full, tmp_path, tokens, monkeypatch):
    stream = open("/dev/full", "w", encoding="ascii") if full else None
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", stream)
    directory = tmp_path / "läufe-語"
    assert main(arguments(directory, tokens, train__steps=3, checkpoint__interval=3)) == 0
    check_saved(directory)
    if stream is not None:
        with contextlib.suppress(OSError):
            stream.close()
