"""Attach an activation stash to the expert layers of a run, sized for its schedule and the stated load."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from fastmp.distributed.groups import ParallelGroups
from fastmp.nn.moe.activation_stash import ActivationStash
from fastmp.nn.moe.layer import MoELayer
from fastmp.nn.segment import LayerChain
from fastmp.plan.rank_load import Load
from fastmp.plan.stash_size import live_entries, overlapped_entries, ring_rows
from fastmp.schedule.schedule import BACKWARD_WEIGHT
from fastmp.training.microbatches import MicrobatchRunner

__all__ = ["attach_stash"]


def attach_stash(runner: MicrobatchRunner, groups: ParallelGroups) -> ActivationStash | None:
    """Give the layers of `runner` that receive into symmetric memory one stash; return it.

    None: there is no such layer, `model.moe.activation_stash` is 0, or all of them recompute activations,
    which then live no longer than the backward of a layer.
    """
    of_chunks = [_stashing(chunk) for chunk in runner.chunks]
    layers, counts = [layer for own in of_chunks for layer in own], list(map(len, of_chunks))
    if not layers:
        return None
    # 1. The entries in use at a time, by the steps of this rank.
    if runner.overlap is None:
        order = list(runner.order)
    else:
        order, counts = overlapped_entries(runner.concurrent(), runner.overlap.sections, len(layers))
    live = live_entries(order, counts)
    # 2. The rows that their load needs, once the first forward knows the number of tokens.
    moe, grid = layers[0].moe, groups.grid

    def size(balanced: int, capacity: int) -> int:
        return ring_rows(
            live, Load(moe.activation_stash), balanced=balanced, capacity=capacity, ep=grid.ep,
            ranks=grid.world_size, overflow=moe.stash_overflow,
        )  # fmt: skip

    stash = ActivationStash(size, defers_wgrad=any(step.kind == BACKWARD_WEIGHT for step in order))
    for layer in layers:
        layer.stash = stash
    return stash


def _stashing(chunk: nn.Module) -> Sequence[MoELayer]:
    """Return the layers of a chunk whose activations a stash would keep."""
    chains = [module for module in chunk.modules() if isinstance(module, LayerChain)]
    if any(chain.call is not None for chain in chains):
        return []
    layers = [module for module in chunk.modules() if isinstance(module, MoELayer)]
    return [
        layer for layer in layers if layer.moe.activation_stash and layer.dispatcher.spec.symmetric_memory
    ]
