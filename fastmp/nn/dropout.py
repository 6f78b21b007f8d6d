"""Dropout under tensor parallelism: alike on all TP ranks for replicas, different for shards.

Replicated activations draw from the default generator, which is alike on the ranks of a TP group; shards
(heads of the attention, parts of the sequence) draw inside `rng.fork("tensor-parallel")`.
torch.compile cannot take a fork into a graph: it breaks there, or raises under fullgraph=True.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed import ProcessGroup

from fastmp.ops import bias_dropout_add
from fastmp.parallel.collectives import group_size
from fastmp.parallel.rng import RngTracker

__all__ = ["Dropout", "require_rng", "sharded_region"]


def require_rng(owner: str, probability: float, group: ProcessGroup | None, rng: RngTracker | None) -> None:
    """Refuse dropout of shards without a generator per rank: all shards would drop the same positions."""
    if probability > 0.0 and rng is None and group_size(group) > 1:
        raise ValueError(
            f"{owner}: dropout {probability} of tensor-parallel shards over {group_size(group)} ranks "
            "needs rng=RngTracker(...), got rng=None"
        )


def sharded_region(rng: RngTracker | None, device: torch.device) -> AbstractContextManager:
    """Random numbers drawn inside on `device` are of this rank's shard. Without a tracker (one rank): torch's
    own generator."""
    return nullcontext() if rng is None else rng.fork("tensor-parallel", device=device)


class Dropout(nn.Module):
    """Dropout of hidden states; `sharded`: they are this rank's part of the sequence, not a replica."""

    def __init__(
        self, probability: float, *, group: ProcessGroup | None, rng: RngTracker | None, sharded: bool
    ) -> None:
        super().__init__()
        if sharded:
            require_rng("Dropout", probability, group, rng)
        self.probability, self.rng, self.sharded = probability, rng, sharded

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.drops:
            return x
        with self._stream(x.device):
            return F.dropout(x, self.probability)

    def add(self, x: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor) -> torch.Tensor:
        """residual + dropout(x + bias) in one pass; backward makes the mask again, so none is kept."""
        with self._stream(x.device):
            return bias_dropout_add(x, bias, residual, p=self.probability, training=self.training)

    @property
    def drops(self) -> bool:
        return self.training and self.probability > 0.0

    def _stream(self, device: torch.device) -> AbstractContextManager:
        """Where random numbers come from, if any are drawn: no fork, and no break of a graph, if not."""
        return sharded_region(self.rng, device) if self.sharded and self.drops else nullcontext()

    def extra_repr(self) -> str:
        return f"{self.probability}, sharded={self.sharded}"
