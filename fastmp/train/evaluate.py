"""Held-out loss: nats per token, and nats per byte of text next to the unigram entropy of that text.

A loss per byte compares across tokenizers. The entropy of single bytes is what a model reaches that knows
only how often each byte occurs, so the distance between the two is what was learnt.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fastmp.parallel.collectives import all_reduce_, group_rank, group_size

if TYPE_CHECKING:
    from fastmp.parallel.groups import ParallelGroups

__all__ = ["Evaluation", "evaluate"]

LossFunction = Callable[[nn.Module, dict[str, Tensor]], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Evaluation:
    """`loss` in nats per token over `num_tokens` tokens.

    `bytes_per_token` and `unigram_entropy` (nats per byte) are those of the held-out text; None if unknown.
    """

    loss: float
    num_tokens: int
    bytes_per_token: float | None = None
    unigram_entropy: float | None = None

    @property
    def loss_per_byte(self) -> float | None:
        """Nats per byte of text."""
        return None if self.bytes_per_token is None else self.loss / self.bytes_per_token


@torch.no_grad()
def evaluate(
    model: nn.Module,
    data: Any,
    loss_fn: LossFunction,
    *,
    groups: ParallelGroups | None = None,
    device: torch.device | str | None = None,
    max_batches: int | None = None,
) -> Evaluation:
    """Loss of `model` (in eval mode, then back in the mode it was in) on the held-out part of `data`.

    data: `validation_batches(dp_rank, dp_size, max_batches=...)` yields dicts of CPU tensors, equally many on
        every rank. `data.validation.info`, where there is one, gives bytes_per_token and unigram_entropy.
    loss_fn: (model, batch) -> (sum of losses, number of tokens), as in training; what may follow is left.

    Every rank calls it and gets the same numbers. ValueError where there is not a single token.
    """
    dp = None if groups is None else groups.dp
    dp_cp = None if groups is None else groups.dp_cp
    was_training = model.training
    model.eval()
    try:
        totals = None
        for batch in data.validation_batches(group_rank(dp), group_size(dp), max_batches=max_batches):
            batch = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
            loss, num_tokens, *_ = loss_fn(model, batch)
            both = torch.stack([loss.double(), num_tokens.double()])
            totals = both if totals is None else totals + both
    finally:
        model.train(was_training)
    if totals is None:
        raise ValueError("evaluate: the data has no held-out batches")
    if dp_cp is not None:
        all_reduce_(totals, dp_cp)
    total, num_tokens = totals.tolist()
    if num_tokens == 0:
        raise ValueError("evaluate: the held-out batches hold no tokens")
    info = getattr(getattr(data, "validation", None), "info", None)
    return Evaluation(
        loss=total / num_tokens,
        num_tokens=int(num_tokens),
        bytes_per_token=getattr(info, "bytes_per_token", None),
        unigram_entropy=getattr(info, "unigram_entropy", None),
    )
