"""What the README shows is what happens: its Python runs, alone and on two ranks; its plan is printed."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from fastmp import cli

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.fixture
def example(tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    path = tmp_path / "swap.py"
    path.write_text(code)
    return path


@pytest.mark.parametrize("launcher", [[sys.executable], TORCHRUN], ids=["alone", "two ranks"])
def test_the_example_runs(example, launcher):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run([*launcher, str(example)], check=True, env=environment, cwd=example.parent, timeout=120)


def test_the_plan_is_what_is_printed(capsys):
    blocks = re.findall(r"```\n\$ fastmp (plan .*)\n((?:.*\n)*?)```", README)
    assert blocks
    for command, expected in blocks:
        assert cli.main(shlex.split(command)) == 0
        assert capsys.readouterr().out == expected


def test_every_file_it_names_is_there():
    for path in re.findall(r"(?:configs|docs|benchmarks)/[\w./-]+\.\w+", README):
        assert (ROOT / path).exists(), path
