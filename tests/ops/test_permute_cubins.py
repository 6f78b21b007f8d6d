"""What Triton makes of the kernels of permutation, permute and unpermute: resources, access widths."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from cubin_tools import ITEMSIZE, REGISTERS, Launch, cases, check_resources, compute, wide_loads, wide_stores

from fastmp.ops import _triton, rows
from fastmp.ops import permute_triton as kernels

COLUMNS = 7168
SORTS = ("count", "sum_blocks", "rank", "mark")
MOVES = ("permute", "unpermute", "unpermute weighted", "unpermute_backward")


def sort_launch(name: str, experts: int) -> Launch:
    """The steps of permutation, and the flags of rows in use."""
    numbers = dict.fromkeys(("indices", "counts", "totals", "row_of", "offsets"), "*i32")
    blocks = {"BLOCK": kernels.BLOCK_PAIRS, "BINS": experts}
    if name == "count":
        tensors = {key: numbers[key] for key in ("indices", "counts")}
        return Launch(kernels.count_kernel, tensors, ("num_pairs", "num_experts"), blocks, rows.NUM_WARPS)
    if name == "sum_blocks":
        constants = {"BLOCK_B": kernels.BLOCK_BLOCKS, "BLOCK_E": kernels.BLOCK_EXPERTS}
        tensors = {key: numbers[key] for key in ("counts", "totals")}
        sizes = ("num_blocks", "num_experts")
        return Launch(kernels.sum_blocks_kernel, tensors, sizes, constants, rows.NUM_WARPS)
    if name == "rank":
        sizes = ("num_pairs", "num_experts")
        constants = blocks | {"STEP": kernels.STEP}
        return Launch(kernels.rank_kernel, numbers, sizes, constants, rows.NUM_WARPS)
    tensors = {"row_of": "*i32", "used": "*u8"}
    return Launch(kernels.mark_kernel, tensors, ("num_pairs", "num_rows"), {"BLOCK": 1024}, rows.NUM_WARPS)


def launch(name: str, dtype: str) -> Launch:
    """As for rows of 7168 columns, eight a token."""
    if name in SORTS:
        return sort_launch(name, 256)
    data, sums = f"*{dtype}", f"*{compute(dtype)}"
    weighted = name in ("unpermute weighted", "unpermute_backward")
    constants = {
        "WEIGHTED": weighted,
        "COMPUTE": _triton.tl.float64 if dtype == "fp64" else _triton.tl.float32,
        "VECTOR": 16 // ITEMSIZE[dtype],
    }
    scatters = name in ("permute", "unpermute_backward")
    shape = kernels.block_shape(COLUMNS, ITEMSIZE[dtype], 4 if scatters else 2)
    constants |= dict(zip(("BLOCK_M", "BLOCK_N"), shape, strict=True))
    tensors = {"y": data, "row_of": "*i32", "probs": sums, "out": data}
    if scatters:
        tensors |= {"x": data, "used": "*u8", "dprobs": sums}
        constants["ZERO_ROWS"] = kernels.ZERO_ROWS
        sizes = ("num_pairs", "num_slots", "num_rows", "num_vectors", "x_pitch", "y_pitch")
    else:
        constants["SLOTS"] = kernels.SLOTS
        sizes = ("num_tokens", "num_slots", "num_rows", "num_vectors", "y_pitch")
    absent = () if weighted else ("probs", "dprobs", "y") if scatters else ("probs",)
    tensors = {key: kind for key, kind in tensors.items() if key not in absent}
    kernel = kernels.scatter_kernel if scatters else kernels.gather_kernel
    return Launch(kernel, tensors, sizes, constants | dict.fromkeys(absent), rows.NUM_WARPS)


@pytest.mark.parametrize(("name", "dtype", "arch"), cases(MOVES))
def test_moves(name, dtype, arch):
    """Accesses of 16 bytes only, all slots of a token in flight, room for half of the threads or more."""
    cubin = launch(name, dtype).compile(arch)
    check_resources(cubin, dtype, arch)
    if name.startswith("unpermute") and name != "unpermute_backward":
        assert wide_loads(cubin) >= 2 * kernels.SLOTS and wide_stores(cubin) >= 2
    else:
        assert wide_loads(cubin) >= (4 if name == "permute" else 8)
        assert wide_stores(cubin) >= 8, "the rows, and those of zeros"
    narrow = re.findall(r"[ls][dt]\.global\S*\.v2\.b32|[ls][dt]\.global\S*\.v4\.b16", cubin.ptx)
    assert not narrow
    threads = 32 * rows.NUM_WARPS
    assert REGISTERS // (cubin.registers * threads) * threads >= (1024 if name == "permute" else 512)


@pytest.mark.parametrize("arch", [90, pytest.param(100, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("experts", (32, 256, 512))
@pytest.mark.parametrize("name", SORTS)
def test_sorts(name, experts, arch):
    cubin = sort_launch(name, experts).compile(arch)
    check_resources(cubin, "fp32", arch)
    assert cubin.registers <= 128 and cubin.shared <= 16 << 10
    assert "atom.global" not in cubin.ptx and "red.global" not in cubin.ptx  # which would lose the order


@pytest.mark.parametrize("name", (*SORTS, "permute", "unpermute weighted", "unpermute_backward"))
def test_sizes_of_one_compile(name):
    """The launcher makes constants of integers that equal 1: one token, one slot, one row, one expert."""
    assert (
        launch(name, "bf16")
        .specialised(constants={"SLOTS": 1} if "weighted" in name else None)
        .compile(90)
        .spill_bytes
        == 0
    )
