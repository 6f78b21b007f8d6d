"""topk_router of fastmp, torch eager and torch.compile, each with what a Switch loss and a z-loss need."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.cases import OURS, Case, CpuGoal, Workload, against_torch, title
from fastmp.ops import OPS, topk_router
from fastmp.ops.core.registry import compute_dtype

GROUPS, OPEN, SCALE = 8, 4, 2.5  # of the sigmoid router, as DeepSeek-V3 has them


def _finish(logits: Tensor, scores: Tensor, probs: Tensor, indices: Tensor) -> tuple[Tensor, ...]:
    """Probabilities, scores summed and weighted by the experts' loads, squared log-sum-exps summed."""
    counts = F.one_hot(indices, logits.shape[-1]).sum((0, 1))
    return probs, scores.sum(0) * counts, logits.logsumexp(-1).square().sum()


def _eager_softmax(logits: Tensor, k: int) -> tuple[Tensor, ...]:
    """Route like Mixtral and Qwen3-MoE."""
    logits = logits.float()
    scores = logits.softmax(-1)
    probs, indices = scores.topk(k, -1)
    return _finish(logits, scores, probs / probs.sum(-1, keepdim=True), indices)


def _eager_sigmoid(logits: Tensor, bias: Tensor, k: int) -> tuple[Tensor, ...]:
    """Route like DeepSeek-V3."""
    logits = logits.float()
    scores = logits.sigmoid()
    by = (scores + bias).detach()
    groups = by.unflatten(-1, (GROUPS, -1)).topk(2, -1).values.sum(-1).topk(OPEN, -1).indices
    closed = torch.ones(len(by), GROUPS, dtype=torch.bool, device=by.device).scatter(1, groups, False)
    by = by.unflatten(-1, (GROUPS, -1)).masked_fill(closed[..., None], -torch.inf).flatten(1)
    indices = by.topk(k, -1).indices
    probs = scores.gather(1, indices)
    scores = scores / scores.sum(-1, keepdim=True)
    return _finish(logits, scores, probs / probs.sum(-1, keepdim=True) * SCALE, indices)


def router_case(
    tokens: int, experts: int, k: int, score: str, dtype: torch.dtype, device: str, seed: int = 0
) -> Case:
    generator = torch.Generator(device).manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, generator=generator)

    logits = random(tokens, experts).to(dtype).requires_grad_()
    bias = 0.1 * random(experts) if score == "sigmoid" else None
    grads = random(tokens, k), random(experts), random(1)[0]
    options = {"score": score, "expert_bias": bias, "normalize": True}
    if score == "sigmoid":
        options |= {"num_groups": GROUPS, "group_topk": OPEN, "scale": SCALE}

    def ours() -> tuple[Tensor, ...]:
        _, probs, counts, score_sums, z_sum, _ = topk_router(logits, k, balance=False, **options)
        return probs, score_sums * counts, z_sum

    eager = _eager_softmax if score == "softmax" else _eager_sigmoid
    inputs = (logits, k) if bias is None else (logits, bias, k)
    indices = torch.empty(tokens, k, dtype=torch.int32, device="meta")
    return Case(
        title(f"router {score} k={k}", (tokens, experts), dtype),
        (logits,),
        grads,
        against_torch(ours, eager, *inputs),
        OPS["topk_router"].traffic(logits, bias, k, score, 1, 1, False, 1.0, False),
        OPS["topk_router_backward"].traffic(*grads, logits, indices, score, False, 1.0),
    )


# A micro-batch of Qwen3-MoE, of DeepSeek-V3, of Mixtral.
WORKLOADS = (
    Workload(
        "router",
        router_case,
        cpu=((8192, 128, 8, "softmax"),),
        cuda=((8192, 128, 8, "softmax"), (8192, 8, 2, "softmax")),
        tiny=(19, 16, 3, "softmax"),
    ),
    Workload(
        "router grouped",
        router_case,
        cpu=((8192, 256, 8, "sigmoid"),),
        cuda=((8192, 256, 8, "sigmoid"), (1024, 256, 8, "sigmoid")),
        tiny=(19, 16, 3, "sigmoid"),
    ),
)
GOALS = (
    CpuGoal("router", "float32", "forward", OURS, 2.0, 2.0, over_compile=1.0),
    CpuGoal("router", "float32", "both", OURS, 2.0, 2.0, over_compile=1.0),
    CpuGoal("router grouped", "float32", "forward", OURS, 6.0, 6.0, over_compile=2.5),
    CpuGoal("router grouped", "float32", "both", OURS, 6.0, 6.0, over_compile=2.5),
    CpuGoal("router grouped", "bfloat16", "both", OURS, 6.0, 6.0, over_compile=2.5),
)
SHAPES = dict.fromkeys(("topk_router", "topk_router_backward"), ((8192, 256), (8192, 128)))


def arguments(op: str, shape: tuple[int, ...], dtype: torch.dtype, device: str, seed: int) -> tuple:
    """Random arguments of `torch.ops.fastmp.<op>`: sigmoid, bias and groups of DeepSeek-V3, 8 experts."""
    generator = torch.Generator(device).manual_seed(seed)
    tokens, experts = shape
    logits = torch.randn(shape, device=device, generator=generator).to(dtype)
    wide = compute_dtype(dtype)
    bias = torch.randn(experts, device=device, generator=generator, dtype=wide) / 8
    if op == "topk_router":
        return logits, bias, 8, "sigmoid", GROUPS, OPEN, True, SCALE, False
    shapes = (tokens, 8), (experts,), ()
    grads = [torch.randn(s, device=device, generator=generator, dtype=wide) for s in shapes]
    indices = torch.rand(shape, device=device, generator=generator).argsort(-1)[:, :8].to(torch.int32)
    return *grads, logits, indices.contiguous(), "sigmoid", True, SCALE
