"""What Triton makes of the grouped products: resources, tensor core instructions, TMA, access widths."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from cubin_tools import ITEMSIZE, Launch, cases, check_resources, compute, wide_loads, wide_stores

from fastmp.ops import _triton
from fastmp.ops import grouped_mm_triton as kernels

N, K = 4096, 7168
TOKENS = {"decode": 1, "few": 48, "fine": 200, "large": 4096}
FORMS = {
    "none": ("none", False),
    "swiglu": ("silu", True),
    "geglu": ("gelu", True),
    "gelu": ("gelu_tanh", False),
}
SIZES = ("num_rows", "num_experts", "n_vectors", "k_vectors", "x_pitch", "w_jump", "w_pitch")
WGRAD_SIZES = ("num_rows", "n_vectors", "k_vectors", "grad_pitch", "x_pitch", "out_jump", "out_pitch")


def tma_of(dtype: str, arch: int) -> bool:
    return ITEMSIZE[dtype] == 2 and arch >= 90


def product(form: str, tokens: str, transposed: bool, dtype: str, arch: int, tma: bool) -> Launch:
    """As launched for so many tokens an expert, up to 255 experts."""
    activation, gated = FORMS[form]
    blocks = kernels.product_blocks(TOKENS[tokens], N, K, ITEMSIZE[dtype], arch if tma else 80, gated)
    data, fused = f"*{dtype}", form != "none"
    tensors = dict.fromkeys(("x", "w", "bias", "offsets", "y", "h"), data) | {"offsets": "*i32"}
    kinds = {}
    if tma:
        block = (blocks.terms, blocks.columns) if transposed else (blocks.columns, blocks.terms)
        kinds = {
            "x": f"tensordesc<{dtype}[{blocks.rows},{blocks.terms}]>",
            "w": f"tensordesc<{dtype}[1,{block[0]},{block[1]}]>",
        }
    absent = {} if fused else {"bias": None, "h": None}
    constants = {
        "FORM": activation,
        "GATED": gated,
        "KEEP": fused,
        "HAS_BIAS": fused,
        "TRANSPOSED": transposed,
        "TMA": tma,
        "COMPUTE": _triton.tl.float64 if dtype == "fp64" else _triton.tl.float32,
        **dict.fromkeys(("N_VECTOR", "K_VECTOR", "W_VECTOR"), 16 // ITEMSIZE[dtype]),
        "BLOCK_E": 256,
        "BLOCK_M": blocks.rows,
        "BLOCK_N": blocks.columns,
        "BLOCK_K": blocks.terms,
        "GROUP": kernels._GROUP,
        **absent,
    }
    tensors = {name: kind for name, kind in tensors.items() if name not in kinds and name not in absent}
    return Launch(
        kernels.grouped_mm_kernel, tensors, SIZES, constants, blocks.num_warps, num_stages=blocks.num_stages,
        kinds=kinds,
    )  # fmt: skip


def wgrad(accumulate: bool, dtype: str, arch: int, tma: bool) -> Launch:
    blocks = kernels.wgrad_blocks(N, K, ITEMSIZE[dtype], arch if tma else 80)
    data, total = f"*{dtype}", f"*{compute(dtype)}" if accumulate else f"*{dtype}"
    descriptors = {
        "grad_rows": f"tensordesc<{dtype}[{blocks.terms},{blocks.rows}]>",
        "x_rows": f"tensordesc<{dtype}[{blocks.terms},{blocks.columns}]>",
    }
    constants = {
        "ACCUMULATE": accumulate,
        "TMA": tma,
        "COMPUTE": _triton.tl.float64 if dtype == "fp64" else _triton.tl.float32,
        **dict.fromkeys(("N_VECTOR", "K_VECTOR"), 16 // ITEMSIZE[dtype]),
        "BLOCK_E": 256,
        "BLOCK_N": blocks.rows,
        "BLOCK_K": blocks.columns,
        "BLOCK_R": blocks.terms,
        "GROUP": kernels._GROUP,
        **({} if tma else dict.fromkeys(descriptors)),
    }
    tensors = {"grad": data, "x": data, "offsets": "*i32", "out": total}
    return Launch(
        kernels.grouped_wgrad_kernel, tensors, WGRAD_SIZES, constants, blocks.num_warps,
        num_stages=blocks.num_stages, kinds=descriptors if tma else {},
    )  # fmt: skip


def launch(name: str, dtype: str, arch: int, tma: bool) -> Launch:
    first, _, rest = name.partition(" ")
    if first == "wgrad":
        return wgrad(rest == "accumulating", dtype, arch, tma)
    return product(first, rest.partition(" ")[0], rest.endswith("transposed"), dtype, arch, tma)


NAMES = (
    *(f"none {tokens}" for tokens in TOKENS),
    "none large transposed",
    "none decode transposed",
    *(f"{form} {tokens}" for form in ("swiglu", "geglu", "gelu") for tokens in ("fine", "large")),
    "wgrad accumulating",
    "wgrad writing",
)


def check_tensor_cores(cubin, name: str, arch: int) -> None:
    """The instruction of the architecture, except that tiles of 16 rows are too low for the large ones."""
    if arch == 80 or "decode" in name:
        assert "mma.sync.aligned.m16n8k16" in cubin.ptx
    elif arch == 90:
        assert "wgmma.mma_async" in cubin.ptx
    else:
        assert "tcgen05.mma" in cubin.ptx


@pytest.mark.parametrize(("name", "dtype", "arch"), cases(NAMES))
def test_kernel(name, dtype, arch):
    tma = tma_of(dtype, arch)
    cubin = launch(name, dtype, arch, tma).compile(arch)
    check_resources(cubin, dtype, arch)
    assert wide_stores(cubin), "stores narrower than 16 bytes"
    if ITEMSIZE[dtype] == 2:
        check_tensor_cores(cubin, name, arch)
    if tma:
        assert "cp.async.bulk.tensor" in cubin.ptx
        assert "cp.async.cg.shared.global" not in cubin.ptx
    elif ITEMSIZE[dtype] == 2:  # asynchronous copies of 16 bytes
        assert "cp.async.cg.shared.global" in cubin.ptx and "cp.async.ca" not in cubin.ptx
    if name == "wgrad accumulating":
        assert wide_loads(cubin) >= 2


@pytest.mark.parametrize("name", ("none large", "none decode", "none large transposed", "wgrad accumulating"))
@pytest.mark.parametrize("arch", (90, 100))
def test_through_pointers(name, arch):
    """Where addresses are no multiples of 16 bytes for TMA; the instructions are the same."""
    cubin = launch(name, "bf16", arch, False).compile(arch)
    check_resources(cubin, "bf16", arch)
    check_tensor_cores(cubin, name, arch)


@pytest.mark.parametrize("name", ("none large", "wgrad accumulating"))
def test_odd_sizes_and_sizes_of_one_compile(name):
    """The launcher makes constants of integers that equal 1; rows start anywhere."""
    described = launch(name, "bf16", 90, False)
    vectors = {name: 1 for name in described.constants if name.endswith("_VECTOR")}
    assert described.specialised((), vectors).compile(90).spill_bytes == 0
