"""Optional import of Triton, and the limits of kernel arguments.

Every other module imports `jit` and `tl` from here; without Triton `jit` does nothing and no kernel is
launched. Triton decides at decoration, by TRITON_INTERPRET=1, between compiling and interpreting a kernel.
"""

from __future__ import annotations

import functools
import inspect

__all__ = [
    "ABSENT", "GPUTarget", "INTERPRETED", "MAX_COUNT", "MAX_EXPERTS", "MAX_SIZE", "MAX_STRIP", "MAX_WALKING",
    "VERSION", "TensorDescriptor", "cdiv", "check_count", "check_declared", "check_limits", "driver", "jit",
    "knobs", "launch_limits", "limits", "next_power_of_2", "tl",
]  # fmt: skip

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

    def jit(fn=None, *, dynamic="", fixed=""):
        """Decorate a Triton kernel, as `@jit(dynamic="num_rows", fixed="num_cols")`, or a device function.

        Every integer argument of a kernel is declared, or its launch raises: an undeclared one would compile
        the kernel again for each value.

        Args:
            dynamic: names of integers that differ from batch to batch, and of strides derived from them. No
                value recompiles the kernel. Named tensors are not specialised on their alignment either.
            fixed: names of sizes and pitches that the model fixes. The compiler learns whether they are 1 or
                multiples of 16.
        """
        if fn is None:
            return functools.partial(jit, dynamic=dynamic, fixed=fixed)
        names, changing = list(inspect.signature(fn).parameters), dynamic.split()
        declared = frozenset([*changing, *fixed.split()])
        if unknown := declared.difference(names):
            raise ValueError(f"jit: {fn.__name__} has no parameters {sorted(unknown)}")
        kernel = triton.jit(fn, do_not_specialize=[name for name in names if name in changing])
        kernel.counts = tuple(name in changing for name in names)
        kernel.declared, kernel.limits = declared, {}
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

    def jit(fn=None, *, dynamic="", fixed=""):
        return fn or (lambda function: function)


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


def check_declared(kernel, arguments: tuple) -> None:
    """Raise ValueError for an integer argument that `jit` was not told of."""
    for name, value in zip(kernel.arg_names, arguments, strict=False):
        if type(value) is int and name not in kernel.declared:
            raise ValueError(
                f"{kernel.fn.__name__}: every new value of {name} would compile the kernel again: name it in "
                f'@jit(dynamic="{name}") if it differs from batch to batch, else in fixed='
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
