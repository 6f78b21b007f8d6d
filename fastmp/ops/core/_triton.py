"""Optional import of Triton, and the limits of kernel arguments.

Every other module imports `jit` and `tl` from here; without Triton `jit` does nothing and no kernel is
launched. Triton decides at decoration, by TRITON_INTERPRET=1, between compiling and interpreting a kernel.
"""

from __future__ import annotations

import inspect

__all__ = [
    "ABSENT", "DO_NOT_SPECIALIZE", "GPUTarget", "INTERPRETED", "MAX_COUNT", "MAX_EXPERTS", "MAX_SIZE",
    "MAX_STRIP", "MAX_WALKING", "VERSION", "TensorDescriptor", "cdiv", "check_count", "check_limits",
    "driver", "jit", "knobs", "launch_limits", "limits", "next_power_of_2", "tl",
]  # fmt: skip

# Kernel parameters passed to Triton as `do_not_specialize`: counts that differ from batch to batch, and
# strides derived from them. A new value then never recompiles a kernel. Sizes and pitches that the model
# fixes stay specialised: the compiler learns whether they are 1 or multiples of 16. An integer parameter that
# changes between calls must be listed here, or every new value compiles the kernel again.
DO_NOT_SPECIALIZE = frozenset(
    ("first_element", "groups", "k_rows", "k_size_1", "k_stride_0", "k_stride_1", "k_stride_2", "noise_seed",
     "index_vectors", "num_assignments", "num_blocks", "num_queries", "num_rows", "num_steps", "num_strips",
     "num_tokens", "q_rows", "q_size_1", "q_stride_0", "q_stride_1", "q_stride_2", "rank", "rows_per_strip",
     "rows_per_turn", "s_pitch", "step", "strip_steps", "ticket", "timeout_ms", "tokens", "turn_0", "turn_1",
     "turn_2")
)  # fmt: skip

# Upper bounds of integer arguments, for `limits`. Kernels compute with them in int32.
MAX_COUNT = (1 << 31) - (1 << 16)  # rows and tokens; leaves room to add a block (see `check_count`)
MAX_SIZE = 1 << 26  # columns, in elements or in vectors of up to 16
MAX_EXPERTS = 1 << 14  # experts, ranks, and experts of a token
MAX_STRIP = 1 << 30  # rows of a strip, of which a launch has hundreds
MAX_WALKING = 1 << 16  # programs of a persistent kernel, which loops over blocks

try:
    import triton
    import triton.language as tl
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.tools.tensor_descriptor import TensorDescriptor

    def jit(fn):
        """Decorate a Triton kernel or device function, without specialising on `DO_NOT_SPECIALIZE`."""
        names = inspect.signature(fn).parameters
        kernel = triton.jit(fn, do_not_specialize=[name for name in names if name in DO_NOT_SPECIALIZE])
        kernel.counts = tuple(name in DO_NOT_SPECIALIZE for name in names)
        kernel.limits = {}
        return kernel

    def _keep_masks_boolean():
        """Cast masks to bool in Triton's interpreter.

        The interpreter of Triton 3.9 accepts boolean masks only, but widens a mask combined with a scalar
        condition to integers.
        """
        from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

        def boolean(method, position):
            def accepting(self, *arguments, **options):
                mask = arguments[position]
                if isinstance(mask, TensorHandle) and mask.data.dtype != bool:
                    mask.data = mask.data.astype(bool)
                return method(self, *arguments, **options)

            return accepting

        for name, position in (
            ("create_masked_load", 1),
            ("create_masked_store", 2),
            ("create_atomic_rmw", 3),
        ):
            setattr(InterpreterBuilder, name, boolean(getattr(InterpreterBuilder, name), position))

    ABSENT = ""
    VERSION = triton.__version__
    INTERPRETED = triton.knobs.runtime.interpret
    if INTERPRETED:
        _keep_masks_boolean()
except ImportError:
    triton = tl = knobs = GPUTarget = driver = TensorDescriptor = None
    ABSENT = "Triton is not installed"
    VERSION = None
    INTERPRETED = False

    def jit(fn):
        return fn


def limits(**bounds: int):
    """Declare upper bounds of a kernel's integer arguments; the lower bound is 0.

    `programs` bounds the number of programs. A name that is no argument bounds a variable inside the kernel,
    which the caller checks. The launcher raises ValueError beyond the bounds. Within them no 32-bit
    arithmetic of the kernel overflows; tools/cubins/ranges.py proves it.
    """

    def declare(kernel):
        kernel.limits = bounds
        return kernel

    return declare


def check_limits(kernel, programs: int, arguments: tuple) -> None:
    """Raise ValueError for int32 arguments beyond the `limits` of a kernel; int64 arguments are unlimited."""
    values = dict(zip(kernel.arg_names, arguments, strict=False), programs=programs)
    for name, bound in kernel.limits.items():
        value = values.get(name)
        if type(value) is int and bound < value < 1 << 31:
            raise ValueError(
                f"{kernel.fn.__name__}: expected {name} of at most {bound}, got {value}: split the tensors"
            )


def launch_limits(kernel, arguments: tuple) -> tuple[tuple[int, int], ...]:
    """Return the limits to check at every launch of a plan, as (argument position, bound).

    A plan's key contains all sizes, so only int32 counts, which the key leaves out, and the number of
    programs (position -1) can exceed their bound later.
    """
    positions = [i for i, count in enumerate(kernel.counts[: len(arguments)]) if count]
    narrow = {
        kernel.arg_names[i]: i for i in positions if type(arguments[i]) is int and arguments[i] < 1 << 31
    }
    narrow["programs"] = -1
    return tuple((narrow[name], bound) for name, bound in kernel.limits.items() if name in narrow)


def check_count(op: str, what: str, count: int) -> None:
    """Raise ValueError for a count between `MAX_COUNT` and 2^31, where int32 overflows by adding a block.

    Larger counts are passed as int64.
    """
    if MAX_COUNT < count < 1 << 31:
        raise ValueError(
            f"{op}: expected at most {MAX_COUNT} {what}, or {1 << 31} and more, got {count}: split the call"
        )


def cdiv(x: int, y: int) -> int:
    """Return x / y rounded up; on the host `triton.cdiv` takes ten times as long."""
    return -(-x // y)


def next_power_of_2(n: int) -> int:
    """Return the smallest power of two not below n; 1 for n below 1."""
    return 1 << max(n - 1, 0).bit_length()
