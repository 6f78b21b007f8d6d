"""`fastmp train` over ranks: one that is stopped or killed from outside ends the job, which says so."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from train_tools import ROOT, arguments

from fastmp.hang import explain


@pytest.mark.full
@pytest.mark.parametrize(
    ("number", "said"), [(signal.SIGSTOP, "is stopped"), (signal.SIGKILL, "is gone: killed or crashed")]
)
def test_a_rank_that_is_stopped_or_killed_ends_the_job_with_its_name(tmp_path, tokens, number, said):
    changes = {"train__steps": 100_000, "train__stall_seconds": 4, "parallel__pp": 2, "model__num_layers": 2}
    options = arguments(tmp_path, tokens, **changes)
    launcher = ["-m", "fastmp", "launch", "--nproc-per-node", "2", "-m", "fastmp", "train"]
    process = subprocess.Popen(
        [sys.executable, *launcher, *options],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    lines = []
    for line in process.stdout:
        lines.append(line)
        if "step     10/" in line:
            break
    records = [
        json.loads((tmp_path / "tiny" / "hang" / f"rank-{rank:05d}.json").read_text()) for rank in (0, 1)
    ]
    pids = [record["record"]["pid"] for record in records]
    os.kill(pids[1], number)
    began = time.monotonic()
    rest = process.stdout.read()
    assert process.wait(timeout=60) not in (0, None), rest
    assert time.monotonic() - began < 4 + 3 + 5, rest  # and torchrun's own time
    verdict = explain(tmp_path / "tiny")
    assert f"Rank 1 (host {os.uname().nodename}, process {pids[1]}) {said}" in verdict
    assert verdict.splitlines()[0] in rest and "Rank 0 waited in " in verdict
    assert not any(psutil.pid_exists(pid) for pid in pids)
