"""csrc/cuda compiled by g++ for a CPU: see tests/cuda_on_cpu/cuda_on_cpu.h."""

from __future__ import annotations

import ctypes
import itertools
import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
HERE = ROOT / "tests" / "cuda_on_cpu"
CUDA = ROOT / "csrc" / "cuda"
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize=vptr", "-fno-sanitize-recover=all", "-g1"]
SHARED_BYTES = 233472  # of a multiprocessor of an H100
_numbers = itertools.count()


def compile_cuda(source: Path, target: Path, *options: str) -> None:
    """Compile for a CPU; where this process has the sanitizers loaded, with them."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++")
    sanitize = SANITIZE if "libasan" in os.environ.get("LD_PRELOAD", "") else []
    command = [compiler, "-std=c++20", "-O1", "-w", "-fno-strict-aliasing", f"-isystem{HERE}", *sanitize]
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    done = subprocess.run(
        [*command, "-x", "c++", source, "-x", "none", "-o", target, *options],
        cwd=target.parent, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@dataclass(frozen=True)
class Kernels:
    """A compiled .cu file."""

    library: ctypes.CDLL
    namespace: str

    def op(self, name: str) -> Callable:
        return getattr(getattr(torch.ops, self.namespace), name).default

    def set(self, seed: int, shared_bytes: int = SHARED_BYTES) -> None:
        """Draw the order of threads from `seed`; give a multiprocessor so many bytes of shared memory."""
        self.library.cuda_on_cpu_set(ctypes.c_uint64(seed), shared_bytes)


def kernels(source: Path, folder: Path, *options: str) -> Kernels:
    """The ops of a .cu file, on CPU tensors."""
    number = next(_numbers)
    namespace, target = f"cuda_on_cpu_{os.getpid()}_{number}", folder / f"{source.stem}_{number}.so"
    package = Path(torch.__file__).parent
    compile_cuda(
        source, target, "-shared", "-fPIC", "-fno-gnu-unique", "-fvisibility=hidden",
        f"-I{ROOT / 'csrc'}", f"-I{CUDA}", f"-isystem{package / 'include'}", "-include", str(HERE / "ops.h"),
        f"-DFASTMP_NAMESPACE={namespace}", *options,
        f"{package / 'lib' / 'libtorch_cpu.so'}", f"{package / 'lib' / 'libc10.so'}",
    )  # fmt: skip
    torch.ops.load_library(str(target))
    return Kernels(ctypes.CDLL(str(target)), namespace)
