"""What Triton makes of the norm kernels: resources, access widths, each element read once."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from cubin_tools import (
    ITEMSIZE,
    REGISTERS,
    SHARED_LIMIT,
    Launch,
    cases,
    check_resources,
    compute,
    wide_loads,
    wide_stores,
)

from fastmp.ops import _triton, norm_triton

# (kernel, columns, centred): rows of 8192 are the longest of which the backward holds whole ones
KERNELS = {
    "rms_norm": (norm_triton.norm_kernel, 8192, False),
    "layer_norm": (norm_triton.norm_kernel, 8192, True),
    "layer_norm long": (norm_triton.norm_kernel, 16384, True),
    "layer_norm wide": (norm_triton.norm_wide_kernel, 20480, True),
    "rms_norm_backward": (norm_triton.norm_backward_kernel, 4096, False),
    "layer_norm_backward": (norm_triton.norm_backward_kernel, 8192, True),
    "layer_norm_backward wide": (norm_triton.norm_backward_wide_kernel, 12288, True),
}


def launch(name: str, dtype: str, columns: int | None = None) -> Launch:
    """With a residual and a bias; rows of f64, and of fp32 backward, are 4096 columns long at most."""
    kernel, most, centred = KERNELS[name]
    itemsize, data, sums = ITEMSIZE[dtype], f"*{dtype}", f"*{compute(dtype)}"
    shorter = dtype == "fp64" or (dtype == "fp32" and "backward" in name)
    columns = columns or (min(most, 4096) if shorter and "wide" not in name else most)
    constants = {
        "CENTRED": centred,
        "HAS_BIAS": centred,
        "COMPUTE": _triton.tl.float64 if dtype == "fp64" else _triton.tl.float32,
        "VECTOR": 16 // itemsize,
    }
    block = norm_triton.block_shape(columns, itemsize, backward="backward" in name)
    if kernel is norm_triton.norm_wide_kernel:
        tensors = dict.fromkeys(("total", "weight", "bias", "y"), data) | {"stats": sums}
        _, block_n, num_warps = norm_triton.WIDE_BLOCK
        constants |= {"EPS": 1e-5, "BLOCK_N": block_n}
        return Launch(kernel, tensors, ("num_rows", "num_vectors", "total_pitch"), constants, num_warps)
    block_m, block_n, num_warps = block or norm_triton.WIDE_BACKWARD_BLOCK
    constants |= {"BLOCK_M": block_m, "BLOCK_N": block_n}
    if "backward" not in name:
        tensors = dict.fromkeys(("x", "residual", "weight", "bias", "y", "total"), data) | {"stats": sums}
        sizes = "num_rows", "num_vectors", "x_pitch", "residual_pitch"
        return Launch(kernel, tensors, sizes, {**constants, "EPS": 1e-5, "HAS_RESIDUAL": True}, num_warps)
    tensors = dict.fromkeys(("grad", "grad_total", "total", "weight", "dx"), data)
    tensors |= {"stats": sums, "partials": sums}
    sizes = "num_rows", "num_vectors", "grad_pitch", "grad_total_pitch", "total_pitch"
    constants |= {"HAS_GRAD_TOTAL": True, "NUM_STAGES": norm_triton.num_stages(itemsize)}
    return Launch(kernel, tensors, sizes, constants, num_warps)


def wide_copies(cubin: _triton.Cubin) -> int:
    """Number of 16-byte copies from global to shared memory in the code."""
    return len(re.findall(r"cp\.async\.c[ag]\.shared\.global.*, 0x10", cubin.ptx))


def per_multiprocessor(cubin: _triton.Cubin, num_warps: int, arch: int) -> int:
    """Programs that fit on one by registers and shared memory."""
    return min(REGISTERS // (cubin.registers * 32 * num_warps), SHARED_LIMIT[arch] // max(cubin.shared, 1))


@pytest.mark.parametrize(("name", "dtype", "arch"), cases(KERNELS))
def test_kernel(name, dtype, arch):
    described = launch(name, dtype)
    cubin = described.compile(arch)
    check_resources(cubin, dtype, arch)
    assert wide_stores(cubin), "no 16-byte store"
    threads = 32 * described.num_warps
    vectors = described.constants["BLOCK_N"] // (threads * described.constants["VECTOR"])
    if described.kernel is norm_triton.norm_kernel:
        assert described.constants["BLOCK_M"] == 1
        assert wide_loads(cubin) == vectors * (4 if "layer_norm" in name else 3)  # x, residual, weight, bias
    elif described.kernel is norm_triton.norm_backward_kernel:
        assert described.constants["BLOCK_M"] == 1
        # a block of rows is copied once: before the loop for each stage but one, and once in it
        assert wide_copies(cubin) == 3 * vectors * described.constants["NUM_STAGES"]
        if dtype == "bf16":
            assert per_multiprocessor(cubin, described.num_warps, arch) * described.num_warps >= 16
    elif name == "layer_norm wide":
        assert wide_loads(cubin) == 5 * vectors
    if name == "rms_norm" and dtype != "fp64":
        assert per_multiprocessor(cubin, described.num_warps, arch) >= 2


@pytest.mark.parametrize("name", ["rms_norm", "layer_norm", "rms_norm_backward", "layer_norm_backward"])
@pytest.mark.parametrize("columns", (128, 2048))
def test_several_rows_a_program(name, columns):
    described = launch(name, "bf16", columns)
    assert described.constants["BLOCK_M"] > 1
    cubin = described.compile(90)
    check_resources(cubin, "bf16", 90)
    assert wide_loads(cubin) and wide_stores(cubin)


@pytest.mark.parametrize("name", list(KERNELS))
def test_sizes_of_one_and_absent_tensors_compile(name):
    """The launcher makes constants of integers that equal 1 and of None."""
    described = launch(name, "bf16")
    absent = [name for name in ("residual", "bias", "grad_total") if name in described.tensors]
    flags = {"HAS_RESIDUAL", "HAS_BIAS", "HAS_GRAD_TOTAL"} & set(described.constants)
    assert described.specialised(absent, dict.fromkeys(flags, False)).compile(90).spill_bytes == 0


@pytest.mark.parametrize("name", ["layer_norm", "layer_norm_backward"])
def test_rows_of_odd_length_compile(name):
    """Their accesses are as narrow as an element, and nothing is copied ahead."""
    described = launch(name, "bf16", 4095)
    described.constants["VECTOR"] = 1
    cubin = described.compile(90)
    check_resources(cubin, "bf16", 90)
    assert not wide_copies(cubin)
