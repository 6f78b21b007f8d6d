"""Ranks that a launcher starts, and functions of a test's module called on two GPUs."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch

from fastmp.distributed.runtime import Runtime

SCRIPT = """
import fastmp
from {module} import {name}

{name}(fastmp.init())
"""


SECONDS = 240.0  # less than a test may take: pytest would end its own process, and leave the ranks their GPUs


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_launcher(
    command: Sequence[str], environment: Mapping[str, str] | None = None, seconds: float = SECONDS
) -> None:
    """Run a launcher to its end; kill it and its ranks, which have sessions of their own, if it takes longer.

    Raises:
        subprocess.CalledProcessError: its status is not 0.
        subprocess.TimeoutExpired: it took longer than `seconds`.
    """
    with subprocess.Popen(command, env=environment) as launcher:
        try:
            launcher.wait(seconds)
        except BaseException:
            tree = psutil.Process(launcher.pid)
            for process in [tree, *tree.children(recursive=True)]:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            raise
    if launcher.returncode:
        raise subprocess.CalledProcessError(launcher.returncode, command)


def call_on_two_gpus(function: Callable[[Runtime], None], tmp_path: Path) -> None:
    """Call `function` on two ranks with a GPU each; skip the test where no two reach each other's memory."""
    if torch.cuda.device_count() < 2 or not torch.cuda.can_device_access_peer(0, 1):
        pytest.skip("needs two GPUs that reach each other's memory")
    script = tmp_path / "on_gpus.py"
    script.write_text(SCRIPT.format(module=function.__module__, name=function.__name__))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-m", "fastmp", "launch", "-n", "2", str(script)]
    run_launcher(command, environment)
