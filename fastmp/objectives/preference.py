"""Preference optimisation: DPO, ORPO and SimPO from pairs, KTO from single answers.

Each takes log-probabilities of tokens, (B, S), or (N,) with `cu_seqlens`, and returns the loss with metrics.
Of pairs, the first half of the sequences are the chosen answers and the second half the rejected, in the same
order. Pairs and sequences without tokens in the mask count nowhere. A token of log-probability -inf counts as
one of -1e30, without a gradient.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from fastmp.distributed.collectives import all_reduce_, group_size
from fastmp.objectives.sequences import Sequences
from fastmp.ops.core.checks import require

Result = tuple[Tensor, dict[str, Tensor]]


def sequence_log_probs(
    log_probs: Tensor, mask: Tensor, *, average: bool = False, cu_seqlens: Tensor | None = None
) -> Tensor:
    """Sum of the log-probabilities of each sequence, (B,), or their mean.

    Args:
        log_probs: of tokens: (B, S), or (N,) with `cu_seqlens`.
        mask: bool, of the tokens that count.
        average: return the mean; zero for a sequence without tokens.
        cu_seqlens: (B + 1,) boundaries of packed sequences.

    Example:
        packed, mask = torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([True, True, True])
        sequence_log_probs(packed, mask, cu_seqlens=torch.tensor([0, 2, 3]))  # [-3.0, -3.0]
    """
    sequences = Sequences("sequence_log_probs", mask, cu_seqlens)
    (values,) = sequences.masked(log_probs=log_probs)
    return sequences.mean(values) if average else sequences.sum(values)


def _halves(sequences: Sequences, values: Tensor) -> tuple[Tensor, Tensor]:
    """Split values (B,) into those of chosen and of rejected answers."""
    message = "{}: expected chosen answers, then as many rejected ones, got {} sequences"
    require(len(values) % 2 == 0, message, sequences.name, len(values))
    chosen, rejected = values.view(2, -1).unbind()
    return chosen, rejected


class _Pairs:
    """Pairs of sequences, and what is reported of their rewards."""

    def __init__(self, sequences: Sequences) -> None:
        self.sequences = sequences
        chosen, rejected = _halves(sequences, sequences.live)
        self.live = chosen & rejected

    def mean(self, values: Tensor) -> Tensor:
        return self.sequences.sequence_mean(values, self.live)

    def metrics(self, rewards: Tensor) -> dict[str, Tensor]:
        chosen, rejected = _halves(self.sequences, rewards.detach())
        return {
            "reward_chosen": self.mean(chosen),
            "reward_rejected": self.mean(rejected),
            "reward_margin": self.mean(chosen - rejected),
            "reward_accuracy": self.mean((chosen > rejected).to(rewards.dtype)),
        }


def dpo_loss(
    log_probs: Tensor,
    mask: Tensor,
    *,
    ref_log_probs: Tensor,
    beta: float = 0.1,
    cu_seqlens: Tensor | None = None,
) -> Result:
    """Direct preference optimisation (R. Rafailov et al., arXiv:2305.18290).

    The reward of an answer is beta times the sum of log_probs - ref_log_probs, and the loss the mean of
    -log sigmoid(reward of the chosen answer - reward of the rejected answer).

    Args:
        log_probs: of the tokens of chosen, then of rejected answers: (B, S), or (N,) with `cu_seqlens`.
        mask: bool, of the answers' tokens.
        ref_log_probs: of the reference policy; no gradient.
        beta: how strongly the policy is held to the reference.
        cu_seqlens: (B + 1,) boundaries of packed sequences.

    Returns:
        The loss, and metrics: means of "reward_chosen", "reward_rejected", "reward_margin" and
        "reward_accuracy" over the pairs.

    Raises:
        ValueError: shapes or options that do not fit.

    Example:
        log_probs, mask = -torch.rand(2, 6).requires_grad_(), torch.ones(2, 6, dtype=torch.bool)
        loss, metrics = dpo_loss(log_probs, mask, ref_log_probs=log_probs.detach())  # log 2
    """
    sequences = Sequences("dpo_loss", mask, cu_seqlens)
    pairs = _Pairs(sequences)
    policy, reference = sequences.log_probs(log_probs=log_probs, ref_log_probs=ref_log_probs.detach())
    rewards = beta * sequences.sum(policy - reference)
    chosen, rejected = _halves(sequences, rewards)
    return pairs.mean(-F.logsigmoid(chosen - rejected)), pairs.metrics(rewards)


def simpo_loss(
    log_probs: Tensor,
    mask: Tensor,
    *,
    beta: float = 2.0,
    gamma: float = 1.0,
    cu_seqlens: Tensor | None = None,
) -> Result:
    """Simple preference optimisation (Y. Meng et al., "SimPO", arXiv:2405.14734).

    The reward of an answer is beta times the mean of log_probs, without a reference, and the loss the mean of
    -log sigmoid(reward of the chosen answer - reward of the rejected answer - gamma).

    Args:
        gamma: target margin of the rewards.

        The other arguments, the result and the errors are those of `dpo_loss`.

    Example:
        log_probs, mask = -torch.rand(2, 6).requires_grad_(), torch.ones(2, 6, dtype=torch.bool)
        loss, metrics = simpo_loss(log_probs, mask)
    """
    sequences = Sequences("simpo_loss", mask, cu_seqlens)
    pairs = _Pairs(sequences)
    (policy,) = sequences.log_probs(log_probs=log_probs)
    rewards = beta * sequences.mean(policy)
    chosen, rejected = _halves(sequences, rewards)
    return pairs.mean(-F.logsigmoid(chosen - rejected - gamma)), pairs.metrics(rewards)


def orpo_loss(
    log_probs: Tensor, mask: Tensor, *, beta: float = 0.1, cu_seqlens: Tensor | None = None
) -> Result:
    """Odds ratio preference optimisation (J. Hong et al., "ORPO", arXiv:2403.07691).

    With p the geometric mean of an answer's probabilities, the loss is the mean over pairs of
    -log p(chosen) - beta log sigmoid(log odds(chosen) - log odds(rejected)), where odds = p / (1 - p).

    Args:
        beta: weight of the odds ratio (lambda of the paper).

        The other arguments, the result and the errors are those of `dpo_loss`. Metrics are those of
        rewards beta log p, and "nll", the first term of the loss.

    Example:
        log_probs, mask = -torch.rand(2, 6).requires_grad_(), torch.ones(2, 6, dtype=torch.bool)
        loss, metrics = orpo_loss(log_probs, mask)
    """
    sequences = Sequences("orpo_loss", mask, cu_seqlens)
    pairs = _Pairs(sequences)
    (policy,) = sequences.log_probs(log_probs=log_probs)
    log_p = sequences.mean(policy)
    # the odds of a certain answer are infinite: no closer to 1 than a unit of the dtype
    below_one = log_p.clamp(max=-torch.finfo(log_p.dtype).eps)
    log_odds = below_one - (-below_one.expm1()).log()
    chosen, rejected = _halves(sequences, log_odds)
    nll = pairs.mean(-_halves(sequences, log_p)[0])
    loss = nll - beta * pairs.mean(F.logsigmoid(chosen - rejected))
    return loss, pairs.metrics(beta * log_p) | {"nll": nll.detach()}


def kto_reference_point(
    log_probs: Tensor,
    mask: Tensor,
    *,
    ref_log_probs: Tensor,
    group: dist.ProcessGroup | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Estimate KL(policy || reference) for `kto_loss` from answers to other prompts.

    Args:
        log_probs, ref_log_probs: of answers, each after a prompt that is not its own; no gradient is kept.
        mask: bool, of the answers' tokens.
        group: data-parallel ranks, whose answers are averaged together.
        cu_seqlens: (B + 1,) boundaries of packed sequences.

    Returns:
        A scalar: the mean over sequences of the sum of log_probs - ref_log_probs, at least zero.
    """
    sequences = Sequences("kto_reference_point", mask, cu_seqlens)
    policy, reference = sequences.log_probs(
        log_probs=log_probs.detach(), ref_log_probs=ref_log_probs.detach()
    )
    total = sequences.sum(policy - reference).sum()
    sums = torch.stack((total, sequences.live.sum().to(total.dtype)))
    if group_size(group) > 1:
        all_reduce_(sums, group)
    return (sums[0] / sums[1].clamp(min=1)).clamp(min=0)


def kto_loss(
    log_probs: Tensor,
    mask: Tensor,
    *,
    ref_log_probs: Tensor,
    desirable: Tensor,
    reference_point: Tensor | float,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    cu_seqlens: Tensor | None = None,
) -> Result:
    """Kahneman-Tversky optimisation (K. Ethayarajh et al., "KTO", arXiv:2402.01306).

    With r the sum of log_probs - ref_log_probs of an answer and z the reference point, the loss is the mean
    of w (1 - sigmoid(beta (r - z))) for desirable answers and w (1 - sigmoid(beta (z - r))) for the others.

    Args:
        log_probs: of the tokens: (B, S), or (N,) with `cu_seqlens`.
        mask: bool, of the answers' tokens.
        ref_log_probs: of the reference policy; no gradient.
        desirable: (B,) bool.
        reference_point: z, as of `kto_reference_point`; no gradient.
        beta: how strongly the policy is held to the reference.
        desirable_weight, undesirable_weight: w of the two kinds of answers.
        cu_seqlens: (B + 1,) boundaries of packed sequences.

    Returns:
        The loss, and metrics: means of the rewards beta r, "reward_chosen" of desirable and "reward_rejected"
        of other answers, and their difference "reward_margin".

    Example:
        log_probs, mask = -torch.rand(2, 6).requires_grad_(), torch.ones(2, 6, dtype=torch.bool)
        loss, metrics = kto_loss(
            log_probs, mask, ref_log_probs=log_probs.detach(), desirable=torch.tensor([True, False]),
            reference_point=0.0,
        )  # 0.5
    """
    sequences = Sequences("kto_loss", mask, cu_seqlens)
    sequences.per_sequence(desirable=desirable)
    require(desirable.dtype == torch.bool, "kto_loss: expected bool desirable, got {}", desirable.dtype)
    policy, reference = sequences.log_probs(log_probs=log_probs, ref_log_probs=ref_log_probs.detach())
    log_ratio = sequences.sum(policy - reference)
    if isinstance(reference_point, Tensor):
        reference_point = reference_point.detach()
    gain = beta * (log_ratio - reference_point)
    gain = gain.where(desirable, -gain)
    weight = torch.full_like(gain, undesirable_weight).masked_fill(desirable, desirable_weight)
    loss = sequences.sequence_mean(weight * (-gain).sigmoid())  # 1 - sigmoid(gain)
    rewards = beta * log_ratio.detach()
    chosen = sequences.sequence_mean(rewards, sequences.live & desirable)
    rejected = sequences.sequence_mean(rewards, sequences.live & ~desirable)
    return loss, {
        "reward_chosen": chosen,
        "reward_rejected": rejected,
        "reward_margin": chosen - rejected,
    }
