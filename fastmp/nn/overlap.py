"""EP communication overlap: the all-to-all of one microbatch with the compute of another (DualPipe-style).

`OverlappedLayers` partitions the `LayerChain`s of chunks where segments begin or cease to communicate. The
executor of a pipeline runs these parts one by one, in the order of `fastmp.schedule.stream_schedule`, and
cuts the autograd graph at the same places, so that a backward also runs part by part: a forward that is
overlapped with a backward interleaves the parts of both. On a GPU, communication runs on the exchange stream.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from fastmp.nn.segment import BoundSegment, LayerChain, Tensors, run_segments
from fastmp.schedule.stream_schedule import SegmentCost, SegmentFacts, partition_segments
from fastmp.tensor_parallel.attributes import hook_traits

__all__ = ["OverlappedLayers"]

Through = Callable[[int, LayerChain, Tensors, Mapping[str, Any]], Tensors]


class OverlappedLayers:
    """The layers of pipeline chunks in parts, so that two microbatches overlap: `Pipeline(overlap=)`.

    Forwards without gradients, and those outside of a pipeline's training step, run as usual.

    Attributes:
        runner: who runs the parts in place of `run_part`, with its arguments, or None: a graph manager.
        through: who runs a chain in a training step, called as through(chunk, chain, tensors, keywords).
        chains: the layers of each chunk.
        facts: the segments of each chunk; sections: its parts.

    Raises:
        ValueError: a chain recomputes activations; in `check_hooks`, a layer has hooks that would be skipped
            (a forward pre-hook with the trait `replayed` is called).
    """

    def __init__(self, chains: Sequence[LayerChain]) -> None:
        if any(chain.call is not None for chain in chains):
            raise ValueError("overlap_experts: layers are run in parts, which recompute=True does not know")
        self.chains = list(chains)
        self.runner: Callable[..., tuple[Tensors, Tensors]] | None = None
        self.through: Through | None = None
        self._links: list[list[list[BoundSegment]]] = []
        self.facts: list[list[SegmentFacts]] = []
        self.sections: list[list[SegmentCost]] = []
        for chunk, chain in enumerate(chains):
            links = chain.bound_segments()
            self.facts.append([link.facts for link in links])
            parts = partition_segments(self.facts[-1])
            self._links.append([[links[i] for i in own] for own, _ in parts])
            self.sections.append([section for _, section in parts])
            chain.runner = partial(self._run, chunk)

    @property
    def exchanges(self) -> bool:
        """True if a layer exchanges rows with other ranks; a pipeline stage may have none."""
        return any(section.exchange for own in self.sections for section in own)

    def links(self, chunk: int, part: int) -> list[BoundSegment]:
        """Return the segments of a part."""
        return self._links[chunk][part]

    def run_part(
        self, chunk: int, part: int, tensors: Tensors, shared: Mapping[str, Any]
    ) -> tuple[Tensors, Tensors]:
        """Run the segments of a part, with the forward hooks of layers; returns as `run_segments` does."""
        links = self.links(chunk, part)
        for layer in (link.layer for link in links if link.first):
            for hook in _replayed_hooks(layer):
                hook(layer, ())
        return run_segments(links, tensors, shared=shared)

    def check_hooks(self) -> None:
        """Raise ValueError for a hook of a layer that running its segments would skip."""
        for layer in (layer for chain in self.chains for layer in chain):
            if (hook := _skipped_hook(layer)) is not None:
                raise ValueError(
                    f"overlap_experts: layers are run in parts, so {type(layer).__name__} is not called, "
                    f"nor its hook {hook}; put it on a module inside the layer"
                )

    def _run(self, chunk: int, chain: LayerChain, tensors: Tensors, shared: Mapping[str, Any]) -> Tensors:
        if self.through is None or not torch.is_grad_enabled():
            return chain.run(tensors, shared)
        return self.through(chunk, chain, tensors, shared)


def _skipped_hook(layer: nn.Module) -> Callable[..., Any] | None:
    """Return a hook of `layer` that running its segments would skip, or None."""
    before = [hook for hook in layer._forward_pre_hooks.values() if hook not in _replayed_hooks(layer)]
    others = (layer._forward_hooks, layer._backward_pre_hooks, layer._backward_hooks)
    return next(iter((*before, *(hook for hooks in others for hook in hooks.values()))), None)


def _replayed_hooks(layer: nn.Module) -> list[Callable[..., Any]]:
    """Return the forward pre-hooks of `layer` that are called as hook(layer, ()) before its first segment."""
    return [hook for hook in layer._forward_pre_hooks.values() if hook_traits(hook).replayed]
