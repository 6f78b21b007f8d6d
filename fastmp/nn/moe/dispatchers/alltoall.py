"""All-to-all dispatcher: rows go to the ranks of their experts over `ep`, in splits of any size.

What a rank receives is sorted by source, then by expert, and is sorted once more. With expert tensor
parallelism the ranks of an `etp` group, which hold other tokens and other slices of the same experts, share
their rows: all-gather in, reduce-scatter out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fastmp.config.dispatchers import ALLTOALL
from fastmp.distributed.collectives import all_to_all, gather_sequence, reduce_scatter_sequence
from fastmp.nn.moe.dispatchers.counted import CountedDispatcher, add_up
from fastmp.nn.moe.dispatchers.dispatcher import DispatchState, first_rows, pad_rows
from fastmp.nn.moe.dispatchers.fp8_rows import fp8_all_to_all
from fastmp.ops import block_rows, permutation, permute, unpermute

__all__ = ["AllToAllDispatcher"]


@dataclass(slots=True)
class AllToAllPrepared(DispatchState):
    probs: Tensor  # (T, k)
    row_of: Tensor  # (T, k), the row of each assignment as it is sent
    row_of_received: Tensor  # (at most, 1), the row at the experts of each row received
    starts: Tensor  # where each block of rows of one expert and source starts as received
    places: Tensor  # and where its rows go at the experts
    offsets: Tensor  # (L,)
    counts: Tensor  # (R, E + 1), on its way to the host


@dataclass(slots=True)
class AllToAllDispatched(DispatchState):
    probs: Tensor  # (T, k)
    row_of: Tensor  # (T, k)
    row_of_received: Tensor  # (received, 1)
    numbers: Tensor  # on the host: `_numbers`


class AllToAllDispatcher(CountedDispatcher[AllToAllPrepared, AllToAllDispatched]):
    """Send each token to its experts by all-to-all over `ep`, then gather the rows of the `etp` ranks."""

    spec = ALLTOALL
    prepared, dispatched = AllToAllPrepared, AllToAllDispatched
    adds_residual = True

    def preprocess(
        self, indices: Tensor, probs: Tensor, max_tokens: int, rejected: bool = False
    ) -> AllToAllPrepared:
        row_of, offsets = permutation(indices, self.num_experts)
        counts = torch.diff(offsets, prepend=offsets.new_zeros(1))
        matrix_RX = self._all_rank_counts(counts, indices.shape[0], max_tokens, rejected)
        copy_RX = self.copies.start(matrix_RX)
        starts, places, offsets = self._blocks(matrix_RX)
        # The places of all rows that can be received, unless a rank has more than `max_tokens` tokens.
        most = self.etp * self.ep * max_tokens * min(indices.shape[1], self.num_local)
        row_of_received = block_rows(starts, places, most)
        return AllToAllPrepared(probs, row_of, row_of_received, starts, places, offsets, copy_RX)

    def dispatch(self, tokens: Tensor, state: AllToAllPrepared) -> tuple[Tensor, Tensor, AllToAllDispatched]:
        fp8, count = self.fp8 if self.ep_group is not None else None, state.row_of.numel()
        # sort by rank and expert, while the copy is on its way
        if fp8 is None:
            rows = permute(tokens, state.row_of, count)
        else:
            quantized = permute(tokens.detach(), state.row_of, count, quantize=True, block=fp8.block)
        numbers = self._received_counts(state.counts)  # waits for the device
        sent, received, by_etp = self._splits(numbers)
        # all-to-all over ep
        if fp8 is None:
            rows = self._exchanged(first_rows(rows, sum(sent)), sent, received)
        else:
            q, s = (first_rows(each, sum(sent)) for each in quantized)
            assert self.ep_group is not None
            rows = fp8_all_to_all(
                tokens, state.row_of, (q, s), sent, received, self.ep_group, fp8, own_stream=self.own_stream
            )
        # all-gather over etp, padded to the longest of its ranks
        if self.etp > 1:
            rows = gather_sequence(pad_rows(rows, max(by_etp)), self.etp_group, own_stream=self.own_stream)
        # sort by expert
        row_of_received = state.row_of_received
        if len(row_of_received) < len(rows):
            row_of_received = block_rows(state.starts, state.places, len(rows))
        row_of_received = first_rows(row_of_received, len(rows))
        rows = permute(rows, row_of_received, sum(by_etp))
        return rows, state.offsets, AllToAllDispatched(state.probs, state.row_of, row_of_received, numbers)

    def sizes(self, state: AllToAllDispatched) -> list[int]:
        return self._values(state.numbers)[-self.num_local :]

    def combine(self, outputs: Tensor, state: AllToAllDispatched) -> Tensor:
        return unpermute(self._returned(outputs, state), state.row_of, state.probs)

    def combine_onto(
        self, residual: Tensor, out: Tensor | None, outputs: Tensor, state: AllToAllDispatched
    ) -> Tensor:
        rows = self._returned(outputs, state)
        return unpermute(rows, state.row_of, state.probs, residual=residual, out=out)

    def _returned(self, outputs: Tensor, state: AllToAllDispatched) -> Tensor:
        """Send the outputs back: reduce-scatter over etp, then all-to-all over ep."""
        sent, received, by_etp = self._splits(state.numbers)
        rows = unpermute(outputs, state.row_of_received, None)
        if self.etp > 1:
            rows = reduce_scatter_sequence(rows, self.etp_group, own_stream=self.own_stream)
            rows = first_rows(rows, by_etp[self.etp_rank])
        return self._exchanged(rows, received, sent)

    def _exchanged(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        return all_to_all(rows, sent, received, self.ep_group, check=False, own_stream=self.own_stream)

    def _numbers(self, matrix_RX: np.ndarray) -> np.ndarray:
        sent = add_up(matrix_RX[self.rank, :-1].reshape(self.ep, -1), 1)
        local = self._local(matrix_RX)
        received = add_up(local, 2)
        of_experts = add_up(local, (0, 1))
        return np.concatenate((sent, received[self.etp_rank], add_up(received, 1), of_experts))

    def _splits(self, numbers: Tensor) -> tuple[list[int], list[int], list[int]]:
        """Return the rows sent to and received from each ep rank, and those received by each etp rank."""
        values, ep = self._values(numbers), self.ep
        return values[:ep], values[ep : 2 * ep], values[2 * ep : 2 * ep + self.etp]

    def _blocks(self, matrix_RX: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return (starts, places, offsets) of the blocks of rows from one source for one expert.

        starts: the first row of each block as received. places: its first row at the experts. offsets: the
            end
        of each expert's rows.

        After the rows of each etp rank comes a block of padding, which goes nowhere.
        """
        rows = self._local(matrix_RX).reshape(self.etp, -1)
        totals = rows.sum(1, keepdim=True)
        sizes = torch.cat((rows, totals.max() - totals), 1).flatten()
        starts = (sizes.cumsum(0) - sizes).to(torch.int32)
        by_expert = rows.reshape(-1, self.num_local).t()
        ends = by_expert.reshape(-1).cumsum(0).view_as(by_expert)
        places = (ends - by_expert).t().reshape(self.etp, -1)
        offsets = ends[:, -1].to(torch.int32)
        return starts, F.pad(places, (0, 1), value=-1).flatten().to(torch.int32), offsets
