"""Cross-entropy over a vocabulary that is sharded over a group: local ops and one collective.

Each rank reads its logits once and reduces them to three numbers a token (row maximum, sum of exponentials,
the target's logit; the sum of logits as a fourth with label smoothing). These are gathered; from them every
rank computes the same loss, to the bit, and the gradient of its own shard. The backward does not communicate,
and what is communicated does not grow with the vocabulary.
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
    """The loss of every token (...), or its mean or sum (`reduction`), for logits sharded over `group`.

    logits (..., V/P) are columns [r * V/P, (r+1) * V/P) of the vocabulary on rank r; target (...) holds ids
    of the undivided vocabulary (int64), the same on every rank. The loss is fp32 (float64 for float64 logits)
    and equal on all ranks. The options mean what they mean in `fastmp.ops.cross_entropy`: label smoothing is
    over the undivided vocabulary, columns from `vocab_size` on are padding without a gradient, and with
    `grad_in_place` the backward writes the gradient over the logits.

    ValueError for shapes that do not match, and on a CPU for a target outside the vocabulary.
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

    stats = torch.ops.fastmp.cross_entropy_stats(
        rows_NV.detach(), target_N, vocab_start, vocab_size, label_smoothing != 0
    ).unsqueeze(0)
    if size > 1:
        stats, _ = all_gather(stats, group)
    loss_N = ops.cross_entropy_from_stats(
        rows_NV, target_N, stats, vocab_start=vocab_start, vocab_size=vocab_size,
        label_smoothing=label_smoothing, z_loss=z_loss, ignore_index=ignore_index,
        token_weight=None if token_weight is None else token_weight.reshape(-1), grad_in_place=grad_in_place,
    )  # fmt: skip
    return reduced(loss_N.reshape(target.shape), target, token_weight, ignore_index, reduction)
