"""rope of fastmp (into new memory and in place), torch eager, torch.compile and Liger."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.cases import (
    COMPILE,
    EAGER,
    LIGER,
    OURS,
    Case,
    CpuGoal,
    Workload,
    against_torch,
    normal,
    title,
)
from benchmarks.peers import peer
from fastmp.ops import OPS, rope_cos_sin, rope_qk
from fastmp.ops.core.registry import compute_dtype

IN_PLACE = "fastmp in place"


class _Made(torch.autograd.Function):
    """`values` as what a projection of `leaf` made: may be overwritten, and the gradient goes to the leaf."""

    @staticmethod
    def forward(ctx, leaf, values):
        return values.detach()

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def _rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def _eager(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """The code of Llama and Megatron-LM; cos and sin are (S, 1, 1, D) in the dtype of q."""
    return q * cos + _rotate_half(q) * sin, k * cos + _rotate_half(k) * sin


def rope_case(
    tokens: int, heads: int, kv_heads: int, width: int, dtype: torch.dtype, device: str, seed: int = 0
) -> Case:
    generator = torch.Generator(device).manual_seed(seed)

    def random(num_heads: int) -> Tensor:
        return torch.randn(tokens, 1, num_heads, width, device=device, generator=generator).to(dtype)

    q, k = random(heads).requires_grad_(), random(kv_heads).requires_grad_()
    grads = random(heads), random(kv_heads)
    cos, sin = rope_cos_sin(tokens, width, device=device)
    wide = [torch.cat((t, t), -1)[:, None, None].to(dtype) for t in (cos, sin)]
    own = q.detach().clone(), k.detach().clone()  # turns further with every call

    def in_place() -> tuple[Tensor, Tensor]:
        return rope_qk(*map(_Made.apply, (q, k), own), cos, sin, in_place=True)

    rivals = against_torch(lambda: rope_qk(q, k, cos, sin), _eager, q, k, *wide) | {IN_PLACE: in_place}
    if (liger := peer(LIGER, "liger_kernel.ops.rope:LigerRopeFunction", device)) is not None:
        liger_own = [t.clone() for t in own]
        liger_angles = [t[:, 0, 0][None] for t in wide]

        def with_liger() -> tuple[Tensor, Tensor]:
            """Takes (B, N, S, D) and overwrites what it is given, gradients included."""
            made = [t.permute(1, 2, 0, 3) for t in map(_Made.apply, (q, k), liger_own)]
            return tuple(t.permute(2, 0, 1, 3) for t in liger.apply(*made, *liger_angles))

        rivals[LIGER] = with_liger
    traffic = OPS["rope"].traffic(q, k, cos, sin, False, False)
    shape = (tokens, heads, kv_heads, width)
    return Case(title("rope", shape, dtype), (q, k), grads, rivals, traffic, traffic)


# Tokens, heads of queries and of keys, width: Llama-3-8B, one of eight ranks of Llama-3-70B, all of that, the
# rotated part of DeepSeek-V3's heads.
_SHAPES = ((8192, 32, 8, 128), (8192, 8, 1, 128), (32768, 64, 8, 128), (8192, 128, 1, 64))
WORKLOADS = (
    Workload(
        "rope",
        rope_case,
        cpu=((2048, 32, 8, 128),),
        cuda=_SHAPES,
        rivals=(OURS, IN_PLACE, EAGER, COMPILE, LIGER),
        tiny=(6, 4, 2, 8),
    ),
)
GOALS = (
    CpuGoal("rope", "float32", "both", OURS, 4.0, 2.0),
    CpuGoal("rope", "float32", "both", IN_PLACE, 5.0, 2.0),
    CpuGoal("rope", "bfloat16", "both", OURS, 2.5, 2.0),
)
SHAPES = {"rope": _SHAPES, "rope_": _SHAPES}


def arguments(op: str, shape: tuple[int, int, int, int], dtype: torch.dtype, device: str, seed: int) -> tuple:
    """Random arguments of `torch.ops.fastmp.<op>`; in place, q and k turn further call after call."""
    tokens, heads, kv_heads, width = shape
    random = normal(dtype, device, seed)
    q, k = (random(tokens, 1, n, width) for n in (heads, kv_heads))
    angles = rope_cos_sin(tokens, width, dtype=compute_dtype(dtype), device=device)
    return q, k, *angles, False, False
