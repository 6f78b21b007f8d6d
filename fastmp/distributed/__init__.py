"""Ranks and their process groups: grid, start-up, collectives, random streams, symmetric memory.

Names are imported when first used: `RankGrid` never imports torch.
"""

from __future__ import annotations

from fastmp._lazy import exports

__getattr__, __dir__, __all__ = exports(
    __name__,
    {
        "grid": "RankGrid",
        "groups": "ParallelGroups",
        "runtime": "Runtime init main_guard",
        "collectives": "all_to_all copy_to_group gather_from_group gather_sequence "
        "group_rank group_size reduce_from_group "
        "reduce_scatter_sequence split_to_group",
        "rng": "RngTracker",
    },
)
