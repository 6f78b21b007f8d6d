"""What Triton makes of the softmax kernels: resources, access widths, exponentials."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from cubin_tools import (
    ITEMSIZE,
    REGISTERS,
    Launch,
    cases,
    check_resources,
    exponentials,
    wide_loads,
    wide_stores,
)

from fastmp.ops import _triton, softmax


def launch(name: str, dtype: str) -> Launch:
    """As for so many keys; the forward has a mask where it is not causal."""
    direction, keys = name.split()[0], int(name.split()[1])
    block_m, block_n, num_warps, whole = softmax.block_shape(4096, keys, ITEMSIZE[dtype])
    constants = {
        "CAUSAL": name.endswith("causal"),
        "COMPUTE": _triton.tl.float64 if dtype == "fp64" else _triton.tl.float32,
        "VECTOR": 16 // ITEMSIZE[dtype],
        "WHOLE": whole,
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
    }
    data = f"*{dtype}"
    if direction == "backward":
        tensors = {"grad": data, "y": data, "dx": data}
        sizes = ("num_queries", "num_vectors", "grad_pitch", "y_pitch")
        return Launch(
            softmax.softmax_backward_kernel, tensors, sizes, constants, num_warps, kinds={"scale": "fp64"}
        )
    tensors = {"x": data, "mask": "*u8", "y": data}
    strides = ("mask_outer", "mask_inner", "mask_query")
    sizes = ("num_queries", "num_vectors", "x_pitch", "num_inner", *strides)
    constants |= {"HAS_MASK": True, "mask_key": 1}
    described = Launch(
        softmax.softmax_kernel,
        tensors,
        sizes,
        constants,
        num_warps,
        aligned=strides,
        kinds={"scale": "fp64"},
    )
    if constants["CAUSAL"]:
        del tensors["mask"]
        constants |= {"HAS_MASK": False, "mask": None}
    return described


NAMES = (
    "forward 128",
    "backward 128 causal",
    "forward 4096",
    "forward 4096 causal",
    "backward 4096",
    "backward 4096 causal",
    "forward 16384",
    "backward 16384",
    "forward 65536 causal",
    "backward 65536",
)


@pytest.mark.parametrize(("name", "dtype", "arch"), cases(NAMES))
def test_kernel(name, dtype, arch):
    described = launch(name, dtype)
    cubin = described.compile(arch)
    check_resources(cubin, dtype, arch)
    c = described.constants
    elements = c["BLOCK_M"] * c["BLOCK_N"] // (32 * described.num_warps)
    accesses = elements * ITEMSIZE[dtype] // 16
    passes, tensors = 1 if c["WHOLE"] else 2, 1 if name.startswith("forward") else 2
    assert wide_loads(cubin) >= passes * tensors * accesses, "loads narrower than 16 bytes"
    assert wide_stores(cubin) >= accesses, "stores narrower than 16 bytes"
    assert cubin.registers * 32 * described.num_warps <= REGISTERS
    if dtype != "fp64":
        # one a score, two and the rescaling of the sum where rows are read twice; none in the backward
        wanted = 0 if name.startswith("backward") else elements if c["WHOLE"] else 2 * elements + 1
        assert exponentials(cubin) == wanted


@pytest.mark.parametrize("name", ["forward 4096", "backward 4096"])
def test_sizes_of_one_compile(name):
    """The launcher makes constants of integers that equal 1."""
    assert launch(name, "bf16").specialised().compile(90).spill_bytes == 0
