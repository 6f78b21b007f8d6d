"""The one place that imports Triton, which is optional: without it the kernels below are never launched.

Kernels are written as `@jit` functions that use `tl`; whether they are compiled or interpreted is decided
by Triton when they are decorated (TRITON_INTERPRET=1).
"""

from __future__ import annotations

__all__ = ["ABSENT", "INTERPRETED", "VERSION", "TensorDescriptor", "cdiv", "jit", "next_power_of_2", "tl"]

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
