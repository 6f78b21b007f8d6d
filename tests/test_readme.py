"""What README and docs show is what happens: Python runs, alone and on two ranks; the plan is printed."""

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


@pytest.mark.parametrize(
    ("page", "number", "launcher"),
    [
        pytest.param("README.md", 0, [sys.executable], marks=pytest.mark.full),
        ("README.md", 0, TORCHRUN),
        ("README.md", 1, [sys.executable]),
        pytest.param("docs/pipeline.md", 0, [sys.executable], marks=pytest.mark.full),
        pytest.param("docs/pipeline.md", 0, TORCHRUN, marks=pytest.mark.full),
        ("docs/pipeline.md", 1, [sys.executable]),
        ("docs/cuda-graphs.md", 0, [sys.executable]),
        ("docs/learning-rates.md", 0, [sys.executable]),
        ("docs/optimizer.md", 0, [sys.executable]),
        ("docs/muon.md", 0, [sys.executable]),
        pytest.param("docs/many-machines.md", 0, [sys.executable], marks=pytest.mark.full),
        pytest.param("docs/fsdp2.md", 0, TORCHRUN, marks=pytest.mark.full),
        pytest.param("docs/faults.md", 0, TORCHRUN, marks=pytest.mark.full),
    ],
    ids=[
        *("swapped layers alone", "swapped layers on two ranks", "experts"),
        *(
            "stages alone",
            "stages on two ranks",
            "simulation",
            "graphs",
            "learning rates",
            "optimizer",
            "muon",
            "an adopted group",
            "shards on two ranks",
            "a watch over two ranks",
        ),
    ],
)
def test_the_examples_run(page, number, launcher, tmp_path):
    example = tmp_path / "example.py"
    example.write_text(re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)[number])
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run([*launcher, str(example)], check=True, env=environment, cwd=example.parent, timeout=120)


def test_the_plan_is_what_is_printed(capsys):
    blocks = re.findall(r"```\n\$ fastmp (plan .*)\n((?:.*\n)*?)```", README)
    assert blocks
    for command, expected in blocks:
        assert cli.main(shlex.split(command)) == 0
        assert capsys.readouterr().out == expected


@pytest.mark.parametrize("page", ["README.md", "docs/many-machines.md"])
def test_every_file_it_names_is_there(page):
    paths = re.findall(r"(?:configs|docs|benchmarks|scripts)/[\w./-]+\.\w+", (ROOT / page).read_text())
    assert paths
    for path in paths:
        assert (ROOT / path).exists(), path
