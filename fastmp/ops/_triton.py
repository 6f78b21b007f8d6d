"""The one place that imports Triton, which is optional: without it the kernels below are never launched.

Kernels are written as `@jit` functions that use `tl`; whether they are compiled or interpreted is decided
by Triton when they are decorated (TRITON_INTERPRET=1).
"""

from __future__ import annotations

import inspect

__all__ = [
    "ABSENT", "COUNTS", "GPUTarget", "INTERPRETED", "VERSION", "TensorDescriptor", "cdiv", "driver", "jit",
    "knobs", "next_power_of_2", "tl",
]  # fmt: skip

# Parameters of kernels that count what differs from batch to batch, and strides that follow from it. Another
# value compiles nothing anew: only sizes and pitches, which a model fixes, tell the compiler whether they are
# one or multiples of sixteen. Nor need it know how entries of `groups` and `step` are aligned.
COUNTS = frozenset(
    ("first_element", "groups", "k_rows", "k_size_1", "k_stride_0", "k_stride_1", "k_stride_2", "noise_seed",
     "num_blocks", "num_pairs", "num_queries", "num_rows", "num_steps", "num_strips", "num_tokens",
     "pair_vectors", "q_rows", "q_size_1", "q_stride_0", "q_stride_1", "q_stride_2", "rank", "rows_per_strip",
     "step", "strip_steps", "tokens", "turn_0", "turn_1", "turn_2")
)  # fmt: skip

try:
    import triton
    import triton.language as tl
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.tools.tensor_descriptor import TensorDescriptor

    def jit(fn):
        """Make a Triton kernel of a function, or a function that kernels call."""
        names = inspect.signature(fn).parameters
        kernel = triton.jit(fn, do_not_specialize=[name for name in names if name in COUNTS])
        kernel.counts = tuple(name in COUNTS for name in names)
        return kernel

    ABSENT = ""
    VERSION = triton.__version__
    INTERPRETED = triton.knobs.runtime.interpret
except ImportError:
    triton = tl = knobs = GPUTarget = driver = TensorDescriptor = None
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
