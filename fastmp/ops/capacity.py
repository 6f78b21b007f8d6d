"""apply_capacity: drop (token, expert) assignments beyond the capacity of an expert.

Shapes are static and there is no host-device synchronisation: a stable sort by expert ranks the assignments
of each expert, and those whose rank reaches the capacity are dropped. GShard: Lepikhin et al. 2020 (arXiv
2006.16668).
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastmp.ops.core import checks

POLICIES = ("probs", "position")


def apply_capacity(
    indices: Tensor, probs: Tensor, num_experts: int, capacity: int, policy: str = "probs"
) -> tuple[Tensor, Tensor]:
    """Limit every expert to `capacity` tokens; dropped assignments get index -1 and probability 0.

    Args:
        indices: (..., k) integers, the experts of each token. Entries outside [0, num_experts) count as
            dropped.
        probs: (..., k), their probabilities; differentiable.
        num_experts: number of experts.
        capacity: maximum number of tokens per expert, at least 1.
        policy: "probs" keeps the largest probabilities (NaN first; of equal ones the earlier token);
            "position" keeps the earliest tokens, in row-major order.

    Returns:
        indices and probs of the same shapes and dtypes.

    Raises:
        ValueError: capacity is below 1, the policy is unknown, or shapes differ.

    Example:

        indices = torch.tensor([[0], [0], [1]])
        probs = torch.tensor([[0.2], [0.9], [0.5]])
        kept, kept_probs = fastmp.ops.apply_capacity(indices, probs, num_experts=2, capacity=1)
        assert kept.tolist() == [[-1], [0], [1]]
    """
    checks.check_choice("apply_capacity", "policy", policy, POLICIES)
    checks.require(capacity > 0, "apply_capacity: capacity must be at least 1 token, got {}", capacity)
    checks.check_shape("apply_capacity", indices.shape, to=("indices", indices), probs=probs)
    # 1. Group assignments by expert; dropped ones go last, to expert `num_experts`.
    real = (indices >= 0) & (indices < num_experts)
    expert = indices.where(real, num_experts).flatten()
    if policy == "probs":
        order = probs.detach().flatten().sort(descending=True, stable=True).indices
        order = order.gather(0, expert.gather(0, order).sort(stable=True).indices)
    else:
        order = expert.sort(stable=True).indices
    # 2. Rank within the expert = position in the sorted list - first position of the expert.
    ranked = expert.gather(0, order)
    rank = torch.arange(len(order), device=order.device) - torch.searchsorted(ranked, ranked)
    # 3. Keep ranks below the capacity, in the original order.
    kept = torch.empty_like(rank, dtype=torch.bool).scatter_(0, order, rank < capacity)
    kept = kept.view(indices.shape) & real
    return indices.where(kept, -1), probs.where(kept, 0)
