"""apply_capacity: the pairs of token and expert that an expert of limited capacity drops.

Shapes are static and nothing waits for the device: a stable sort by expert gives each pair its rank among the
pairs of its expert, and pairs whose rank reaches the capacity are dropped. GShard, Lepikhin et al. 2020
(arXiv 2006.16668).
"""

from __future__ import annotations

import torch
from torch import Tensor

POLICIES = ("probs", "position")


def apply_capacity(
    indices: Tensor, probs: Tensor, num_experts: int, capacity: int, policy: str = "probs"
) -> tuple[Tensor, Tensor]:
    """At most `capacity` tokens for every expert; the others' pairs get index -1 and probability 0.

    Args:
        indices: (..., k) integers, the experts of each token; outside [0, num_experts): dropped already.
        probs: (..., k), their probabilities; differentiable.
        capacity: tokens an expert takes, at least 1.
        policy: "probs" keeps the largest probabilities (NaN first), ties to the earlier token; "position"
            the earliest tokens. Tokens are in row-major order.

    Returns:
        indices and probs of the same shapes and dtypes.

    Raises:
        ValueError: capacity below 1, an unknown policy, or shapes that differ.
    """
    if policy not in POLICIES:
        raise ValueError(f"apply_capacity: policy must be one of {POLICIES}, got {policy!r}")
    if capacity < 1:
        raise ValueError(f"apply_capacity: capacity must be at least 1 token, got {capacity}")
    if indices.shape != probs.shape:
        shapes = f"{tuple(indices.shape)} but probs {tuple(probs.shape)}"
        raise ValueError(f"apply_capacity: indices have shape {shapes}")
    real = (indices >= 0) & (indices < num_experts)
    expert = indices.where(real, num_experts).flatten()
    if policy == "probs":
        order = probs.detach().flatten().sort(descending=True, stable=True).indices
        order = order.gather(0, expert.gather(0, order).sort(stable=True).indices)
    else:
        order = expert.sort(stable=True).indices
    ranked = expert.gather(0, order)
    rank = torch.arange(len(order), device=order.device) - torch.searchsorted(ranked, ranked)
    kept = torch.empty_like(rank, dtype=torch.bool).scatter_(0, order, rank < capacity)
    kept = kept.view(indices.shape) & real
    return indices.where(kept, -1), probs.where(kept, 0)
