"""`fastmp train` over ranks: one that is stopped or killed from outside ends the job, which says so."""

from __future__ import annotations

import json
import os
import re
import signal
import tempfile
import time

import psutil
import pytest
import torch
from train_tools import arguments, read_until, start

from fastmp.apps import train_main as main
from fastmp.apps.hang import explain
from fastmp.config.recipe import parse_arguments
from fastmp.distributed.runtime import Runtime
from fastmp.testing import ranks


@pytest.mark.full
@pytest.mark.parametrize(
    ("number", "said"), [(signal.SIGSTOP, "is stopped"), (signal.SIGKILL, "is gone: killed or crashed")]
)
def test_a_rank_that_is_stopped_or_killed_ends_the_job_with_its_name(tmp_path, tokens, number, said):
    changes = {"train__steps": 100_000, "train__stall_seconds": 4, "parallel__pp": 2, "model__num_layers": 2}
    options = arguments(tmp_path, tokens, **changes)
    process = start(options, "-m", "fastmp", "launch", "--nproc-per-node", "2")
    read_until(process, "step     10/")
    records = [
        json.loads((tmp_path / "tiny" / "hang" / f"rank-{rank:05d}.json").read_text()) for rank in (0, 1)
    ]
    pids = [record["record"]["pid"] for record in records]
    os.kill(pids[1], number)
    began = time.monotonic()
    rest = process.stdout.read()
    assert process.wait(timeout=60) not in (0, None), rest
    assert time.monotonic() - began < 4 + 3 + 5, rest  # and torchrun's own time
    report = explain(tmp_path / "tiny")
    assert f"Rank 1 (host {os.uname().nodename}, process {pids[1]}) {said}" in report
    assert report.splitlines()[0] in rest and "Rank 0 waited in " in report
    assert not any(psutil.pid_exists(pid) for pid in pids)


@pytest.mark.full
def test_a_rank_that_dies_while_groups_are_made_ends_the_job(tmp_path, tokens, monkeypatch, capfd):
    """The other one waits in C++ for the address of one that is gone, with no connection that closes."""
    options = arguments(tmp_path, tokens, parallel__tp=2)

    def rank_main(rank, world_size):
        def make(recipe, runtime):
            if rank == 1:
                time.sleep(5)
                os.kill(os.getpid(), signal.SIGKILL)
            return make_groups(recipe, runtime)

        monkeypatch.setattr(main, "make_groups", make)
        runtime = Runtime(rank, world_size, rank, torch.device("cpu"))
        main.train(parse_arguments(options), runtime)

    make_groups = main.make_groups
    monkeypatch.setattr(ranks, "GRACE", 60.0)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # for what the hang report leaves
    began = time.monotonic()
    with pytest.raises(ranks.RankError, match="died without a report") as error:
        ranks.run_ranks(rank_main, 2, timeout=90)
    assert "still running" not in str(error.value) and time.monotonic() - began < 40
    assert re.search(r"Rank 1 \(host .*\) is gone: killed or crashed", capfd.readouterr().err)
    assert not (tmp_path / "tiny").exists()
