"""Divergences between a student and a teacher in plain torch, from their log-probabilities.

With student probabilities p, teacher probabilities q and the mixture m = beta q + (1 - beta) p, the loss of a
token is KL(q || p) for beta = 0 (forward), KL(p || q) for beta = 1 (reverse), and otherwise the generalised
Jensen-Shannon divergence beta KL(q || m) + (1 - beta) KL(p || m).

Every KL(w || m) is computed as the sum of w f(log m - log w) with f(d) = e^d - 1 - d >= 0, which adds
sum(m) - sum(w) = 0. No term is negative, so nothing cancels where student and teacher agree, and equal ones
have loss zero; an error in the normaliser, common to all columns, enters squared.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fastmp.ops.core.registry import compute_dtype
from fastmp.ops.cross_entropy_triton import real_columns

_SERIES = tuple(1 / math.factorial(n) for n in range(16, 1, -1))  # of f(d) / d^2, the highest power first


def _kl_terms(weight: Tensor, mixture: Tensor, gap: Tensor) -> Tensor:
    """Return w f(gap), where m = w e^gap; m where w is zero."""
    series = torch.full_like(gap, _SERIES[0])
    for coefficient in _SERIES[1:]:
        series = series * gap + coefficient
    terms = torch.where(gap.abs() < 0.5, weight * gap * gap * series, mixture - weight - weight * gap)
    return torch.where(weight == 0, mixture, terms)


def _mixture_gaps(log_p: Tensor, log_q: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Return log m - log p and log m - log q, relative to the larger of p and q."""
    gap = log_p - log_q
    small = (-gap.abs()).exp()
    above = gap >= 0
    log_m = torch.where(above, (1 - beta) + beta * small, beta + (1 - beta) * small).log()
    return torch.where(above, log_m, log_m - gap), torch.where(above, log_m + gap, log_m)


def divergence_terms(log_p: Tensor, log_q: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Return the terms of KL(q || m) and KL(p || m), in the shape of the log-probabilities."""
    p, q = log_p.exp(), log_q.exp()
    if beta == 0:
        return _kl_terms(q, p, log_p - log_q), torch.zeros_like(p)
    if beta == 1:
        return torch.zeros_like(p), _kl_terms(p, q, log_q - log_p)
    m = beta * q + (1 - beta) * p
    below_p, below_q = _mixture_gaps(log_p, log_q, beta)
    return _kl_terms(q, m, below_q), _kl_terms(p, m, below_p)


def loss_of(sums: Tensor, beta: float) -> Tensor:
    """Return the loss (N,) from the sums KL(q || m) and KL(p || m), (N, 2)."""
    if beta in (0, 1):
        return sums[:, int(beta)].clone()
    return beta * sums[:, 0] + (1 - beta) * sums[:, 1]


def divergence_slope(log_p: Tensor, log_q: Tensor, kl_p: Tensor, beta: float) -> Tensor:
    """Return the gradient of the loss with respect to the student's scaled logits, of which p is the softmax.

    kl_p: KL(p || m), with a last dimension of one.
    """
    p = log_p.exp()
    if beta == 0:
        return p - log_q.exp()
    if beta == 1:
        return (p * (log_p - log_q - kl_p)).masked_fill(p == 0, 0)
    below_p, _ = _mixture_gaps(log_p, log_q, beta)
    return (-(1 - beta) * p * (below_p + kl_p)).masked_fill(p == 0, 0)


def _log_probs(
    logits: Tensor, teacher_logits: Tensor, normalisers: Tensor, scale: Tensor | None, real: int
) -> tuple[Tensor, Tensor]:
    """Return log p and log q of the columns that are no padding."""
    top, log_total, teacher_top, teacher_log_total = normalisers[:, :, None].unbind(1)
    factor = 1 if scale is None else scale.where(scale > 0, math.nan)[:, None]
    x, y = (each[:, :real].to(compute_dtype(each.dtype)) for each in (logits, teacher_logits))
    return (x - top) * factor - log_total, (y - teacher_top) * factor - teacher_log_total


def sums_reference(logits, teacher_logits, normalisers, scale, beta, vocab_start, vocab_size):
    real = real_columns(logits.shape[1], vocab_start, vocab_size)
    log_p, log_q = _log_probs(logits, teacher_logits, normalisers, scale, real)
    return torch.stack([terms.sum(1) for terms in divergence_terms(log_p, log_q, beta)], 1)


def grad_reference_(
    logits, teacher_logits, normalisers, kl_p, grad_loss, scale, beta, vocab_start, vocab_size
):  # fmt: skip
    real = real_columns(logits.shape[1], vocab_start, vocab_size)
    log_p, log_q = _log_probs(logits, teacher_logits, normalisers, scale, real)
    factor = grad_loss if scale is None else grad_loss * scale
    logits[:, real:] = 0
    logits[:, :real] = factor[:, None] * divergence_slope(log_p, log_q, kl_p[:, None], beta)
