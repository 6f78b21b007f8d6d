"""`fastmp launch`: what it makes of its options, and a job of it that loses a rank."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.elastic.rendezvous import RendezvousParameters

from fastmp.apps import launch_main
from fastmp.config import Environment

SET = ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "PET_NPROC_PER_NODE", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT")

WORKER = """
import os, signal, sys, time
import torch, torch.distributed as dist
import fastmp

def listening(pid):
    files = [f"/proc/{pid}/fd/{name}" for name in os.listdir(f"/proc/{pid}/fd")]
    sockets = {os.readlink(file) for file in files if os.path.lexists(file)}
    lines = [line.split() for name in ("tcp", "tcp6") for line in open(f"/proc/net/{name}").readlines()[1:]]
    return [line[1].split(":")[0] for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in sockets]

who, how, folder = sys.argv[1:]
if how == "saves":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
runtime = fastmp.init(backend="gloo") if who == "fastmp" else dist.init_process_group("gloo")
rank, attempt = dist.get_rank(), os.environ["TORCHELASTIC_RESTART_COUNT"]
total = torch.ones(1)
for step in range(10):
    dist.all_reduce(total.fill_(rank + 1.0))
    if how == "killed" and (rank, step, attempt) == (1, 5, "0"):
        os.kill(os.getpid(), signal.SIGKILL)
    if how in ("saves", "does not save"):
        os.kill(os.getppid(), signal.SIGTERM) if step == 9 and rank == 0 else None
        time.sleep(3600 if step == 9 else 0)
with open(f"{folder}/{rank}", "w") as file:
    file.write(f"{total.item()} {attempt} {sorted({*listening(os.getpid()), *listening(os.getppid())})}")
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture
def programs(monkeypatch, tmp_path):
    """Make scripts in the current directory."""
    monkeypatch.chdir(tmp_path)
    for name in ("train.py", "train", "x"):
        (tmp_path / name).touch()


@pytest.fixture
def options(monkeypatch, programs):
    """Read options on a machine with so many GPUs and 8 cores; variables that it sets are put back."""
    for name in SET:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(8))

    def read(line: str, gpus: int = 0):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        return launch_main._read_options(line.split())

    return read


def test_one_rank_a_gpu_is_started_unless_told_otherwise(options, monkeypatch, capsys):
    assert options("train.py", gpus=4).nproc_per_node == "4"
    assert capsys.readouterr().err == ""
    assert options("train.py").nproc_per_node == "1"
    assert capsys.readouterr().err == "fastmp launch: no GPU found, starting 1 process; -n N starts N\n"
    for two in ("-n 2", "--nproc-per-node 2", "--nproc_per_node=2"):
        assert options(f"{two} train.py", gpus=4).nproc_per_node == "2"
    monkeypatch.setenv("PET_NPROC_PER_NODE", "1")
    assert options("train.py", gpus=4).nproc_per_node == "1"


def test_threads_are_the_cores_over_the_ranks(options, monkeypatch):
    options("-n 3 train.py")
    assert os.environ["OMP_NUM_THREADS"] == "2"
    options("-n 1 train.py")
    assert os.environ["OMP_NUM_THREADS"] == "2"  # what is set stays


def test_ranks_that_are_told_to_stop_have_time_to_save(options, monkeypatch):
    assert "SIGUSR1" in options("train.py").signals_to_handle.split(",")
    assert os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == "120"


def test_train_and_generate_are_short_for_the_module(options):
    args = options("-n 2 train --recipe some.toml -n 3")
    assert (args.module, args.training_script) == (True, "fastmp")
    assert args.training_script_args == ["train", "--recipe", "some.toml", "-n", "3"]
    args = options("-n 2 generate --tp 2")
    assert (args.training_script, args.training_script_args) == ("fastmp", ["generate", "--tp", "2"])
    assert options("./train --steps 3").training_script == "./train"
    assert options("-m train --steps 3").training_script == "train"


@pytest.mark.parametrize("line", ["", "--standalone", "--max-restarts 3", "--nnodes 1"])
def test_ranks_of_one_machine_meet_at_the_loopback_address(options, line):
    args = options(f"{line} -n 2 train.py")
    assert args.rdzv_backend == "loopback" and not args.standalone
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"


@pytest.mark.parametrize(
    "line",
    [
        "--nnodes 2 --node-rank 0 --master-addr head --master-port 1234",
        "--nnodes 1:4 --rdzv-backend c10d --rdzv-endpoint head:1234",
        "--rdzv-backend c10d --rdzv-endpoint localhost:0",
        "--master-port 1234",
    ],
)
def test_a_rendezvous_that_is_asked_for_is_torchruns(options, line):
    args = options(f"{line} -n 2 train.py")
    assert args.rdzv_backend == ("c10d" if "c10d" in line else "static")
    assert "GLOO_SOCKET_IFNAME" not in os.environ


def test_every_attempt_has_a_store_of_its_own():
    handler = launch_main._Loopback(RendezvousParameters("loopback", "127.0.0.1", "none", 1, 1))
    first, second = handler.next_rendezvous(), handler.next_rendezvous()
    first.store.set("who", "a rank that is dead")
    assert not second.store.check(["who"])
    assert first.bootstrap_store_info.master_port != second.bootstrap_store_info.master_port
    assert (second.rank, second.world_size) == (0, 1)


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("-n some train.py", "-n: expected a number of processes, or gpu, got 'some'"),
        ("-n 1 --nnodes 0 train.py", "nodes"),
        ("-n 1 --max-restarts -1 x", "restarts"),
    ],
)
def test_a_number_that_is_none_is_one_line(options, capsys, line, name):
    assert launch_main.main(line.split()) == 2
    err = capsys.readouterr().err
    assert err.startswith("fastmp launch: ") and name in err and err.count("\n") == 1


def test_the_environment_has_what_torchrun_takes_for_its_option():
    assert Environment.read({"PET_NPROC_PER_NODE": "auto"}).ranks_per_machine == "auto"


def launched(folder: Path, *line: str) -> subprocess.CompletedProcess[str]:
    worker = folder / "worker.py"
    worker.write_text(WORKER)
    environment = {name: value for name, value in os.environ.items() if name not in SET}
    environment["PYTHONPATH"] = str(Path(launch_main.__file__).parents[1])
    command = [sys.executable, "-m", "fastmp", "launch", "-n", "2", *line]
    command[len(command) - 2 : len(command) - 2] = [str(worker)]
    return subprocess.run(
        [*command, str(folder)], env=environment, capture_output=True, text=True, timeout=120
    )


@pytest.mark.full
@pytest.mark.parametrize("who", ["fastmp", "torch"])
def test_a_killed_rank_costs_one_restart_and_nobody_listens_to_the_network(tmp_path, who):
    """Also where a program initialises torch.distributed by itself, as under torchrun it often cannot."""
    done = launched(tmp_path, "--max-restarts", "1", who, "killed")
    assert done.returncode == 0, done.stderr
    seen = [(tmp_path / str(rank)).read_text() for rank in range(2)]
    assert seen == ["3.0 1 ['0100007F']"] * 2


@pytest.mark.full
def test_the_status_is_that_of_the_rank_that_ended_first(tmp_path):
    done = launched(tmp_path, "fastmp", "killed")
    assert done.returncode == 128 + 9
    assert "fastmp launch: rank 1 ended first, with status -9" in done.stderr


@pytest.mark.full
@pytest.mark.parametrize(("how", "status"), [("saves", 0), ("does not save", 128 + 15)])
def test_a_signal_is_a_failure_only_where_a_rank_fails(tmp_path, how, status):
    assert launched(tmp_path, "fastmp", how).returncode == status
