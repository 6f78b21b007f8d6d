"""What Triton makes of the bias-GeLU kernels: resources, access widths, exponentials."""

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

from fastmp.ops import _triton, activation, rows

COLUMNS = 8192


def launch(name: str, dtype: str) -> Launch:
    """As for rows of 8192 columns."""
    data, sums = f"*{dtype}", f"*{compute(dtype)}"
    if name == "sum_strips":
        return Launch(
            rows.sum_strips_kernel, {"partials": sums, "sums": data}, ("num_strips", "num_cols"),
            {"BLOCK_M": 128, "BLOCK_N": 32}, rows.NUM_WARPS, aligned=("num_cols",),
        )  # fmt: skip
    kernel, form = name.split()
    block_m, block_n = rows.block_shape(COLUMNS, ITEMSIZE[dtype])
    constants = {
        "HAS_BIAS": True,
        "TANH": form == "tanh",
        "COMPUTE": _triton.tl.float64 if dtype == "fp64" else _triton.tl.float32,
        "VECTOR": 16 // ITEMSIZE[dtype],
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
    }
    if kernel == "bias_gelu":
        tensors = {"x": data, "bias": data, "y": data}
        sizes = ("num_rows", "num_vectors", "x_pitch")
        return Launch(activation.bias_gelu_kernel, tensors, sizes, constants, rows.NUM_WARPS)
    tensors = {"grad": data, "x": data, "bias": data, "dx": data, "partials": sums}
    sizes = ("num_rows", "rows_per_strip", "num_vectors", "grad_pitch", "x_pitch")
    return Launch(activation.bias_gelu_backward_kernel, tensors, sizes, constants, rows.NUM_WARPS)


NAMES = (
    "bias_gelu tanh",
    "bias_gelu none",
    "bias_gelu_backward tanh",
    "bias_gelu_backward none",
    "sum_strips",
)


@pytest.mark.parametrize(("name", "dtype", "arch"), cases(NAMES))
def test_kernel(name, dtype, arch):
    described = launch(name, dtype)
    cubin = described.compile(arch)
    check_resources(cubin, dtype, arch)
    if name != "sum_strips":
        assert wide_loads(cubin), "no 16-byte load"
        assert wide_stores(cubin), "no 16-byte store"
    if name == "bias_gelu tanh" and dtype != "fp64":
        block = described.constants["BLOCK_M"] * described.constants["BLOCK_N"]
        assert exponentials(cubin) == block // (32 * described.num_warps)


@pytest.mark.parametrize("name", ["bias_gelu tanh", "bias_gelu_backward tanh"])
def test_sizes_of_one_and_absent_tensors_compile(name):
    """The launcher makes constants of integers that equal 1 and of None."""
    described = launch(name, "bf16")
    absent = [name for name in ("bias", "partials") if name in described.tensors]
    assert described.specialised(absent, {"HAS_BIAS": False}).compile(90).spill_bytes == 0
