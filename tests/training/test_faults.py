"""`fastmp train` over ranks: one that is stopped or killed from outside ends the job, which says so."""

from __future__ import annotations

import json
import os
import re
import signal
import tempfile
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from marks import ON_GPUS, full
from train_tools import arguments, read_until, start

from fastmp.apps import train_main as main
from fastmp.apps.hang import explain
from fastmp.config import Recipe
from fastmp.config.recipe import parse_arguments
from fastmp.distributed.runtime import Runtime
from fastmp.testing import ranks
from fastmp.watchdog.channel import Channel


@pytest.mark.parametrize("device", [*full(["cpu"]), ON_GPUS])
@pytest.mark.parametrize(
    ("number", "said"), [(signal.SIGSTOP, "is stopped"), (signal.SIGKILL, "is gone: killed or crashed")]
)
def test_a_rank_that_is_stopped_or_killed_ends_the_job_with_its_name(
    tmp_path, tokens, monkeypatch, number, said, device
):
    if device == "cuda":
        if reason := ranks.lacks_gpus(2):
            pytest.skip(reason)
        for name, value in ranks.gpu_variables(2).items():
            monkeypatch.setenv(name, value)
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
    # torchrun's own time, and on a GPU that of kernels which wait for a peer
    assert time.monotonic() - began < 4 + 3 + (5 if device == "cpu" else 30), rest
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


def test_a_start_goes_unwatched_where_no_temporary_directory_is_private(tmp_path, monkeypatch, capfd):
    """As on a file system without modes, on one machine of two; later watchdogs of the ranks still meet."""

    def rank_main(rank, world_size):
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        if rank == 1:
            mkdir = Path.mkdir
            monkeypatch.setattr(Path, "mkdir", lambda path, mode: (mkdir(path), path.chmod(0o777)))
            monkeypatch.setattr(main, "host_id", lambda: ("another machine", 0))
        with main._watch_start(Recipe(), Runtime(rank, world_size, 0, torch.device("cpu"))):
            dist.barrier()
        return Channel(1.0)._prefix

    first, second = ranks.run_ranks(rank_main, 2)
    assert first == second and list(tmp_path.iterdir()) == []
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("fastmp: rank 1: starting without the hang watchdog, which needs a private")
    assert re.search(r"\(.*fastmp-start-.* is of mode 777, where .*\); set TMPDIR to another place$", line)
