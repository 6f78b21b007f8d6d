"""The one place where a Triton kernel is started.

Triton's own path works out at every launch what to compile for, and may take longer than the kernel runs.
Here the first launch of its kind goes that way and keeps the compiled kernel. Later ones find it by one
look-up and call its launcher with the values alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fastmp.ops import _triton

_INT32 = (1 << 31) - 1
_MOST = 4096  # plans; more come from sizes that do not repeat, and are planned again
_KNOWN = _triton.VERSION is not None and _triton.VERSION.startswith("3.6.")  # whose launchers are called here


class _Plan:
    """A compiled kernel on one device, ready to be called with a grid and values."""

    __slots__ = ("constants", "current_device", "device", "function", "metadata", "run", "stream")

    def __init__(self, kernel: Any, compiled: Any, constants: dict[str, Any]) -> None:
        active, names = _triton.driver.active, kernel.arg_names
        self.run: Callable[..., None] = compiled.run
        self.function, self.metadata = compiled.function, compiled.packed_metadata
        self.stream: Callable[[int], int] = active.get_current_stream
        self.current_device: Callable[[], int] = active.get_current_device
        self.device = active.get_current_device()
        self.constants = tuple(constants[name] for name in names if name in constants)
        assert set(names[len(names) - len(self.constants) :]) <= set(constants), "constants come last"

    def __call__(self, programs: int, arguments: tuple) -> None:
        self.run(
            programs, 1, 1, self.stream(self.device), self.function, self.metadata, None, None, None,
            *arguments, *self.constants,
        )  # fmt: skip


_plans: dict[tuple, _Plan] = {}
_instead: Callable[[Any, tuple, dict[str, Any]], object] | None = None
architecture_elsewhere = 80  # what tiles are chosen for where tensors are on no GPU: the oldest


@contextmanager
def instead(record: Callable[[Any, tuple, dict[str, Any]], object], arch: int) -> Iterator[None]:
    """Inside, `record` gets kernel, arguments and constants of what would be launched on meta tensors.

    arch: the architecture (90 is 9.0) whose tiles they have.
    """
    global _instead, architecture_elsewhere
    before = _instead, architecture_elsewhere
    _instead, architecture_elsewhere = record, arch
    try:
        yield
    finally:
        _instead, architecture_elsewhere = before


def _key(kernel: Any, arguments: tuple, constants: dict[str, Any]) -> tuple:
    """Name the code that Triton would launch, and the device: at least as finely as Triton does.

    Sizes count as they are, for there are few; counts (`_triton.COUNTS`) by their width alone. A constant has
    one type in all launches of a kernel.
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
            key += (argument.dtype, argument.get_device(), argument.data_ptr() & 15)
    return tuple(key)


def _watched() -> bool:
    """Whether a profiler asks Triton for more about a launch than a plan keeps."""
    hooks = _triton.knobs.runtime
    return bool(hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls)


def _plan(key: tuple, kernel: Any, programs: int, arguments: tuple, constants: dict[str, Any]) -> None:
    """Launch by Triton's own path and keep the compiled kernel."""
    described = _triton.TensorDescriptor
    tensors = [a.base if type(a) is described else a for a in arguments]
    tensors = [t for t in tensors if isinstance(t, Tensor)]
    if _instead is not None and tensors[0].is_meta:
        _instead(kernel, arguments, constants)
        return
    devices = {t.device for t in tensors}
    if len(devices) > 1:
        raise ValueError(f"{kernel.fn.__name__}: all tensors must be on one device, got {devices}")
    with torch.cuda.device_of(tensors[0]):
        compiled = kernel[(programs,)](*arguments, **constants)
        if compiled is not None and _KNOWN:
            if len(_plans) >= _MOST:
                _plans.clear()
            _plans[key] = _Plan(kernel, compiled, constants)


def launch(kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
    """Launch `programs` programs of a kernel on the current stream of its tensors' device.

    Args:
        arguments: all that are no constants, in the kernel's order: tensors or None, descriptors, numbers.
        constants: every `tl.constexpr` parameter, and Triton's options (num_warps, num_stages); always in the
            same order.

    Raises:
        ValueError: tensors are on different devices.
    """
    if _triton.INTERPRETED:
        kernel[(programs,)](*arguments, **constants)
        return
    key = _key(kernel, arguments, constants)
    plan = _plans.get(key)
    if plan is None or _watched():
        _plan(key, kernel, programs, arguments, constants)
    elif plan.current_device() == plan.device:
        plan(programs, arguments)
    else:
        with torch.cuda.device(plan.device):
            plan(programs, arguments)
