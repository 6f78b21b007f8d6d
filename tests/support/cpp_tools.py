"""C++ kernels as shared libraries, one for each instruction set: a machine serves only its best one."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

CSRC = Path(__file__).resolve().parents[2] / "csrc"
FLAGS = {
    "base": [],
    "avx2": ["-mavx2", "-mfma"],
    "avx512": ["-mavx2", "-mfma", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"],
}


def runnable() -> list[str]:
    best = torch.backends.cpu.get_cpu_capability()
    return ["base", *["avx2"] * (best in ("AVX2", "AVX512")), *["avx512"] * (best == "AVX512")]


def compiled(folder: Path, source: str, isas: list[str]) -> dict[str, ctypes.CDLL]:
    """`source` as one shared library for each instruction set, built side by side."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    (folder / "source.cpp").write_text(source)
    include = Path(torch.__file__).parent / "include"
    common = [compiler, "-std=c++20", "-O2", "-fno-math-errno", "-fPIC", "-shared", "-w", f"-I{CSRC}"]
    jobs = {}
    for isa in isas:
        options = [f"-isystem{include}", f"-DFASTMP_ISA={isa}", *FLAGS[isa], "-o", folder / f"{isa}.so"]
        jobs[isa] = subprocess.Popen([*common, *options, folder / "source.cpp"])
    assert all(job.wait() == 0 for job in jobs.values())
    return {isa: ctypes.CDLL(str(folder / f"{isa}.so")) for isa in isas}


def pointers(*tensors: Tensor) -> list[ctypes.c_void_p]:
    return [ctypes.c_void_p(t.data_ptr()) for t in tensors]
