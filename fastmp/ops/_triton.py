"""The one place that imports Triton, which is optional: without it the kernels below are never launched.

Kernels are written as `@jit` functions that use `tl`; whether they are compiled or interpreted is decided
by Triton when they are decorated (TRITON_INTERPRET=1).
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor

    jit = triton.jit
    ABSENT = ""
    VERSION = triton.__version__
    INTERPRETED = triton.knobs.runtime.interpret
except ImportError:
    triton = tl = TensorDescriptor = None
    ABSENT = "Triton is not installed"
    VERSION = None
    INTERPRETED = False

    def jit(fn):
        return fn


def cdiv(x: int, y: int) -> int:
    """x / y rounded up, for the host: `triton.cdiv` takes ten times as long there."""
    return -(-x // y)


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


@dataclass(frozen=True)
class Cubin:
    """What the compiler made of one kernel: its resources and its code as text.

    `stack` and `spill_bytes` are bytes a thread, `shared` bytes a CTA.
    """

    registers: int
    stack: int
    spill_bytes: int
    shared: int
    ptx: str
    code: bytes

    @property
    def sass(self) -> str:
        """The machine code as text; the disassembler inside Triton 3.6 does not know sm_103."""
        return _cuobjdump("-sass", self.code)


@cache
def _tool(name: str) -> str:
    """Path of a CUDA tool that ships inside Triton."""
    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name)


def _cuobjdump(option: str, code: bytes) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(code)
        return subprocess.check_output(
            [_tool("cuobjdump"), option, path], text=True, stderr=subprocess.STDOUT
        )


def compile_to_cubin(
    kernel: Any,
    signature: dict[str, str],
    constants: dict[str, Any],
    *,
    arch: int,
    num_warps: int = 4,
    num_stages: int = 3,
    aligned: tuple[str, ...] = (),
) -> Cubin:
    """Compile `kernel` for `arch` (80, 90, 100, 103) with no GPU at hand.

    Args:
        signature: Triton type of each run-time argument in order, e.g. {"x": "*bf16", "n": "i32"}.
        constants: values of the `tl.constexpr` arguments.
        aligned: run-time arguments promised to be divisible by 16, as the launcher would find them.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    types = {n: signature.get(n, "constexpr") for n in names}
    attrs = {(names.index(n),): [["tt.divisibility", 16]] for n in aligned}
    source = ASTSource(
        kernel, types, constexprs={(names.index(n),): v for n, v in constants.items()}, attrs=attrs
    )
    compiled = triton.compile(
        source, target=GPUTarget("cuda", arch, 32), options={"num_warps": num_warps, "num_stages": num_stages}
    )
    usage = _cuobjdump("-res-usage", compiled.asm["cubin"])
    figures = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    return Cubin(
        registers=figures["REG"],
        stack=figures["STACK"],
        spill_bytes=figures["LOCAL"],
        shared=compiled.metadata.shared,
        ptx=compiled.asm["ptx"],
        code=compiled.asm["cubin"],
    )
