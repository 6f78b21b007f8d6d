"""Launches without a GPU: kernels that are not compiled, but record what they are called with."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from fastmp.ops.core import launcher
from fastmp.ops.precompile import AbsentGPU


@dataclass(frozen=True)
class Called:
    """A call of a compiled kernel's launcher; `code` is everything that the code was compiled for."""

    code: tuple
    grid: tuple[int, int, int]
    stream: int
    function: str
    metadata: tuple
    values: tuple


def comparable(value: Any) -> Any:
    """Return the part of an argument that the C part of a launcher reads."""
    if isinstance(value, torch.Tensor):
        return value.data_ptr(), value.dtype
    if isinstance(value, TensorDescriptor):
        shape = *value.shape, *value.strides, *value.block_shape, value.padding
        return *comparable(value.base), *shape
    return type(value), value


class _Recorded:
    """Stands in for a compiled kernel."""

    def __init__(self, calls: list[Called], code: tuple) -> None:
        self.calls, self.code = calls, code
        self.function, self.packed_metadata = f"function of {code[0]}", (4, 1, len(code))
        self.metadata = SimpleNamespace(target=GPUTarget("none", 90, 32))  # which no driver is called for

    def launch_metadata(self, grid: tuple, stream: int, *values: Any) -> str:
        return self.code[0]

    def _init_handles(self) -> None:
        """Load nothing."""

    def run(self, x: int, y: int, z: int, stream: int, function: str, metadata: tuple, *rest: Any) -> None:
        _, _, _, *values = rest
        values = tuple(map(comparable, values))
        self.calls.append(Called(self.code, (x, y, z), stream, function, metadata, values))


_devices = itertools.count(1000)  # what is "compiled" for a GPU is kept apart by its number


class _Device(AbsentGPU):
    def __init__(self) -> None:
        super().__init__(90)
        self.number = next(_devices)

    def get_current_device(self) -> int:
        return self.number

    def get_current_stream(self, device: int) -> int:
        return 7 + device


@dataclass
class Recording:
    """calls: in order. compiled: how many kernels. asked: how many launches took Triton's own path."""

    calls: list[Called]
    compiled: int = 0
    asked: int = 0


@contextmanager
def recording() -> Iterator[Recording]:
    """Launches call stand-ins, on a GPU with compute capability 9.0 as far as launchers can see."""
    found = Recording([])
    run = JITFunction.run

    def compile_nothing(kernel, key, signature, device, constexprs, options, attrs, warmup):
        found.compiled += 1
        cache = kernel.device_caches[device][0]
        code = kernel.__name__, str(signature), str(constexprs), str(attrs), str(options), key
        cache[key] = _Recorded(found.calls, code)
        return cache[key]

    def counted(kernel, *arguments, **named):
        found.asked += 1
        return run(kernel, *arguments, **named)

    with (
        mock.patch.object(JITFunction, "_do_compile", compile_nothing),
        mock.patch.object(JITFunction, "run", counted),
        mock.patch.object(launcher, "architecture_elsewhere", 90),
        mock.patch.object(driver, "_active", _Device()),
        mock.patch.object(launcher, "_plans", {}),
    ):
        yield found
