"""The symmetric-memory dispatcher: no host synchronisation, and a CUDA graph can hold all of it.

One kernel puts a rank's tokens at their rows in the memory of the experts' rank, another gets the outputs
from there; a device-side barrier separates writes and reads. Counts are exchanged the same way, and each rank
computes the rows of its tokens from them, on the device. Received rows are sorted by expert, then by source:
bit for bit the rows of an `AllToAllDispatcher`, followed by zeros up to the capacity.

With experts in FP8 tokens are sent quantised (see `fp8_rows`), their gradients as they are.

Rows beyond the capacity are dropped: the token gets nothing from that expert, and no gradient; dropped
assignments are counted. Without `moe.symmetric_capacity` the capacity is all tokens of all ranks.

T tokens of this rank, k experts of each, H hidden, E experts, L experts of this rank, C rows of capacity, R
ranks of the etp-ep group.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from fastmp.config import MoEConfig
from fastmp.config.dispatchers import SYMMETRIC
from fastmp.config.precision import Fp8Recipe
from fastmp.distributed.groups import ParallelGroups
from fastmp.distributed.streams import exchanging
from fastmp.distributed.symmetric_memory import ExchangeViews, SymmetricExchange
from fastmp.nn.moe.dispatchers.dispatcher import Dispatcher, DispatchState, no_compile
from fastmp.nn.moe.dispatchers.fp8_rows import packed, unpacked
from fastmp.ops import permutation, quantize_rows
from fastmp.ops.exchange import (
    exchange_barrier,
    exchange_counts,
    exchange_give,
    exchange_places,
    exchange_pull,
    exchange_push,
    exchange_take,
)

__all__ = ["SymmetricDispatcher"]

_ALIGNED = 16  # bytes of an access: rows in FP8 are made multiples of it


@dataclass(slots=True)
class SymmetricPrepared(DispatchState):
    probs: Tensor  # (T, k)
    indices: Tensor  # (T, k)
    row_of: Tensor  # (T, k), the row of each assignment among those of this rank
    ends: Tensor  # (E,), where each expert's rows end


@dataclass(slots=True)
class SymmetricDispatched(DispatchState):
    probs: Tensor  # (T, k)
    where: Tensor  # (T, k), the row of each assignment at the rank of its expert, or -1
    ends: Tensor  # (L + 1,), where each local expert's rows end, and how many assignments were dropped


class SymmetricDispatcher(Dispatcher[SymmetricPrepared, SymmetricDispatched]):
    """Exchange rows through the symmetric memory of `exchange`, whose group divides the experts.

    Args:
        moe: `symmetric_capacity` is the row capacity over a balanced load.
        exchange: allocates its memory at the first dispatch, on all ranks together.
        own_stream: communicate on the exchange stream, which has high priority, while the current stream
            waits; for layers whose shared expert fills the GPU at the same time.

    Raises ValueError where the ranks do not divide the experts, and as `SymmetricExchange.reserve`.
    """

    spec = SYMMETRIC
    prepared, dispatched = SymmetricPrepared, SymmetricDispatched

    def __init__(self, moe: MoEConfig, exchange: SymmetricExchange, *, own_stream: bool = False) -> None:
        super().__init__(moe.num_experts, exchange.ep)
        self.moe, self.exchange, self.own_stream = moe, exchange, own_stream
        self.may_drop = moe.symmetric_capacity is not None

    @classmethod
    def create(cls, moe: MoEConfig, groups: ParallelGroups) -> Self:
        assert groups.exchange is not None
        return cls(moe, groups.exchange, own_stream=moe.shared_expert_ffn_hidden_size > 0)

    def reserve(self, max_tokens: int) -> None:
        self.exchange.request(max_tokens)

    def preprocess(
        self, indices: Tensor, probs: Tensor, max_tokens: int, rejected: bool = False
    ) -> SymmetricPrepared:
        row_of, ends = permutation(indices, self.num_experts)
        return SymmetricPrepared(probs, indices, row_of, ends)

    @no_compile
    def dispatch(
        self, tokens: Tensor, state: SymmetricPrepared
    ) -> tuple[Tensor, Tensor, SymmetricDispatched]:
        views = self.exchange.reserve(
            tokens, top_k=self.moe.top_k, experts=self.num_experts, factor=self.moe.symmetric_capacity
        )
        # all ranks of etp-ep put their counts into each other's memory, on the exchange stream if it is used
        with _stream(tokens, self.own_stream):
            matrix_RE = exchange_counts(
                state.ends, views.epochs, views.counts, views.peer_offsets, views.rank, views.timeout
            )
            where, offsets, dropped = exchange_places(
                state.row_of, state.indices, matrix_RE, views.rank, self.exchange.ep, views.capacity
            )
        rows = _SymmetricDispatch.apply(tokens, where, offsets, views, self.own_stream, self.fp8)
        # The experts do not return their offsets: combine has its own.
        ends = torch.cat((offsets, dropped.view(1)))
        return rows, offsets, SymmetricDispatched(state.probs, where, ends)

    @no_compile
    def combine(self, outputs: Tensor, state: SymmetricDispatched) -> Tensor:
        views = self.exchange.views
        outputs = outputs.to(views.rows.dtype)
        total: Tensor = _SymmetricCombine.apply(
            outputs, state.probs, state.where, state.ends[:-1], views, self.own_stream
        )
        return total

    def dropped(self, state: SymmetricDispatched) -> Tensor:
        return state.ends[-1]


def _stream(x: Tensor, own_stream: bool) -> AbstractContextManager[None]:
    """Enter the stream of an exchange; autograd nodes call it inside, as they run on the current stream."""
    return exchanging(x) if own_stream else nullcontext()


def _barrier(views: ExchangeViews) -> None:
    exchange_barrier(views.epochs, views.peer_offsets, views.rank, views.timeout)


class _SymmetricDispatch(Function):
    """Tokens (T, H) to the rows (C, H) of this rank's experts; a token's gradient is the sum of its rows'."""

    @staticmethod
    def forward(
        ctx: Any,
        tokens: Tensor,
        where: Tensor,
        offsets: Tensor,
        views: ExchangeViews,
        own_stream: bool,
        fp8: Fp8Recipe | None,
    ) -> Tensor:
        ctx.save_for_backward(where, offsets)
        ctx.views, ctx.own_stream = views, own_stream
        # 1. In FP8, a row is its bytes and scales, in the first columns of a row of the buffer.
        sent = tokens
        if fp8 is not None:
            q, s = quantize_rows(tokens, block=fp8.block)
            sent = packed(q, s, _ALIGNED).view(tokens.dtype)
        # 2. Put each token at its rows at the experts' ranks. 3. All ranks meet. 4. Take what has arrived.
        with _stream(tokens, own_stream):
            exchange_push(sent, where, None, None, views.epochs, views.rows, views.peer_offsets)
            _barrier(views)
            rows = exchange_take(views.rows, views.epochs, offsets, sent.shape[1])
        return rows if fp8 is None else unpacked(rows.view(torch.uint8), tokens.shape[1], fp8, tokens.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        views, (where, offsets) = ctx.views, ctx.saved_tensors
        # 1. Offer this rank's row gradients. 2. All ranks meet. 3. Get each token's from its experts' ranks.
        with _stream(grad, ctx.own_stream):
            exchange_give(grad, offsets, views.epochs, views.rows)
            _barrier(views)
            total, _ = exchange_pull(views.rows, views.epochs, views.peer_offsets, where, None, False)
        return total, None, None, None, None, None


class _SymmetricCombine(Function):
    """Outputs (C, H) of this rank's experts to the weighted sums (T, H) of each token's."""

    @staticmethod
    def forward(
        ctx: Any,
        outputs: Tensor,
        probs: Tensor,
        where: Tensor,
        offsets: Tensor,
        views: ExchangeViews,
        own_stream: bool,
    ) -> Tensor:
        keep = ctx.needs_input_grad[1]
        with _stream(outputs, own_stream):
            exchange_give(outputs, offsets, views.epochs, views.rows)
            _barrier(views)
            total, rows = exchange_pull(views.rows, views.epochs, views.peer_offsets, where, probs, keep)
        ctx.save_for_backward(probs, where, offsets, rows)
        ctx.views, ctx.own_stream = views, own_stream
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        views, (probs, where, offsets, rows) = ctx.views, ctx.saved_tensors
        asked = ctx.needs_input_grad[1]
        y = rows if asked else None
        with _stream(grad, ctx.own_stream):
            dprobs = exchange_push(grad, where, probs, y, views.epochs, views.rows, views.peer_offsets)
            _barrier(views)
            dy = exchange_take(views.rows, views.epochs, offsets)
        return dy, dprobs if asked else None, None, None, None, None
