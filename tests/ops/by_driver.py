"""What fastmp hands to the CUDA driver equals, byte for byte, what Triton's own launchers hand to it.

`test_launcher.py` runs these tests in a process that has fake_driver.c in place of the driver. All of
Triton's path runs there, down to the launchers that it has a C compiler make. Most kernels are not compiled.
"""

from __future__ import annotations

import ctypes
import re
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import triton.language as tl
from every_op_tools import op_backends
from hypothesis import given, settings
from hypothesis import strategies as st
from marks import full
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaLauncher, CudaUtils
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from fastmp.ops import OPS, _triton, launcher
from fastmp.ops.warm import AbsentGPU
from fastmp.testing.ops import run, samples

FAKE = ctypes.CDLL("libcuda.so.1")
FAKE.fake_take.restype = ctypes.c_size_t
_taken = ctypes.create_string_buffer(1 << 20)
_BYTES = {"i1": 1, "i32": 4, "i64": 8, "fp32": 4, "fp64": 8}
_PTX_BYTES = {"8": 1, "16": 2, "32": 4, "64": 8}
_functions = []  # what the handles of functions point to


def handle_of(sizes: list[int]) -> int:
    """The handle of a function that takes parameters of so many bytes."""
    function = (ctypes.c_int64 * (len(sizes) + 1))(len(sizes), *sizes)
    _functions.append(function)
    return ctypes.addressof(function)


def demanded(ptx: str) -> list[int]:
    """The bytes of each parameter of compiled code."""
    (parameters,) = re.findall(r"\.visible \.entry \w+\(([^)]*)\)", ptx)
    found = re.findall(r"\.param(?: \.align \d+)? \.[a-z](\d+)[^\[,\n]*(?:\[(\d+)\])?", parameters)
    return [int(items or 1) * _PTX_BYTES[bits] for bits, items in found]


def block_of(kind: str) -> list[int]:
    """The block of a descriptor's type, as in tensordesc<bf16[64, 32]>."""
    return [int(size) for size in kind.partition("[")[2].partition("]")[0].split(",")]


def parameter_sizes(signature: dict[str, str]) -> list[int]:
    """The bytes of each parameter; those of scratch memory come last."""
    sizes = []
    for kind in signature.values():
        if kind.startswith("tensordesc"):
            rank = len(block_of(kind))
            sizes += [128, *rank * [4], *rank * [8]]
        elif kind != "constexpr":
            sizes.append(8 if kind[0] == "*" else _BYTES[kind])
    return [*sizes, 8, 8]


def launched() -> bytes:
    """All that was launched since it was last asked."""
    size = FAKE.fake_take(_taken)
    assert size <= len(_taken)
    return ctypes.string_at(_taken, size)


class _Device(AbsentGPU):
    """The first of two GPUs of compute capability 9.0 that the fake driver serves."""

    def __init__(self) -> None:
        super().__init__(90)
        self.utils, self.launcher_cls = CudaUtils(), CudaLauncher
        self.number, self.stream = 0, 7

    def get_current_device(self) -> int:
        return self.number

    def get_current_stream(self, device: int) -> int:
        return self.stream + 100 * device


class _Standing:
    """A kernel that is not compiled, with Triton's own launcher."""

    def __init__(self, kernel: Any, signature: dict, constants: dict, options: Any) -> None:
        self.src = types.SimpleNamespace(fn=kernel, signature=signature, constants=constants)
        blocks = [block_of(kind) for kind in signature.values() if kind.startswith("tensordesc")]
        maps = [
            {"swizzle": i % 4, "elem_size": 2, "elem_type": i % 16, "block_size": block, "fp4_padded": False}
            for i, block in enumerate(blocks, start=len(_functions))
        ]
        self.metadata = types.SimpleNamespace(
            name=kernel.__name__, target=GPUTarget("cuda", 90, 32), tensordesc_meta=maps,
            num_ctas=options.num_ctas, global_scratch_size=0, global_scratch_align=1,
            profile_scratch_size=0, profile_scratch_align=1,
            launch_cooperative_grid=options.launch_cooperative_grid, launch_pdl=options.launch_pdl,
        )  # fmt: skip
        self.packed_metadata = options.num_warps, options.num_ctas, 100 * options.num_warps + 1
        self.function = handle_of(parameter_sizes(signature))
        self.run = CudaLauncher(self.src, self.metadata)

    def launch_metadata(self, grid: tuple, stream: int, *values: Any) -> None:
        return None


@contextmanager
def _on_the_fake_driver(compiles: bool) -> Iterator[_Device]:
    """compiles: whether kernels are compiled, or stand-ins have a launcher only."""
    device = _Device()
    initialise = CompiledKernel._init_handles

    def stand_in(kernel, key, signature, device, constants, options, attrs, warmup):
        cache = kernel.device_caches[device][0]
        cache[key] = _Standing(kernel, signature, constants, options)
        return cache[key]

    def load(compiled):
        if compiled.module is None:
            FAKE.fake_next_function(ctypes.c_void_p(handle_of(demanded(compiled.asm["ptx"]))))
        initialise(compiled)

    with (
        mock.patch.object(JITFunction, "_do_compile", JITFunction._do_compile if compiles else stand_in),
        mock.patch.object(CompiledKernel, "_init_handles", load),
        mock.patch.object(launcher, "architecture_elsewhere", 90),
        mock.patch.object(driver, "_active", device),
        mock.patch.object(launcher, "_plans", {}),
    ):
        launched()
        FAKE.fake_answer(0)
        FAKE.fake_version(13020)
        yield device


def by_the_driver() -> bool:
    """Whether no plan calls a launcher of Triton's."""
    return all(type(plan.launch) is types.BuiltinFunctionType for plan in launcher._plans.values())


def compare(launch: Any, kernel: Any, programs: int, arguments: tuple, constants: dict[str, Any]) -> None:
    """Launch by Triton's own path, and twice by ours: the second finds a plan."""
    kernel[(programs,)](*arguments, **constants)
    theirs = launched()
    launch(kernel, programs, arguments, constants)
    assert launched() == theirs
    launch(kernel, programs, arguments, constants)
    assert launched() == theirs
    assert bool(theirs) == (programs > 0)


def _compare_op(op: str, backend: str, dtype: torch.dtype, monkeypatch: Any) -> None:
    launch = launcher.launch
    monkeypatch.setattr(launcher, "launch", lambda *given: compare(launch, *given))
    for arguments in samples(op, device="cpu", dtype=dtype):
        run(op, OPS[op].implementations[backend], arguments)
    assert launcher._plans
    assert by_the_driver()


@pytest.mark.parametrize("dtype", [torch.bfloat16, *full([torch.float32])], ids=str)
@pytest.mark.parametrize(("op", "backend"), op_backends(("triton",)))
def test_every_op(op, backend, dtype, monkeypatch):
    with _on_the_fake_driver(compiles=False):
        _compare_op(op, backend, dtype, monkeypatch)


@pytest.mark.parametrize("op", ["grouped_mm", "rms_norm"])
def test_kernels_that_are_compiled(op, monkeypatch):
    """Their code tells how many bytes each parameter has, and Triton how tensor maps are encoded."""
    with _on_the_fake_driver(compiles=True):
        _compare_op(op, "triton", torch.bfloat16, monkeypatch)


@_triton.jit
def _kernel(
    x, y, blocks, num_rows, pitch, scale, exact: tl.float64, COMPUTE: tl.constexpr, BLOCK: tl.constexpr
):
    pass


CONSTANTS = {"COMPUTE": tl.float32, "BLOCK": 64, "num_warps": 8}
TENSORS = st.builds(lambda start: torch.empty(64)[start:], st.sampled_from([0, 1, 4]))
SIZES = st.sampled_from([0, 1, 2, 16, (1 << 31) - 1, 1 << 31, (1 << 40) + 16, -1, -(1 << 31), -(1 << 40)])
NUMBERS = st.floats(-1e300, 1e300) | st.sampled_from([0.1, 1.0, -0.0, float("inf")])
BLOCKS = st.builds(
    lambda shape, block, padding: TensorDescriptor.from_tensor(
        torch.empty(shape, dtype=torch.bfloat16), block[: len(shape)], padding
    ),
    st.sampled_from([(128,), (48, 64), (2, 3, 4, 5, 16)]),
    st.permutations([1, 2, 4, 8, 16]),
    st.sampled_from(["zero", "nan"]),
)


@settings(max_examples=50)
@given(st.integers(0, 3), st.tuples(TENSORS, st.none(), BLOCKS | st.none(), SIZES, SIZES, NUMBERS, NUMBERS))
def test_arguments_of_all_kinds(programs, arguments):
    with _on_the_fake_driver(compiles=False):
        compare(launcher.launch, _kernel, programs, arguments, CONSTANTS)
        assert by_the_driver()


@pytest.mark.parametrize("rows, small", [(512, True), (513, False)])
def test_a_bit_that_drivers_before_13_2_set_wrongly_is_cleared(rows, small):
    """In maps of tensors that begin and end within 128 KiB."""
    x, memory = torch.empty(64), torch.empty(rows, 128, dtype=torch.bfloat16)
    blocks, launches = TensorDescriptor.from_tensor(memory[:, :64], [16, 64]), []
    with _on_the_fake_driver(compiles=False):
        for version in (13020, 13020, 13010):
            FAKE.fake_version(version)
            launcher.launch(_kernel, 1, (x, None, blocks, 7, 64, 0.5, 0.5), CONSTANTS)
            launches.append(launched())
        assert by_the_driver()
    _, newer, older = launches
    cleared = [one ^ other for one, other in zip(newer, older, strict=True) if one != other]
    assert cleared == ([1 << 5] if small else [])


def _launch(x: Any) -> None:
    launcher.launch(_kernel, 5, (x, None, None, 7, 64, 0.5, 0.5), CONSTANTS)


def test_clusters_stay_with_triton():
    x = torch.empty(64)
    with _on_the_fake_driver(compiles=False):
        compare(launcher.launch, _kernel, 5, (x, None, None, 7, 64, 0.5, 0.5), {**CONSTANTS, "num_ctas": 2})
        assert not by_the_driver()


def test_the_stream_is_asked_for_at_each_launch():
    x = torch.empty(64)
    with _on_the_fake_driver(compiles=False) as device:
        _launch(x)
        launched()
        for device.stream in (7, 9):
            _launch(x)
            assert int.from_bytes(launched()[28:36], "little") == device.stream


def test_a_launch_on_another_device_than_the_current_one(monkeypatch):
    x = torch.empty(64)
    with _on_the_fake_driver(compiles=False) as device:

        @contextmanager
        def entered(number):
            before, device.number = device.number, number
            yield
            device.number = before

        monkeypatch.setattr(torch.cuda, "device", entered)
        _launch(x)
        _launch(x)
        here = launched()
        assert here[: len(here) // 2] == here[len(here) // 2 :]
        device.number = 1
        _launch(x)
        assert launched() == here[: len(here) // 2]
        assert device.number == 1


def test_a_thread_without_a_context_gets_that_of_the_device():
    x = torch.empty(64)
    with _on_the_fake_driver(compiles=False) as device:
        device.number = 1
        _launch(x)
        FAKE.fake_forget_context()
        _launch(x)
        assert FAKE.fake_retained() == 1


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (701, r"CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES \(701\): too many resources requested for launch$"),
        (12345, r"an error that it has no name for \(12345\)"),
    ],
)
def test_an_error_of_the_driver_is_raised_with_its_name(code, says):
    x = torch.empty(64)
    with _on_the_fake_driver(compiles=False):
        _launch(x)
        FAKE.fake_answer(code)
        with pytest.raises(RuntimeError, match=rf"^_kernel: the CUDA driver refuses the launch with {says}"):
            _launch(x)
