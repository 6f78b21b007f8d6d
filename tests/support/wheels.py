"""Wheels of this checkout and bare environments to install them into, for tests of what is installed."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PIP = ("-m", "pip", "--disable-pip-version-check")


def load(path: str):
    """A script of the repository as a module, without running it."""
    spec = importlib.util.spec_from_file_location(Path(path).stem + "_script", ROOT / path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def run(*command: str | Path, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("FASTMP_OPS", "PYTHON"))}
    return subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**kept, **variables},
        capture_output=True,
        text=True,
        timeout=1700,  # pytest stops a test sooner, unless it asks for more
        check=False,
    )


def succeed(*command: str | Path, cwd: Path, **variables: str) -> str:
    done = run(*command, cwd=cwd, **variables)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def make_wheel(directory: Path, **variables: str) -> Path:
    options = ("--no-build-isolation", "--no-deps", "--no-index", "-w", directory)
    succeed(sys.executable, *PIP, "wheel", *options, ".", cwd=ROOT, **variables)
    (wheel,) = directory.glob("fastmp-*.whl")
    return wheel


def bare_environment(directory: Path) -> Path:
    """An empty environment that sees the packages of this one through a .pth; returns its Python."""
    venv.create(directory, with_pip=False)
    (site,) = directory.glob("lib/python*/site-packages")
    outer = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (site / "outer.pth").write_text("\n".join(outer) + "\n")
    return directory / "bin" / "python"


def install(wheel: Path, directory: Path) -> Path:
    """A bare environment with the wheel; returns its Python."""
    python = bare_environment(directory)
    options = ("--no-deps", "--no-index", "--ignore-installed")
    succeed(python, *PIP, "install", *options, wheel, cwd=directory)
    return python


def record_of(python: Path) -> dict:
    (record,) = python.parent.parent.glob("lib/python*/site-packages/fastmp/_build.json")
    return json.loads(record.read_text())
