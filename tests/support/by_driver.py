"""Launches of fastmp hand the CUDA driver the same bytes as Triton's own launchers.

`test_launcher.py` runs these tests in a process that has fake_driver.c in place of the driver. All of
Triton's path runs there, down to the launchers that it has a C compiler make. Most kernels are not compiled.
"""

from __future__ import annotations

import ctypes
import types
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import triton
import triton.language as tl
from capture_tools import loads_in_captures
from every_op_tools import op_backends
from hypothesis import given, settings
from hypothesis import strategies as st
from marks import full
from triton.backends.nvidia.driver import CudaLauncher, CudaUtils
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from fastmp import ops
from fastmp.ops import OPS, precompile
from fastmp.ops.core import _triton, launcher
from fastmp.ops.precompile import AbsentGPU
from fastmp.testing.ops import run, samples
from tools.cubins.compiled import parameters_of

FAKE = ctypes.CDLL("libcuda.so.1")
FAKE.fake_take.restype = ctypes.c_size_t
_taken = ctypes.create_string_buffer(1 << 20)
_BYTES = {"i1": 1, "i32": 4, "i64": 8, "fp32": 4, "fp64": 8}
_functions = []  # what the handles of functions point to


def handle_of(sizes: list[int]) -> int:
    """The handle of a function that takes parameters of so many bytes."""
    function = (ctypes.c_int64 * (len(sizes) + 1))(len(sizes), *sizes)
    _functions.append(function)
    return ctypes.addressof(function)


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
    """The first of two GPUs that the fake driver serves."""

    def __init__(self, arch: int) -> None:
        super().__init__(arch)
        self.utils, self.launcher_cls = CudaUtils(), CudaLauncher
        self.number, self.stream = 0 if arch == 90 else arch, 7

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
            name=kernel.__name__, target=driver.active.get_current_target(), tensordesc_meta=maps,
            num_ctas=options.num_ctas, global_scratch_size=0, global_scratch_align=1,
            profile_scratch_size=0, profile_scratch_align=1,
            launch_cooperative_grid=options.launch_cooperative_grid, launch_pdl=options.launch_pdl,
        )  # fmt: skip
        self.packed_metadata = options.num_warps, options.num_ctas, 100 * options.num_warps + 1
        self.function = None
        self.run = CudaLauncher(self.src, self.metadata)

    def _init_handles(self) -> None:
        if self.function is None:
            FAKE.fake_next_function(ctypes.c_void_p(handle_of(parameter_sizes(self.src.signature))))
            load, shared = driver.active.utils.load_binary, self.packed_metadata[2]
            self.function = load(self.metadata.name, b"code", shared, driver.active.number)[1]

    def launch_metadata(self, grid: tuple, stream: int, *values: Any) -> tuple:
        self._init_handles()
        return self.metadata.name, grid, stream


@contextmanager
def _on_the_fake_driver(compiles: bool = False, arch: int = 90) -> Iterator[_Device]:
    """compiles: whether kernels are compiled, or stand-ins have a launcher only."""
    device = _Device(arch)
    initialise = CompiledKernel._init_handles

    def stand_in(kernel, key, signature, device, constants, options, attrs, warmup):
        cache = kernel.device_caches[device][0]
        cache[key] = _Standing(kernel, signature, constants, options)
        return cache[key]

    def load(compiled):
        if compiled.module is None:
            FAKE.fake_next_function(ctypes.c_void_p(handle_of(parameters_of(compiled.asm["ptx"]))))
        initialise(compiled)

    with (
        mock.patch.object(JITFunction, "_do_compile", JITFunction._do_compile if compiles else stand_in),
        mock.patch.object(CompiledKernel, "_init_handles", load),
        mock.patch.object(launcher, "architecture_elsewhere", arch),
        mock.patch.object(driver, "_active", device),
        mock.patch.object(launcher, "_plans", {}),
    ):
        launched()
        FAKE.fake_answer(0)
        FAKE.fake_capture(0)
        FAKE.fake_more_parameters(0)
        yield device


def by_the_driver() -> bool:
    """Return True if no plan calls a launcher of Triton's."""
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
    with _on_the_fake_driver():
        _compare_op(op, backend, dtype, monkeypatch)


@pytest.mark.parametrize("op", ["grouped_mm", "rms_norm"])
def test_kernels_that_are_compiled(op, monkeypatch):
    """Their code tells how many bytes each parameter has, and Triton how tensor maps are encoded."""
    with _on_the_fake_driver(compiles=True):
        _compare_op(op, "triton", torch.bfloat16, monkeypatch)


@_triton.jit(dynamic="num_rows", fixed="pitch")
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
    with _on_the_fake_driver():
        compare(launcher.launch, _kernel, programs, arguments, CONSTANTS)
        assert by_the_driver()


def _bits_85(*maps: tuple[int, int]) -> list[bool]:
    """Read bit 85 of the tensor maps of a launch, which are its first parameters, with such ranks."""
    launch, at, bits = launched(), 28 + 8 + 4 + 8 + 8, []
    for rank in maps:
        bits.append(bool(launch[at + 10] & 1 << 5))
        at += 128 + rank * (4 + 8)
    return bits


def _grouped(op: str, rows: int, width: int) -> tuple[torch.Tensor, ...]:
    """Make arguments of a grouped GEMM of two experts: x has `rows` rows of 64 columns."""
    bf16, offsets = torch.bfloat16, torch.tensor([rows // 2, rows], dtype=torch.int32)
    x = torch.empty(rows, 64, dtype=bf16)
    if op == "grouped_mm":
        return x, torch.empty(2, width, 64, dtype=bf16), offsets, False
    return torch.empty(rows, width, dtype=bf16), x, offsets


@pytest.mark.parametrize("hooked", [False, True], ids=["", "hooked"])
@pytest.mark.parametrize(
    ("op", "rows", "width", "bits"),
    [
        ("grouped_mm", 1023, 64, [False, False]),
        ("grouped_mm", 1024, 512, [True, True]),
        ("grouped_mm_wgrad", 32, 64, [False, False]),
        ("grouped_mm_wgrad", 1023, 128, [True, False]),
        ("grouped_mm_wgrad", 1024, 64, [True, True]),
    ],
)
def test_only_maps_of_128_KiB_keep_bit_85_on_blackwell(op, rows, width, bits, hooked, monkeypatch):
    """The TMA unit may read so much from the base address; ragged maps of wgrad have shapes beyond it."""
    ranks = (2, 3) if op == "grouped_mm" else (4, 4)
    if hooked:
        monkeypatch.setattr(triton.knobs.runtime.launch_enter_hook, "calls", [lambda metadata: None])
    for arch, wanted in ((100, bits), (103, bits), (90, [True, True])):  # Hopper does not look at the bit
        with _on_the_fake_driver(arch=arch):
            for _ in range(3):
                OPS[op].implementations["triton"](*_grouped(op, rows, width))
                assert _bits_85(*ranks) == wanted


def _launch(x: Any) -> None:
    launcher.launch(_kernel, 5, (x, None, None, 7, 64, 0.5, 0.5), CONSTANTS)


def test_limits_hold_at_every_launch(monkeypatch):
    """Of a plan that `_host` launches; what is beyond them never reaches the driver. Hooks come in pairs."""
    heard, hooks = [], triton.knobs.runtime
    monkeypatch.setattr(_kernel, "limits", {"programs": 8, "num_rows": 100})
    x = torch.empty(64)
    with _on_the_fake_driver():
        for programs, rows in ((1, 7), (8, 100)):
            compare(launcher.launch, _kernel, programs, (x, None, None, rows, 64, 0.5, 0.5), CONSTANTS)
        assert by_the_driver()
        for hooked in (False, True):
            if hooked:
                monkeypatch.setattr(hooks.launch_enter_hook, "calls", [lambda _: heard.append("enter")])
                monkeypatch.setattr(hooks.launch_exit_hook, "calls", [lambda _: heard.append("exit")])
            for programs, rows, expected in (
                (1, 101, "expected num_rows of at most 100, got 101"),
                (9, 7, "expected programs of at most 8, got 9"),
            ):
                with pytest.raises(ValueError, match=expected):
                    launcher.launch(_kernel, programs, (x, None, None, rows, 64, 0.5, 0.5), CONSTANTS)
        assert not launched()
        assert heard == ["enter", "exit"] * 2


def test_clusters_stay_with_triton():
    x = torch.empty(64)
    with _on_the_fake_driver():
        compare(launcher.launch, _kernel, 5, (x, None, None, 7, 64, 0.5, 0.5), {**CONSTANTS, "num_ctas": 2})
        assert not by_the_driver()


def test_the_stream_is_asked_for_at_each_launch():
    x = torch.empty(64)
    with _on_the_fake_driver() as device:
        _launch(x)
        launched()
        for device.stream in (7, 9):
            _launch(x)
            assert int.from_bytes(launched()[28:36], "little") == device.stream


def test_a_launch_on_another_device_than_the_current_one(monkeypatch):
    x = torch.empty(64)
    with _on_the_fake_driver() as device:

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
    with _on_the_fake_driver() as device:
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
    with _on_the_fake_driver():
        _launch(x)
        FAKE.fake_answer(code)
        with pytest.raises(RuntimeError, match=rf"^_kernel: the CUDA driver refuses the launch with {says}"):
            _launch(x)


@pytest.fixture
def nothing_loaded(monkeypatch):
    """Let Triton forget what it has compiled `_kernel` to."""
    monkeypatch.setattr(_kernel, "device_caches", defaultdict(_kernel.create_binder))


def _load(x: Any, **constants: Any) -> int:
    """Launch a kernel whose plan is not there yet; returns how many modules were loaded."""
    before = FAKE.fake_modules()
    launcher.launch(_kernel, 5, (x, None, None, 7, 64, 0.5, 0.5), {**CONSTANTS, **constants})
    return FAKE.fake_modules() - before


def test_a_kernel_that_is_new_in_a_capture_is_loaded(nothing_loaded):
    """The driver loads modules in relaxed mode only; the thread gets its own mode back."""
    x = torch.empty(64)
    with _on_the_fake_driver():
        assert _load(x, BLOCK=128) == 1
        alone = launched()
        FAKE.fake_capture(1)
        assert [_load(x, BLOCK=256), _load(x, BLOCK=256)] == [1, 0]
        inside = launched()
        assert FAKE.fake_capture_mode() == 0
        assert inside[: len(inside) // 2] == inside[len(inside) // 2 :]
        assert len(inside) == 2 * len(alone)


def test_a_kernel_that_is_new_in_a_capture_is_listed(nothing_loaded):
    """As in GPU tests, which fail then: see conftest.py."""
    x = torch.empty(64)
    with _on_the_fake_driver(compiles=True):
        for capturing, found in ((False, []), (True, []), (True, ["_kernel"])):
            with loads_in_captures(lambda: capturing) as loaded:  # noqa: B023
                _load(x, BLOCK=128 if not found else 256)
            assert loaded == found


def test_a_driver_that_loads_nothing_in_a_capture_is_named_with_the_kernel(nothing_loaded):
    x = torch.empty(64)
    with _on_the_fake_driver():
        FAKE.fake_capture(2)
        expected = r"^_kernel was not launched before this capture, .*: operation not permitted .*warm_up"
        for _ in range(2):
            with pytest.raises(RuntimeError, match=expected):
                _load(x)
            assert FAKE.fake_capture_mode() == 0
        FAKE.fake_capture(0)
        assert _load(x) == 1


def test_other_errors_of_loading_stay_as_they_are(nothing_loaded):
    with _on_the_fake_driver():
        FAKE.fake_capture(1)
        with mock.patch.object(driver.active.utils, "load_binary", side_effect=RuntimeError("no memory")):
            with pytest.raises(RuntimeError, match=r"^no memory$"):
                _load(torch.empty(64))
        assert FAKE.fake_capture_mode() == 0


def test_a_function_that_takes_other_parameters_is_launched_by_triton(nothing_loaded):
    """As the driver has it (CUDA 12.4): a Triton release may add or move those of scratch memory."""
    x, constants = torch.empty(64), {**CONSTANTS, "BLOCK": 16}
    block = TensorDescriptor.from_tensor(torch.empty(16, 64).bfloat16(), [16, 64])
    arguments = x, None, block, 7, 64, 0.5, 0.5
    for more, ours in ((0, True), (1, False), (-1, False)):
        with _on_the_fake_driver():
            FAKE.fake_more_parameters(more)
            compare(launcher.launch, _kernel, 5, arguments, constants)
            assert by_the_driver() == ours


def test_a_parameter_of_another_size_is_launched_by_triton(nothing_loaded):
    x = torch.empty(64)
    with _on_the_fake_driver():
        with mock.patch.dict(_BYTES, {"i32": 8}):
            _load(x)
        assert not by_the_driver()


@pytest.mark.parametrize("version", ["3.6.0", "3.7.1"])
def test_parameters_that_no_driver_tells_are_trusted_in_triton_3_6(version, nothing_loaded):
    """Run with a driver before CUDA 12.4, too: see `test_launcher.py`."""
    told = hasattr(FAKE, "cuFuncGetParamInfo")
    with _on_the_fake_driver(), mock.patch.object(launcher, "_PROVEN", version.startswith("3.6.")):
        _load(torch.empty(64))
        assert by_the_driver() == (told or version == "3.6.0")


def test_hooks_of_a_profiler_are_called_around_each_launch(monkeypatch):
    x, heard = torch.empty(64), []
    hooks = triton.knobs.runtime
    with _on_the_fake_driver() as device:
        _launch(x)
        alone = launched()
        monkeypatch.setattr(hooks.launch_enter_hook, "calls", [lambda m: heard.append((m, launched()))])
        monkeypatch.setattr(hooks.launch_exit_hook, "calls", [lambda m: heard.append((m, launched()))])
        device.stream = 9
        for _ in range(2):
            _launch(x)
    metadata = "_kernel", (5,), 9
    assert [each for each, _ in heard] == 4 * [metadata]
    empty, first, nothing, second = (written for _, written in heard)
    assert (empty, nothing) == (b"", b"")
    assert first == second
    assert len(first) == len(alone)


def test_warm_up_loads_what_is_launched_later(monkeypatch):
    """On a GPU that is there: a capture then finds every kernel, where the driver would load none."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(precompile, "compile_all", lambda codes, arch, **options: None)
    arguments = {"dtype": torch.bfloat16, "requires_grad": True}

    def both(device):
        x, bias = (torch.empty(*shape, device=device, **arguments) for shape in ((32, 64), (64,)))
        if device == "meta":
            y = ops.bias_gelu(x, bias, approximate="none")
            y.backward(torch.empty_like(y))
            return
        y = OPS["bias_gelu"].implementations["triton"](x, bias, "none")
        OPS["bias_gelu_backward"].implementations["triton"](y, x, bias, "none")

    with _on_the_fake_driver():
        with precompile.recording(90) as codes:
            both("meta")
        for kernel, _ in map(precompile.Code.call, codes):
            monkeypatch.setattr(kernel, "device_caches", defaultdict(kernel.create_binder))
        before = FAKE.fake_modules()
        assert ops.warm_up(lambda: both("meta"), arch=80) > 1
        assert FAKE.fake_modules() == before  # of another GPU: none is loaded
        count = ops.warm_up(lambda: both("meta"))
        assert FAKE.fake_modules() - before == count == len(codes) > 1
        assert launched() == b""
        FAKE.fake_capture(2)
        both("cpu")
        assert launched()
        assert FAKE.fake_modules() == before + count
