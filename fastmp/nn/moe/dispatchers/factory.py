"""Make the token dispatcher of an MoE layer from its configuration and process groups."""

from __future__ import annotations

from fastmp.config import MoEConfig
from fastmp.distributed.collectives import group_size
from fastmp.distributed.groups import ParallelGroups
from fastmp.nn.moe.dispatchers.base import (
    AllGatherDispatcher,
    AllToAllDispatcher,
    LocalDispatcher,
    SharingDispatcher,
    is_within,
)
from fastmp.nn.moe.dispatchers.deepep import DeepEPDispatcher
from fastmp.nn.moe.dispatchers.symmetric import SymmetricDispatcher

__all__ = ["make_dispatcher"]


def make_dispatcher(moe: MoEConfig, groups: ParallelGroups) -> LocalDispatcher:
    """The dispatcher that `moe.dispatcher` names, for the etp and ep groups of `groups`.

    Raises ValueError where the ranks do not divide the experts, and where hosts must tell each other sizes
    but have no backend for that.
    """
    if groups.etp_ep is None:
        return LocalDispatcher(moe.num_experts)
    beside = moe.shared_expert_ffn_hidden_size > 0  # which computes while rows travel
    if group_size(groups.ep) == 1:
        assert groups.etp is not None
        one_sequence = is_within(groups.etp, groups.tp)
        return SharingDispatcher(moe.num_experts, groups.etp, one_sequence=one_sequence, own_stream=beside)
    if moe.dispatcher == "symmetric":
        assert groups.exchange is not None
        return SymmetricDispatcher(moe, groups.exchange, own_stream=beside)
    if moe.dispatcher == "deepep":
        return DeepEPDispatcher(moe, groups)
    kind = AllGatherDispatcher if moe.dispatcher == "allgather" else AllToAllDispatcher
    return kind(
        moe.num_experts,
        ep_group=groups.ep,
        etp_group=groups.etp,
        etp_ep_group=groups.etp_ep,
        etp_varies_first=groups.grid.etp_varies_first,
        own_stream=beside,
    )
