"""permutation, permute and unpermute of fastmp, torch eager and torch.compile: sort, select, scatter."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.bench_norm import IN_TURN
from benchmarks.bench_quantize import BLOCK, plain_rows
from benchmarks.cases import COMPILE, EAGER, OURS, Case, CpuGoal, Workload, against_torch, title
from fastmp.ops import OPS, permutation, permute, quantize_rows, unpermute
from fastmp.ops.core.fp8 import E4M3
from fastmp.ops.core.registry import compute_dtype


def _indices(tokens: int, slots: int, experts: int, device: str, generator: torch.Generator) -> Tensor:
    """Different experts of each token, some twice as likely as others."""
    scores = torch.rand(tokens, experts, device=device, generator=generator)
    scores += 0.2 * torch.linspace(0, 1, experts, device=device)
    return scores.topk(slots, 1).indices.to(torch.int32)


def _eager_permutation(indices: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    order = indices.flatten().argsort(stable=True)
    rows = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    ends = torch.zeros(experts, dtype=torch.int64, device=indices.device)
    ends = ends.scatter_add_(0, indices.flatten().long(), torch.ones_like(order)).cumsum(0)
    return rows.view(indices.shape), ends


def permutation_case(
    tokens: int, slots: int, experts: int, dtype: torch.dtype, device: str, seed: int = 0
) -> Case:
    generator = torch.Generator(device).manual_seed(seed)
    indices = _indices(tokens, slots, experts, device, generator)
    rivals = against_torch(lambda: permutation(indices, experts), _eager_permutation, indices, experts)
    shape = (tokens, slots, experts)
    moved = OPS["permutation"].traffic(indices, experts)
    return Case(title("permutation", shape, torch.int32), (indices,), (), rivals, moved, 0)


def _rows(tokens: int, width: int, slots: int, dtype: torch.dtype, device: str, seed: int) -> tuple:
    """x (T, H) and y (T k, H), grads alike, probs, row_of, and the pairs and tokens in the order of rows."""
    generator = torch.Generator(device).manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, generator=generator).to(dtype)

    indices = _indices(tokens, slots, 16 * slots, device, generator)
    row_of, _ = permutation(indices, 16 * slots)
    pairs = indices.flatten().argsort(stable=True)
    probs = torch.rand(tokens, slots, device=device, generator=generator, dtype=compute_dtype(dtype))
    x, y = random(tokens, width).requires_grad_(), random(tokens * slots, width).requires_grad_()
    return x, y, random(tokens, width), random(tokens * slots, width), probs, row_of, pairs, pairs // slots


def permute_case(tokens: int, width: int, slots: int, dtype: torch.dtype, device: str, seed: int = 0) -> Case:
    x, _, _, grad, _, row_of, _, sources = _rows(tokens, width, slots, dtype, device, seed)

    def eager(x: Tensor) -> Tensor:
        return x.index_select(0, sources)

    return Case(
        title("permute", (tokens, width, slots), dtype),
        (x,),
        grad,
        against_torch(lambda: permute(x, row_of, tokens * slots), eager, x),
        OPS["permute"].traffic(x, row_of, tokens * slots),
        OPS["unpermute"].traffic(grad, row_of, None),
    )


def quantized_case(
    tokens: int, width: int, slots: int, dtype: torch.dtype, device: str, seed: int = 0
) -> Case:
    x, _, _, _, _, row_of, _, sources = _rows(tokens, width, slots, dtype, device, seed)
    x, num_rows = x.detach(), tokens * slots

    def eager(x: Tensor) -> tuple[Tensor, Tensor]:
        q, s = plain_rows(x)
        return q.view(torch.uint8).index_select(0, sources).view(E4M3), s.index_select(0, sources)

    rivals = against_torch(lambda: permute(x, row_of, num_rows, quantize=True), eager, x)
    rivals[IN_TURN] = lambda: quantize_rows(permute(x, row_of, num_rows))
    name = title("permute quantized", (tokens, width, slots), dtype)
    moved = OPS["permute_quantized"].traffic(x, None, row_of, num_rows, BLOCK, E4M3)
    return Case(name, (x,), x, rivals, moved, 0)


def unpermute_case(
    tokens: int, width: int, slots: int, dtype: torch.dtype, device: str, seed: int = 0
) -> Case:
    _, y, grad, _, probs, row_of, pairs, sources = _rows(tokens, width, slots, dtype, device, seed)
    probs.requires_grad_()
    places = sources[:, None].expand(-1, width)

    def eager(y: Tensor, probs: Tensor) -> Tensor:
        weighted = y * probs.flatten()[pairs, None]
        return torch.zeros_like(weighted[:tokens]).scatter_add(0, places, weighted).to(y.dtype)

    return Case(
        title("unpermute", (tokens, width, slots), dtype),
        (y, probs),
        grad,
        against_torch(lambda: unpermute(y, row_of, probs), eager, y, probs),
        OPS["unpermute"].traffic(y, row_of, probs),
        OPS["unpermute_backward"].traffic(grad, y, row_of, probs),
    )


# Micro-batches of DeepSeek-V3, Qwen3-30B-A3B and Mixtral: 8 of 256, 8 of 128 and 2 of 8 experts.
_CUDA = ((8192, 7168, 8), (8192, 2048, 8), (8192, 4096, 2))
WORKLOADS = (
    Workload(
        "permutation",
        permutation_case,
        cpu=((8192, 8, 128),),
        cuda=((8192, 8, 256), (8192, 8, 512), (8192, 2, 8)),
        directions=("forward",),
        dtypes=(torch.float32,),
        tiny=(21, 3, 7),
    ),
    Workload("permute", permute_case, cpu=((2048, 2048, 8),), cuda=_CUDA, tiny=(6, 8, 2)),
    Workload(
        "permute quantized",
        quantized_case,
        cpu=((2048, 2048, 8),),
        cuda=_CUDA,
        rivals=(OURS, IN_TURN, EAGER, COMPILE),
        directions=("forward",),
        dtypes=(torch.bfloat16,),
        tiny=(6, 128, 2),
    ),
    Workload("unpermute", unpermute_case, cpu=((2048, 2048, 8),), cuda=_CUDA, tiny=(6, 8, 2)),
)
GOALS = (
    CpuGoal("permutation", "float32", "forward", OURS, 4.0, 4.0),
    CpuGoal("permute", "float32", "both", OURS, 1.5, 1.2),
    CpuGoal("unpermute", "float32", "forward", OURS, 4.0, 4.0),
    CpuGoal("unpermute", "float32", "both", OURS, 2.0, 1.5),
    CpuGoal("unpermute", "bfloat16", "both", OURS, 2.0, 1.5),
)
SHAPES = {
    "block_rows": ((8, 32, 65536), (64, 4, 65536)),  # rows of so many ranks for each of so many experts
    "permutation": ((8192, 8, 256), (8192, 8, 512)),
    **dict.fromkeys(("permute", "permute_quantized"), _CUDA),
    **{
        f"unpermute{name}": _CUDA
        for name in ("", "_into", "_add", "_add_into", "_backward", "_backward_into")
    },
}


def arguments(op: str, shape: tuple[int, int, int], dtype: torch.dtype, device: str, seed: int) -> tuple:
    """Random arguments of `torch.ops.fastmp.<op>`."""
    if op == "block_rows":
        ranks, experts, rows = shape
        ends = torch.arange(1, ranks * experts + 1, device=device) * rows // (ranks * experts)
        sizes = torch.diff(ends, prepend=ends.new_zeros(1))
        by_expert = sizes.view(ranks, experts).t().flatten()
        places = (by_expert.cumsum(0) - by_expert).view(experts, ranks).t().flatten()
        return (ends - sizes).to(torch.int32), places.to(torch.int32), rows
    if op == "permutation":
        tokens, slots, experts = shape
        generator = torch.Generator(device).manual_seed(seed)
        return _indices(tokens, slots, experts, device, generator), experts
    x, y, grad, _, probs, row_of, _, _ = _rows(*shape, dtype, device, seed)
    return {
        "permute": (x.detach(), row_of, len(y)),
        "permute_quantized": (x.detach(), None, row_of, len(y), BLOCK, E4M3),
        "unpermute": (y.detach(), row_of, probs),
        "unpermute_into": (y.detach(), row_of, probs, torch.empty_like(grad)),
        "unpermute_add": (y.detach(), row_of, probs, grad),
        "unpermute_add_into": (y.detach(), row_of, probs, grad, torch.empty_like(grad)),
        "unpermute_backward": (grad, y.detach(), row_of, probs),
        "unpermute_backward_into": (grad, y.detach(), row_of, probs, torch.empty_like(probs)),
    }[op]
