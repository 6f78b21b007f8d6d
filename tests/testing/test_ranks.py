"""Forked and spawned ranks: results in order, failures that name the rank, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import unittest
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from marks import full

import fastmp
from fastmp.testing import ranks
from fastmp.testing.ranks import RankError, run_ranks


def use_threads() -> None:
    """Start the parent's thread pools: what makes a careless fork hang."""
    x = torch.randn(700, 700, requires_grad=True)
    (x @ x).relu().sum().backward()


def child_pids() -> set[int]:
    return {
        int(pid)
        for task in Path("/proc/self/task").iterdir()
        for pid in (task / "children").read_text().split()
    }


@pytest.fixture(autouse=True)
def nothing_left_behind():
    before, num_files = child_pids(), len(os.listdir("/proc/self/fd"))
    yield
    assert child_pids() <= before
    assert len(os.listdir("/proc/self/fd")) <= num_files
    assert not dist.is_initialized()


def compute(rank: int, world_size: int, offset: float) -> tuple:
    x = torch.randn(300, 300, requires_grad=True)
    (x @ x).sum().backward()
    total = torch.full((1000,), rank + offset)
    dist.all_reduce(total)
    same = [torch.empty_like(x) for _ in range(world_size)]
    dist.all_gather(same, x.detach())
    return rank, world_size, total[0].item(), torch.get_num_threads(), all(torch.equal(x, y) for y in same)


@pytest.mark.parametrize("world_size", [1, 4, *full([2, 8])])
def test_results_come_in_rank_order(world_size):
    use_threads()
    total = sum(rank + 0.5 for rank in range(world_size))
    expected = [(rank, world_size, total, 1, True) for rank in range(world_size)]
    assert run_ranks(compute, world_size, 0.5) == expected
    assert (
        run_ranks(compute, world_size, 0.5) == expected
    )  # and again: a parent is good for any number of pools


def test_results_may_be_large_and_functions_closures():
    scale = 3.0
    results = run_ranks(lambda rank, world_size: torch.full((1 << 20,), rank * scale), 2)
    assert [result.shape for result in results] == [(1 << 20,)] * 2
    assert results[1].eq(3.0).all()


@pytest.mark.full
def test_four_ranks_take_a_fraction_of_a_second():
    best = min(timed(lambda: run_ranks(compute, 4, 0.0)) for _ in range(5))
    assert best < 2.0  # measured: 0.06 s on two idle cores; spawned processes need several seconds


def timed(call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def failure(fn, world_size: int = 4, timeout: float = 30) -> RankError:
    with pytest.raises(RankError) as caught:
        run_ranks(fn, world_size, timeout=timeout)
    return caught.value


def raise_on_two(rank: int, world_size: int) -> None:
    if rank == 2:
        raise ValueError(f"no shard {rank} of {world_size}")
    dist.barrier()


def test_the_first_exception_is_shown_in_full_and_the_rest_in_a_line():
    error = failure(raise_on_two)
    assert error.rank == 2
    text = str(error)
    assert text.startswith("rank 2 of 4 raised\nTraceback")
    assert "ValueError: no shard 2 of 4" in text and "in raise_on_two" in text
    assert text.count("Traceback") == 1 and "rank 0: RuntimeError: " in text


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_rank_that_dies_is_named_with_its_signal(number):
    def die(rank: int, world_size: int) -> None:
        if rank == 1:
            os.kill(os.getpid(), number)
        dist.barrier()

    error = failure(die)
    assert error.rank == 1
    assert f"rank 1 of 4 died without a report (killed by {number.name})" in str(error)
    if number == signal.SIGSEGV:
        assert "in die" in str(error)


def test_a_rank_that_exits_is_named_with_its_status():
    def leave(rank: int, world_size: int) -> None:
        if rank == 3:
            os._exit(7)
        dist.barrier()

    assert "rank 3 of 4 died without a report (exit code 7)" in str(failure(leave))


def skip_the_barrier(rank: int, world_size: int) -> None:
    if rank != 1:
        dist.barrier()


def test_ranks_that_hang_show_where():
    start = time.monotonic()
    error = failure(skip_the_barrier, timeout=1.5)
    assert time.monotonic() - start < 6
    text = str(error)
    assert "hung for 1.5 s: ranks [0, 2, 3] of 4" in text
    assert text.count("in skip_the_barrier") == 3


def test_a_stopped_rank_is_ended_too():
    def stop(rank: int, world_size: int) -> None:
        if rank == 0:
            os.kill(os.getpid(), signal.SIGSTOP)

    assert "rank 0\n(no stack: the process could not run)" in str(failure(stop, 2, timeout=1.0))


@pytest.mark.full
def test_a_failure_does_not_wait_for_ranks_that_go_on():
    def one_fails(rank: int, world_size: int) -> None:
        if rank == 1:
            raise KeyError("early")
        time.sleep(60)

    start = time.monotonic()
    error = failure(one_fails, 2)
    assert time.monotonic() - start < 15
    assert error.rank == 1 and "rank 0: still running, ended" in str(error)


def test_a_result_that_cannot_be_sent_is_an_error():
    assert "pickle" in str(failure(lambda rank, world_size: lambda: 0, 1))


def test_a_world_without_ranks_and_another_device_are_errors():
    with pytest.raises(ValueError, match="at least 1, got 0"):
        run_ranks(compute, 0, 0.0)
    with pytest.raises(ValueError, match="device must be 'cpu' or 'cuda', got 'cuda:0'"):
        run_ranks(compute, 1, 0.0, device="cuda:0")


def nested(rank: int, world_size: int) -> None:
    run_ranks(compute, 2, 0.0)


def test_a_parent_with_a_process_group_may_not_fork():
    assert "the parent holds a process group" in str(failure(nested, 1))


def test_killing_the_parent_ends_the_ranks(tmp_path):
    code = (
        "import os, time\n"
        "from fastmp.testing import run_ranks\n"
        "def wait(rank, world_size):\n"
        f"    open(f'{tmp_path}/{{os.getpid()}}', 'w').close()\n"
        "    time.sleep(60)\n"
        "run_ranks(wait, 2)\n"
    )
    root = str(Path(fastmp.__file__).parents[1])
    parent = subprocess.Popen([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": root})
    try:
        limit = time.monotonic() + 60
        while len(list(tmp_path.iterdir())) < 2 and time.monotonic() < limit:
            time.sleep(0.05)
    finally:
        parent.kill()
        parent.wait()
    pids = [int(path.name) for path in tmp_path.iterdir()]
    assert len(pids) == 2
    limit = time.monotonic() + 5
    while any(map(is_running, pids)) and time.monotonic() < limit:
        time.sleep(0.05)
    assert not any(map(is_running, pids))


def spawn(fn, world_size: int, *args, timeout: float = 120) -> list:
    """Run what `device="cuda"` runs, on CPU ranks."""
    return ranks._run(ranks._pickled(fn, args), world_size, timeout, "cpu")


def test_spawned_ranks_do_what_forked_ones_do(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert spawn(compute, 2, 0.5) == run_ranks(compute, 2, 0.5)


@pytest.mark.full
def test_failures_of_spawned_ranks_are_shown_as_those_of_forked_ones():
    with pytest.raises(RankError, match=r"(?s)rank 2 of 4 raised.*in raise_on_two.*no shard 2 of 4"):
        spawn(raise_on_two, 4)
    with pytest.raises(RankError, match=r"(?s)hung for 15 s: ranks \[0\] of 2.*in skip_the_barrier"):
        spawn(skip_the_barrier, 2, timeout=15)


@pytest.mark.parametrize(
    "fn", (lambda rank, world: 0, type("Local", (), {})().__init__), ids=("closure", "method")
)
def test_new_processes_need_a_function_that_they_can_import(fn):
    with pytest.raises(
        ValueError, match=r"expected a function at the top level .*got <.*; define it with `def`"
    ):
        run_ranks(fn, 2, device="cuda")


def test_main_is_another_module_in_a_new_process(monkeypatch):
    monkeypatch.setattr(compute, "__module__", "__main__")
    monkeypatch.setattr(sys.modules["__main__"], "compute", compute, raising=False)
    with pytest.raises(ValueError, match=r"got <function compute .*\(defined in __main__\); define it"):
        run_ranks(compute, 2, device="cuda")


def test_ranks_without_gpus_that_can_be_shared_are_skipped(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(unittest.SkipTest, match="no GPU"):
        run_ranks(compute, 2, 0.5, device="cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(ranks, "nccl_version", lambda: (2, 28))
    with pytest.raises(unittest.SkipTest, match=r"2 ranks on 1 GPU\(s\) need NCCL 2.30 or later, got 2.28"):
        run_ranks(compute, 2, 0.5, device="cuda")
    assert ranks.lacks_gpus(1) == ""


@pytest.mark.parametrize(
    ("world", "gpus", "ctas"), [(2, 1, "4"), (4, 1, "2"), (16, 1, "1"), (4, 2, "4"), (2, 2, None)]
)
def test_ranks_that_share_a_gpu_share_its_multiprocessors(monkeypatch, world, gpus, ctas):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    variables = ranks.gpu_variables(world)
    assert variables.get("NCCL_MAX_CTAS") == ctas
    assert ("NCCL_MULTI_RANK_GPU_ENABLE" in variables) == (world > gpus)


def on_gpu(rank: int, world_size: int) -> tuple:
    device = fastmp.init().device
    x = torch.full((1000,), rank + 1.0, device=device)
    dist.all_reduce(x)
    return device.type, x[0].item(), dist.get_backend(), torch.get_num_threads()


@pytest.mark.gpu
@pytest.mark.alone
def test_ranks_on_gpus_talk_over_nccl():
    found = run_ranks(on_gpu, 2, device="cuda", timeout=240)
    assert [(kind, total, threads) for kind, total, _, threads in found] == [("cuda", 3.0, 1)] * 2
    assert all("nccl" in backend for *_, backend, _ in found)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
