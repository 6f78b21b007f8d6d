"""Functions of the ratio of two policies: estimates of their divergence, importance weights."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from fastmp.objectives.sequences import Sequences, finite_log_probs
from fastmp.ops.core.checks import check_choice, check_shape, require

# Log-ratios are clamped to [-20, 20] before they are exponentiated: exp(20) is 4.9e8. Beyond, a log-ratio has
# no gradient.
LOG_RATIO_LIMIT = 20.0


class KLEstimates(NamedTuple):
    """Three estimates of a KL divergence, for every token."""

    k1: Tensor
    k2: Tensor
    k3: Tensor


def clamped(log_ratio: Tensor) -> Tensor:
    """Clamp log-ratios to a range that can be exponentiated."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def kl_estimates(log_probs: Tensor, other_log_probs: Tensor) -> KLEstimates:
    """Estimate KL(policy || other) at every token that the policy has sampled.

    With d = log_probs - other_log_probs, clamped to [-20, 20], and 0 where both are -inf: k1 = d (unbiased,
    may be negative), k2 = d^2 / 2 (its gradient is that of the divergence), k3 = exp(-d) - 1 + d (unbiased,
    never negative).
    J. Schulman, "Approximating KL Divergence", 2020; k3 is the penalty of GRPO.

    Args:
        log_probs, other_log_probs: of the same tokens, of any shape.

    Example:
        k1, k2, k3 = kl_estimates(torch.tensor([-1.0, -2.0]), torch.tensor([-1.0, -2.5]))
        assert k3[0] == 0 and k1[1] == 0.5 and k2[1] == 0.125
    """
    check_shape("kl_estimates", log_probs.shape, to=("log_probs", log_probs), other_log_probs=other_log_probs)
    d = clamped(finite_log_probs(log_probs) - finite_log_probs(other_log_probs))
    return KLEstimates(d, d.square() / 2, (-d).expm1() + d)


def mismatch_weights(
    log_probs: Tensor,
    generation_log_probs: Tensor,
    mask: Tensor,
    *,
    level: str = "token",
    outside: str = "truncate",
    low: float = 0.0,
    high: float = 2.0,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Weights that correct for a generation engine whose log-probabilities differ from those of training.

    With w = exp(log_probs - generation_log_probs), or of its sum over the sequence for level "sequence":

    - outside="truncate": min(w, high), truncated importance sampling (F. Yao et al., "Your Efficient RL
      Framework Secretly Brings You Off-Policy RL Training", 2025).
    - outside="zero": w if low <= w <= high, else 0, so that the token, or the sequence, is masked (J. Liu et
      al., "When Speed Kills Stability", 2025; with tokens, low=0.5 and high=5, IcePop, arXiv:2510.18855).

    Args:
        log_probs: of the policy that sampled, computed by the training framework: (B, S), or (N,) packed.
        generation_log_probs: of the same weights, from the generation engine.
        mask: bool, of the tokens that count.
        level: "token" or "sequence".
        cu_seqlens: (B + 1,) boundaries of packed sequences.

    Returns:
        Weights of the tokens, without a gradient, zero outside the mask: `token_weight` of `grpo_loss`,
        `gspo_loss` and `dapo_loss`.

    Example:
        train, generated = torch.tensor([[-1.0, -1.0, 0.0]]), torch.tensor([[-1.5, -3.0, 0.0]])
        mask = torch.tensor([[True, True, False]])
        mismatch_weights(train, generated, mask)  # [[1.6487, 2.0, 0.0]]
    """
    name = "mismatch_weights"
    check_choice(name, "level", level, ("token", "sequence"))
    check_choice(name, "outside", outside, ("truncate", "zero"))
    require(0 <= low <= high, "{}: expected 0 <= low <= high, got low={} and high={}", name, low, high)
    require(outside == "zero" or low == 0, '{}: low={} needs outside="zero"', name, low)
    sequences = Sequences(name, mask, cu_seqlens)
    ours, theirs = sequences.log_probs(
        log_probs=log_probs.detach(), generation_log_probs=generation_log_probs.detach()
    )
    log_ratio = ours - theirs
    if level == "sequence":
        log_ratio = sequences.spread(sequences.sum(log_ratio))
    weights = clamped(log_ratio).exp()
    if outside == "truncate":
        weights = weights.clamp(max=high)
    else:
        weights = weights.where((weights >= low) & (weights <= high), 0)
    return weights.where(mask, 0)
