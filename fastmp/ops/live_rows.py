"""Rows of tokens that count: the only ones that the GEMMs of a chunked loss see."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from fastmp.ops.linear_cross_entropy_chunks import Shards


class LiveRows(Shards):
    """`shards` of which only the rows `live` (L,) of the N gathered tokens are multiplied.

    own_rows: of the hidden states of this rank, before they are gathered.
    """

    def __init__(self, shards: Shards, live: Tensor, num_rows: int, own_rows: int) -> None:
        self.shards, self.live, self.num_rows, self.gathers = shards, live, num_rows, own_rows != num_rows
        self.rank, self.size = shards.rank, shards.size

    def gather_hidden(self, hidden: Tensor) -> Tensor:
        return self.shards.gather_hidden(hidden).index_select(0, self.live)

    def gather_stats(self, stats: Tensor) -> tuple[Tensor, Any]:
        return self.shards.gather_stats(stats)

    def reduce_grad(self, grad: Tensor) -> tuple[Tensor, Any]:
        every = grad.new_zeros(self.num_rows, grad.shape[1])
        if self.gathers:  # each rank receives other rows
            return self.shards.reduce_grad(every.index_copy_(0, self.live, grad))
        grad, work = self.shards.reduce_grad(grad)
        placing = _Placing(work, every, self.live, grad)
        if work is None:
            placing.wait()
        return every, None if work is None else placing


class _Placing(NamedTuple):
    """Work that puts rows in their places once they are reduced."""

    work: Any
    every: Tensor
    live: Tensor
    rows: Tensor

    def wait(self) -> None:
        if self.work is not None:
            self.work.wait()
        self.every.index_copy_(0, self.live, self.rows)
