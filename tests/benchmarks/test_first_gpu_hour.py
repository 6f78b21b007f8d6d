"""Preparation of a GPU machine without a network: with a stand-in for Python, and as it is."""

from __future__ import annotations

import importlib.util
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Python as the script calls it: its environments are itself; it has CUTLASS, and no GPU.
PYTHON = """#!/bin/sh
echo "$@" >> {said}
case "$*" in
*environment.py*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && touch fastmp/_C_cuda.so;;
*cutlass_library*) echo {package};;
*benchmarks.smoke*|*benchmarks.gpu_check*) echo "no GPU" >&2; exit {status};;
esac
"""


@pytest.fixture
def script():
    path = ROOT / "scripts" / "first_gpu_hour.py"
    spec = importlib.util.spec_from_file_location("first_gpu_hour", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def python(tmp_path):
    """Make the stand-in: python(status of programs that need a GPU)."""
    headers = tmp_path / "cutlass_library" / "source" / "include" / "cutlass"
    headers.mkdir(parents=True)
    (headers / "cutlass.h").touch()

    def make(status: int = 2) -> Path:
        path = tmp_path / "python3.12"
        said, package = tmp_path / "said", tmp_path / "cutlass_library"
        path.write_text(PYTHON.format(said=said, package=package, status=status))
        path.chmod(0o755)
        return path

    return make


def test_everything_is_prepared_and_the_commands_are_printed(script, python, tmp_path, capsys):
    """The copy has libraries and headers; no command names a path of this machine."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout of git")
    out = tmp_path / "out"
    assert script.main(["--out", str(out), "--python", str(python())]) == 0
    said = (tmp_path / "said").read_text()
    assert f"--venv {out / 'venv'} --torch 2.11.0 test" in said
    with tarfile.open(out / "fastmp.tar.gz") as packed:
        names = set(packed.getnames())
    for name in (
        "fastmp/_C_cuda.so", "benchmarks/gpu_check.py", "tests/ops/test_gpu.py", "pyproject.toml",
        ".gpu/cutlass/cutlass/cutlass.h",
    ):  # fmt: skip
        assert f"fastmp/{name}" in names, name
    commands = capsys.readouterr().out.partition("Unpack fastmp.tar.gz")[2]
    assert re.findall(r"^# (\d)\.", commands, re.MULTILINE) == ["1", "2", "3"]
    assert str(tmp_path) not in commands and str(ROOT) not in commands


def test_what_does_not_reach_the_gpu_or_a_failing_step_ends_it(script, python, tmp_path):
    preparation = script.Preparation(tmp_path / "out", str(python(status=1)))
    preparation.gpu.mkdir(parents=True)
    (preparation.tree / "fastmp").mkdir()
    preparation.build()
    with pytest.raises(SystemExit, match=r"benchmarks\.smoke does not reach the GPU: no GPU"):
        preparation.check()
    with pytest.raises(SystemExit, match="status 3 of "):
        script.run(sys.executable, "-c", "raise SystemExit(3)", cwd=tmp_path)


def test_the_commands_are_understood(script, capsys):
    """Every module, option and path in them is there."""
    from benchmarks import gpu_check, smoke

    text = script.COMMANDS.format(setup=script.SETUP, torch=script.TORCH).replace("\\\n", " ")
    programs = {"benchmarks.gpu_check": gpu_check.main, "benchmarks.smoke": smoke.main}
    found = []
    for module, rest in re.findall(r"python3 -m (\S+)([^;|\n]*)", text):
        options = shlex.split(rest.partition("2>")[0])
        found.append(module)
        if module in programs:
            assert programs[module](options) == 2 and "no GPU" in capsys.readouterr().err
    assert found == [
        "fastmp", "benchmarks.precompile", "benchmarks.smoke", "pytest", "benchmarks.gpu_check",
        "benchmarks.gpu_check",
    ]  # fmt: skip
    for path in re.findall(r"tests/[\w/.]+", text):
        assert (ROOT / path).exists(), path


@pytest.mark.exhaustive
@pytest.mark.timeout(7200)
def test_it_is_prepared_as_it_is(script, tmp_path):
    """Minutes for torch, and for CUDA C++."""
    python = shutil.which("python3.12")
    if python is None or subprocess.run([python, "-V"], capture_output=True).returncode:
        pytest.skip("needs Python 3.12")
    if shutil.which("nvcc") is None:
        pytest.skip("needs nvcc")
    assert script.main(["--out", str(tmp_path)]) == 0
    assert (tmp_path / "fastmp.tar.gz").stat().st_size > 10 << 20
