"""What README and docs show is what happens: Python runs, alone and on two ranks; the plan is printed."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from marks import full

from fastmp import cli

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
ALONE = [sys.executable]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.mark.parametrize(
    ("page", "number", "launcher"),
    [
        ("README.md", 1, TORCHRUN),
        *full(
            [
                ("README.md", 0, ALONE),
                ("README.md", 1, ALONE),
                ("README.md", 2, ALONE),
                ("docs/pipeline.md", 0, ALONE),
                ("docs/pipeline.md", 0, TORCHRUN),
                ("docs/pipeline.md", 1, ALONE),
                ("docs/cuda-graphs.md", 0, ALONE),
                ("docs/learning-rates.md", 0, ALONE),
                ("docs/optimizer.md", 0, ALONE),
                ("docs/muon.md", 0, ALONE),
                ("docs/from-liger.md", 0, ALONE),
                ("docs/attention.md", 0, ALONE),
                ("docs/many-machines.md", 0, ALONE),
                ("docs/fsdp2.md", 0, TORCHRUN),
                ("docs/reinforcement-learning.md", 0, ALONE),
                ("docs/generate.md", 0, ALONE),
                ("docs/faults.md", 0, TORCHRUN),
                ("docs/transformers.md", 1, TORCHRUN),
            ]
        ),
    ],
)
def test_the_examples_run(page, number, launcher, tmp_path):
    example = tmp_path / "example.py"
    code = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)[number]
    if "transformers" in code:
        pytest.importorskip("transformers", reason="transformers is not installed")
    example.write_text(code)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run([*launcher, str(example)], check=True, env=environment, cwd=example.parent, timeout=120)


def test_the_plan_is_what_is_printed(capsys):
    blocks = re.findall(r"```\n\$ fastmp (plan .*)\n((?:.*\n)*?)```", README)
    assert blocks
    for command, expected in blocks:
        assert cli.main(shlex.split(command)) == 0
        assert capsys.readouterr().out == expected


def test_the_page_for_users_of_liger_names_functions_that_there_are():
    page = (ROOT / "docs" / "from-liger.md").read_text()
    rows = re.findall(r"^\| `[Ll]iger\w+[^|]*\|([^|]*)\|", page, re.MULTILINE)
    named = {name for cell in rows for name in re.findall(r"`([\w.]+)[(`]", cell)} - {"x"}
    assert len(rows) > 9 and len(named) > 12
    for name in named:
        room, _, function = name.rpartition(".")
        assert hasattr(importlib.import_module(room or "fastmp.ops"), function), name


@pytest.mark.parametrize("page", ["README.md", "docs/many-machines.md"])
def test_every_file_it_names_is_there(page):
    paths = re.findall(r"(?:configs|docs|benchmarks|scripts)/[\w./-]+\.\w+", (ROOT / page).read_text())
    assert paths
    for path in paths:
        assert (ROOT / path).exists(), path
