"""Joining a job, restarts under one store, and what is left of a job after one rank fails."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from gpu_ranks import free_port

import fastmp
from fastmp.config import Environment
from fastmp.distributed import rendezvous
from fastmp.distributed import runtime as module
from fastmp.distributed.rendezvous import fresh_store
from fastmp.distributed.runtime import CONNECTING, Runtime, main_guard
from fastmp.testing.ranks import run_ranks
from fastmp.training.checkpoint.format import CheckpointError

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "FASTMP_DEBUG")

WORKER = """
import json, os, signal, sys, time
import torch, torch.distributed as dist
import fastmp
from fastmp.distributed import ParallelGroups, RankGrid, main_guard

def main():
    mode, folder = sys.argv[1:]
    runtime = fastmp.init(backend="gloo", timeout_minutes=1)
    groups = ParallelGroups.create(RankGrid(world_size=runtime.world_size, tp=2))
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    total = torch.zeros(1)
    for step in range(20):
        x = torch.full((1,), float(step + runtime.rank))
        dist.all_reduce(x, group=groups.tp)
        total += x
        if runtime.rank == 1 and step == 10 and restarts == 0:
            if mode == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if mode == "raise":
                raise KeyError("a shelf that is not there")
    with open(f"{folder}/result-{runtime.rank}", "w") as file:
        json.dump([total.item(), restarts], file)
    runtime.close()

raise SystemExit(main_guard(main))
"""

# Leaves while threads of gloo wait for the GIL: only blocking calls give it to them. Forks save imports, and
# each ends as a program does; `Slow` makes its clean-up long enough for the threads to come to it.
LEAVING = """
import os, sys, time
import torch, torch.distributed as dist
import fastmp

class Slow:
    def __del__(self, sleep=time.sleep):
        sleep(0.2)

for _ in range(6):
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        runtime = fastmp.init(backend="gloo")
        slow, groups = Slow(), [dist.group.WORLD, *(dist.new_group([0]) for _ in range(4))]
        for group in groups:
            dist.all_reduce(torch.ones(3), group=group)
        sys.setswitchinterval(100)
        for group in groups:
            dist.all_reduce(torch.ones(3), group=group, async_op=True)
        runtime.close()
        break
    status = os.waitpid(child, 0)[1]
    if status != 0:
        raise SystemExit(f"a rank ended with status {status}")
"""


@pytest.fixture
def launcher(monkeypatch):
    """Set the variables a launcher sets; none of them at first."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)

    def set_variables(**variables: object) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(name, str(value))

    return set_variables


@pytest.fixture
def worker(tmp_path: Path) -> Path:
    path = tmp_path / "worker.py"
    path.write_text(WORKER)
    return path


def child_environment(**variables: object) -> dict[str, str]:
    root = str(Path(fastmp.__file__).parents[1])
    kept = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    return kept | {"PYTHONPATH": root, "OMP_NUM_THREADS": "1"} | {k: str(v) for k, v in variables.items()}


def torchrun(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", *map(str, arguments)]
    return subprocess.run(command, env=child_environment(), capture_output=True, text=True, timeout=120)


def run_together(
    commands: list[list[object]], environments: list[dict[str, str]], seconds: float
) -> tuple[list[int], list[str]]:
    """Run processes next to each other; return their statuses and errors. None is left when one hangs."""
    running = [
        subprocess.Popen(list(map(str, command)), env=environment, stderr=subprocess.PIPE, text=True)
        for command, environment in zip(commands, environments, strict=True)
    ]
    try:
        errors = [process.communicate(timeout=seconds)[1] for process in running]
    finally:
        for process in running:
            process.kill()
    return [process.returncode for process in running], errors


def rank_environments(world_size: int) -> list[dict[str, str]]:
    """The variables that a launcher gives to each rank."""
    names = {"WORLD_SIZE": world_size, "MASTER_PORT": free_port()}
    return [child_environment(RANK=rank, LOCAL_RANK=rank, **names) for rank in range(world_size)]


def lines_of_ranks(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("fastmp: ")]


def test_without_a_launcher_a_rank_is_a_world_of_one(launcher):
    runtime = fastmp.init(backend="gloo")
    assert runtime == Runtime(rank=0, world_size=1, local_rank=0, device=torch.device("cpu"))
    assert not dist.is_initialized()
    runtime.close()
    runtime.close()


@pytest.mark.parametrize(
    ("variables", "arguments", "message"),
    [
        (
            {"WORLD_SIZE": 2},
            {},
            "WORLD_SIZE is 2 but RANK is not set; start .*fastmp launch --nproc-per-node 2",
        ),
        ({"WORLD_SIZE": 2, "RANK": 2}, {}, r"RANK 2 is outside 0 .. WORLD_SIZE - 1 = 1"),
        ({"WORLD_SIZE": 2, "RANK": "one"}, {}, "RANK must be an integer, got 'one'"),
        ({}, {"backend": "mpi"}, "backend must be None, 'gloo' or 'nccl', got 'mpi'"),
        ({}, {"timeout_minutes": 0}, "timeout_minutes must be positive, got 0"),
        ({}, {"join_seconds": -1}, "join_seconds must be positive, got -1"),
    ],
)
def test_variables_that_make_no_sense_are_errors_that_name_them(launcher, variables, arguments, message):
    launcher(**variables)
    with pytest.raises(ValueError, match=message):
        fastmp.init(**arguments)


@pytest.mark.parametrize("shares", (False, True))
def test_nccl_finds_its_variables_and_ranks_a_minute_to_connect(launcher, monkeypatch, shares):
    """NCCL reads its variables once, when the group is made; the minute ends with that."""
    launcher(RANK=0, WORLD_SIZE=1, LOCAL_RANK=0, MASTER_PORT=free_port())
    names = ("NCCL_GRAPH_REGISTER", "NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES")
    for name in names:
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    if shares:
        monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    monkeypatch.setattr(module, "_device", lambda env, backend: torch.device("cuda", 0))
    seen = []

    def make(backend, *, timeout, **options):
        seen.append((backend, *map(os.environ.get, names), timeout))

    monkeypatch.setattr(dist, "init_process_group", make)
    monkeypatch.setattr(dist.distributed_c10d, "_set_pg_timeout", seen.append)
    runtime = fastmp.init(timeout_minutes=3)
    set_ = ("0", "0", "1") if shares else ("0", None, None)
    assert seen == [("cpu:gloo,cuda:nccl", *set_, CONNECTING), timedelta(minutes=3)]
    assert runtime.device.type == "cuda" and runtime.owns_group


def test_more_ranks_than_gpus_is_an_error_that_names_both(launcher, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    launcher(RANK=1, WORLD_SIZE=2, LOCAL_RANK=1)
    message = r"LOCAL_RANK is 1, but torch sees 1 GPU\(s\) on this machine; .*NCCL_MULTI_RANK_GPU_ENABLE=1"
    with pytest.raises(ValueError, match=message):
        fastmp.init()


@pytest.mark.parametrize("launched_by", ("RANK", "OMPI"))
def test_ranks_share_gpus_where_nccl_lets_them(launcher, monkeypatch, capfd, launched_by):
    """Ranks 0 to 3 take GPUs 0, 1, 0, 1; the first that shares one says so."""
    seen, said = [], []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2 if launched_by == "RANK" else 1)
    monkeypatch.setattr(torch.cuda, "set_device", seen.append)
    monkeypatch.setattr(module, "nccl_version", lambda: (2, 30))
    for rank in range(4):
        prefix = "" if launched_by == "RANK" else "OMPI_COMM_WORLD_"
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 4, "SIZE": 4, "LOCAL_SIZE": 4}
        launcher(**{prefix + name: value for name, value in names.items()}, NCCL_MULTI_RANK_GPU_ENABLE=1)
        module._device(Environment.read(), None)
        said.append("speed means nothing" in capfd.readouterr().err)
    gpus = 2 if launched_by == "RANK" else 1
    assert [device.index for device in seen] == [rank % gpus for rank in range(4)]
    assert said == [rank == gpus for rank in range(4)]
    monkeypatch.setattr(module, "nccl_version", lambda: (2, 28))
    with pytest.raises(ValueError, match=r"NCCL_MULTI_RANK_GPU_ENABLE=1 needs NCCL 2\.30 .*got 2\.28"):
        module._device(Environment.read(), None)


def test_the_version_of_nccl_is_that_of_the_library(monkeypatch):
    """Not torch's own number, which stays where LD_PRELOAD brings another library."""

    def get_version(number):
        number._obj.value = 23007

    library = SimpleNamespace(ncclGetVersion=get_version)
    monkeypatch.setattr(ctypes, "CDLL", {"libnccl.so.2": library}.__getitem__)
    assert module.nccl_version() == (2, 30)


def test_nccl_without_a_gpu_is_an_error(launcher, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="backend 'nccl' needs a CUDA GPU"):
        fastmp.init(backend="nccl")


def join(rank: int, world_size: int, ports: list[int]) -> tuple:
    """Under a plain launcher: twice in a row, since closing leaves nothing behind."""
    dist.destroy_process_group()
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    os.environ.pop("MASTER_ADDR", None)  # localhost by default
    sums = []
    for port in ports:
        os.environ["MASTER_PORT"] = str(port)
        runtime = fastmp.init(backend="gloo", join_seconds=20)
        x = torch.full((1,), rank + 1.0)
        dist.all_reduce(x)
        sums.append(x.item())
        again = fastmp.init(backend="gloo")
        assert again == replace(runtime, owns_group=False)
        again.close()
        dist.barrier()
        runtime.close()
    return runtime.rank, runtime.world_size, str(runtime.device), sums


def test_a_launcher_that_sets_the_variables_is_enough():
    port = free_port()
    assert run_ranks(join, 3, [port, port, free_port()]) == [
        (rank, 3, "cpu", [6.0, 6.0, 6.0]) for rank in range(3)
    ]


@pytest.mark.full
def test_threads_of_gloo_that_want_the_gil_do_not_abort_a_rank_that_leaves(tmp_path):
    program = tmp_path / "leaving.py"
    program.write_text(LEAVING)
    variables = child_environment(RANK=0, WORLD_SIZE=1, LOCAL_RANK=0, MASTER_PORT=free_port())
    done = subprocess.run(
        [sys.executable, program], env=variables, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def cannot_join(rank: int, world_size: int, port: int, first: int, ranks: int, seconds: float) -> str:
    """What `init` says on rank `first + rank` of so many; its default process group goes before."""
    dist.destroy_process_group()
    os.environ.update(
        RANK=str(first + rank), WORLD_SIZE=str(ranks), MASTER_ADDR="localhost", MASTER_PORT=str(port)
    )
    with pytest.raises(RuntimeError) as caught:
        fastmp.init(backend="gloo", join_seconds=seconds)
    return str(caught.value)


@pytest.mark.full
def test_ranks_that_never_come_are_named():
    messages = run_ranks(cannot_join, 2, free_port(), 0, 4, 3, timeout=30)
    assert "ranks [2, 3] of 4 did not join in 3 s" in messages[0]
    assert re.search(r"rank 1 of 4 waited [23](\.\d)? s, but ranks \[2, 3\] did not join", messages[1])


def test_a_store_that_is_not_there_is_named():
    port = free_port()
    (message,) = run_ranks(cannot_join, 1, port, 1, 2, 1, timeout=30)
    assert f"rank 1 cannot reach the store of rank 0 at localhost:{port} in 1 s" in message
    assert "onnection refused" in message and message.endswith(
        "set MASTER_ADDR and MASTER_PORT to where it runs"
    )


@pytest.mark.full
def test_without_rank_0_the_others_say_one_line(worker, tmp_path):
    rank = subprocess.run(
        [sys.executable, str(worker), "plain", str(tmp_path)],
        env=child_environment(RANK=1, WORLD_SIZE=2, LOCAL_RANK=1, MASTER_PORT=free_port()),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert rank.returncode == 1
    assert rank.stderr.startswith("fastmp: rank 1: ") and rank.stderr.count("\n") == 1, rank.stderr


def test_a_port_that_another_program_has_is_named_by_every_rank():
    """The other program takes connections and never answers."""
    with socket.socket() as stranger:
        stranger.bind(("localhost", 0))
        stranger.listen()
        port = stranger.getsockname()[1]
        messages = run_ranks(cannot_join, 2, port, 0, 2, 1, timeout=30)
    assert messages == [
        f"fastmp.init: rank 0 cannot listen on port {port}: another program has it; set another MASTER_PORT",
        f"fastmp.init: rank 1 reached localhost:{port}, but the store of rank 0 did not answer in 1 s: "
        "another program may have the port; set another MASTER_PORT",
    ]


@pytest.mark.full
def test_a_job_without_one_of_its_ranks_ends(worker, tmp_path):
    """Nobody supervises the ranks, nothing is set: they end long before a collective's timeout, a minute."""
    run = f"import runpy; print('here', flush=True); runpy.run_path({str(worker)!r}, run_name='__main__')"
    command = [sys.executable, "-c", "import fastmp.distributed; " + run, "plain", str(tmp_path)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    ranks = [subprocess.Popen(command, env=environment, **pipes) for environment in rank_environments(3)[:2]]
    try:
        for process in ranks:
            assert process.stdout is not None and process.stdout.readline() == "here\n"
        errors = [process.communicate(timeout=50)[1] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [1, 1]
    assert "fastmp.init: ranks [2] of 3 did not join in 5 s" in errors[0]
    assert not list(tmp_path.glob("result-*"))


LOST = """
import os
from datetime import timedelta
import torch.distributed as dist
import fastmp
from fastmp.distributed import runtime
from fastmp.distributed.runtime import main_guard

runtime.CONNECTING = timedelta(seconds=2)
if os.environ["RANK"] == "1":
    dist.init_process_group = lambda *arguments, **options: os._exit(7)
raise SystemExit(main_guard(lambda: fastmp.init(backend="gloo") and None))
"""


@pytest.mark.full
def test_a_rank_that_is_lost_after_it_joined_is_missed_while_ranks_connect():
    statuses, errors = run_together([[sys.executable, "-c", LOST]] * 2, rank_environments(2), 60)
    assert statuses == [1, 7]
    assert "rank 0: another rank is gone (RuntimeError: fastmp.init: all 2 ranks had joined" in errors[0]
    assert "could not connect to each of them in 2 s" in errors[0]


def incarnations(rank: int, world_size: int, port: int) -> list[int]:
    """Three lives of a job on one store; in the second, ranks 2 and 3 die before they answer."""
    store = dist.TCPStore("localhost", port, world_size, rank == 0, wait_for_workers=False)
    seen = []
    for life in range(3):
        dist.barrier()  # a launcher starts no rank before all ranks of the life before are dead
        if rank == 0:
            time.sleep(0.2)  # the others come first, and find only what the dead left behind
        if life == 1:
            if rank < 2:
                with pytest.raises(RuntimeError, match=r"ranks \[2, 3\] (of 4 )?did not join"):
                    fresh_store(store, rank, world_size, timedelta(seconds=0.6))
            continue
        own = fresh_store(store, rank, world_size, timedelta(seconds=20))
        own.add("arrived", 1)  # a name space that was used before would count further
        dist.barrier()
        seen.append(own.add("arrived", 0))
    dist.barrier()  # rank 0 serves the store
    return seen


def test_a_restarted_job_never_reads_what_dead_ranks_left_in_the_store():
    assert run_ranks(incarnations, 4, free_port()) == [[4, 4]] * 4


def in_threads(pool, store, ranks, world_size, seconds):
    """The rendezvous of these ranks, each a thread of its own."""
    time_limit = timedelta(seconds=seconds)
    return {rank: pool.submit(fresh_store, store, rank, world_size, time_limit) for rank in ranks}


def test_a_rank_that_dies_in_the_rendezvous_joins_it_when_it_is_started_again():
    store = dist.HashStore()
    with ThreadPoolExecutor(3) as pool:
        joining = in_threads(pool, store, [0], 3, 20)
        with pytest.raises(RuntimeError, match=r"rank 1 of 3 waited 0\.1 s"):
            fresh_store(store, 1, 3, timedelta(seconds=0.1))
        joining |= in_threads(pool, store, [2], 3, 20)
        time.sleep(0.1)
        assert not any(each.done() for each in joining.values())
        joining |= in_threads(pool, store, [1], 3, 5)
        joining[1].result().set("key", "1")
        assert all(each.result().get("key") == b"1" for each in joining.values())


def test_a_rank_that_dies_in_the_rendezvous_is_named():
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        leader = in_threads(pool, store, [0], 3, 0.8)[0]
        with pytest.raises(RuntimeError, match=r"rank 1 of 3 waited 0\.1 s"):
            fresh_store(store, 1, 3, timedelta(seconds=0.1))
        in_threads(pool, store, [2], 3, 0.5)
        with pytest.raises(RuntimeError, match=r"ranks \[1\] of 3 did not join in 0.8 s"):
            leader.result()


def test_a_rank_that_waits_for_seconds_says_for_whom(capfd, monkeypatch):
    """One line on each rank, with names in small jobs; torch warns of each of its own waits that is over."""
    monkeypatch.setattr(rendezvous, "_QUIET_SECONDS", 0.15)
    store, port = dist.HashStore(), free_port()
    server = dist.TCPStore("localhost", port, is_master=True, wait_for_workers=False)
    with ThreadPoolExecutor(4) as pool:
        # 1. Rank 0 is not there; the store is that of a launcher.
        early = in_threads(pool, server, [2], 4, 20)[2]
        time.sleep(0.3)
        # 2. Rank 3 comes too late: rank 0 gives up, and ranks 1 and 2 with it.
        joining = in_threads(pool, server, [0], 4, 0.6) | in_threads(pool, server, [1], 4, 20)
        for each, said in (
            (joining[0], r"ranks \[3\] of 4 did not join in 0.6 s; start them"),
            (joining[1], r"rank 1 of 4 waited \d\.?\d* s, but ranks \[3\] did not join; start all ranks"),
            (early, r"rank 2 of 4 waited \d\.?\d* s, but ranks \[3\] did not join"),
        ):
            with pytest.raises(RuntimeError, match=said):
                each.result(5)
        # 3. In a large job ranks other than 0 count.
        with pytest.raises(RuntimeError, match=r"ranks \[2, 3, 4, 5, 6, 7, 8, 9 and 90 others\] of 100"):
            many = in_threads(pool, store, [0, 1], 100, 0.4)
            many[0].result()
        with pytest.raises(RuntimeError, match=r"rank 1 of 100 waited \S+ s, but \S+ \S+ .*did not join"):
            many[1].result()
    lines = sorted(capfd.readouterr().err.splitlines())
    assert [re.sub(r"up to \d+ s", "up to N s", line) for line in lines] == [
        "fastmp: rank 0: 2 of 100 ranks are here, waiting for ranks "
        "[2, 3, 4, 5, 6, 7, 8, 9 and 90 others], up to N s more",
        "fastmp: rank 0: 3 of 4 ranks are here, waiting for ranks [3], up to N s more",
        "fastmp: rank 1: 2 of 100 ranks are here, waiting for 98 ranks, up to N s more",
        "fastmp: rank 1: 3 of 4 ranks are here, waiting for ranks [3], up to N s more",
        "fastmp: rank 2: waiting for rank 0, up to N s more",
    ]


def test_ranks_that_have_all_come_wait_for_rank_0_alone(capfd, monkeypatch):
    """It has published a name and does not open it."""
    monkeypatch.setattr(rendezvous, "_QUIET_SECONDS", 0.15)
    store = dist.HashStore()
    store.set("fastmp/leader", "name")
    with ThreadPoolExecutor(3) as pool:
        for rank, joining in in_threads(pool, store, [1, 2, 3], 4, 0.5).items():
            with pytest.raises(
                RuntimeError, match=rf"rank {rank} of 4 waited 0\.5 s, but rank 0 did not join"
            ):
                joining.result(5)
    lines = sorted(capfd.readouterr().err.splitlines())
    said = "3 of 4 ranks are here, waiting for rank 0, up to 0 s more"
    assert lines == [f"fastmp: rank {rank}: {said}" for rank in (1, 2, 3)]


@pytest.mark.parametrize("looked", ["before", "after"])
def test_a_rank_that_comes_while_rank_0_gives_up_has_come(monkeypatch, looked):
    find = rendezvous._missing

    def find_late(store, prefix, wait):
        found = find(store, prefix, wait) if looked == "after" else None
        for counted in (prefix, f"{prefix}/here"):
            rendezvous._count(store, counted, rendezvous._StartWait(1, 2, timedelta(seconds=1)))
        return found or find(store, prefix, wait)

    monkeypatch.setattr(rendezvous, "_missing", find_late)
    store = dist.HashStore()
    fresh_store(store, 0, 2, timedelta(seconds=0.1)).set("key", "1")
    assert store.check([f"fastmp/{store.get('fastmp/leader').decode()}/open"])


def test_a_rank_that_waits_for_the_store_says_so_once(launcher, capfd, monkeypatch):
    monkeypatch.setattr(rendezvous, "_QUIET_SECONDS", 0.1)
    port = free_port()
    launcher(RANK=1, WORLD_SIZE=2, LOCAL_RANK=1, MASTER_ADDR="localhost", MASTER_PORT=port)
    with pytest.raises(RuntimeError, match="rank 1 cannot reach the store of rank 0"):
        fastmp.init(backend="gloo", join_seconds=0.5)
    said = f"fastmp: rank 1: waiting for the store of rank 0 at localhost:{port}, up to 0 s more\n"
    assert capfd.readouterr().err == said


def test_ranks_that_an_earlier_incarnation_did_not_have_wait_for_its_successor():
    """torchrun --nnodes=1:2 restarts with another number of ranks under the same store."""
    store = dist.HashStore()
    with ThreadPoolExecutor(3) as pool:
        for world_size in (2, 3):
            joining = in_threads(pool, store, range(1, world_size), world_size, 5)
            time.sleep(0.1)
            assert not any(each.done() for each in joining.values())
            fresh_store(store, 0, world_size, timedelta(seconds=5)).set("life", str(world_size))
            assert {each.result().get("life") for each in joining.values()} == {str(world_size).encode()}


def guarded(error: BaseException | None):
    def main() -> None:
        if error is not None:
            raise error

    return main


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (None, 0, ""),
        (ValueError("heads 6\nis not  divisible by tp 4"), 2, "heads 6 is not divisible by tp 4"),
        (
            FileNotFoundError(2, "no such file", "text.bin"),
            1,
            "FileNotFoundError: [Errno 2] no such file: 'text.bin'",
        ),
        (KeyError("x"), 1, "KeyError: 'x' (FASTMP_DEBUG=1 shows the traceback)"),
        (CheckpointError("gone is no checkpoint"), 2, "gone is no checkpoint"),
        (UnicodeError("x"), 2, "UnicodeError: x"),
        (AssertionError(), 1, "AssertionError (FASTMP_DEBUG=1 shows the traceback)"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_a_failure_is_one_line(launcher, capsys, error, status, line):
    assert main_guard(guarded(error)) == status
    assert capsys.readouterr().err == (f"fastmp: {line}\n" if line else "")


def test_mistakes_that_are_listed_stay_a_list(launcher, capsys):
    assert main_guard(guarded(ValueError("2 mistakes:\n  tp is 3\n  pp  is 5"))) == 2
    assert capsys.readouterr().err == "fastmp: 2 mistakes:\n  tp is 3\n  pp is 5\n"


def test_a_note_says_where(launcher, capsys):
    error = KeyError("x")
    error.add_note("step 3")
    assert main_guard(guarded(error)) == 1
    assert capsys.readouterr().err.startswith("fastmp: step 3: KeyError: 'x' (")


def test_debugging_adds_the_traceback(launcher, capsys):
    launcher(FASTMP_DEBUG=1)
    assert main_guard(guarded(KeyError("x"))) == 1
    err = capsys.readouterr().err
    assert "Traceback" in err and err.endswith("fastmp: KeyError: 'x'\n")


def test_a_traceback_that_cannot_be_written_changes_no_status(launcher, monkeypatch):
    launcher(FASTMP_DEBUG=1)
    stream = open("/dev/full", "w", buffering=1)
    monkeypatch.setattr(sys, "stderr", stream)
    assert main_guard(guarded(KeyError("x"))) == 1
    with contextlib.suppress(OSError):
        stream.close()


def test_the_status_of_the_program_is_kept(launcher):
    assert main_guard(lambda: 3) == 3
    with pytest.raises(SystemExit, match="2"):
        main_guard(guarded(SystemExit(2)))


def test_a_malformed_variable_is_one_line(launcher, capsys):
    launcher(RANK="one")
    assert main_guard(guarded(None)) == 2
    assert capsys.readouterr().err == "fastmp: environment: RANK must be an integer, got 'one'\n"


def test_an_exception_on_one_rank_ends_all(worker, tmp_path):
    """With nobody to supervise the ranks: the closed connection is what ends the other one."""
    command = [sys.executable, worker, "raise", tmp_path]
    statuses, (other, first) = run_together([command] * 2, rank_environments(2), 55)
    assert statuses == [1, 1]
    assert lines_of_ranks(first) == [
        "fastmp: rank 1: KeyError: 'a shelf that is not there' (FASTMP_DEBUG=1 shows the traceback)"
    ]
    (line,) = lines_of_ranks(other)
    assert line.startswith("fastmp: rank 0: another rank is gone (") and "Traceback" not in first + other


@pytest.mark.full
def test_torchrun_restarts_a_job_whose_rank_was_killed(worker, tmp_path):
    done = torchrun("--standalone", "--nproc-per-node=2", "--max-restarts=1", worker, "kill", tmp_path)
    assert done.returncode == 0, done.stderr
    right = sum(step + step + 1 for step in range(20))
    assert [json.loads((tmp_path / f"result-{rank}").read_text()) for rank in range(2)] == [[right, 1]] * 2


@pytest.mark.full
def test_a_layout_that_does_not_fit_the_ranks_ends_the_job_with_a_clear_line(worker, tmp_path):
    done = torchrun("--standalone", "--nproc-per-node=3", worker, "plain", tmp_path)
    assert done.returncode != 0
    lines = lines_of_ranks(done.stderr)
    # a rank that is still connecting when the first one leaves can only say that
    lines = [line for line in lines if "another rank is gone" not in line]
    assert lines and all(
        line.endswith(": RankGrid: world_size 3 is not a multiple of tp 2 x cp 1 x pp 1 = 2")
        for line in lines
    )
    assert not list(tmp_path.glob("result-*"))


@pytest.mark.exhaustive
def test_two_nodes_restart_together_though_their_counts_differ(worker, tmp_path):
    """Only the agent of the killed rank counts a restart; the ranks must meet nevertheless."""
    port = free_port()
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
    command += ["--max-restarts=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}"]
    command += [worker, "kill", tmp_path]
    statuses, errors = run_together([command] * 2, [child_environment()] * 2, 150)
    assert statuses == [0, 0], "\n".join(errors)
    right = sum(step + step + 1 for step in range(20))
    assert [json.loads((tmp_path / f"result-{rank}").read_text())[0] for rank in range(2)] == [right] * 2


def test_an_error_with_text_of_others_cannot_control_the_terminal(launcher, capsys):
    def main():
        raise ConnectionError("\x1b[31mRank 1 is gone\x1b[0m \udcff")

    assert main_guard(main) == 1
    assert capsys.readouterr().err == "fastmp: ConnectionError: \\x1b[31mRank 1 is gone\\x1b[0m \\udcff\n"
