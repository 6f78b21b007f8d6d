"""Output layer and what follows in one, over a vocabulary that is sharded over a group.

Collectives join the shards of `fastmp.ops.linear_cross_entropy` and `linear_log_probs`: the statistics of
some tokens are gathered while the logits of the next ones are made, and the gradient of the hidden states is
summed once, behind the last product. What is communicated does not grow with the vocabulary, and no rank ever
holds the logits of all tokens.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from fastmp.distributed.collectives import all_gather, all_reduce_, group_size, reduce_scatter
from fastmp.ops.linear_cross_entropy import linear_cross_entropy_of
from fastmp.ops.linear_cross_entropy_chunks import ALONE, Shards
from fastmp.ops.linear_log_probs import linear_log_probs_of
from fastmp.profiling import traced

__all__ = ["vocab_parallel_linear_cross_entropy", "vocab_parallel_linear_log_probs"]


class _Group(Shards):
    """The collectives between the shards of a group."""

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


def _shards(group: dist.ProcessGroup | None, sequence_parallel: bool) -> Shards:
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
    """The loss of every token (...), or its mean or sum (`reduction`), from hidden states and output weight.

    The loss is the one of `parallel_logits` and `vocab_parallel_cross_entropy`, without the logits.

    hidden: (..., H), the same on every rank; with `sequence_parallel` this rank's part of it along dim 0.
    weight: (V/P, H), this rank's shard of the output embedding, rank r's rows [r * V/P, (r+1) * V/P). Its
        gradient is added to `weight.main_grad` where there is one: if `loss_grad` is given, in the forward
        pass, so set main gradients to zero before it.
    target: (...) int64 ids of all tokens in the whole vocabulary, the same on every rank.
    bias: (V/P,), this rank's shard; its gradient goes to autograd.
    loss_grad: the gradient that every token's loss will receive, the same on every rank, if it is known. The
        gradients are then made in the forward pass, with no product done twice; the backward pass checks
        that the upstream gradient is `loss_grad`, and can run once.

    The other options, the result and the errors: as in `fastmp.ops.linear_cross_entropy`.
    """
    return linear_cross_entropy_of(
        _shards(group, sequence_parallel), "vocab_parallel_linear_cross_entropy", hidden, weight, target,
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
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The log-probability of every target (...), and on request the entropies, the same on every rank.

    Forward there is one collective, of three or four numbers a token; backward one, which sums the gradient
    of hidden. Gradients that arrive must be the same on every rank.

    hidden, weight, target: as in `vocab_parallel_linear_cross_entropy`.

    The other options, the result and the errors: as in `fastmp.ops.linear_log_probs`.
    """
    return linear_log_probs_of(
        _shards(group, sequence_parallel), "vocab_parallel_linear_log_probs", hidden, weight, target,
        temperature=temperature, return_entropy=return_entropy, ignore_index=ignore_index,
        vocab_size=vocab_size, workspace=workspace,
    )  # fmt: skip
