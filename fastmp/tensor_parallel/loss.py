"""Cross-entropy over a vocabulary that is sharded over a group: local ops and one collective.

1. Each rank reads its logits once and reduces them to three numbers a token: row maximum, sum of exponentials
   and the target's logit (with label smoothing five: the sum of logits and their number as well).
2. These statistics are all-gathered over the group: traffic does not grow with the vocabulary.
3. From them every rank computes the same loss, to the bit, and the gradient of its shard. The backward does
   not communicate.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from fastmp import ops
from fastmp.distributed.collectives import all_gather, group_rank, group_size
from fastmp.ops.core import checks
from fastmp.ops.reduction import check_reduction, reduced

__all__ = ["vocab_parallel_cross_entropy"]


def vocab_parallel_cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    group: dist.ProcessGroup | None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    ignore_index: int = -100,
    token_weight: torch.Tensor | None = None,
    vocab_size: int | None = None,
    reduction: str = "none",
    grad_in_place: bool = False,
) -> torch.Tensor:
    """Return the cross-entropy of every token (...), or its mean or sum, for logits sharded over `group`.

    Args:
        logits: (..., V/P), columns [r * V/P, (r+1) * V/P) of the vocabulary on rank r.
        target: (...) int64 ids of the full vocabulary, the same on every rank.
        label_smoothing: over the full vocabulary.
        vocab_size: columns from here on are padding without a gradient. None: there is no padding.
        reduction: "none", "mean" or "sum".
        grad_in_place: let backward overwrite the logits with their gradient.

        The others are those of `fastmp.ops.cross_entropy`.

    Returns:
        the loss in fp32 (float64 for float64 logits), equal on all ranks.

    Raises:
        ValueError: shapes do not match; on a CPU, a target is outside the vocabulary.

    Example:
        >>> logits, target = torch.zeros(2, 3, 8), torch.zeros(2, 3, dtype=torch.int64)
        >>> vocab_parallel_cross_entropy(logits, target, group=None).shape
        torch.Size([2, 3])
    """
    op = "vocab_parallel_cross_entropy"
    checks.check_floating(op, "logits", logits)
    checks.check_shape(op, logits.shape[:-1], to=("logits", logits), target=target, token_weight=token_weight)
    checks.require(target.dtype == torch.int64, "{}: target must be torch.int64, got {}", op, target.dtype)
    check_reduction(op, reduction)
    size, shard = group_size(group), logits.shape[-1]
    vocab_start = group_rank(group) * shard
    if vocab_size is None:
        vocab_size = size * shard
    checks.require(
        0 < vocab_size <= size * shard,
        "{}: vocab_size is {}, but the logits have {} columns in {} shards",
        *(op, vocab_size, size * shard, size),
    )
    rows_NV, target_N = logits.reshape(target.numel(), shard), target.reshape(-1)
    if rows_NV.stride(1) != 1:
        rows_NV = rows_NV.contiguous()

    # 1. Statistics of this rank's columns: (P', N, 3 or 5).
    stats = torch.ops.fastmp.cross_entropy_stats(
        rows_NV.detach(), target_N, vocab_start, vocab_size, label_smoothing != 0
    ).unsqueeze(0)
    # 2. All-gather them over the group, on the current stream.
    if size > 1:
        stats, _ = all_gather(stats, group)
    # 3. The loss, and in backward the gradient of this rank's columns, from the statistics of all ranks.
    loss_N = ops.cross_entropy_from_stats(
        rows_NV, target_N, stats, vocab_start=vocab_start, vocab_size=vocab_size,
        label_smoothing=label_smoothing, z_loss=z_loss, ignore_index=ignore_index,
        token_weight=None if token_weight is None else token_weight.reshape(-1), grad_in_place=grad_in_place,
    )  # fmt: skip
    return reduced(loss_N.reshape(target.shape), target, token_weight, ignore_index, reduction)
