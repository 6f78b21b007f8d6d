"""The DeepEP dispatcher, also between machines: each token is sent to a rank once.

A rank receives a token if at least one of its experts was chosen, with all choices and their probabilities.
It sorts the rows by expert, and returns one row, the weighted sum of its experts' outputs. The token's rank
adds up the rows of all ranks. The gradient of dispatch is combine, and the reverse. DeepEP computes the
sizes; the host waits for them in `dispatch`.

With expert tensor parallelism each choice becomes `etp` choices, one for each shard of the expert.

T tokens of this rank, N received ones, k experts of each, H hidden, E experts, L experts of this rank, D etp
ranks that divide an expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from fastmp.config import MoEConfig
from fastmp.config.dispatchers import DEEPEP
from fastmp.distributed.collectives import group_size
from fastmp.distributed.deepep_buffer import DeepEPBuffer
from fastmp.distributed.groups import ParallelGroups
from fastmp.nn.moe.dispatchers.dispatcher import Dispatcher, DispatchState
from fastmp.nn.segment import Tensors
from fastmp.ops import permutation, permute, unpermute
from fastmp.ops.core.registry import compute_dtype

__all__ = ["DeepEPDispatcher"]

_MAX_CHOICES = 32  # of a token: a warp of DeepEP's kernels has a lane for each


@dataclass(slots=True)
class DeepEPPrepared(DispatchState):
    indices: Tensor  # (T, k)
    probs: Tensor  # (T, k)


@dataclass(slots=True)
class DeepEPDispatched(DispatchState):
    weights: Tensor  # (N, k)
    row_of: Tensor  # (N, k), the row of each choice here, or -1
    counts: Tensor  # (L,), on the host
    handle: Tensors  # DeepEP's own, whose number differs within and between machines

    def tensors(self) -> Tensors:
        return self.weights, self.row_of, self.counts, *self.handle

    @classmethod
    def with_tensors(cls, tensors: Tensors) -> Self:
        weights, row_of, counts, *handle = tensors
        return cls(weights, row_of, counts, tuple(handle))


class DeepEPDispatcher(Dispatcher[DeepEPPrepared, DeepEPDispatched]):
    """Send tokens to their experts through `groups.deepep`, whose ranks divide them.

    Raises ValueError where the ranks do not divide the experts, and where a token has more choices than
    DeepEP supports.
    """

    spec = DEEPEP
    prepared, dispatched = DeepEPPrepared, DeepEPDispatched

    def __init__(self, moe: MoEConfig, groups: ParallelGroups) -> None:
        super().__init__(moe.num_experts, group_size(groups.ep))
        assert groups.deepep is not None
        self.buffer: DeepEPBuffer = groups.deepep
        self.etp = group_size(groups.etp)
        if moe.top_k * self.etp > _MAX_CHOICES:
            raise ValueError(
                f"DeepEPDispatcher: top_k {moe.top_k} x etp {self.etp} are more than the {_MAX_CHOICES} "
                'choices of a token that DeepEP sends; take "alltoall"'
            )
        # How far apart in the group the ranks are that differ by one in etp, or in ep.
        self._steps = (1, self.etp) if groups.grid.etp_varies_first else (self.ep, 1)

    @classmethod
    def create(cls, moe: MoEConfig, groups: ParallelGroups) -> Self:
        return cls(moe, groups)

    def check(self, rows: Tensor) -> None:
        self.buffer.check(rows)

    def preprocess(
        self, indices: Tensor, probs: Tensor, max_tokens: int, rejected: bool = False
    ) -> DeepEPPrepared:
        if rejected:
            raise ValueError(
                f"MoELayer: the {len(indices)} tokens of this rank are too few: its experts would have a "
                "capacity of less than one token"
            )
        return DeepEPPrepared(indices, probs)

    def _parts(self, indices: Tensor) -> Tensor:
        """Number the parts (T, D x k) of experts, those of the first rank of the group first."""
        etp_step, ep_step = self._steps
        peers = indices // self.num_local
        first = indices + peers * (self.num_local * (ep_step - 1))
        parts = [first + d * self.num_local * etp_step for d in range(self.etp)]
        return torch.cat([part.masked_fill(indices < 0, -1) for part in parts], 1)

    def dispatch(self, tokens: Tensor, state: DeepEPPrepared) -> tuple[Tensor, Tensor, DeepEPDispatched]:
        indices, probs = state.indices, state.probs
        if self.etp > 1:
            indices, probs = self._parts(indices), probs.repeat(1, self.etp)
        buffer = self.buffer.reserve(tokens)
        # all ranks of etp-ep exchange layouts, then tokens, on DeepEP's stream; its host waits for the sizes
        received, weights, chosen, counts, *handle = _DeepEPDispatch.apply(
            tokens.contiguous(),
            probs.to(compute_dtype(tokens.dtype)).contiguous(),
            indices.to(self.buffer.index_dtype).contiguous(),
            buffer,
            self.num_experts * self.etp,
        )
        row_of, offsets = permutation(chosen.to(torch.int32), self.num_local)
        rows = permute(received, row_of, int(counts.sum()))
        return rows, offsets, DeepEPDispatched(weights, row_of, counts, tuple(handle))

    def sizes(self, state: DeepEPDispatched) -> list[int]:
        return state.counts.tolist()

    def combine(self, outputs: Tensor, state: DeepEPDispatched) -> Tensor:
        sums = unpermute(outputs, state.row_of, state.weights)
        total: Tensor = _DeepEPCombine.apply(sums, self.buffer.reserve(sums), *state.handle)
        return total


class _DeepEPDispatch(Function):
    """Dispatch tokens (T, H) with probabilities (T, k) and choices (T, k).

    Returns tokens (N, H), probabilities (N, k), choices (N, k) among this rank's experts or -1, the number of
    rows of each expert (L,), which is on the host, and the tensors of DeepEP's handle.
    """

    @staticmethod
    def forward(
        ctx: Any, tokens: Tensor, probs: Tensor, indices: Tensor, buffer: Any, num_experts: int
    ) -> Tensors:
        of_rank, of_machine, of_expert, goes, _ = buffer.get_dispatch_layout(indices, num_experts)
        received, chosen, weights, counts, handle, _ = buffer.dispatch(
            tokens,
            topk_idx=indices,
            topk_weights=probs,
            num_tokens_per_rank=of_rank,
            num_tokens_per_rdma_rank=of_machine,
            num_tokens_per_expert=of_expert,
            is_token_in_rank=goes,
        )
        counts = torch.tensor(counts, device="cpu")
        ctx.save_for_backward(*handle)
        ctx.buffer = buffer
        ctx.mark_non_differentiable(chosen, counts, *handle)
        return received, weights, chosen, counts, *handle

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dreceived: Tensor, dweights: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        dtokens, dprobs, _ = ctx.buffer.combine(
            dreceived.contiguous(), ctx.saved_tensors, topk_weights=dweights.contiguous()
        )
        return dtokens, dprobs, None, None, None


class _DeepEPCombine(Function):
    """Return rows (N, H) to the ranks of their tokens, summed over ranks: (T, H)."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, buffer: Any, *handle: Tensor) -> Tensor:
        ctx.save_for_backward(*handle)
        ctx.buffer = buffer
        total, _, _ = buffer.combine(rows, handle)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dtotal: Tensor) -> tuple[Tensor | None, ...]:
        handle = ctx.saved_tensors
        drows, *_ = ctx.buffer.dispatch(dtotal.contiguous(), handle=handle)
        return drows, None, *[None] * len(handle)
