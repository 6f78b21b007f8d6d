"""Clipped policy gradients without a critic: GRPO, GSPO and DAPO.

Each takes log-probabilities of tokens, (B, S), or (N,) with `cu_seqlens`, and returns the loss with metrics.
A token of log-probability -inf has no gradient; its ratio is 1 if it is impossible under both policies.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastmp.objectives.log_ratios import clamped, kl_estimates
from fastmp.objectives.sequences import Sequences
from fastmp.ops.core.checks import check_choice, require
from fastmp.ops.core.registry import compute_dtype

Result = tuple[Tensor, dict[str, Tensor]]


def group_advantages(
    rewards: Tensor, group_size: int, *, epsilon: float = 1e-4, scale: bool = True
) -> Tensor:
    """Advantages of GRPO: rewards minus the mean of their group, divided by its standard deviation.

    Args:
        rewards: (B,), also integers; the samples of one prompt follow each other. The result is float32
            (float64 for float64).
        group_size: samples of a prompt.
        epsilon: added to the standard deviation.
        scale: False leaves the division out (Dr. GRPO, arXiv:2503.20783).

    Example:
        group_advantages(torch.tensor([0.0, 1.0, 1.0, 1.0]), 2, scale=False)  # [-0.5, 0.5, 0, 0]
    """
    fits = group_size > 0 and rewards.dim() == 1 and len(rewards) % group_size == 0
    message = "group_advantages: expected rewards (B,) in groups of {}, got shape {}"
    require(fits, message, group_size, rewards.shape)
    groups = rewards.to(compute_dtype(rewards.dtype)).view(-1, group_size)
    advantages = groups - groups.mean(1, keepdim=True)
    if scale and group_size > 1:
        advantages = advantages / (groups.std(1, keepdim=True) + epsilon)
    return advantages.view(-1)


def _clipped_loss(
    name: str,
    sequences: Sequences,
    log_ratio: Tensor,
    advantages: Tensor,
    epsilon_low: float,
    epsilon_high: float,
    delta: float | None,
    token_weight: Tensor | None,
    penalty: Tensor | None,
    normalize: str,
    divisor: Tensor | float | None,
) -> Result:
    """Return the loss of PPO's clipped objective minus a penalty, from log-ratios of the tokens."""
    require(
        0 <= epsilon_low <= 1 and epsilon_high >= 0,
        "{}: expected epsilon_low within [0, 1] and epsilon_high of at least 0, got {} and {}",
        *(name, epsilon_low, epsilon_high),
    )
    check_choice(name, "normalize", normalize, ("sequence", "token"))
    if advantages.dim() == 1 and sequences.counts.shape == advantages.shape:
        advantages = sequences.spread(advantages)
    (advantages,) = sequences.masked(advantages=advantages.detach())
    # 1. The lower of the plain and the clipped objective.
    ratio = clamped(log_ratio).exp()
    capped = ratio
    if delta is not None:
        require(
            delta > 1 + epsilon_high, "{}: delta={} must exceed 1 + epsilon_high={}",
            *(name, delta, epsilon_high),
        )  # fmt: skip
        capped = ratio.clamp(max=delta)
    within = ratio.clamp(1 - epsilon_low, 1 + epsilon_high)
    objective = torch.min(capped * advantages, within * advantages)
    if token_weight is not None:
        objective = objective * sequences.masked(token_weight=token_weight.detach())[0]
    if penalty is not None:
        objective = objective - penalty
    # 2. Its mean.
    if normalize == "token":
        total, count = sequences.sum(objective).sum(), sequences.counts.sum()
    else:
        total, count = sequences.mean(objective).sum(), sequences.live.sum()
    loss = -total / (count.clamp(min=1) if divisor is None else divisor)
    # 3. Metrics.
    low = (ratio < 1 - epsilon_low) & (advantages < 0)
    high = (ratio > 1 + epsilon_high) & (advantages > 0)
    fractions = {"clip_fraction_low": low, "clip_fraction_high": high, "clip_fraction": low | high}
    metrics = {key: sequences.token_mean(value.float()) for key, value in fractions.items()}
    return loss, metrics | {"ratio": sequences.token_mean(ratio.detach())}


def _log_ratio_and_metrics(
    sequences: Sequences, log_probs: Tensor, old_log_probs: Tensor | None, ref_log_probs: Tensor | None
) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
    """Return the tokens' log-ratios, k3 from the reference, and metrics of both divergences."""
    old = log_probs.detach() if old_log_probs is None else old_log_probs.detach()
    policy, old = sequences.log_probs(log_probs=log_probs, old_log_probs=old)
    estimates = {"old": kl_estimates(old, policy)}
    if ref_log_probs is not None:
        (reference,) = sequences.log_probs(ref_log_probs=ref_log_probs.detach())
        estimates["ref"] = kl_estimates(policy, reference)
    metrics = {
        f"kl_{policy}_{kind}": sequences.token_mean(getattr(each, kind).detach())
        for policy, each in estimates.items()
        for kind in ("k1", "k2", "k3")
    }
    return policy - old, estimates["ref"].k3 if "ref" in estimates else None, metrics


def _penalty(name: str, beta: float, k3: Tensor | None) -> Tensor | None:
    require(beta == 0 or k3 is not None, "{}: beta={} needs ref_log_probs", name, beta)
    return None if beta == 0 or k3 is None else beta * k3


def grpo_loss(
    log_probs: Tensor,
    mask: Tensor,
    *,
    advantages: Tensor,
    old_log_probs: Tensor | None = None,
    ref_log_probs: Tensor | None = None,
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
    delta: float | None = None,
    beta: float = 0.0,
    normalize: str = "sequence",
    divisor: Tensor | float | None = None,
    token_weight: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Result:
    """Group relative policy optimisation (Z. Shao et al., "DeepSeekMath", arXiv:2402.03300).

    With r = exp(log_probs - old_log_probs), advantage A and k3 of `kl_estimates` from the reference, the loss
    of a token is -min(r A, clip(r, 1 - epsilon_low, 1 + epsilon_high) A) + beta k3.

    Args:
        log_probs: of the sampled tokens: (B, S), or (N,) with `cu_seqlens`. Only these receive a gradient.
        mask: bool, of the tokens that count: False for prompts, padding and sequences to leave out.
        advantages: (B,), as of `group_advantages`, or one for each token.
        old_log_probs: of the policy that sampled. None: of this policy; the ratio is then 1.
        ref_log_probs: of the reference policy. None: no penalty, and no metrics of it.
        delta: upper bound of r where A is negative, above 1 + epsilon_high (INTELLECT-2, arXiv:2505.07291).
        beta: coefficient of the penalty.
        normalize: "sequence" takes the mean of each sequence, then the mean of the sequences that have
            tokens; "token" the mean of all tokens.
        divisor: in place of this batch's number of sequences, or tokens: those of the whole step if it has
            several microbatches or ranks; B times the length limit, with "token", for Dr. GRPO
            (arXiv:2503.20783).
        token_weight: factors of the tokens' clipped objectives, as of `mismatch_weights`; no gradient.
        cu_seqlens: (B + 1,) boundaries of packed sequences.

    Returns:
        The loss, and metrics over the tokens that count: "clip_fraction" and its parts "clip_fraction_low"
        and "clip_fraction_high", "ratio", "kl_old_k1" to "kl_old_k3" for KL(old || policy), "kl_ref_k1" to
        "kl_ref_k3" for KL(policy || reference).

    Raises:
        ValueError: shapes or options that do not fit.

    Example:
        log_probs = -torch.rand(4, 6).requires_grad_()
        advantages = group_advantages(torch.tensor([0.0, 1.0, 1.0, 0.0]), 2)
        loss, metrics = grpo_loss(log_probs, torch.ones(4, 6, dtype=torch.bool), advantages=advantages)
        loss.backward()
    """
    return _token_objective(
        "grpo_loss", log_probs, mask, advantages, old_log_probs, ref_log_probs, epsilon_low, epsilon_high,
        delta, beta, normalize, divisor, token_weight, cu_seqlens,
    )  # fmt: skip


def _token_objective(
    name, log_probs, mask, advantages, old_log_probs, ref_log_probs, epsilon_low, epsilon_high, delta, beta,
    normalize, divisor, token_weight, cu_seqlens,
):  # fmt: skip
    sequences = Sequences(name, mask, cu_seqlens)
    log_ratio, k3, of_kl = _log_ratio_and_metrics(sequences, log_probs, old_log_probs, ref_log_probs)
    loss, metrics = _clipped_loss(
        name, sequences, log_ratio, advantages, epsilon_low, epsilon_high, delta, token_weight,
        _penalty(name, beta, k3), normalize, divisor,
    )  # fmt: skip
    return loss, metrics | of_kl


def dapo_loss(
    log_probs: Tensor,
    mask: Tensor,
    *,
    advantages: Tensor,
    old_log_probs: Tensor | None = None,
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.28,
    divisor: Tensor | float | None = None,
    token_weight: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Result:
    """Decoupled clip and token-level policy gradient (Q. Yu et al., "DAPO", arXiv:2503.14476).

    This is `grpo_loss` with a higher upper clip, the mean over all tokens, and no penalty. For overlong
    filtering, clear the mask of sequences that were cut off: they count nowhere.

    Args:
        The arguments, the result and the errors are those of `grpo_loss`.

    Example:
        log_probs, mask = -torch.rand(2, 6).requires_grad_(), torch.ones(2, 6, dtype=torch.bool)
        mask[1] = False  # cut off at the length limit
        loss, metrics = dapo_loss(log_probs, mask, advantages=torch.tensor([1.0, -1.0]))
    """
    return _token_objective(
        "dapo_loss", log_probs, mask, advantages, old_log_probs, None, epsilon_low, epsilon_high, None, 0.0,
        "token", divisor, token_weight, cu_seqlens,
    )  # fmt: skip


def gspo_loss(
    log_probs: Tensor,
    mask: Tensor,
    *,
    advantages: Tensor,
    old_log_probs: Tensor | None = None,
    ref_log_probs: Tensor | None = None,
    epsilon_low: float = 3e-4,
    epsilon_high: float = 4e-4,
    beta: float = 0.0,
    divisor: Tensor | float | None = None,
    token_weight: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Result:
    """Group sequence policy optimisation (C. Zheng et al., arXiv:2507.18071).

    The ratio of a sequence, s = exp(mean over its tokens of log_probs - old_log_probs), takes the place of
    the tokens' ratios of GRPO, and all tokens of a sequence are clipped together. With advantages of tokens
    this is GSPO-token: the value of the ratio is s, and its gradient goes to the token.

    Args:
        The arguments, the result and the errors are those of `grpo_loss`, with normalize="sequence".

    Example:
        log_probs, mask = -torch.rand(2, 6).requires_grad_(), torch.ones(2, 6, dtype=torch.bool)
        loss, metrics = gspo_loss(log_probs, mask, advantages=torch.tensor([1.0, -1.0]))
    """
    name = "gspo_loss"
    sequences = Sequences(name, mask, cu_seqlens)
    log_ratio, k3, of_kl = _log_ratio_and_metrics(sequences, log_probs, old_log_probs, ref_log_probs)
    # the mean is clamped, not its terms
    of_sequence = sequences.spread(sequences.mean(log_ratio.detach()))
    loss, metrics = _clipped_loss(
        name, sequences, of_sequence + (log_ratio - log_ratio.detach()), advantages, epsilon_low,
        epsilon_high, None, token_weight, _penalty(name, beta, k3), "sequence", divisor,
    )  # fmt: skip
    return loss, metrics | of_kl
