"""All-gather dispatcher: every rank of the etp-ep group gets all tokens, and keeps those for its experts.

A reduce-scatter adds up the outputs. It suits few experts a rank and many experts a token.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fastmp.config.dispatchers import ALLGATHER
from fastmp.distributed.collectives import all_gather, gather_sequence, reduce_scatter_sequence
from fastmp.nn.moe.dispatchers.counted import CountedDispatcher, add_up
from fastmp.nn.moe.dispatchers.dispatcher import DispatchState, first_rows, pad_rows
from fastmp.ops import permutation, permute, unpermute

__all__ = ["AllGatherDispatcher"]


@dataclass(slots=True)
class AllGatherPrepared(DispatchState):
    indices: Tensor  # (T, k)
    probs: Tensor  # (T, k)
    counts: Tensor  # (R, E + 1), on its way to the host


@dataclass(slots=True)
class AllGatherDispatched(DispatchState):
    probs: Tensor  # (R * longest, k), of all ranks
    row_of: Tensor  # (R * longest, k), the row of each assignment here, or -1
    numbers: Tensor  # on the host: the longest, this rank's tokens, and the rows of each of its experts


class AllGatherDispatcher(CountedDispatcher[AllGatherPrepared, AllGatherDispatched]):
    """All-gather the tokens of the etp-ep group; reduce-scatter the outputs."""

    spec = ALLGATHER
    prepared, dispatched = AllGatherPrepared, AllGatherDispatched

    def preprocess(
        self, indices: Tensor, probs: Tensor, max_tokens: int, rejected: bool = False
    ) -> AllGatherPrepared:
        # One place more, for dropped assignments; bincount would wait to know how many places there are.
        counts = indices.new_zeros(self.num_experts + 1, dtype=torch.int32)
        counts.index_add_(
            0, indices.flatten() % (self.num_experts + 1), torch.ones_like(counts[:1]).expand(indices.numel())
        )
        matrix_RX = self._all_rank_counts(counts[:-1], indices.shape[0], max_tokens, rejected)
        return AllGatherPrepared(indices, probs, self.copies.start(matrix_RX))

    def dispatch(
        self, tokens: Tensor, state: AllGatherPrepared
    ) -> tuple[Tensor, Tensor, AllGatherDispatched]:
        numbers = self._received_counts(state.counts)  # waits for the device
        longest, _, *of_experts = self._values(numbers)
        # all-gathers over etp-ep, padded to the longest rank: (R * longest, H) and (R * longest, k)
        tokens, probs = (
            gather_sequence(pad_rows(part, longest), self.etp_ep_group, own_stream=self.own_stream)
            for part in (tokens, state.probs)
        )
        # Outside [0, L) are experts of other ranks, dropped assignments and padding: they get no row.
        indices = all_gather(pad_rows(state.indices, longest, -1), self.etp_ep_group)[0]
        row_of, offsets = permutation(indices - self.ep_rank * self.num_local, self.num_local)
        rows = permute(tokens, row_of, sum(of_experts))
        return rows, offsets, AllGatherDispatched(probs, row_of, numbers)

    def sizes(self, state: AllGatherDispatched) -> list[int]:
        return self._values(state.numbers)[-self.num_local :]

    def combine(self, outputs: Tensor, state: AllGatherDispatched) -> Tensor:
        partial = unpermute(outputs, state.row_of, state.probs)
        own = self._values(state.numbers)[1]
        # reduce-scatter over etp-ep: each rank gets the sums of its own tokens
        total = reduce_scatter_sequence(partial, self.etp_ep_group, own_stream=self.own_stream)
        return first_rows(total, own)

    def _numbers(self, matrix_RX: np.ndarray) -> np.ndarray:
        """Return the most tokens that a rank has, this rank's tokens, and the rows of each of its experts."""
        tokens, local = matrix_RX[:, -1], self._local(matrix_RX)
        own = tokens.max(), tokens[self.rank]
        return np.concatenate((own, add_up(local, (0, 1))), dtype=np.int64)
