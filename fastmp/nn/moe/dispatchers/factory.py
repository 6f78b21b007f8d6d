"""Make the token dispatcher of an MoE layer from its configuration and process groups."""

from __future__ import annotations

from typing import Any

from fastmp.config import MoEConfig
from fastmp.config.dispatchers import select_dispatcher
from fastmp.config.specs import load
from fastmp.distributed.collectives import group_size
from fastmp.distributed.groups import ParallelGroups
from fastmp.nn.moe.dispatchers.dispatcher import Dispatcher
from fastmp.nn.moe.dispatchers.sharing import is_within

__all__ = ["make_dispatcher"]


def make_dispatcher(moe: MoEConfig, groups: ParallelGroups) -> Dispatcher[Any, Any]:
    """Return the dispatcher that `moe.dispatcher` names, for the etp and ep groups of `groups`.

    Raises ValueError where the ranks do not divide the experts, where hosts must exchange sizes but have no
    backend for that, and for an unknown name.
    """
    spec = select_dispatcher(
        moe.dispatcher,
        ep=group_size(groups.ep),
        etp=group_size(groups.etp),
        one_sequence=groups.etp is not None and is_within(groups.etp, groups.tp),
    )
    made: Dispatcher[Any, Any] = load(spec.make)(moe, groups)
    return made
