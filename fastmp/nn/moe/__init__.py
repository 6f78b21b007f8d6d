"""Mixture of experts: router, dispatchers, grouped experts, and the layer that they make, in segments."""

from __future__ import annotations

from fastmp._lazy import exports

__getattr__, __dir__, __all__ = exports(
    __name__,
    {
        "router": "Router",
        "dispatchers.allgather": "AllGatherDispatcher",
        "dispatchers.alltoall": "AllToAllDispatcher",
        "dispatchers.dispatcher": "Dispatcher DispatchState",
        "dispatchers.factory": "make_dispatcher",
        "dispatchers.local": "LocalDispatcher",
        "dispatchers.symmetric": "SymmetricDispatcher",
        "experts": "GroupedExperts SharedExperts",
        "layer": "MoELayer",
        "routing": "Routing RoutingRecorder routed",
    },
)
