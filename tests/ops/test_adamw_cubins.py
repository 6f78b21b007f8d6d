"""What Triton makes of the AdamW kernel: resources, access widths, the arguments that stay float64."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from cubin_tools import ITEMSIZE, REGISTERS, Launch, cases, check_resources, compute, wide_loads, wide_stores

from fastmp.ops import adamw

SCALARS = ("lr_tensor", "inv_scale", "clip_coefficient")
NUMBERS = ("lr", "beta1", "beta2", "log_beta1", "log_beta2", "eps", "weight_decay")


def launch(name: str, dtype: str) -> Launch:
    """Gradients of `dtype`; a copy of the parameters in it where that is 16 bits; all scalars as tensors."""
    main = compute(dtype)
    tensors = {"param": f"*{main}", "grad": f"*{dtype}", "exp_avg": f"*{main}", "exp_avg_sq": f"*{main}"}
    tensors |= {"step": "*i64", **dict.fromkeys(SCALARS, "*fp32"), "found_inf": "*i1"}
    constants = {"VECTOR": 16 // ITEMSIZE[main], "BLOCK": adamw.block_size(ITEMSIZE[main])}
    if ITEMSIZE[dtype] == 2:
        tensors["low_precision_out"] = f"*{dtype}"
    else:
        constants["low_precision_out"] = None
    return Launch(
        adamw.adamw_kernel, tensors, ("num_vectors", "num_decayed"), constants, adamw.NUM_WARPS,
        kinds=dict.fromkeys(NUMBERS, "fp64"),
    )  # fmt: skip


@pytest.mark.parametrize(("name", "dtype", "arch"), cases(["adamw"]))
def test_kernel(name, dtype, arch):
    cubin = launch(name, dtype).compile(arch)
    check_resources(cubin, dtype, arch)
    # parameters and both averages, four accesses a thread each; the gradient where it is as wide
    assert wide_stores(cubin) == 12
    assert wide_loads(cubin) == (12 if ITEMSIZE[dtype] == 2 else 16)
    if ITEMSIZE[dtype] == 2:  # a thread's four elements are 8 bytes there, a warp's 256 without a gap
        assert len(re.findall(r"ld\.global\S*\.v2\.b32", cubin.ptx)) == 4
        assert len(re.findall(r"st\.global\S*\.v2\.b32", cubin.ptx)) == 4
    assert cubin.shared <= 8  # nothing is exchanged between threads but the ticket
    assert re.findall(r"\b(?:atom|red)\.\S+", cubin.ptx) == ["atom.global.gpu.relaxed.add.u64"]
    if dtype != "fp64":  # 512 threads or more a multiprocessor, each with 12 wide loads under way: 96 KiB
        assert REGISTERS // (cubin.registers * 32 * adamw.NUM_WARPS) >= 4
        assert not re.findall(r"(?:div|sqrt|fma)\.\S*f64", cubin.ptx)  # slow on some GPUs


@pytest.mark.parametrize("absent", [(), (*SCALARS, "found_inf")], ids=("scalars", "none"))
def test_sizes_of_one_and_absent_tensors_compile(absent):
    """The launcher makes constants of integers that equal 1 and of None."""
    assert launch("adamw", "fp32").specialised(absent).compile(90).spill_bytes == 0


def test_more_than_two_billion_elements_compile_alike():
    """Sizes beyond int32 reach the kernel as int64."""
    few, many = launch("adamw", "bf16"), launch("adamw", "bf16")
    many.kinds.update(num_vectors="i64", num_decayed="i64")
    cubins = [described.compile(90) for described in (few, many)]
    assert len({(wide_loads(cubin), wide_stores(cubin), cubin.shared) for cubin in cubins}) == 1


def test_numbers_reach_the_kernel_in_float64():
    """A Python float would otherwise be passed as float32."""
    types = {param.name: param.annotation_type for param in adamw.adamw_kernel.params}
    assert {types[name] for name in NUMBERS} == {"fp64"}
