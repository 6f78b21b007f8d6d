"""What Triton makes of the bias-dropout-add kernels: resources, access widths, multiplications of Philox."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from cubin_tools import ITEMSIZE, Launch, cases, check_resources, compute, wide_loads, wide_stores

from fastmp.ops import _triton, dropout, rows

COLUMNS = 8192
MASK = {"threshold": "i64", "scale": "i64"}


def launch(name: str, dtype: str) -> Launch:
    """As for rows of 8192 columns; `name` is the kernel, then "plain" (p = 0), "wide" (a residual, and a
    gradient, in fp32) or "no-bias"."""
    kernel, _, form = name.partition(" ")
    data, wide = f"*{dtype}", "*fp32" if form == "wide" else f"*{dtype}"
    itemsize = ITEMSIZE[wide[1:]]
    block_m, block_n = rows.block_shape(COLUMNS, itemsize)
    constants = {
        "HAS_BIAS": form != "no-bias",
        "COMPUTE": _triton.tl.float64 if dtype == "fp64" else _triton.tl.float32,
        "VECTOR": 16 // itemsize,
        "WHOLE": True,
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
    }
    if kernel == "forward":
        tensors = {"x": data, "bias": data, "residual": wide, "y": wide, "seed": "*i64"}
        sizes = ("num_rows", "num_vectors", "x_pitch", "residual_pitch")
        constants["DROPS"] = form != "plain"
        return Launch(dropout.bias_dropout_add_kernel, tensors, sizes, constants, rows.NUM_WARPS, kinds=MASK)
    tensors = {"grad": wide, "dx": data, "partials": f"*{compute(dtype)}", "seed": "*i64"}
    sizes = ("num_rows", "rows_per_strip", "num_vectors", "grad_pitch")
    return Launch(
        dropout.bias_dropout_add_backward_kernel, tensors, sizes, constants, rows.NUM_WARPS, kinds=MASK
    )


def elements_per_thread(described: Launch) -> int:
    block = described.constants["BLOCK_M"] * described.constants["BLOCK_N"]
    return block // (32 * described.num_warps)


@pytest.mark.parametrize(
    ("name", "dtype", "arch"),
    cases(
        ("forward", "forward plain", "forward wide", "backward", "backward no-bias", "backward wide"),
        without=[(name, dtype) for name in ("forward wide", "backward wide") for dtype in ("fp64", "fp32")],
    ),
)
def test_kernel(name, dtype, arch):
    described = launch(name, dtype)
    cubin = described.compile(arch)
    check_resources(cubin, dtype, arch)
    assert wide_loads(cubin), "no 16-byte load"
    assert wide_stores(cubin), "no 16-byte store"
    assert cubin.registers <= 128
    if dtype == "fp64":
        return
    if name.startswith("forward") or name == "backward no-bias":
        assert cubin.shared == 0 and "bar.sync" not in cubin.ptx, "words are exchanged between threads"
    if name != "forward plain":  # 20 products for four elements, of which some have a constant factor
        groups = elements_per_thread(described) / 4
        products = cubin.ptx.count("mul.wide.u32") + cubin.ptx.count("mul.hi.u32")
        assert 15 * groups <= products <= 20 * groups


def test_a_product_of_philox_is_one_instruction():
    """tl.randint4x has the same words and multiplies twice, once for each half of the 64 bits."""
    described = launch("forward", "bf16")
    code, groups = described.compile(90).sass, elements_per_thread(described) / 4
    assert 17 * groups <= len(re.findall(r"IMAD\.WIDE\.U32", code)) <= 20 * groups
    assert len(re.findall(r"IMAD\.HI\.U32", code)) <= 2 * groups


@pytest.mark.parametrize("name", ["forward", "backward"])
def test_sizes_of_one_and_absent_tensors_compile(name):
    """The launcher makes constants of integers that equal 1 and of None."""
    described = launch(name, "bf16")
    absent = [tensor for tensor in ("bias", "partials") if tensor in described.tensors]
    narrow = {"HAS_BIAS": False, "VECTOR": 1, "WHOLE": False}
    assert described.specialised(absent, narrow).compile(90).spill_bytes == 0


@pytest.mark.parametrize("name", ["forward", "backward"])
@pytest.mark.parametrize("whole", (True, False))
def test_rows_that_are_not_aligned_do_not_spill(name, whole):
    described = launch(name, "bf16")
    block_m = described.constants["BLOCK_M"] // (1 if whole else 4)
    constants = {**described.constants, "VECTOR": 4 if whole else 1, "WHOLE": whole, "BLOCK_M": block_m}
    odd = Launch(
        described.kernel, described.tensors, described.sizes, constants, described.num_warps, kinds=MASK
    )
    cubin = odd.compile(90)
    assert cubin.spill_bytes == 0 and cubin.registers <= 128
