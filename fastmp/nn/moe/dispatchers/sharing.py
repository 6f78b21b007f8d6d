"""The dispatcher of expert tensor parallelism without expert parallelism: the ranks share all their tokens.

Each of the `etp` ranks holds a slice of every expert. They all-gather their tokens, run the same rows through
their slices, and reduce-scatter the partial sums. Where the ranks hold parts of one sequence, all shapes are
static. Otherwise their hosts exchange the number of tokens over gloo, without the device.
"""

from __future__ import annotations

from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from fastmp.config import MoEConfig
from fastmp.config.dispatchers import SHARING, SHARING_SEQUENCES
from fastmp.distributed.collectives import all_gather, gather_sequence, group_size, reduce_scatter_sequence
from fastmp.distributed.groups import ParallelGroups
from fastmp.nn.moe.dispatchers.dispatcher import encode_rejection, pad_rows, raise_if_rejected
from fastmp.nn.moe.dispatchers.local import LocalDispatched, LocalDispatcher, LocalPrepared

__all__ = ["SharingDispatcher", "is_within"]

_HOST = torch.device("cpu")


class SharingDispatcher(LocalDispatcher):
    """Gather the tokens of the `etp` ranks, which each hold a slice of every expert.

    Args:
        etp_group: the ranks that share their tokens. one_sequence: the ranks hold parts of one sequence, so
        that each knows how many tokens the others have. own_stream: as in `fastmp.distributed.collectives`.

    Raises ValueError where hosts must exchange sizes, but the group has no backend for CPU tensors.
    """

    def __init__(
        self, num_experts: int, etp_group: ProcessGroup, *, one_sequence: bool, own_stream: bool = False
    ) -> None:
        super().__init__(num_experts)
        self.etp_group, self.one_sequence, self.own_stream = etp_group, one_sequence, own_stream
        self.spec = SHARING if one_sequence else SHARING_SEQUENCES
        if not one_sequence and _HOST not in etp_group._device_types:
            raise ValueError(
                f"MoELayer: {group_size(etp_group)} ranks share experts but not sequences, so their hosts "
                f"must tell each other sizes, which backend {dist.get_backend(etp_group)} cannot do: "
                'initialise with backend="cpu:gloo,cuda:nccl", as fastmp.init does'
            )

    @classmethod
    def create(cls, moe: MoEConfig, groups: ParallelGroups) -> Self:
        assert groups.etp is not None
        return cls(
            moe.num_experts,
            groups.etp,
            one_sequence=is_within(groups.etp, groups.tp),
            own_stream=moe.shared_expert_ffn_hidden_size > 0,
        )

    def preprocess(
        self, indices: Tensor, probs: Tensor, max_tokens: int, rejected: bool = False
    ) -> LocalPrepared:
        if not self.one_sequence:  # the etp hosts agree on the longest
            count = encode_rejection(max_tokens, rejected)
            max_tokens = max(raise_if_rejected(_of_all_ranks(count, self.etp_group)))
        # all-gather of choices over etp: (etp * max_tokens, k)
        all_indices = all_gather(pad_rows(indices, max_tokens, -1), self.etp_group)[0]
        return super().preprocess(all_indices, probs, max_tokens)

    def dispatch(self, tokens: Tensor, state: LocalPrepared) -> tuple[Tensor, Tensor, LocalDispatched]:
        max_tokens = state.row_of.shape[0] // group_size(self.etp_group)
        # all-gather of tokens and probabilities over etp; their gradients are reduce-scattered
        tokens, probs = (
            gather_sequence(pad_rows(part, max_tokens), self.etp_group, own_stream=self.own_stream)
            for part in (tokens, state.probs)
        )
        return super().dispatch(tokens, LocalPrepared(probs, state.row_of, state.offsets))

    def combine(self, outputs: Tensor, state: LocalDispatched) -> Tensor:
        partial = super().combine(outputs, state)
        # reduce-scatter of the partial sums over etp
        return reduce_scatter_sequence(partial, self.etp_group, own_stream=self.own_stream)


def _of_all_ranks(number: int, group: ProcessGroup) -> list[int]:
    """Gather a number of each rank of `group`, from host to host."""
    return all_gather(torch.tensor([number], device=_HOST), group)[0].tolist()


def is_within(group: ProcessGroup, other: ProcessGroup | None) -> bool:
    """Return True if all ranks of `group` are in `other`."""
    if other is None:
        return False
    return set(dist.get_process_group_ranks(group)) <= set(dist.get_process_group_ranks(other))
