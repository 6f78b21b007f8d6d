"""Teachers of the distillation losses: passes over chunks that compare a student's logits with a teacher's.

A teacher compares the student's logits of a chunk with its own distribution (`losses`), and turns them into
their gradient in place (`grad_`). `HiddenTeacher` computes logits of its own from hidden states and weight;
`TopkTeacher` has log-probabilities of k tokens, and one bucket for the others. Between the shards of a
vocabulary few numbers per token are all-gathered: normalisers, then parts of the divergence.

N tokens, of which M count, H hidden size, V columns of this shard of the vocabulary, k tokens of the teacher.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastmp.ops.chunked_head import HeadPass, LogitChunks, Shards, joined
from fastmp.ops.core.registry import compute_dtype, register
from fastmp.ops.cross_entropy_triton import real_columns
from fastmp.ops.linear_distillation_reference import (
    divergence_slope,
    divergence_terms,
    grad_reference_,
    loss_of,
    sums_reference,
)
from fastmp.ops.linear_distillation_triton import launch_grad, launch_sums
from fastmp.ops.linear_log_probs import merge_shards

# Least tail mass of a teacher that reverse KL divides by: what rounding leaves of 1 - sum(q) in float32.
_LEAST_TAIL = 2.0**-23


def _flops(logits: Tensor, beta: float, vocab_start: int, vocab_size: int, scaled: bool) -> int:
    """Count about 16 operations a column for one KL divergence, and twice as many for a mixture."""
    each = 16 * (1 if beta in (0, 1) else 2) + 2 * scaled
    return logits.shape[0] * real_columns(logits.shape[1], vocab_start, vocab_size) * each


register(
    "distillation_sums(Tensor logits, Tensor teacher_logits, Tensor normalisers, Tensor? scale, float beta,"
    " int vocab_start, int vocab_size) -> Tensor",
    contract=(
        "logits (N, V) floating; teacher_logits (N, V) logits; normalisers (N, 4) wide(logits); "
        "scale (N) wide(logits); 0 <= beta <= 1; 0 <= vocab_start; 0 < vocab_size"
    ),
    reference=sums_reference,
    triton=launch_sums,
    fake=lambda logits, *others: logits.new_empty((logits.shape[0], 2), dtype=compute_dtype(logits.dtype)),
    flops=lambda logits, teacher, normalisers, scale, beta, start, size: _flops(
        logits, beta, start, size, scale is not None
    ),
)
register(
    "distillation_grad_(Tensor(a!) logits, Tensor teacher_logits, Tensor normalisers, Tensor kl_p,"
    " Tensor grad_loss, Tensor? scale, float beta, int vocab_start, int vocab_size) -> ()",
    contract=(
        "logits (N, V) floating; teacher_logits (N, V) logits; normalisers (N, 4) wide(logits); "
        "kl_p (N) wide(logits); grad_loss (N) wide(logits); scale (N) wide(logits); 0 <= beta <= 1; "
        "0 <= vocab_start; 0 < vocab_size"
    ),
    reference=grad_reference_,
    triton=launch_grad,
    fake=lambda logits, *others: None,
    flops=lambda logits, teacher, normalisers, kl_p, grad, scale, beta, start, size: _flops(
        logits, beta, start, size, scale is not None
    ),
)


class DistillationOptions(NamedTuple):
    """This shard, the divergence, and the bytes for logits."""

    vocab_start: int
    vocab_size: int
    beta: float
    workspace: int


def _stats(logits: Tensor, target: Tensor, scale: Tensor | None, options: DistillationOptions) -> Tensor:
    """Return maximum and sum of exponentials of each row, (M, 2)."""
    stats = torch.ops.fastmp.log_probs_stats(logits, target, scale, *options[:2], False)
    return stats[:, :2]


class Teacher(HeadPass):
    """The passes of a distillation loss.

    Of the inputs, teacher and teacher_values are hidden states (N, H') and weight (V, H'), or int64 ids and
    log-probabilities (N, k); scale are the inverse temperatures (N,).
    """

    inputs = ("teacher", "teacher_values", "live", "scale")
    saved = ("kept",)

    losses: Any  # (logits, tensors of the chunk) -> losses and kept

    def forward(self) -> tuple[Tensor, ...]:
        chunks = self.chunks
        found = [self.losses(chunks.logits(i), **self.part(i)) for i in range(len(chunks.rows))]
        return tuple(self.rows.spread(joined([*each])) for each in zip(*found))

    def loss_and_grad_(self, logits: Tensor, grad_loss: Tensor, **part: Any) -> Tensor:
        loss, kept = self.losses(logits, **part)
        self.grad_(logits, **part, kept=kept, grad_loss=grad_loss)
        return loss


class HiddenTeacher(Teacher):
    """Teacher given by hidden states and weight; its logits of a chunk lie beside the student's."""

    models = 2  # both halves of the workspace hold the logits of the same tokens
    per_token = ("scale",)

    def __init__(self, values: dict[str, Any], options: DistillationOptions, shards: Shards) -> None:
        super().__init__(values, options, shards)
        x = self.rows.gather_hidden(values["teacher"])
        self.teacher = LogitChunks(x, values["teacher_values"], None, options.workspace // self.models)
        self.tokens["no_target"] = torch.zeros(len(x), dtype=torch.int64, device=x.device)

    def part(self, number: int) -> dict[str, Any]:
        return {"teacher_logits": self.teacher.logits(number), **super().part(number)}

    def losses(
        self, logits: Tensor, teacher_logits: Tensor, no_target: Tensor, scale: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the losses of a chunk, and (M, 6): four normalisers, KL(q || m) and KL(p || m)."""
        # 1. Normalisers of both, over all shards.
        own = [_stats(each, no_target, scale, self.options) for each in (logits, teacher_logits)]
        stats = self.rows.gather_stats(torch.cat(own, 1))
        normalisers = []
        for each in stats.split(2, -1):
            top, _, _, total = merge_shards(each[..., 0], each[..., 1], scale)
            normalisers += [top, total.log()]
        # 2. The divergences of this shard's columns, and their sum over the shards.
        kept = torch.stack(normalisers, 1)
        sums = torch.ops.fastmp.distillation_sums(logits, teacher_logits, kept, scale, *self._place)
        sums = self.rows.gather_stats(sums).sum(0)
        return loss_of(sums, self.options.beta), torch.cat([kept, sums], 1)

    def grad_(
        self, logits: Tensor, teacher_logits: Tensor, no_target: Tensor, scale: Tensor | None, kept: Tensor,
        grad_loss: Tensor,
    ) -> None:  # fmt: skip
        """Overwrite the student's logits of a chunk with their gradient."""
        torch.ops.fastmp.distillation_grad_(
            logits, teacher_logits, kept[:, :4], kept[:, 5], grad_loss, scale, *self._place
        )

    @property
    def _place(self) -> tuple[float, int, int]:
        return self.options.beta, self.options.vocab_start, self.options.vocab_size


def _bucket_log_probs(log_probs: Tensor, options: DistillationOptions) -> Tensor:
    """Return the teacher's log-probabilities (M, k) and that of all other tokens, (M, k + 1), normalised."""
    tail = -torch.expm1(log_probs.logsumexp(1, keepdim=True))
    least = _LEAST_TAIL if options.beta == 1 else 0.0
    tail = tail.clamp(min=least).log()
    if log_probs.shape[1] >= options.vocab_size:  # there are no others, whatever rounding leaves
        tail = torch.full_like(tail, -math.inf)
    buckets = torch.cat([log_probs, tail], 1)
    return buckets - buckets.logsumexp(1, keepdim=True)


class TopkTeacher(Teacher):
    """Teacher given by the log-probabilities of k tokens; all others are one bucket with the mass left over.

    The student's tail is the softmax over the other columns, summed directly: 1 - sum(p) would cancel.
    """

    per_token = ("teacher", "teacher_values", "scale")

    def __init__(self, values: dict[str, Any], options: DistillationOptions, shards: Shards) -> None:
        super().__init__(values, options, shards)
        log_probs = self.tokens.pop("teacher_values")
        self.tokens |= {"ids": self.tokens.pop("teacher"), "log_q": _bucket_log_probs(log_probs, options)}

    def _columns(self, ids: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the columns of the ids (M, k), and which of them this shard has."""
        columns = ids - self.options.vocab_start
        real = real_columns(logits.shape[1], self.options.vocab_start, self.options.vocab_size)
        here = (columns >= 0) & (columns < real)
        return columns.where(here, 0), here

    def losses(
        self, logits: Tensor, ids: Tensor, log_q: Tensor, scale: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the losses of a chunk, and (M, k + 3): slopes of the buckets, normaliser of the tail.

        The logits of the teacher's tokens become -inf.
        """
        beta = self.options.beta
        # 1. The student's logits of the k tokens, and statistics of all others.
        columns, here = self._columns(ids, logits)
        chosen = logits.gather(1, columns).to(log_q.dtype).where(here, 0)
        _put(logits, columns, here, torch.full_like(chosen, -math.inf))
        stats = torch.cat([_stats(logits, ids[:, 0].contiguous(), scale, self.options), chosen], 1)
        stats = self.rows.gather_stats(stats)
        tail_top, _, _, tail_total = merge_shards(stats[..., 0], stats[..., 1], scale)
        inside = (ids >= 0) & (ids < self.options.vocab_size)
        log_tail, chosen = tail_total.log(), stats[..., 2:].sum(0).where(inside, math.nan)
        # 2. Log-probabilities of the student's buckets.
        below = chosen - tail_top[:, None]
        buckets = torch.cat([below if scale is None else below * scale[:, None], log_tail[:, None]], 1)
        log_p = buckets.log_softmax(1)
        # 3. Their divergence, and its slope in each bucket.
        sums = torch.stack([terms.sum(1) for terms in divergence_terms(log_p, log_q, beta)], 1)
        slope = divergence_slope(log_p, log_q, sums[:, 1:], beta)
        log_tail = log_tail.masked_fill(log_tail == -math.inf, 0)
        return loss_of(sums, beta), torch.cat([slope, tail_top[:, None], log_tail[:, None]], 1)

    def grad_(
        self, logits: Tensor, ids: Tensor, log_q: Tensor, scale: Tensor | None, kept: Tensor,
        grad_loss: Tensor,
    ) -> None:  # fmt: skip
        """Overwrite the student's logits of a chunk with their gradient."""
        slope = kept[:, :-2] * grad_loss[:, None]
        # 1. Of the tail: its slope, in the proportions of a softmax.
        torch.ops.fastmp.log_probs_grad_(
            logits, ids[:, 0].contiguous(), kept[:, -2], kept[:, -1], -slope[:, -1], None, None, scale,
            *self.options[:2], -1,
        )  # fmt: skip
        # 2. Of the teacher's tokens.
        slope = slope[:, :-1] if scale is None else slope[:, :-1] * scale[:, None]
        _put(logits, *self._columns(ids, logits), slope)


def _put(logits: Tensor, columns: Tensor, here: Tensor, values: Tensor) -> None:
    """Write values (M, k) to those of the columns of each row that this shard has.

    The others repeat the first one that it has, or the row's first logit: a scatter has a fixed shape, and
    equal values may be written in any order.
    """
    if not logits.shape[1]:
        return
    first = here.to(torch.int8).argmax(1, keepdim=True)
    some = here.any(1, keepdim=True)
    values = values.to(logits.dtype)
    default = values.gather(1, first).where(some, logits[:, :1])
    columns = columns.where(here, columns.gather(1, first))
    logits.scatter_(1, columns, values.where(here, default))
