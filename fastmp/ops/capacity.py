"""apply_capacity: drop the pairs of token and expert that are beyond an expert's capacity.

Shapes are static and nothing waits for the device: a stable sort by expert gives each pair its rank among the
pairs of its expert, and pairs whose rank reaches the capacity are dropped. GShard, Lepikhin et al. 2020
(arXiv 2006.16668).
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastmp.ops.core import checks

POLICIES = ("probs", "position")


def apply_capacity(
    indices: Tensor, probs: Tensor, num_experts: int, capacity: int, policy: str = "probs"
) -> tuple[Tensor, Tensor]:
    """Leave every expert at most `capacity` tokens; dropped pairs get index -1 and probability 0.

    Args:
        indices: (..., k) integers, the experts of each token. A pair outside [0, num_experts) stays
            dropped.
        probs: (..., k), their probabilities; differentiable.
        capacity: tokens an expert takes, at least 1.
        policy: "probs" keeps the largest probabilities (NaN first), ties to the earlier token; "position"
            the earliest tokens. Tokens are in row-major order.

    Returns:
        indices and probs of the same shapes and dtypes.

    Raises:
        ValueError: capacity below 1, an unknown policy, or shapes that differ.
    """
    checks.check_choice("apply_capacity", "policy", policy, POLICIES)
    checks.require(capacity > 0, "apply_capacity: capacity must be at least 1 token, got {}", capacity)
    checks.check_shape("apply_capacity", indices.shape, to=("indices", indices), probs=probs)
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
