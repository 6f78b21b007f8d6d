"""clamped_swiglu of fastmp, torch eager and torch.compile: the activation of GPT-OSS."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.cases import Case, Workload, against_torch, normal, title
from fastmp.ops import OPS, clamped_swiglu

ALPHA, LIMIT = 1.702, 7.0


def _eager(x: Tensor) -> Tensor:
    """The activation as transformers computes it."""
    gate, up = x[..., ::2].clamp(max=LIMIT), x[..., 1::2].clamp(min=-LIMIT, max=LIMIT)
    return (up + 1) * (gate * torch.sigmoid(gate * ALPHA))


def clamped_swiglu_case(rows: int, width: int, dtype: torch.dtype, device: str, seed: int = 0) -> Case:
    """x (rows, 2 width)."""
    grad, x = arguments("clamped_swiglu_backward", (rows, width), dtype, device, seed)[:2]
    x.requires_grad_()
    return Case(
        title("clamped_swiglu", (rows, 2 * width), dtype),
        (x,),
        grad,
        against_torch(lambda: clamped_swiglu(x), _eager, x),
        OPS["clamped_swiglu"].traffic(x, ALPHA, LIMIT),
        OPS["clamped_swiglu_backward"].traffic(grad, x, ALPHA, LIMIT),
    )


# Rows are pairs of a token and an expert; the width is that of GPT-OSS's experts.
WORKLOADS = (
    Workload(
        "clamped_swiglu",
        clamped_swiglu_case,
        cpu=((4096, 2880),),
        cuda=((8192, 2880), (32768, 2880)),
        tiny=(6, 8),
    ),
)
SHAPES = dict.fromkeys(("clamped_swiglu", "clamped_swiglu_backward"), ((8192, 2880), (32768, 2880)))


def arguments(op: str, shape: tuple[int, int], dtype: torch.dtype, device: str, seed: int) -> tuple:
    """Random arguments of `torch.ops.fastmp.<op>`; shape is that of y."""
    random = normal(dtype, device, seed)
    rows, width = shape
    x = random(rows, 2 * width)
    grad = random(*shape)
    return (x, ALPHA, LIMIT) if op == "clamped_swiglu" else (grad, x, ALPHA, LIMIT)
