"""The base of dispatchers whose host needs the counts of all ranks: all-to-all and all-gather.

How many rows go where is known on the device only. In `preprocess` all ranks of the etp-ep group all-gather
their counts, a collective of fixed shape, and start the copy of this one matrix to the host: in a CUDA graph
it is a node ahead of whatever comes after. `dispatch` begins by waiting for the copy, the only host-device
synchronisation, and derives every size from it. The matrix is the same on all ranks, so sizes cannot
disagree. A rank that has too few tokens encodes that in its row, and all ranks raise.
"""

from __future__ import annotations

from typing import Self, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from fastmp.config import MoEConfig
from fastmp.distributed.collectives import all_gather, group_rank, group_size
from fastmp.distributed.groups import ParallelGroups
from fastmp.nn.moe.dispatchers.dispatcher import (
    DispatchedT,
    Dispatcher,
    PreparedT,
    encode_rejection,
    raise_if_rejected,
)
from fastmp.nn.moe.host_copies import HostCopies

__all__ = ["CountedDispatcher", "add_up"]

add_up = np.add.reduce  # less overhead than np.sum
Matrix = TypeVar("Matrix", Tensor, np.ndarray)  # on the device, on the host


class CountedDispatcher(Dispatcher[PreparedT, DispatchedT]):
    """A dispatcher over several ranks: their places in the etp-ep group, and the matrix of counts.

    Args:
        ep_group, etp_group, etp_ep_group: the ranks that divide the experts, each expert, and both.
        etp_varies_first: neighbours in `etp_ep_group` are ranks of one etp group, not of one ep group.
        own_stream: as in `fastmp.distributed.collectives`.

    Raises ValueError where the expert-parallel ranks do not divide the experts.
    """

    def __init__(
        self,
        num_experts: int,
        *,
        ep_group: ProcessGroup | None,
        etp_group: ProcessGroup | None,
        etp_ep_group: ProcessGroup,
        etp_varies_first: bool = True,
        own_stream: bool = False,
    ) -> None:
        super().__init__(num_experts, group_size(ep_group))
        self.etp = group_size(etp_group)
        self.ep_group, self.etp_group, self.etp_ep_group = ep_group, etp_group, etp_ep_group
        self.ep_rank, self.etp_rank = group_rank(ep_group), group_rank(etp_group)
        self.rank, self.etp_varies_first = group_rank(etp_ep_group), etp_varies_first
        self.own_stream, self.copies = own_stream, HostCopies()

    @classmethod
    def create(cls, moe: MoEConfig, groups: ParallelGroups) -> Self:
        assert groups.etp_ep is not None
        return cls(
            moe.num_experts,
            ep_group=groups.ep,
            etp_group=groups.etp,
            etp_ep_group=groups.etp_ep,
            etp_varies_first=groups.grid.etp_varies_first,
            own_stream=moe.shared_expert_ffn_hidden_size > 0,
        )

    def _values(self, numbers: Tensor) -> list[int]:
        return numbers.tolist()

    def _all_rank_counts(self, counts: Tensor, tokens: int, max_tokens: int, rejected: bool) -> Tensor:
        """All-gather the matrix (R, E + 1): a rank's rows for each expert, and its tokens or a rejection."""
        last = encode_rejection(max_tokens, True) if rejected else tokens
        return all_gather(F.pad(counts, (0, 1), value=last).unsqueeze(0), self.etp_ep_group)[0]

    def _received_counts(self, copy_RX: Tensor) -> Tensor:
        """Wait for the matrix and return its `_numbers`. Raises ValueError if a rank has too few tokens."""
        matrix_RX = self.copies.wait(copy_RX)
        raise_if_rejected(matrix_RX[:, -1].tolist())
        return torch.from_numpy(self._numbers(matrix_RX))

    def _numbers(self, matrix_RX: np.ndarray) -> np.ndarray:
        """Return all sizes that the host needs, int64, the rows of this rank's experts last."""
        raise NotImplementedError

    def _local(self, matrix_RX: Matrix) -> Matrix:
        """Return the columns of a matrix (R, E + 1) for this rank's experts, as (etp, ep, L)."""
        first = self.ep_rank * self.num_local
        local = matrix_RX[:, first : first + self.num_local]
        if self.etp_varies_first:
            return local.reshape(self.ep, self.etp, -1).swapaxes(0, 1)
        return local.reshape(self.etp, self.ep, -1)
