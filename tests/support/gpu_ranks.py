"""Ranks that a launcher starts, and what ranks on GPUs need."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress

import psutil
import pytest
import torch

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


def skip_without_peer_access() -> None:
    """Skip a test whose ranks would have GPUs that cannot read each other's memory; one GPU can."""
    if torch.cuda.device_count() > 1 and not torch.cuda.can_device_access_peer(0, 1):
        pytest.skip("needs GPUs that reach each other's memory")
