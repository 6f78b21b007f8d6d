"""What Triton makes of the kernels of swiglu and geglu: resources, access widths, exponentials."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from cubin_tools import (
    ITEMSIZE,
    Launch,
    cases,
    check_resources,
    compute,
    exponentials,
    wide_loads,
    wide_stores,
)

from fastmp.ops import _triton, gated, rows

COLUMNS = 14336


def launch(name: str, dtype: str) -> Launch:
    """As for halves of 14336 columns."""
    data, sums = f"*{dtype}", f"*{compute(dtype)}"
    direction, form = name.split()
    shape = rows.block_shape if direction == "forward" else gated.backward_block_shape
    block_m, block_n = shape(COLUMNS, ITEMSIZE[dtype])
    constants = {
        "HAS_BIAS": True,
        "FORM": form,
        "COMPUTE": _triton.tl.float64 if dtype == "fp64" else _triton.tl.float32,
        "VECTOR": 16 // ITEMSIZE[dtype],
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
    }
    if direction == "forward":
        tensors = {"x": data, "bias": data, "y": data}
        sizes = ("num_rows", "num_vectors", "x_pitch")
        return Launch(gated.gated_activation_kernel, tensors, sizes, constants, rows.NUM_WARPS)
    tensors = {"grad": data, "x": data, "bias": data, "dx": data, "partials": sums}
    sizes = ("num_rows", "rows_per_strip", "num_vectors", "grad_pitch", "x_pitch")
    return Launch(gated.gated_activation_backward_kernel, tensors, sizes, constants, rows.NUM_WARPS)


NAMES = tuple(f"{direction} {form}" for direction in ("forward", "backward") for form in gated._FUNCTION)


@pytest.mark.parametrize(("name", "dtype", "arch"), cases(NAMES))
def test_kernel(name, dtype, arch):
    described = launch(name, dtype)
    cubin = described.compile(arch)
    check_resources(cubin, dtype, arch)
    block = described.constants["BLOCK_M"] * described.constants["BLOCK_N"]
    elements = block // (32 * described.num_warps)
    accesses = elements * ITEMSIZE[dtype] // 16
    tensors = 2 if name.startswith("forward") else 3
    assert wide_loads(cubin) >= tensors * accesses, "loads narrower than 16 bytes"
    assert wide_stores(cubin) >= (tensors - 1) * accesses, "stores narrower than 16 bytes"
    if dtype != "fp64":
        assert cubin.registers <= 128
        if name.endswith(("silu", "tanh")):
            assert exponentials(cubin) == elements  # one each, shared by the activation and its slope


@pytest.mark.parametrize("name", ["forward silu", "backward silu"])
def test_sizes_of_one_and_absent_tensors_compile(name):
    """The launcher makes constants of integers that equal 1 and of None."""
    described = launch(name, "bf16")
    absent = [name for name in ("bias", "partials") if name in described.tensors]
    assert described.specialised(absent, {"HAS_BIAS": False}).compile(90).spill_bytes == 0
