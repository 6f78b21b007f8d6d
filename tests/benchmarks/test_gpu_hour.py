"""Preparation of a GPU machine without a network: with a stand-in for Python, and as it is."""

from __future__ import annotations

import importlib.util
import json
import lzma
import shlex
import shutil
import struct
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]

# Python as the script calls it: its environments are itself; it has CUTLASS, and no GPU.
PYTHON = """#!/bin/sh
echo "$@" >> {said}
case "$*" in
*environment.py*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && touch fastmp/_C_cuda.so;;
*cutlass_library*) echo {package};;
*benchmarks.experiments*|*benchmarks.gpu_check*) echo "no GPU" >&2; exit {status};;
*benchmarks.precompile*) mkdir -p $TRITON_CACHE_DIR && touch $TRITON_CACHE_DIR/kernel;;
*install*) mkdir -p .gpu/peers/numpy .gpu/peers/quack && touch .gpu/peers/quack/gemm.py;;
*download*) cp {wheel} "$7";;
esac
"""


@pytest.fixture
def script():
    path = ROOT / "scripts" / "gpu_hour.py"
    spec = importlib.util.spec_from_file_location("gpu_hour", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_hour"] = module  # where dataclasses look
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def python(tmp_path):
    """Make the stand-in: python(status of programs that need a GPU)."""
    headers = tmp_path / "cutlass_library" / "source" / "include" / "cutlass"
    headers.mkdir(parents=True)
    (headers / "cutlass.h").touch()
    wheel = tmp_path / "nvidia_nccl_cu13-2.30.7.whl"
    with zipfile.ZipFile(wheel, "w") as packed:
        packed.writestr("nvidia/nccl/lib/libnccl.so.2", library()[0])

    def make(status: int = 2) -> Path:
        path = tmp_path / "python3.12"
        said, package = tmp_path / "said", tmp_path / "cutlass_library"
        path.write_text(PYTHON.format(said=said, package=package, status=status, wheel=wheel))
        path.chmod(0o755)
        return path

    return make


def library() -> tuple[bytes, bytes]:
    """Return a library with device code of three kinds, and what is left of it for sm_90."""

    def entry(kind: int, arch: int, content: bytes) -> bytes:
        head = struct.pack("<HHIQ", kind, 1, 64, len(content)).ljust(28, b"\0") + struct.pack("<I", arch)
        return head.ljust(64, b"\1") + content

    def of(*contents: bytes) -> bytes:
        entries = b"".join(map(entry, (2, 2, 1), (80, 90, 90), contents))
        return b"host" + struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(entries)) + entries + b"host"

    return of(b"a" * 24, b"b" * 16, b"c" * 8), of(bytes(24), b"b" * 16, bytes(8))


def test_nccl_keeps_the_code_of_one_architecture(script):
    whole, left = library()
    assert script.slim(whole, 90) == left and script.slim(b"no device code", 90) == b"no device code"


def test_everything_is_prepared(script, python, tmp_path, capsys):
    """The copy has libraries, headers and kernels; peers and NCCL are packed by themselves."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout of git")
    out = tmp_path / "out"
    assert script.main(["prepare", "--out", str(out), "--python", str(python())]) == 0
    said = (tmp_path / "said").read_text()
    assert f"--venv {out / 'venv'} --torch 2.11.0 test" in said
    assert "--no-deps liger-kernel" in said and "transformers" in said
    names, printed = {}, capsys.readouterr().out
    for name in ("fastmp", "peers", "nccl"):
        with tarfile.open(out / f"{name}.tar.gz") as packed:
            names[name] = set(packed.getnames())
        assert f"{name}.tar.gz: " in printed
    for name in (
        "fastmp/_C_cuda.so", "benchmarks/gpu_check.py", "tests/ops/test_gpu.py", "pyproject.toml",
        ".gpu/cutlass/cutlass/cutlass.h", "scripts/gpu_hour.py", ".triton/kernel",
    ):  # fmt: skip
        assert f"fastmp/{name}" in names["fastmp"], name
    assert not [name for name in names["fastmp"] if "/.gpu/peers" in name or "nccl.so" in name]
    assert "fastmp/.gpu/peers/quack/gemm.py" in names["peers"]
    assert "fastmp/.gpu/peers/numpy" not in names["peers"]
    packed = (out / "fastmp" / ".gpu" / "nccl" / "libnccl.so.2.xz").read_bytes()
    assert lzma.decompress(packed) == library()[1] and "fastmp/.gpu/nccl/libnccl.so.2.xz" in names["nccl"]


def test_what_does_not_reach_the_gpu_or_a_failing_step_ends_it(script, python, tmp_path):
    preparation = script.Preparation(tmp_path / "out", str(python(status=1)))
    preparation.gpu.mkdir(parents=True)
    (preparation.tree / "fastmp").mkdir()
    preparation.build()
    with pytest.raises(SystemExit, match=r"benchmarks\.experiments does not reach the GPU: no GPU"):
        preparation.check()
    with pytest.raises(SystemExit, match="status 3 of "):
        script.call(sys.executable, "-c", "raise SystemExit(3)", cwd=tmp_path)


@pytest.fixture
def steps(script, monkeypatch, tmp_path):
    """Replace the steps: steps(programs by name) writes the name of each that is started."""
    log = tmp_path / "started"

    def replace(seconds: float = 20.0, **programs: str) -> Callable[[], list[str]]:
        made = [
            script.Step(
                name,
                f"-c {shlex.quote(f'open({str(log)!r}, chr(97)).write({name!r} + chr(10)); {program}')}",
                seconds,
            )
            for name, program in programs.items()
        ]
        monkeypatch.setattr(script, "STEPS", tuple(made))
        return lambda: log.read_text().split()

    return replace


def test_steps_are_taken_in_order_and_those_that_are_done_are_not_taken_again(
    script, steps, tmp_path, capsys
):
    started = steps(first="print(1)", second="raise SystemExit(3)")
    assert script.run(tmp_path / "out", 60) == 0 and script.run(tmp_path / "out", 60) == 0
    assert started() == ["first", "second"]
    record = json.loads((tmp_path / "out" / "hour.json").read_text())
    assert [record[name]["status"] for name in ("first", "second")] == [0, 3]
    assert (tmp_path / "out" / "first.txt").read_text() == "1\n" and "1\n" in capsys.readouterr().out


def test_a_step_that_hangs_is_tried_again_after_all_others(script, steps, tmp_path):
    started = steps(0.5, hangs="import time; print(2, flush=True); time.sleep(60)", other="print(1)")
    begun = time.monotonic()
    assert script.run(tmp_path / "out", 60) == 1
    assert script.run(tmp_path / "out", 60) == 0 and script.run(tmp_path / "out", 60) == 0
    assert started() == ["hangs", "other", "hangs"] and time.monotonic() - begun < 20
    assert (tmp_path / "out" / "hangs.txt").read_text() == "2\n2\n"


def test_a_call_ends_in_time_and_goes_on_while_something_is_left(
    script, steps, monkeypatch, tmp_path, capsys
):
    out = tmp_path / "out"
    started = steps(500, benchmarks="print('gpu_check {out}')", whole="print(1)")
    monkeypatch.setattr(script, "LEAST", 5)
    out.mkdir()
    (out / "gpu.json").write_text('{"left": ["rope"]}')
    assert script.run(out, 60) == 1 and not json.loads((out / "hour.json").read_text())["benchmarks"]["done"]
    (out / "gpu.json").write_text('{"left": []}')
    assert script.run(out, 60) == 0 and started() == ["benchmarks", "whole", "benchmarks"]
    assert script.run(tmp_path / "late", 3) == 1  # not even begun
    assert "the next step is benchmarks" in capsys.readouterr().out and len(started()) == 3


def test_the_commands_are_understood(script, monkeypatch, tmp_path, capsys):
    """Every module, option and path in them is there, and none takes more than nine minutes."""
    from benchmarks import against_transformers, experiments, gpu_check

    programs = {"benchmarks.gpu_check": gpu_check.main, "benchmarks.experiments": experiments.main}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for step in script.STEPS:
        assert step.seconds <= 540
        _, _, module, *words = step.command(tmp_path, step.seconds)
        if module in programs:
            assert programs[module](words) == 2 and "no GPU" in capsys.readouterr().err
        elif module == "benchmarks.bench_transformers":
            monkeypatch.setattr(sys, "argv", [module, *words])
            assert against_transformers.read_options("").out == tmp_path / "transformers.json"
        else:
            assert module in ("fastmp", "pytest", "benchmarks.one_gpu")
    assert script.main(["run", "--list", "--out", str(tmp_path)]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert len(listed) == len(script.STEPS) and "LD_PRELOAD=.gpu/nccl/libnccl.so.2" in listed[2]
    names = [step.name for step in script.STEPS]
    assert names.index("experiments") < names.index("two ranks") < names.index("fp8") < names.index("tests")


def test_the_environment_finds_peers_and_unpacks_nccl(script, monkeypatch, tmp_path):
    monkeypatch.setattr(script, "ROOT", tmp_path)
    packages = tmp_path / ".gpu" / "peers" / "nvidia_cutlass_dsl" / "dsl_packages"
    packages.mkdir(parents=True)
    (tmp_path / ".gpu" / "nccl").mkdir()
    (tmp_path / ".gpu" / "nccl" / "libnccl.so.2.xz").write_bytes(lzma.compress(b"NCCL"))
    paths = script.variables()["PYTHONPATH"].split(":")
    assert paths == [str(tmp_path), str(tmp_path / ".gpu" / "peers"), str(packages)]
    assert (tmp_path / ".gpu" / "nccl" / "libnccl.so.2").read_bytes() == b"NCCL"


@pytest.mark.exhaustive
@pytest.mark.timeout(7200)
def test_it_is_prepared_as_it_is(script, tmp_path):
    """Minutes for torch, and for CUDA C++."""
    python = shutil.which("python3.12")
    if python is None or subprocess.run([python, "-V"], capture_output=True).returncode:
        pytest.skip("needs Python 3.12")
    if shutil.which("nvcc") is None:
        pytest.skip("needs nvcc")
    assert script.main(["prepare", "--out", str(tmp_path)]) == 0
    assert (tmp_path / "fastmp.tar.gz").stat().st_size > 10 << 20
