"""Compilation of an op's launches for a GPU that need not be present.

An op's own launcher runs on meta tensors, so tiles, strides and alignment are those of the shapes that are
named. Triton specialises each kernel, compiles it for the architecture, and does not start it.
"""

from __future__ import annotations

import importlib
import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from pkgutil import walk_packages
from typing import Any
from unittest import mock

import torch

from fastmp import ops
from fastmp.ops.core import _triton, launcher
from fastmp.ops.core.registry import OPS
from fastmp.ops.precompile import AbsentGPU

SHARED_LIMIT = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10, 103: 227 << 10}  # of a program
SHARED_TAKEN = 1 << 10  # by the system, for each program: a multiprocessor has so much more than the limit
REGISTERS = 64 << 10  # of a multiprocessor


def tool(name: str) -> Path:
    """Return the path of an NVIDIA program that ships with Triton, such as cuobjdump."""
    return Path(_triton.triton.__file__).parent / "backends" / "nvidia" / "bin" / name


def cuobjdump(option: str, code: bytes) -> str:
    """Return the output of cuobjdump for a cubin."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(code)
        command = [str(tool("cuobjdump")), option, str(path)]
        return subprocess.check_output(command, text=True, stderr=subprocess.STDOUT)


def parameters_of(ptx: str) -> list[int]:
    """Return the bytes of each parameter of a kernel."""
    (parameters,) = re.findall(r"\.visible \.entry \w+\(([^)]*)\)", ptx)
    found = re.findall(r"\.param(?: \.align \d+)? \.[a-z](\d+)[^\[,\n]*(?:\[(\d+)\])?", parameters)
    return [int(items or 1) * int(bits) // 8 for bits, items in found]


@dataclass(frozen=True)
class Launch:
    """Launch of a kernel: the values of its constants and the compiled code.

    storages: by the name of each argument that is a tensor, what tells its memory.
    limits: of the kernel's integer arguments, as `_triton.limits` declares them.
    """

    kernel: str
    constants: dict[str, Any]
    compiled: Any
    arch: int
    itemsize: int
    storages: dict[str, int]
    limits: dict[str, int]

    @property
    def ptx(self) -> str:
        return self.compiled.asm["ptx"]

    @property
    def ttir(self) -> str:
        return self.compiled.asm["ttir"]

    @property
    def ttgir(self) -> str:
        return self.compiled.asm["ttgir"]

    @property
    def sass(self) -> str:
        return cuobjdump("-sass", self.compiled.asm["cubin"])

    @cached_property
    def usage(self) -> dict[str, int]:
        """Return registers (REG), stack bytes (STACK) and spilled bytes (LOCAL) of a thread."""
        figures = re.findall(r"(REG|STACK|LOCAL):(\d+)", cuobjdump("-res-usage", self.compiled.asm["cubin"]))
        return {key: int(value) for key, value in figures}

    @property
    def shared(self) -> int:
        """Return the bytes of shared memory of a program."""
        return self.compiled.metadata.shared

    @property
    def threads(self) -> int:
        return 32 * self.compiled.metadata.num_warps

    @property
    def elements(self) -> float:
        """Return the elements of a block for each thread."""
        sizes = (
            v for k, v in self.constants.items() if k.startswith("BLOCK") or k in ("WIDTH", "ALL", "EACH")
        )
        return prod(sizes) / self.threads

    @property
    def vectors(self) -> float:
        """Return the number of 16-byte accesses for these elements."""
        return self.elements * self.itemsize / 16

    @property
    def resident(self) -> int:
        """Return the programs resident on a multiprocessor by shared memory and registers, allocated by
        eights.
        """
        registers = -(-self.usage["REG"] // 8) * 8 * self.threads
        programs = min(REGISTERS // registers, 2048 // self.threads)
        return min(programs, (SHARED_LIMIT[self.arch] + SHARED_TAKEN) // (self.shared + SHARED_TAKEN))

    def count(self, *patterns: str) -> int:
        """Return the number of matches of the patterns in the PTX code."""
        return sum(len(re.findall(pattern, self.ptx)) for pattern in patterns)

    @property
    def wide_loads(self) -> int:
        return self.count(r"ld\.global\S*\.v4\.b32", r"ld\.global\S*\.v2\.b64")

    @property
    def wide_stores(self) -> int:
        return self.count(r"st\.global\S*\.v4\.b32", r"st\.global\S*\.v2\.b64")


def launches(op: str, arguments: tuple, arch: int, itemsize: int = 2) -> list[Launch]:
    """Return the launches of one call of an op, in order.

    Args:
        arguments: of the op, its tensors on the device "meta".
        arch: compute capability as one number (90 is 9.0).
        itemsize: bytes of an element of the tensors whose accesses `vectors` counts.
    """
    found: list[Launch] = []

    def compile_only(kernel: Any, arguments: tuple, constants: dict[str, Any]) -> None:
        compiled = kernel.warmup(*arguments, grid=(1,), **constants)
        named = zip(kernel.arg_names, arguments, strict=False)
        storages = {name: a.untyped_storage()._cdata for name, a in named if isinstance(a, torch.Tensor)}
        found.append(Launch(kernel.fn.__name__, constants, compiled, arch, itemsize, storages, kernel.limits))

    with (
        launcher.intercept_launches(compile_only, arch),
        mock.patch.object(_triton.driver, "_active", AbsentGPU(arch)),
    ):
        OPS[op].implementations["triton"](*arguments)
    return found


def kernel_names() -> list[str]:
    """Return the names of all Triton kernels of fastmp.ops, without the functions that they call."""
    names = [each.name for each in walk_packages(ops.__path__, f"{ops.__name__}.")]
    modules = [importlib.import_module(name) for name in names]
    functions = {name: value for module in modules for name, value in vars(module).items()}
    return sorted(
        name for name, value in functions.items() if name.endswith("_kernel") and hasattr(value, "arg_names")
    )


def meta(dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    """Makes tensors of a shape on the device "meta", of `dtype` unless another one is named."""

    def tensor(*shape: int, dtype: torch.dtype = dtype, pitch: int | None = None) -> torch.Tensor:
        """pitch: elements from one row to the next, if there is something in between."""
        if pitch is None:
            return torch.empty(shape, dtype=dtype, device="meta")
        return torch.empty(*shape[:-1], pitch, dtype=dtype, device="meta")[..., : shape[-1]]

    return tensor
