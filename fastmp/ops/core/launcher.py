"""Cached Triton launches: every kernel goes through `launch`.

Triton's own path derives the specialisation at every launch, which may take longer than the kernel itself.
Here:

1. `key_of` maps a call to a key at least as fine as Triton's specialisation.
2. The first call with a key compiles and loads the kernel (`load`) and stores a `_Plan`.
3. Later calls look the plan up and pass the arguments to the CUDA driver (csrc/host/launch.cpp).

A plan falls back to the launcher that Triton compiled where `_host` is not built, and for kernels with launch
features that `_host` does not implement.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fastmp.host import HOST
from fastmp.ops.core import _triton
from fastmp.ops.core.contracts import has_memory

_INT32 = (1 << 31) - 1
_MAX_PLANS = 4096  # sizes that never repeat would fill memory; dropped plans are made again
# Triton versions with plans: a later one may expose less of its compiled kernels
KNOWN = (_triton.VERSION or "").startswith(("3.6.", "3.7.", "3.8.", "3.9."))
# Triton's argument types, as letters for `HOST.planned`
_KINDS = {"constexpr": "-", "i32": "i", "i64": "q", "fp32": "f", "fp64": "d"}
SETS_TENSOR_MAPS = HOST is not None and KNOWN  # `_host` encodes tensor maps; Triton encodes them differently
# the address of a tensor without memory is an offset in a freed storage; allocators stay above this
_LOWEST_MEMORY = 1 << 33
_PROVEN = (_triton.VERSION or "").startswith("3.6.")  # launch parameters compared byte by byte
_hooks: Any = None if _triton.knobs is None else _triton.knobs.runtime
# the limits of a launch as `_triton.launch_limits` returns them, and a function that raises beyond them
_Limits: TypeAlias = tuple[tuple[tuple[int, int], ...], Callable[[int, tuple], None]]
_DTYPES = (*range(8), 10, 8, 9, *range(11, 16))  # tensor map dtypes: Triton's number -> the driver's


class _Plan:
    """A compiled kernel loaded on one device; `launch` takes the number of programs and the arguments."""

    __slots__ = ("compiled", "current_device", "device", "launch", "references", "stream")

    def __init__(self, kernel: Any, compiled: Any, arguments: tuple, constants: dict[str, Any]) -> None:
        active, names = _triton.driver.active, kernel.arg_names
        # keys contain the addresses of kernel and constants, so both must stay alive
        self.references, self.compiled = (kernel, constants), compiled
        self.current_device: Callable[[], int] = active.get_current_device
        self.stream: Callable[[int], int] = active.get_current_stream
        self.device = active.get_current_device()
        values = tuple(constants[name] for name in names if name in constants)
        num_arguments = len(names) - len(values)
        assert set(names[num_arguments:]) <= set(constants), "constants come last"
        limits = _triton.launch_limits(kernel, arguments), partial(_triton.check_limits, kernel)
        target = compiled, self.stream, self.device
        self.launch = _by_the_driver(*target, num_arguments, limits) or _by_triton(*target, values, limits)

    def launch_hooked(self, programs: int, arguments: tuple) -> None:
        """Launch between Triton's launch hooks, which profilers such as Proton install."""
        metadata = self.compiled.launch_metadata((programs,), self.stream(self.device), *arguments)
        _hooks.launch_enter_hook(metadata)
        try:
            self.launch(programs, arguments)
        finally:
            _hooks.launch_exit_hook(metadata)


def _by_triton(
    compiled: Any, stream: Callable[[int], int], device: int, constants: tuple, limits: _Limits
) -> Callable[[int, tuple], None]:
    """Return a launch function that calls Triton's compiled launcher."""
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    bounds, refuse = limits

    def launch(programs: int, arguments: tuple) -> None:
        for position, bound in bounds:
            if (programs if position < 0 else arguments[position]) > bound:
                refuse(programs, arguments)
        run(programs, 1, 1, stream(device), function, metadata, None, None, None, *arguments, *constants)

    return launch


def driver_arguments(compiled: Any, num_arguments: int) -> tuple[str, list[tuple]] | None:
    """Return (kinds, tensor map descriptors) of a kernel's arguments for `HOST.planned`, or None.

    Not supported: clusters, cooperative and programmatic dependent launches, scratch memory, rare argument
    types, and instrumentation by Triton's sanitizers.
    """
    metadata = compiled.metadata
    scratch = metadata.global_scratch_size, metadata.profile_scratch_size
    special = metadata.launch_cooperative_grid, metadata.launch_pdl, any(scratch)
    if metadata.num_ctas != 1 or any(special) or getattr(metadata, "instrumentation_mode", ""):
        return None
    types, maps = list(compiled.src.signature.values())[:num_arguments], metadata.tensordesc_meta or ()
    kinds = ["P" if t[0] == "*" else "T" if t.startswith("tensordesc") else _KINDS.get(t, "") for t in types]
    if not all(kinds) or kinds.count("T") != len(maps) or any(each["fp4_padded"] for each in maps):
        return None
    descriptors = [(m["swizzle"], m["elem_size"], _DTYPES[m["elem_type"]], m["block_size"]) for m in maps]
    return "".join(kinds), descriptors


def _by_the_driver(
    compiled: Any, stream: Callable[[int], int], device: int, num_arguments: int, limits: _Limits
) -> Callable[[int, tuple], None] | None:
    """Return a launch function that calls the CUDA driver, or None if `HOST.planned` does not support it.

    The driver reports the parameters of the loaded function since CUDA 12.4; they must equal the plan's. With
    an older driver only Triton 3.6, whose parameters are known, is launched this way.
    """
    metadata = compiled.metadata
    if HOST is None or metadata.target.backend != "cuda":
        return None
    described = driver_arguments(compiled, num_arguments)
    if described is None:
        return None
    num_warps, _, shared = compiled.packed_metadata
    return HOST.planned(
        metadata.name, compiled.function, device, metadata.target.arch, num_warps, shared, *described, stream,
        _PROVEN, *limits,
    )  # fmt: skip


@contextmanager
def _module_loads_allowed(backend: str) -> Iterator[None]:
    """Allow this thread to load modules during CUDA graph capture, through the relaxed capture mode."""
    if HOST is None or backend != "cuda":
        yield
        return
    before = HOST.exchange_capture_mode(HOST.RELAXED)
    try:
        yield
    finally:
        HOST.exchange_capture_mode(before)


def load(kernel: Any, arguments: Sequence[Any], constants: dict[str, Any]) -> Any:
    """Compile a kernel for these arguments and load it on the current device, without launching it.

    Returns:
        The compiled kernel, or None if a Triton hook took over its compilation.

    Raises:
        RuntimeError: the driver cannot load the module during CUDA graph capture.
    """
    compiled = kernel.warmup(*arguments, grid=(1,), **constants)
    if compiled is None:
        return None
    with _module_loads_allowed(compiled.metadata.target.backend):
        try:
            compiled._init_handles()
        except RuntimeError as error:
            if "captur" not in str(error):
                raise
            raise RuntimeError(
                f"{kernel.fn.__name__} was not launched before this capture, and the CUDA driver loads no "
                f"kernel during one ({error}); launch it once before you capture, with the same dtypes and "
                "options, or load it with fastmp.ops.warm_up(call)"
            ) from error
    return compiled


_plans: dict[tuple | bytes, _Plan] = {}
_interceptor: Callable[[Any, tuple, dict[str, Any]], object] | None = None
architecture_elsewhere = 80  # architecture that tile configs assume for tensors not on a GPU


@contextmanager
def intercept_launches(record: Callable[[Any, tuple, dict[str, Any]], object], arch: int) -> Iterator[None]:
    """Context in which launches on meta tensors call `record(kernel, arguments, constants)` instead.

    arch: compute capability as one number (90 is 9.0), for which tile configs are chosen.
    """
    global _interceptor, architecture_elsewhere
    before = _interceptor, architecture_elsewhere
    _interceptor, architecture_elsewhere = record, arch
    try:
        yield
    finally:
        _interceptor, architecture_elsewhere = before


def check_memory(kernel: Any, arguments: tuple) -> None:
    """Raise ValueError for a tensor of a kernel whose storage was freed."""
    for place, argument in enumerate(arguments):
        tensor = argument.base if type(argument) is _triton.TensorDescriptor else argument
        if isinstance(tensor, Tensor) and not has_memory(tensor):
            raise ValueError(
                f"{kernel.fn.__name__}: expected memory for the elements of {kernel.arg_names[place]}, got a "
                "tensor whose storage was freed (FSDP frees parameters outside of their forward)"
            )


def key_in_python(kernel: Any, arguments: tuple, constants: dict[str, Any]) -> tuple:
    """Return a key of the compiled kernel and its device, at least as fine as Triton's specialisation.

    Sizes enter by value, for there are few; `dynamic` parameters of `_triton.jit` by their width alone. A
    constant has one type in all launches of a kernel.
    """
    key: list[Any] = [kernel.fn, *constants.values()]
    add = key.append
    for argument, counts in zip(arguments, kernel.counts, strict=False):
        kind = type(argument)
        if kind is int:
            add(argument > _INT32 if counts else argument)
        elif argument is None:
            add(None)
        elif kind is float:
            add(float)
        elif kind is _triton.TensorDescriptor:
            base = argument.base
            add((base.dtype, base.get_device(), *argument.block_shape))
        else:
            address = argument.data_ptr()
            if address < _LOWEST_MEMORY:
                check_memory(kernel, arguments)
            key += (argument.dtype, argument.get_device(), address & 15)
    return tuple(key)


key_of = key_in_python if HOST is None else HOST.launch_keys(_triton.TensorDescriptor)


def _plan(
    key: tuple | bytes, kernel: Any, programs: int, arguments: tuple, constants: dict[str, Any]
) -> _Plan | None:
    """Load a kernel and store its plan; None if it is already launched or must not be."""
    described = _triton.TensorDescriptor
    tensors = [a.base if type(a) is described else a for a in arguments]
    tensors = [t for t in tensors if isinstance(t, Tensor)]
    _triton.check_declared(kernel, arguments)
    _triton.check_limits(kernel, programs, arguments)
    if _interceptor is not None and tensors[0].is_meta:
        _interceptor(kernel, arguments, constants)
        return None
    devices = {t.device for t in tensors}
    if len(devices) > 1:
        raise ValueError(f"{kernel.fn.__name__}: all tensors must be on one device, got {devices}")
    with torch.cuda.device_of(tensors[0]):
        compiled = load(kernel, arguments, constants)
        if compiled is None:
            return None
        if not KNOWN:
            kernel[(programs,)](*arguments, **constants)
            return None
        if len(_plans) >= _MAX_PLANS:
            _plans.clear()
        plan = _plans[key] = _Plan(kernel, compiled, arguments, constants)
    return plan


def launch(kernel: Any, programs: int, arguments: tuple, constants: dict[str, Any]) -> None:
    """Launch `programs` programs of a kernel on the current stream of its tensors' device.

    Args:
        kernel: decorated with `_triton.jit`.
        programs: size of the one-dimensional grid.
        arguments: run-time arguments in the kernel's order: tensors or None, descriptors, numbers.
        constants: every `tl.constexpr` parameter, and Triton's options (num_warps, num_stages), always in the
            same order. Build the dictionary once to save time at each launch.

    Raises:
        ValueError: tensors are on different devices, an argument exceeds the kernel's `limits`, or an integer
            is not declared in `_triton.jit`.
        RuntimeError: see `load`.
    """
    if _triton.INTERPRETED:
        _triton.check_declared(kernel, arguments)
        check_memory(kernel, arguments)
        kernel[(programs,)](*arguments, **constants)
        return
    key = key_of(kernel, arguments, constants)
    plan = _plans.get(key) or _plan(key, kernel, programs, arguments, constants)
    if plan is None:
        return
    hooked = _hooks.launch_enter_hook.calls or _hooks.launch_exit_hook.calls  # by profilers
    run = plan.launch_hooked if hooked else plan.launch
    if plan.current_device() == plan.device:
        run(programs, arguments)
    else:
        with torch.cuda.device(plan.device):
            run(programs, arguments)
