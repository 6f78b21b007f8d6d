"""Held-out loss: nats per token, and nats per byte of text next to the unigram entropy of the text.

A loss per byte is comparable across tokenizers. A model of byte frequencies alone reaches the unigram
entropy, so the difference is what was learnt beyond that.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from fastmp.distributed.collectives import group_rank, group_size, sum_over_
from fastmp.distributed.groups import ParallelGroups
from fastmp.training.data.blend import BlendedDataset
from fastmp.training.data.masked import MaskedDataset
from fastmp.training.microbatches import evaluation_mode

if TYPE_CHECKING:
    from fastmp.training.microbatches import MicrobatchRunner

__all__ = ["Evaluation", "evaluate"]


@dataclass(frozen=True)
class Evaluation:
    """The loss of a model on held-out text.

    loss: nats per token, over `num_tokens` tokens.
    bytes_per_token, unigram_entropy: of the held-out text, the latter in nats per byte; None if unknown.
    source_losses: of a blend, the loss of each source.
    """

    loss: float
    num_tokens: int
    bytes_per_token: float | None = None
    unigram_entropy: float | None = None
    source_losses: dict[str, float] = field(default_factory=dict)

    @property
    def loss_per_byte(self) -> float | None:
        """The loss in nats per byte of text; None if the bytes are unknown."""
        return None if self.bytes_per_token is None else self.loss / self.bytes_per_token


@torch.no_grad()
def evaluate(
    runner: MicrobatchRunner,
    data: Any,
    *,
    groups: ParallelGroups = ParallelGroups.alone(),
    device: torch.device | str | None = None,
    max_batches: int | None = None,
) -> Evaluation:
    """Return the loss of a model, in eval mode, on the held-out part of `data`; the same on every rank.

    Every rank calls it. The mode of the model is restored afterwards.

    Args:
        runner: runs the model.
        data: `validation_batches(dp_rank, dp_size, max_batches=...)` yields dicts of CPU tensors, as many on
            every rank. `data.validation.info`, if there is one, has bytes_per_token and unigram_entropy. The
            sources of a `BlendedDataset` are evaluated one by one, and their losses weighed by their shares.
        max_batches: of each source; None: all.

    Raises:
        ValueError: there are no held-out tokens.
    """
    if isinstance(data, BlendedDataset):
        options: dict[str, Any] = {"groups": groups, "device": device, "max_batches": max_batches}
        parts = data.held_out()
        return _blended([(name, share, evaluate(runner, source, **options)) for name, share, source in parts])
    dp_rank, dp_size = group_rank(groups.dp), group_size(groups.dp)
    batches = data.validation_batches(dp_rank, dp_size, max_batches=max_batches)
    with evaluation_mode(runner.chunks):
        totals = runner.evaluate(
            {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
            for batch in batches
        )
    if totals is None:
        raise ValueError("evaluate: the data has no held-out batches")
    total, num_tokens = sum_over_(totals, groups.dp_cp, groups.pp).tolist()
    if num_tokens == 0:
        raise ValueError("evaluate: the held-out batches hold no tokens")
    # The loss of masked tokens is not a loss of all bytes.
    info = (
        None if isinstance(data, MaskedDataset) else getattr(getattr(data, "validation", None), "info", None)
    )
    return Evaluation(
        loss=total / num_tokens,
        num_tokens=int(num_tokens),
        bytes_per_token=getattr(info, "bytes_per_token", None),
        unigram_entropy=getattr(info, "unigram_entropy", None),
    )


def _blended(parts: list[tuple[str, float, Evaluation]]) -> Evaluation:
    """Return the evaluation of a blend from those of its sources: (name, share, evaluation).

    Its unigram entropy is that of a model of the byte frequencies of each source.
    """
    sizes = [share * part.bytes_per_token for _, share, part in parts if part.bytes_per_token is not None]
    entropies = [part.unigram_entropy for *_, part in parts if part.unigram_entropy is not None]
    known = len(sizes) == len(entropies) == len(parts)
    return Evaluation(
        loss=sum(share * part.loss for _, share, part in parts),
        num_tokens=sum(part.num_tokens for *_, part in parts),
        bytes_per_token=sum(sizes) if known else None,
        unigram_entropy=sum(map(operator.mul, sizes, entropies)) / sum(sizes) if known else None,
        source_losses={name: part.loss for name, _, part in parts},
    )
