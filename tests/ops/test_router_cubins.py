"""What Triton makes of the router's kernels: resources, access widths, exponentials, reductions of a warp."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import torch
from cubin_tools import ITEMSIZE, REGISTERS, Launch, cases, check_resources, compute, exponentials, wide_loads

from fastmp.ops import _triton, router_triton
from fastmp.ops._triton import next_power_of_2

TOKENS = 8192
#                 experts, k, score, groups, of them open, bias, normalised
ROUTERS = {
    "mixtral": (8, 2, "softmax", 1, 1, False, True),
    "qwen3": (128, 8, "softmax", 1, 1, False, True),
    "deepseek-v2": (160, 6, "softmax", 8, 3, False, False),
    "deepseek-v3": (256, 8, "sigmoid", 8, 4, True, True),
    "many": (512, 36, "logits", 1, 1, True, True),
}


def _wide(dtype: str) -> torch.dtype:
    return torch.float64 if dtype == "fp64" else torch.float32


def forward(name: str, dtype: str) -> Launch:
    experts, k, score, groups, opened, with_bias, normalize = ROUTERS[name]
    constants = router_triton.constants(TOKENS, experts, k, score, groups, opened, _wide(dtype))
    num_warps = constants.pop("num_warps")
    constants |= {"HAS_BIAS": with_bias, "NORMALIZE": normalize, "VECTOR": 16 // ITEMSIZE[dtype]}
    wide = f"*{compute(dtype)}"
    tensors = dict.fromkeys(("bias", "probs", "score_sums", "z_sum", "partials", "z_partials"), wide)
    tensors |= {"logits": f"*{dtype}", "indices": "*i32", "counts": "*i32", "balance_counts": "*i32"}
    tensors = {n: tensors[n] for n in router_triton.router_kernel.arg_names if n in tensors}
    if not with_bias:
        del tensors["bias"]
        constants["bias"] = None
    if not with_bias and opened == groups:
        del tensors["balance_counts"]
        constants["balance_counts"] = None
    sizes = ("num_steps", "num_sequences", "strip_steps", "pitch")
    return Launch(router_triton.router_kernel, tensors, sizes, constants, num_warps, kinds={"scale": "fp64"})


def backward(name: str, dtype: str) -> Launch:
    experts, k, score, _, _, _, normalize = ROUTERS[name]
    width = max(16, next_power_of_2(experts))
    block_m, num_warps = router_triton.block_shape(TOKENS, width, _wide(dtype).itemsize)
    constants = {
        "K": k,
        "EXPERTS": experts,
        "SIGMOID": score == "sigmoid",
        "NORMALIZE": normalize,
        "COMPUTE": _triton.tl.float64 if dtype == "fp64" else _triton.tl.float32,
        "VECTOR": 16 // ITEMSIZE[dtype],
        "BLOCK_M": block_m,
        "WIDTH": width,
    }
    wide, data = f"*{compute(dtype)}", f"*{dtype}"
    tensors = {"grad_probs": wide, "grad_sums": wide, "grad_z": wide}
    tensors |= {"logits": data, "indices": "*i32", "dx": data}
    sizes = ("num_steps", "num_sequences", "pitch")
    return Launch(
        router_triton.router_backward_kernel, tensors, sizes, constants, num_warps, kinds={"scale": "fp64"}
    )


NAMES = [f"{direction} {name}" for name in ROUTERS for direction in ("forward", "backward")]


@pytest.mark.parametrize(("name", "dtype", "arch"), cases(NAMES))
def test_kernel(name, dtype, arch):
    direction, router = name.split()
    described = {"forward": forward, "backward": backward}[direction](router, dtype)
    cubin = described.compile(arch)
    check_resources(cubin, dtype, arch)
    c, (experts, _, score, *_, normalize) = described.constants, ROUTERS[router]
    width = c.get("WIDTH") or c["ALL"] * c["EACH"]
    elements = max(1, c["BLOCK_M"] * width // (32 * described.num_warps))
    assert cubin.registers * 32 * described.num_warps <= REGISTERS
    if experts >= 128:
        assert wide_loads(cubin) >= elements * ITEMSIZE[dtype] // 16, "loads narrower than 16 bytes"
    if dtype == "fp64":
        return
    # softmax and, beside it, sigmoid of every logit; what is more is of the k chosen ones, or of groups
    wanted = elements * (1 + (score == "sigmoid"))
    if direction == "backward":
        assert exponentials(cubin) == wanted + elements * (normalize and score != "sigmoid")
    else:
        assert wanted < exponentials(cubin) <= wanted + max(elements, 2 * c["ALL"])
    if experts >= 128 and 32 * ITEMSIZE[dtype] * experts >= 32 * 512:  # a warp loads nothing but a token
        assert "redux.sync" in cubin.ptx


@pytest.mark.parametrize("name", ["qwen3", "deepseek-v3"])
def test_sizes_of_one_compile(name):
    """The launcher makes constants of integers that equal 1."""
    assert forward(name, "bf16").specialised().compile(90).spill_bytes == 0
    gradients = ("grad_probs", "grad_sums", "grad_z")
    described = backward(name, "bf16")
    assert described.specialised().compile(90).spill_bytes == 0
    assert described.specialised(gradients, {"NORMALIZE": False}).compile(90).spill_bytes == 0
