"""Settings of tests/conftest.py for the processes that run tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).resolve().parents[1] / "conftest.py"


@pytest.mark.full
@pytest.mark.parametrize(
    ("options", "given", "threads"), [([], None, "2"), (["-n", "1"], None, "1"), (["-n", "1"], "3", "3")]
)
def test_workers_share_the_cores(options, given, threads, tmp_path):
    pytest.importorskip("xdist")
    shutil.copy(CONFTEST, tmp_path)
    code = f"import os\n\ndef test():\n    assert os.environ['OMP_NUM_THREADS'] == {threads!r}\n"
    (tmp_path / "test_threads.py").write_text(code)
    kept = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS" and not k.startswith("PYTEST")}
    variables = kept if given is None else {**kept, "OMP_NUM_THREADS": given}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, tmp_path]
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr
