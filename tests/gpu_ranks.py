"""Tests on two GPUs: a function of a test's module, called on two ranks that a launcher starts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fastmp.parallel.runtime import Runtime

SCRIPT = """
import fastmp
from {module} import {name}

{name}(fastmp.init())
"""


def call_on_two_gpus(function: Callable[[Runtime], None], tmp_path: Path) -> None:
    """Call `function` on two ranks with a GPU each; skip the test where no two reach each other's memory."""
    if torch.cuda.device_count() < 2 or not torch.cuda.can_device_access_peer(0, 1):
        pytest.skip("needs two GPUs that reach each other's memory")
    script = tmp_path / "on_gpus.py"
    script.write_text(SCRIPT.format(module=function.__module__, name=function.__name__))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-m", "fastmp", "launch", "-n", "2", str(script)]
    subprocess.run(command, env=environment, check=True, timeout=300)
