"""Fused output layer and loss, over a vocabulary that is sharded over a group.

Collectives join the shards of `fastmp.ops.linear_cross_entropy` and its siblings: the statistics of one
chunk of tokens are all-gathered while the logits of the next chunk are computed, and the gradient of the
hidden states is all-reduced once, after the last GEMM. Traffic does not grow with the vocabulary, and no rank
materialises the logits of all tokens.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from fastmp.distributed.collectives import all_gather, all_reduce_, group_size, reduce_scatter
from fastmp.ops.chunked_head import ALONE, Shards
from fastmp.ops.linear_cross_entropy import linear_cross_entropy_of
from fastmp.ops.linear_distillation import linear_distillation_of
from fastmp.ops.linear_log_probs import linear_log_probs_of
from fastmp.profiling import traced

__all__ = [
    "vocab_parallel_linear_cross_entropy",
    "vocab_parallel_linear_distillation",
    "vocab_parallel_linear_log_probs",
    "vocab_parallel_linear_topk_distillation",
]


class _Group(Shards):
    """Collectives between the shards of a group; those with a `Work` run on NCCL's stream."""

    def __init__(self, group: dist.ProcessGroup, sequence_parallel: bool) -> None:
        self.group, self.sequence_parallel = group, sequence_parallel
        self.rank, self.size = group.rank(), group.size()

    def tokens(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        if not self.sequence_parallel or len(shape) < 2:
            return shape[:-1]
        return (shape[0] * self.size, *shape[1:-1])

    def gather_hidden(self, hidden: torch.Tensor) -> torch.Tensor:
        return all_gather(hidden, self.group)[0] if self.sequence_parallel else hidden

    def gather_stats(self, stats: torch.Tensor) -> tuple[torch.Tensor, dist.Work | None]:
        return all_gather(stats[None], self.group, overlap=True)

    def reduce_grad(self, grad: torch.Tensor) -> tuple[torch.Tensor, dist.Work | None]:
        if self.sequence_parallel:
            return reduce_scatter(grad, self.group, overlap=True)
        return grad, all_reduce_(grad, self.group, overlap=True)


def shards_of(group: dist.ProcessGroup | None, sequence_parallel: bool) -> Shards:
    """Return the shards of a vocabulary over `group`."""
    return ALONE if group is None or group_size(group) == 1 else _Group(group, sequence_parallel)


@traced("fastmp.vocab_parallel_linear_cross_entropy")
def vocab_parallel_linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    *,
    group: dist.ProcessGroup | None,
    sequence_parallel: bool = False,
    bias: torch.Tensor | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    ignore_index: int = -100,
    token_weight: torch.Tensor | None = None,
    vocab_size: int | None = None,
    reduction: str = "none",
    loss_grad: torch.Tensor | float | None = None,
    workspace: int | None = None,
) -> torch.Tensor:
    """Return the cross-entropy of every token (...), or its mean or sum, without materialising logits.

    The loss is that of `parallel_logits` and `vocab_parallel_cross_entropy`.

    Args:
        hidden: (..., H), the same on every rank; with `sequence_parallel` this rank's shard along dim 0.
        weight: (V/P, H), this rank's shard of the output embedding, rows [r * V/P, (r+1) * V/P) on rank r.
            Its gradient is added to `weight.main_grad` if there is one. With `loss_grad` that happens in the
            forward, so zero main gradients before it.
        target: (...) int64 ids of the full vocabulary for all tokens, the same on every rank.
        bias: (V/P,), this rank's shard; its gradient goes to autograd.
        loss_grad: upstream gradient of every token's loss, the same on every rank, if known. Gradients are
            then computed in the forward, with no GEMM done twice; the backward checks the upstream gradient
            and can run once.

        The other options, the result and the errors are those of `fastmp.ops.linear_cross_entropy`.

    Example:
        >>> hidden, weight = torch.zeros(4, 2, 8), torch.zeros(16, 8)
        >>> target = torch.zeros(4, 2, dtype=torch.int64)
        >>> vocab_parallel_linear_cross_entropy(hidden, weight, target, group=None).shape
        torch.Size([4, 2])
    """
    return linear_cross_entropy_of(
        shards_of(group, sequence_parallel), "vocab_parallel_linear_cross_entropy", hidden, weight, target,
        bias=bias, label_smoothing=label_smoothing, z_loss=z_loss, ignore_index=ignore_index,
        token_weight=token_weight, vocab_size=vocab_size, reduction=reduction, loss_grad=loss_grad,
        workspace=workspace,
    )  # fmt: skip


@traced("fastmp.vocab_parallel_linear_log_probs")
def vocab_parallel_linear_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    *,
    group: dist.ProcessGroup | None,
    sequence_parallel: bool = False,
    temperature: float | torch.Tensor = 1.0,
    return_entropy: bool = False,
    ignore_index: int = -100,
    vocab_size: int | None = None,
    workspace: int | None = None,
    skip_ignored: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probability of every target (...), with `return_entropy` also the entropies.

    The forward has one collective, an all-gather of three or four numbers a token, and the backward one, an
    all-reduce of the gradient of `hidden`. Upstream gradients must be the same on every rank, as the results
    are.

    Args:
        hidden, weight, target: as in `vocab_parallel_linear_cross_entropy`.

        The other options, the result and the errors are those of `fastmp.ops.linear_log_probs`.
    """
    return linear_log_probs_of(
        shards_of(group, sequence_parallel), "vocab_parallel_linear_log_probs", hidden, weight, target,
        temperature=temperature, return_entropy=return_entropy, ignore_index=ignore_index,
        vocab_size=vocab_size, workspace=workspace, skip_ignored=skip_ignored,
    )  # fmt: skip


@traced("fastmp.vocab_parallel_linear_distillation")
def vocab_parallel_linear_distillation(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    teacher_hidden: torch.Tensor,
    teacher_weight: torch.Tensor,
    *,
    group: dist.ProcessGroup | None,
    sequence_parallel: bool = False,
    divergence: str = "forward_kl",
    beta: float = 0.5,
    temperature: float | torch.Tensor = 1.0,
    mask: torch.Tensor | None = None,
    num_tokens: int | None = None,
    vocab_size: int | None = None,
    reduction: str = "mean",
    workspace: int | None = None,
) -> torch.Tensor:
    """Return the divergence of a student from a teacher (...), or its mean or sum, without their logits.

    A chunk of tokens has two collectives: all-gathers of four and of two numbers a token. The gradient of
    `hidden` is all-reduced once. Every rank has the same loss.

    Args:
        hidden, weight: as in `vocab_parallel_linear_cross_entropy`.
        teacher_hidden: (..., H'), as `hidden`: the same on every rank, or its shard along dim 0.
        teacher_weight: (V/P, H'), this rank's shard of the teacher's output embedding, the rows of `weight`.
        temperature, mask, num_tokens: for all tokens, the same on every rank.

        The other options, the result and the errors are those of `fastmp.ops.linear_distillation`.
    """
    return linear_distillation_of(
        shards_of(group, sequence_parallel), "vocab_parallel_linear_distillation", hidden, weight,
        (teacher_hidden, teacher_weight), topk=False, divergence=divergence, beta=beta,
        temperature=temperature, mask=mask, num_tokens=num_tokens, vocab_size=vocab_size,
        reduction=reduction, workspace=workspace,
    )  # fmt: skip


@traced("fastmp.vocab_parallel_linear_topk_distillation")
def vocab_parallel_linear_topk_distillation(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    teacher_ids: torch.Tensor,
    teacher_log_probs: torch.Tensor,
    *,
    group: dist.ProcessGroup | None,
    sequence_parallel: bool = False,
    divergence: str = "forward_kl",
    beta: float = 0.5,
    temperature: float | torch.Tensor = 1.0,
    mask: torch.Tensor | None = None,
    num_tokens: int | None = None,
    vocab_size: int | None = None,
    reduction: str = "mean",
    workspace: int | None = None,
) -> torch.Tensor:
    """Return the divergence from a teacher's top k tokens and the mass of all others (...), mean or sum.

    A chunk of tokens has one collective, an all-gather of k + 2 numbers a token. The gradient of `hidden` is
    all-reduced once. Every rank has the same loss.

    Args:
        hidden, weight: as in `vocab_parallel_linear_cross_entropy`.
        teacher_ids, teacher_log_probs: (..., k) for all tokens, with ids of the full vocabulary, the same on
            every rank.
        temperature, mask, num_tokens: for all tokens, the same on every rank.

        The other options, the result and the errors are those of `fastmp.ops.linear_topk_distillation`.
    """
    return linear_distillation_of(
        shards_of(group, sequence_parallel), "vocab_parallel_linear_topk_distillation", hidden, weight,
        (teacher_ids, teacher_log_probs), topk=True, divergence=divergence, beta=beta,
        temperature=temperature, mask=mask, num_tokens=num_tokens, vocab_size=vocab_size,
        reduction=reduction, workspace=workspace,
    )  # fmt: skip
