"""The time limit of a GPU test: a test that hangs fails, and those after it run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from gpu_ranks import run_launcher

TESTS = Path(__file__).parent
ROOT = TESTS.parent
HANGS = """
import ctypes, time
import pytest

# the fixture keeps conftest.py from importing torch within the limit of two seconds
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("captures_may_load")]
LIBC = ctypes.CDLL(None)


def test_hangs():
    time.sleep(60)


def test_hangs_where_no_signal_ends_it():
    mutex = ctypes.create_string_buffer(64)
    while True:
        LIBC.pthread_mutex_lock(mutex)


def test_is_next():
    pass
"""
PLUGIN = "import conftest\nconftest._reason_without_gpu = lambda: None\nconftest.GRACE = 1.0\n"
CONFIG = "[pytest]\ntimeout = 2\ntimeout_method = thread\nmarkers =\n    gpu\n"


def run(folder: Path, *options: str) -> tuple[int, str]:
    """Run the tests that hang with conftest.py, as if there were a GPU; return status and output."""
    for name, text in (("test_hangs.py", HANGS), ("with_a_gpu.py", PLUGIN), ("pytest.ini", CONFIG)):
        (folder / name).write_text(text)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, (folder, TESTS, ROOT)))
    plugins = ("-p", "conftest", "-p", "with_a_gpu", "-p", "no:cacheprovider")
    command = [sys.executable, "-m", "pytest", "-c", folder / "pytest.ini", *plugins, *options, folder]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.full
def test_a_hang_fails_one_test_in_a_worker(tmp_path):
    status, output = run(tmp_path, "-n", "1")
    assert status == 1 and "2 failed, 1 passed" in output
    assert "crashed while running 'test_hangs.py::test_hangs_where_no_signal_ends_it'" in output


@pytest.mark.full
def test_a_hang_fails_one_test_in_one_process_where_a_signal_ends_it(tmp_path):
    status, output = run(tmp_path, "-k", "not signal")
    assert status == 1 and "1 failed, 1 passed" in output
    status, output = run(tmp_path, "-k", "signal or next")
    assert status == 1 and "test_hangs_where_no_signal_ends_it: no signal ends it; run GPU tests" in output
    assert "passed" not in output


LAUNCHER = """
import pathlib, subprocess, sys
ranks = [subprocess.Popen(["sleep", "600"], start_new_session=True) for _ in range(2)]
pathlib.Path(sys.argv[1]).write_text(" ".join(str(rank.pid) for rank in ranks))
sys.exit([rank.wait() for rank in ranks][0])
"""


@pytest.mark.full
def test_no_rank_outlives_a_launcher_that_takes_too_long(tmp_path):
    """torchrun gives each rank a session of its own."""
    ranks = tmp_path / "ranks"
    with pytest.raises(subprocess.TimeoutExpired):
        run_launcher([sys.executable, "-c", LAUNCHER, str(ranks)], seconds=3)
    _, alive = psutil.wait_procs(
        [psutil.Process(pid) for pid in map(int, ranks.read_text().split()) if psutil.pid_exists(pid)], 10
    )
    assert [rank.status() for rank in alive] in ([], [psutil.STATUS_ZOMBIE] * len(alive))


def test_a_launcher_that_fails_is_an_error():
    with pytest.raises(subprocess.CalledProcessError):
        run_launcher([sys.executable, "-c", "raise SystemExit(3)"])


def test_make_runs_gpu_tests_in_workers_after_their_kernels_are_compiled(tmp_path):
    """A worker that hangs or dies fails one test; those that need the GPU alone run one by one."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/said\n[ "$1" = -c ] && echo 1 || true\n')
    python.chmod(0o755)
    settings = (f"VENV={python}", "SETUP=:", "WORKERS=-n many", "PYTEST=")
    subprocess.run(["make", "-C", ROOT, *settings, "test"], check=True, capture_output=True)
    _, compiled, several, alone, *_ = (tmp_path / "said").read_text().splitlines()
    assert compiled == "-m benchmarks.precompile --phase correctness"
    assert several.startswith("-m pytest ") and several.endswith(" -m gpu and not alone -n many")
    assert alone.startswith("-m pytest ") and alone.endswith(" -m gpu and alone -n 1")
