"""Every launch equals what Triton's own path would launch, without a GPU: compiled kernels are stand-ins."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import torch
import triton
import triton.language as tl
from every_op_tools import op_backends
from hypothesis import given, settings
from hypothesis import strategies as st
from launch_tools import recording
from triton.tools.tensor_descriptor import TensorDescriptor

import fastmp
from fastmp.host import HOST
from fastmp.ops import OPS
from fastmp.ops.core import _triton, launcher
from fastmp.ops.core.tma import use_tma
from fastmp.testing.ops import run, samples


@_triton.jit(dynamic="num_rows", fixed="pitch")
def _kernel(
    x, y, blocks, num_rows, pitch, scale, exact: tl.float64, COMPUTE: tl.constexpr, BLOCK: tl.constexpr
):
    pass


TENSORS = st.builds(
    lambda dtype, start: torch.empty(4, 128, dtype=dtype).view(-1)[start:],
    st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.int32, torch.int64]),
    st.sampled_from([0, 1, 2, 4, 8]),
)
SIZES = st.sampled_from([0, 1, 2, 15, 16, 17, 32, (1 << 31) - 1, 1 << 31, (1 << 31) + 1, 1 << 32, -1, -16])
BLOCKS = st.builds(
    lambda dtype, block: TensorDescriptor.from_tensor(torch.empty(16, 64, dtype=dtype), [block, 64]),
    st.sampled_from([torch.bfloat16, torch.float16]),
    st.sampled_from([16, 32]),
)
NUMBERS = st.floats(-1, 1, width=32)
ARGUMENTS = st.tuples(TENSORS, TENSORS | st.none(), BLOCKS | st.none(), SIZES, SIZES, NUMBERS, NUMBERS)
CONSTANTS = st.fixed_dictionaries(
    {
        "COMPUTE": st.sampled_from([tl.float32, tl.float64]),
        "BLOCK": st.sampled_from([64, 128]),
        "num_warps": st.sampled_from([4, 8]),
    }
)


# how launches are told apart: with the compiled module, and without
KEYS = [launcher.key_in_python, *[launcher.key_of] * (HOST is not None)]


@pytest.mark.parametrize("key", KEYS, ids=["python", "compiled"][: len(KEYS)])
@settings(max_examples=30, deadline=None)
@given(calls=st.lists(st.tuples(st.integers(1, 9), ARGUMENTS, CONSTANTS), min_size=8, max_size=24))
def test_calls_of_all_kinds_launch_what_triton_would(key, calls):
    """Launches in a row, with plans kept: dtypes, alignment, ones, multiples of 16, 64 bits, None."""
    with recording() as found, mock.patch.object(launcher, "key_of", key):
        for programs, arguments, constants in calls:
            _kernel[(programs,)](*arguments, **constants)
            launcher.launch(_kernel, programs, arguments, constants)
            launcher.launch(_kernel, programs, arguments, constants)
            theirs, first, second = found.calls[-3:]
            assert first == theirs
            assert second == theirs


def test_only_the_first_launch_of_a_kind_asks_triton():
    x = torch.empty(16, 64, dtype=torch.bfloat16)
    call = {"COMPUTE": tl.float32, "BLOCK": 64, "num_warps": 4}
    with recording() as found:
        for _ in range(3):
            launcher.launch(_kernel, 1, (x, None, None, 7, 64, 0.5, 0.5), call)
        assert (found.asked, found.compiled) == (1, 1)
        launcher.launch(_kernel, 2, (x.clone(), None, None, 7, 64, 0.25, 2.0), call)
        assert found.asked == 1
        launcher.launch(_kernel, 1, (x.half(), None, None, 7, 64, 0.5, 0.5), call)
        assert (found.asked, found.compiled) == (2, 2)


@pytest.mark.parametrize("key", KEYS, ids=["python", "compiled"][: len(KEYS)])
def test_keys_tell_apart_what_triton_compiles_apart(key):
    """Each line is one kind; the dispatcher hands an op new floats and strings at each call."""
    x = torch.empty(65, 64)
    blocks = [
        TensorDescriptor.from_tensor(torch.empty(16, 64, dtype=dtype), [rows, 64])
        for dtype, rows in (
            (torch.bfloat16, 16),
            (torch.bfloat16, 16),
            (torch.bfloat16, 8),
            (torch.float16, 16),
        )
    ]
    kinds = [
        [{}, {"x": x[1:]}, {"num_rows": 1}, {"num_rows": 16}, {"scale": 1.0}],
        [{"x": x.view(-1)[1:]}, {"x": x.view(-1)[5:]}],
        [{"x": x.bfloat16()}],
        [{"y": x}],
        [{"num_rows": 1 << 31}, {"num_rows": 1 << 40}],
        [{"pitch": 1}],
        [{"pitch": 2}],
        [{"pitch": 1 << 32}],
        [{"blocks": blocks[0]}, {"blocks": blocks[1]}],
        [{"blocks": blocks[2]}],
        [{"blocks": blocks[3]}],
        [{"COMPUTE": tl.float64}],
        [{"BLOCK": 128}],
        [{"BLOCK": 0.5}, {"BLOCK": float("0.50")}],
        [{"BLOCK": 0.25}],
        [{"BLOCK": "tanh of x"}, {"BLOCK": " ".join(["tanh", "of", "x"])}],
        [{"BLOCK": "tanh of y"}],
        [{"BLOCK": ""}],
        [{"BLOCK": True}],
        [{"BLOCK": False}],
    ]
    call = {"x": x, "y": None, "blocks": None, "num_rows": 7, "pitch": 64, "scale": 0.5, "exact": 0.5}
    call |= {"COMPUTE": tl.float32, "BLOCK": 64}

    def key_with(change):
        values = list((call | change).values())
        return key(_kernel, tuple(values[:7]), dict(zip(("COMPUTE", "BLOCK"), values[7:], strict=True)))

    keys = [{key_with(change) for change in kind} for kind in kinds]
    assert [len(each) for each in keys] == [1] * len(kinds)
    assert len(set().union(*keys)) == len(kinds)


def test_limits_hold_at_every_launch_of_a_plan(monkeypatch):
    """A later launch may have more rows or programs than the one that the plan was made for."""
    x = torch.empty(16, 64)
    call = {"COMPUTE": tl.float32, "BLOCK": 64, "num_warps": 4}
    monkeypatch.setattr(_kernel, "limits", {"programs": 8, "num_rows": 100, "pitch": 64, "BLOCK": 64})
    with recording() as found:
        for programs, rows in ((1, 7), (8, 100), (8, 1 << 31), (8, (1 << 31) + 1)):  # int64 has no limit
            launcher.launch(_kernel, programs, (x, None, None, rows, 64, 0.5, 0.5), call)
        for programs, rows, expected in (
            (1, 101, "expected num_rows of at most 100, got 101"),
            (9, 7, "expected programs of at most 8, got 9"),
            (9, 1 << 31, "expected programs of at most 8, got 9"),
        ):
            with pytest.raises(ValueError, match=expected):
                launcher.launch(_kernel, programs, (x, None, None, rows, 64, 0.5, 0.5), call)
        assert len(found.calls) == 4


def test_a_profiler_gets_its_hooks_called(monkeypatch):
    """Around each launch, with the metadata that Triton makes of it, as Proton asks for."""
    x, heard = torch.empty(16, 64), []
    call = {"COMPUTE": tl.float32, "BLOCK": 64, "num_warps": 4}
    hooks = triton.knobs.runtime
    with recording() as found:
        monkeypatch.setattr(hooks.launch_enter_hook, "calls", [lambda m: heard.append((m, len(found.calls)))])
        monkeypatch.setattr(hooks.launch_exit_hook, "calls", [lambda m: heard.append((m, len(found.calls)))])
        for _ in range(2):
            launcher.launch(_kernel, 1, (x, None, None, 7, 64, 0.5, 0.5), call)
        assert heard == [("_kernel", 0), ("_kernel", 1), ("_kernel", 1), ("_kernel", 2)]
        assert found.asked == 1


def test_blackwell_gets_no_tensor_maps_of_tritons_own(monkeypatch):
    """Without the compiled module their bit 85 stays set, whatever memory is there: see by_driver.py."""
    for ours in (True, False):
        monkeypatch.setattr(launcher, "SETS_TENSOR_MAPS", ours)
        assert [use_tma(arch, 2, True, 64) for arch in (80, 90, 100, 103)] == [False, True, ours, ours]


def test_only_launches_on_meta_tensors_are_replaced():
    call = {"COMPUTE": tl.float32, "BLOCK": 64, "num_warps": 4}
    replaced = []
    with recording() as found, launcher.intercept_launches(lambda *launch: replaced.append(launch), 90):
        for device in ("meta", "cpu"):
            x = torch.empty(16, 64, device=device)
            launcher.launch(_kernel, 1, (x, None, None, 7, 64, 0.5, 0.5), call)
    assert len(found.calls) == 1
    ((kernel, (tensor, *_), constants),) = replaced
    assert kernel is _kernel
    assert tensor.is_meta
    assert constants == call


@_triton.jit(dynamic="num_rows")
def _undeclared(x, num_rows, num_cols, scale, BLOCK: tl.constexpr):
    pass


def test_an_integer_that_is_not_declared_is_refused():
    x = torch.empty(16)
    with recording() as found:
        with pytest.raises(ValueError, match=r'_undeclared: .*num_cols .*@jit\(dynamic="num_cols"\)'):
            launcher.launch(_undeclared, 1, (x, 7, 64, 0.5), {"BLOCK": 64})
        launcher.launch(_undeclared, 1, (x, 7, 64.0, 0.5), {"BLOCK": 64})
    assert found.compiled == 1


def test_a_declaration_of_no_parameter_is_refused():
    with pytest.raises(ValueError, match=r"jit: _undeclared has no parameters \['columns'\]"):
        _triton.jit(_undeclared.fn, fixed="columns")


def test_tensors_on_two_devices_are_refused():
    x, there = torch.empty(16, 64), torch.empty(16, 64, device="meta")
    with recording(), pytest.raises(ValueError, match="_kernel: all tensors must be on one device"):
        call = {"COMPUTE": tl.float32, "BLOCK": 64, "num_warps": 4}
        launcher.launch(_kernel, 1, (x, there, None, 7, 64, 0.5, 0.5), call)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("op", "backend"), op_backends(("triton",)))
def test_launches_what_triton_would(op, backend, dtype, monkeypatch):
    """Grid, stream, code and values; the second of two launches does not ask Triton."""
    launch, launches = launcher.launch, 0

    def both(kernel, programs, arguments, constants):
        nonlocal launches
        launches += 1
        del found.calls[:]
        kernel[(programs,)](*arguments, **constants)
        launch(kernel, programs, arguments, constants)
        asked = found.asked
        launch(kernel, programs, arguments, constants)
        assert found.asked == asked
        theirs, first, second = found.calls
        assert first == theirs
        assert second == theirs

    with recording() as found:
        monkeypatch.setattr(launcher, "launch", both)
        for arguments in samples(op, device="cpu", dtype=dtype):
            run(op, OPS[op].implementations[backend], arguments)
    assert launches
    assert found.asked < 3 * launches


SUPPORT = Path(__file__).resolve().parents[2] / "support"


def _fake_driver(where: Path, *options: str) -> Path:
    """Compile fake_driver.c to a library that the loader takes for the CUDA driver's."""
    compiler = shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("Triton needs gcc or clang")
    library = where / "libcuda.so.1"
    headers = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
    options = ("-O1", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", f"-I{headers}", "-o", library, *options)
    subprocess.run([compiler, *options, SUPPORT / "fake_driver.c"], check=True)
    return library


@pytest.mark.full
@pytest.mark.skipif(HOST is None, reason="fastmp._host is not built")
@pytest.mark.skipif(not launcher.KNOWN, reason="launches by the driver are for Triton 3.6 to 3.9")
@pytest.mark.parametrize(
    ("options", "tests"),
    [((), ()), (("-DWITHOUT_PARAMETERS",), ("-k", "parameters_that_no_driver_tells"))],
    ids=["", "before CUDA 12.4"],
)
def test_the_driver_gets_what_triton_would_give_it(options, tests, tmp_path, request):
    """In a process of its own, which must not find another driver; sanitizers are loaded before this one."""
    fake_driver = _fake_driver(tmp_path, *options)
    more = ["--full"] if request.config.getoption("--full") else []
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *more, *tests, "by_driver.py"]
    variables = {
        "LD_PRELOAD": f"{os.environ.get('LD_PRELOAD', '')} {fake_driver}",
        "PYTHONPATH": str(Path(fastmp.__file__).parents[1]),
        "TRITON_LIBCUDA_PATH": str(fake_driver.parent),
    }
    done = subprocess.run(
        command, cwd=SUPPORT, env={**os.environ, **variables},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


@pytest.mark.parametrize("key", KEYS, ids=["python", "compiled"][: len(KEYS)])
@pytest.mark.parametrize("offset", [0, 3])
def test_a_tensor_whose_storage_was_freed_is_not_launched(key, offset):
    """Its address is null, or that of its offset."""
    freed, empty = torch.randn(64), torch.empty(0)
    others = None, None, 7, 64, 0.5, 0.5
    view = freed[offset:]
    key(_kernel, (view, *others), {})
    freed.untyped_storage().resize_(0)
    with pytest.raises(
        ValueError, match=r"^_kernel: expected memory for the elements of x, got a tensor whose"
    ):
        key(_kernel, (view, *others), {})
    key(_kernel, (empty, *others), {})
