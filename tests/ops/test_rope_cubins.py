"""What Triton makes of the rope kernel: resources, access widths, no detour through shared memory."""

from __future__ import annotations

import importlib
import re

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from cubin_tools import ITEMSIZE, Launch, cases, check_resources, compute, wide_loads, wide_stores

from fastmp.ops import _triton

module = importlib.import_module("fastmp.ops.rope")  # the name in the package is the function

SIZES = ("q_rows", "q_size_1", "q_size_2", "q_stride_0", "q_stride_1", "q_stride_2")
TENSORS = ("q", "q_out", "k", "k_out")


def launch(dtype: str, width: int, rotated: int, interleaved: bool, in_place: bool) -> Launch:
    """As for heads of `width` elements, queries and keys together."""
    itemsize = ITEMSIZE[dtype]
    block_m, block_half = module.block_shape(rotated // 2, itemsize)
    constants = {
        "HAS_K": True,
        "INTERLEAVED": interleaved,
        "INVERSE": True,
        "IN_PLACE": in_place,
        "HALF": rotated // 2,
        "DIM": width,
        "VECTOR": 16 // itemsize,
        "TURN_VECTOR": 16 // ITEMSIZE[compute(dtype)],
        "BLOCK_M": block_m,
        "BLOCK_HALF": block_half,
        "COMPUTE": _triton.tl.float64 if dtype == "fp64" else _triton.tl.float32,
        "INDEX": _triton.tl.int32,
    }
    tensors = dict.fromkeys(TENSORS, f"*{dtype}") | dict.fromkeys(("cos", "sin"), f"*{compute(dtype)}")
    sizes = (*SIZES, *(name.replace("q_", "k_") for name in SIZES), "turn_0", "turn_1", "turn_2")
    return Launch(module.rope_kernel, tensors, sizes, constants, module.NUM_WARPS)


FORMS = {
    "halves 64": (64, 64, False, False),
    "halves 128": (128, 128, False, False),
    "halves 256": (256, 256, False, True),
    "pairs 128": (128, 128, True, False),
    "pairs 64 in place": (64, 64, True, True),
    "part of 128": (128, 32, False, False),
}


@pytest.mark.parametrize(("name", "dtype", "arch"), cases(FORMS))
def test_kernel(name, dtype, arch):
    cubin = launch(dtype, *FORMS[name]).compile(arch)
    check_resources(cubin, dtype, arch)
    if not name.startswith("pairs") or ITEMSIZE[dtype] == 2:  # 16 bytes of x are as many pairs as 16 of cos
        assert cubin.shared == 0, "elements change threads"
    if dtype != "fp64":
        assert cubin.registers <= 64  # 1024 threads of a multiprocessor, with 64 KiB of x on the way
    assert wide_loads(cubin) == len(re.findall(r"\bld\.global", cubin.ptx))
    assert wide_stores(cubin) == len(re.findall(r"\bst\.global", cubin.ptx))
    if FORMS[name][0] == FORMS[name][1]:  # twice 16 bytes of each half, for q and for k
        assert wide_stores(cubin) == 8


@pytest.mark.parametrize("interleaved", (False, True), ids=("halves", "pairs"))
def test_odd_part_of_a_head(interleaved):
    """20 of 80 elements (Phi-2): halves begin at multiples of 4 bytes, and no access is narrower."""
    cubin = launch("bf16", 80, 20, interleaved, False).compile(90)
    check_resources(cubin, "bf16", 90)
    widths = re.findall(r"\b(?:ld|st)\.global\S*\.(b\d+)", cubin.ptx)
    assert widths and "b16" not in widths


def test_levels_of_one_and_absent_keys_compile():
    """The launcher makes constants of integers that equal 1 and of None."""
    described = launch("bf16", 128, 128, False, False)
    assert described.specialised(("k", "k_out"), {"HAS_K": False}).compile(90).spill_bytes == 0
