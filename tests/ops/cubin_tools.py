"""Compiling Triton kernels as their launchers would, with no GPU, and reading facts off the result.

A family's test_<family>_cubins.py describes its kernels as `Launch`es: bf16 on every architecture in
`make test`, the other dtypes with --exhaustive.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest

from fastmp.ops import _triton

ARCHS = (80, 90, 100, 103)
SHARED_LIMIT = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10, 103: 227 << 10}
REGISTERS = 64 << 10  # of a multiprocessor
# Bytes of stack a thread: none with the release that tile sizes were chosen for; others park a few words.
STACK = 0 if _triton.VERSION.startswith("3.6.") else 32
ITEMSIZE = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}


def compute(dtype: str) -> str:
    """What kernels compute in for elements of `dtype`."""
    return "fp64" if dtype == "fp64" else "fp32"


@dataclass(frozen=True)
class Launch:
    """A kernel with the argument types and constants of one launch.

    `tensors` are pointers by name ("*bf16"), aligned to 16 bytes; `sizes` are i32 arguments (`kinds` names
    other types); those in `aligned` are divisible by 16.
    """

    kernel: Any
    tensors: dict[str, str]
    sizes: tuple[str, ...]
    constants: dict[str, Any]
    num_warps: int
    aligned: tuple[str, ...] = ()
    num_stages: int = 3
    kinds: dict[str, str] = field(default_factory=dict)

    def compile(self, arch: int) -> _triton.Cubin:
        signature = {**self.tensors, **dict.fromkeys(self.sizes, "i32"), **self.kinds}
        missing = set(self.kernel.arg_names) - set(signature) - set(self.constants)
        assert not missing, f"arguments {missing} are not described"
        return _triton.compile_to_cubin(
            self.kernel, signature, self.constants, arch=arch, num_warps=self.num_warps,
            num_stages=self.num_stages, aligned=(*self.tensors, *self.aligned),
        )  # fmt: skip

    def specialised(self, absent: Iterable[str] = (), constants: dict[str, Any] | None = None) -> Launch:
        """As the launcher specialises it where every size is 1 and the tensors `absent` are None."""
        fixed = dict.fromkeys(self.sizes, 1) | dict.fromkeys(absent, None)
        return Launch(
            self.kernel,
            {name: kind for name, kind in self.tensors.items() if name not in fixed},
            (),
            {**self.constants, **fixed, **(constants or {})},
            self.num_warps,
            num_stages=self.num_stages,
            kinds=self.kinds,
        )


def cases(names: Iterable[str], *, without: Iterable[tuple[str, str]] = ()) -> list[Any]:
    """Parameters (name, dtype, arch): other dtypes than bf16 are exhaustive; `without`: (name, dtype)."""
    skipped = set(without)
    return [
        pytest.param(
            name,
            dtype,
            arch,
            marks=() if dtype == "bf16" else pytest.mark.exhaustive,
            id=f"{name}-{dtype}-sm_{arch}",
        )
        for dtype in ITEMSIZE
        for arch in ARCHS
        for name in names
        if (name, dtype) not in skipped
    ]


def check_resources(cubin: _triton.Cubin, dtype: str, arch: int) -> None:
    """Nothing spilled, no stack (f64 functions may keep a table there), shared memory within the limit."""
    assert cubin.spill_bytes == 0
    assert cubin.stack <= STACK or dtype == "fp64"
    assert cubin.shared <= SHARED_LIMIT[arch]


def wide_loads(cubin: _triton.Cubin) -> int:
    """Number of 16-byte global loads in the code."""
    return len(re.findall(r"ld\.global\S*\.v4\.b32|ld\.global\S*\.v2\.b64", cubin.ptx))


def wide_stores(cubin: _triton.Cubin) -> int:
    """Number of 16-byte global stores in the code."""
    return len(re.findall(r"st\.global\S*\.v4\.b32|st\.global\S*\.v2\.b64", cubin.ptx))


def exponentials(cubin: _triton.Cubin) -> int:
    return cubin.ptx.count("ex2.approx")
