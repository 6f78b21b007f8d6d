"""Activation recomputation: keep a layer's input, and run its forward again when backward needs the rest.

All random streams start from where they stood, so masks are the same and gradients are equal bit for bit.
Without sequence parallelism every TP rank holds the same input. On request each rank keeps 1/TP of it, and
recomputation gathers it again: TP times less memory for one all-gather a layer (Korthikanti et al. 2022,
section 5, has the memory of both).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import checkpoint

from fastmp.nn.segment import Tensors
from fastmp.parallel.collectives import all_gather, group_rank, group_size
from fastmp.parallel.rng import RngTracker, Seeds

__all__ = ["recompute"]


def recompute(
    function: Callable[..., torch.Tensor | Tensors],
    hidden: torch.Tensor,
    *others: torch.Tensor,
    rng: RngTracker | None,
    shard_over: ProcessGroup | None = None,
) -> torch.Tensor | Tensors:
    """Call `function(hidden, *others)`, and keep only its arguments for backward.

    Args:
        function: a layer, or anything that computes the same when called twice.
        hidden: first argument, usually (S, B, H).
        rng: the streams that `function` draws from; None: torch's default generators only.
        shard_over: keep 1/P of `hidden`, which must be the same on all P ranks of this group, and all of
            `others`.

    Raises ValueError where P does not divide the number of elements of `hidden`.
    """
    size = group_size(shard_over)
    if hidden.numel() % size:
        raise ValueError(
            f"recompute: an input of {hidden.numel()} elements cannot be divided over {size} ranks"
        )
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": rng is None}
    if rng is not None:
        options["context_fn"] = lambda: _rng_contexts(rng)
    if shard_over is None or size == 1 or not torch.is_grad_enabled():
        return checkpoint(function, hidden, *others, **options)
    shard = hidden.detach().reshape(size, -1)[group_rank(shard_over)].clone()
    return checkpoint(_Gathering(function, hidden, shard_over), shard, *others, **options)


class _Gathering:
    """A call of `function`: with the tensor itself the first time, then with one gathered from the shards."""

    def __init__(
        self, function: Callable[..., torch.Tensor | Tensors], hidden: torch.Tensor, group: ProcessGroup
    ) -> None:
        self.function, self.group = function, group
        self.shape, self.requires_grad = hidden.shape, hidden.requires_grad
        self.first: torch.Tensor | None = hidden

    def __call__(self, shard: torch.Tensor, *others: torch.Tensor) -> torch.Tensor | Tensors:
        hidden, self.first = self.first, None
        if hidden is None:
            hidden = all_gather(shard.detach(), self.group)[0].view(self.shape)
            hidden.requires_grad_(self.requires_grad)
        return self.function(hidden, *others)


def _rng_contexts(rng: RngTracker) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """The contexts of the forward, which starts now, and of its repetition."""
    seeds = Seeds(rng.states())
    return rng.noting(seeds), _Replay(rng, seeds)


class _Replay:
    """`rng.again(seeds)`, which may be entered twice: a graph that is kept can run backward again."""

    def __init__(self, rng: RngTracker, seeds: Seeds) -> None:
        self.rng, self.seeds = rng, seeds

    def __enter__(self) -> None:
        self.context = self.rng.again(self.seeds)
        self.context.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.context.__exit__(*error)
