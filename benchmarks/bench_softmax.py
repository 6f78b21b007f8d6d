"""scaled_masked_softmax of fastmp, torch eager and torch.compile."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from benchmarks.cases import OURS, Case, CpuGoal, Workload, against_torch, title
from fastmp.ops import OPS, scaled_masked_softmax

SCALE = 0.125


def _eager(x: Tensor, hidden: Tensor) -> Tensor:
    return torch.softmax((x * SCALE).masked_fill(hidden, -math.inf), -1)


def softmax_case(
    batch: int,
    heads: int,
    queries: int,
    keys: int,
    causal: bool,
    dtype: torch.dtype,
    device: str,
    seed: int = 0,
) -> Case:
    """Causal, or keys hidden by a mask (batch, 1, 1, keys) as padding is; eager has the causal mask ready."""
    generator = torch.Generator(device).manual_seed(seed)
    shape = batch, heads, queries, keys
    x, grad = (torch.randn(shape, device=device, generator=generator).to(dtype) for _ in range(2))
    x.requires_grad_()
    if causal:
        mask = None
        hidden = torch.ones(queries, keys, dtype=torch.bool, device=device).triu(keys - queries + 1)
    else:
        hidden = mask = torch.rand(batch, 1, 1, keys, device=device, generator=generator) < 0.25
        hidden[..., 0] = False
    ours = partial(scaled_masked_softmax, x, mask, scale=SCALE, causal=causal)
    return Case(
        title("softmax " + ("causal" if causal else "mask"), shape, dtype),
        (x,),
        grad,
        against_torch(ours, _eager, x, hidden),
        OPS["scaled_masked_softmax"].traffic(x, mask, SCALE, causal),
        OPS["scaled_masked_softmax_backward"].traffic(grad, x, SCALE, causal),
    )


# One micro-batch of attention: GPT-3 and Llama-3-8B at 2048 and 8192 tokens, 8 heads a rank, and long keys.
WORKLOADS = (
    Workload(
        "softmax",
        softmax_case,
        cpu=((2, 8, 1024, 1024, False), (2, 8, 1024, 1024, True)),
        cuda=(
            (4, 12, 2048, 2048, True),
            (1, 4, 8192, 8192, True),
            (4, 12, 2048, 2048, False),
            (1, 8, 512, 65536, False),
        ),
        tiny=(2, 3, 5, 8, True),
    ),
)
GOALS = (
    CpuGoal("softmax", "float32", "forward", OURS, 4.0, 2.5),
    CpuGoal("softmax", "float32", "both", OURS, 4.0, 2.5),
    CpuGoal("softmax", "bfloat16", "both", OURS, 4.0, 2.5),
)
SHAPES = dict.fromkeys(
    ("scaled_masked_softmax", "scaled_masked_softmax_backward"), ((48, 2048, 2048), (4, 8192, 8192))
)


def arguments(op: str, shape: tuple[int, ...], dtype: torch.dtype, device: str, seed: int) -> tuple:
    """Random arguments of `torch.ops.fastmp.<op>`, with a mask of the keys."""
    generator = torch.Generator(device).manual_seed(seed)
    x, grad = (torch.randn(shape, device=device, generator=generator).to(dtype) for _ in range(2))
    if op == "scaled_masked_softmax_backward":
        return grad, x, SCALE, False
    return x, torch.rand(shape[-1], device=device, generator=generator) < 0.25, SCALE, False
