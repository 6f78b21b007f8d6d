"""A signal before the training loop ends a run at once, with one line and the status that shells give."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from marks import full

from fastmp.apps.signals import ended_by_signals, work_is_saved

ROOT = Path(__file__).parents[2]
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
RECIPE = ("train", "--recipe", "configs/gpt-small.toml", "--train.name", "never-begun")


def start(*command, **variables):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    return subprocess.Popen(
        [sys.executable, "-m", "fastmp", *command], env=environment, cwd=ROOT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def wait_until(true, process):
    limit = time.monotonic() + 60
    while not true():
        assert process.poll() is None and time.monotonic() < limit
        time.sleep(0.005)


def handles(process, number):
    """Whether the process has a handler for the signal: the mask SigCgt of Linux."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    mask = next(line for line in status.splitlines() if line.startswith("SigCgt")).split()[1]
    return int(mask, 16) >> (number - 1) & 1


@pytest.mark.parametrize("launcher", [(), *full([(("launch", "-n", "2"),)])], ids=lambda each: "".join(each))
@pytest.mark.parametrize("number", [signal.SIGTERM, *full([signal.SIGINT, signal.SIGUSR1])])
def test_handlers_are_there_before_torch_is(launcher, number):
    process = start(*launcher, *RECIPE)
    wait_until(lambda: handles(process, signal.SIGUSR1), process)
    assert "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text()
    process.send_signal(number)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    name = "Ctrl-C" if number == signal.SIGINT else number.name
    assert said == f"\nfastmp: {name} outside of the training loop: nothing to save\n"


@pytest.mark.full
def test_a_rank_that_waits_for_others_ends_too():
    """Rank 0 waits in C++ for the store's other rank, where Python runs no handler."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    place = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_PORT": str(port)}
    process = start(*RECIPE, "--parallel.tp", "2", "--train.join_seconds", "300", **place)
    listens = f":{port:04X} 00000000:0000 0A"
    tables = [Path("/proc/net/tcp"), Path("/proc/net/tcp6")]
    wait_until(lambda: any(listens in table.read_text() for table in tables if table.exists()), process)
    time.sleep(0.5)
    begun = time.monotonic()
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 143 and "SIGTERM outside of the training loop" in said
    assert time.monotonic() - begun < 10


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize(
    ("saved", "where", "status"),
    [(False, "within", 128), (True, "within", 0), (True, "after", 7), (False, "after", None)],
)
def test_once_the_work_is_saved_a_signal_ends_the_process_with_0(number, saved, where, status, capfd):
    """After the block a process that is about to end ignores signals: it has a status already."""
    if not (child := os.fork()):
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's own raises KeyboardInterrupt
        with ended_by_signals(exits=True):
            if saved:
                work_is_saved()
            if where == "within":
                os.kill(os.getpid(), number)
                time.sleep(10)
        os.kill(os.getpid(), number)
        os._exit(7)
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert ended == (-number if status is None else 128 + number if status == 128 else status)
    assert ("after the last save: nothing to save" in capfd.readouterr().err) == (status == 0)


@pytest.mark.parametrize("saved", [False, True])
def test_a_signal_ends_the_process_with_its_status_where_stderr_cannot_be_written(saved):
    if not (child := os.fork()):
        signal.alarm(10)
        os.dup2(os.open("/dev/full", os.O_WRONLY), 2)
        try:
            with ended_by_signals(exits=True):
                if saved:
                    work_is_saved()
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(10)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == (0 if saved else 143)


def test_handlers_are_given_back_and_children_do_not_end_their_parent():
    before = [signal.getsignal(number) for number in SIGNALS]
    with ended_by_signals():
        work_is_saved()
        assert [signal.getsignal(number) for number in SIGNALS] != before
        if not (child := os.fork()):
            time.sleep(60)
            os._exit(0)
        time.sleep(0.05)
        os.kill(child, signal.SIGTERM)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGTERM
        time.sleep(0.05)
    assert [signal.getsignal(number) for number in SIGNALS] == before
    assert signal.set_wakeup_fd(-1) == -1
