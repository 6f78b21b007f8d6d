"""Dropout over ranks: one mask for activations that TP ranks replicate, different masks for shards.

Replicated activations draw from the default generator, which is in the same state on the ranks of a TP group;
shards (attention heads, slices of the sequence) draw inside `rng.fork("tensor-parallel")`. CP ranks hold
different tokens, so each CP rank has its own stream for either. torch.compile breaks the graph at a fork, or
raises under fullgraph=True.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch.distributed import ProcessGroup

from fastmp.distributed.collectives import group_size
from fastmp.distributed.rng import RngTracker
from fastmp.nn.placement import Placement
from fastmp.ops import bias_dropout_add
from fastmp.ops.core.checks import is_dtensor
from fastmp.tensor_parallel.layers import GroupModule

__all__ = ["Dropout", "random_stream", "require_rng"]

_DEFAULT_STREAM = nullcontext()


def require_rng(owner: str, probability: float, on: Placement, *, sharded: bool) -> None:
    """Raise ValueError for dropout over CP ranks, and if `sharded` over TP ranks, without `on.rng`.

    All ranks would drop the same positions.
    """
    for axis, over in (("tensor", on.groups.tp if sharded else None), ("context", on.groups.cp)):
        if probability > 0.0 and on.rng is None and group_size(over) > 1:
            raise ValueError(
                f"{owner}: dropout {probability} of {axis}-parallel shards over {group_size(over)} ranks "
                "needs rng=RngTracker(...), got rng=None"
            )


def random_stream(
    rng: RngTracker | None, device: torch.device, *, sharded: bool, cp_group: ProcessGroup | None
) -> AbstractContextManager[None]:
    """Return a context that draws on `device` for a TP shard if `sharded`, else for a TP replica.

    Either way the numbers are for the tokens of this CP rank. Without a tracker (on one rank) they come from
    torch's generator.
    """
    if rng is None:
        return _DEFAULT_STREAM
    parts = ("tensor",) * sharded + ("context",) * (group_size(cp_group) > 1)
    if not parts:
        return _DEFAULT_STREAM
    return rng.fork("-".join((*parts, "parallel")), device=device)


class Dropout(GroupModule):
    """Dropout of hidden states: TP shards under sequence parallelism, else TP replicas."""

    def __init__(self, probability: float, on: Placement = Placement()) -> None:
        super().__init__()
        require_rng("Dropout", probability, on, sharded=on.sequence_parallel)
        self.probability, self.rng = probability, on.rng
        self.sharded, self.cp_group = on.sequence_parallel, on.groups.cp

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.drops:
            return x
        with self._stream(x.device):
            return F.dropout(x, self.probability)

    def add(
        self,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return residual + dropout(x + bias) from one kernel; backward regenerates the mask.

        out: written with the result if shape, dtype and device agree.
        """
        if out is not None and (out.shape, out.dtype, out.device) != (x.shape, residual.dtype, x.device):
            out = None
        if not self.drops:
            return bias_dropout_add(x, bias, residual, p=0.0, out=out)
        with self._stream(x.device):
            seed = None if self.rng is None or is_dtensor(x) else self.rng.seed(x.device)
            return bias_dropout_add(x, bias, residual, p=self.probability, seed=seed, out=out)

    @property
    def drops(self) -> bool:
        return self.training and self.probability > 0.0

    def _stream(self, device: torch.device) -> AbstractContextManager[None]:
        """Return the random stream of masks."""
        return random_stream(self.rng, device, sharded=self.sharded, cp_group=self.cp_group)

    def extra_repr(self) -> str:
        return f"{self.probability}, sharded={self.sharded}"
