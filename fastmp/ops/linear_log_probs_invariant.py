"""Log-probabilities for `fastmp.ops.batch_invariant`: the same bits in every batch and over any shards.

N tokens, W numbers of a token, P shards.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fastmp.ops import exact
from fastmp.ops.core.registry import compute_dtype
from fastmp.ops.cross_entropy_triton import real_columns
from fastmp.ops.invariant_mode import exactly
from fastmp.ops.linear_cross_entropy_chunks import LogitChunks, Shards


def make_invariant_log_probs(
    hidden: Tensor, weight: Tensor, target: Tensor, scale: Tensor | None, options: Any, shards: Shards
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (log_prob, entropy, top, log_total) from sums that depend on no order and no sharding.

    The arguments and the results are those of `_make_log_probs` of `linear_log_probs.py`.
    """

    def joined_over_shards(values: Tensor) -> Tensor:
        """Return values (N, W) of all shards, (P, N, W)."""
        every, work = shards.gather_stats(values.contiguous())
        if work is not None:
            work.wait()
        return every

    chunks = LogitChunks(shards.gather_hidden(hidden), weight, None, options.workspace)
    tops, found = [], []
    for number, rows in enumerate(chunks.rows):
        every = chunks.logits(number)
        real = real_columns(every.shape[1], options.vocab_start, options.vocab_size)
        logits = every[:, :real].to(compute_dtype(every.dtype))
        with exactly(weight):
            # 1. The largest logit of all shards
            own = (
                logits.amax(1, keepdim=True)
                if logits.shape[1]
                else logits.new_full((len(logits), 1), -math.inf)
            )
            top = joined_over_shards(own).amax(0)
            # 2. Sums of the exponentials, and of their products with the logarithms; the target's logit
            below = (logits - top.masked_fill(top == -torch.inf, 0)).double()
            below = below if scale is None else below * scale[rows, None]
            p = exact.exp(below)
            column = target[rows] - options.vocab_start
            here = (column >= 0) & (column < logits.shape[1])
            of_target = below.new_zeros(len(logits))
            if logits.shape[1]:
                of_target = below.gather(1, column.where(here, 0)[:, None])[:, 0].where(here, 0)
            sums = [exact.exact_sum(p), of_target]
            if options.with_entropy:
                sums.append(exact.exact_sum((p * below).masked_fill(p == 0, 0)))
            found.append(torch.stack(sums, 1))
            tops.append(top[:, 0])
    with exactly(weight):
        # 3. Their sums over all shards
        total, of_target, *weighted = joined_over_shards(torch.cat(found)).sum(0).unbind(1)
        top, log_total = torch.cat(tops), exact.log(total)
        ignored, inside = target == options.ignore_index, (target >= 0) & (target < options.vocab_size)
        dtype = compute_dtype(weight.dtype)

        def of_targets(values: Tensor) -> Tensor:
            return values.to(dtype).where(inside, float("nan")).masked_fill(ignored, 0)

        entropy = total.new_empty(0, dtype=dtype)
        if weighted:
            entropy = of_targets(log_total - weighted[0] / total)
        return of_targets(of_target - log_total), entropy, top, log_total.to(dtype)
