"""A layer is an ordered list of segments, and that is all it says about how it may be run.

A segment takes and returns a fixed tuple of tensors: everything that crosses from one segment to the next is
in that tuple, so whoever runs a layer can stop between any two of them. `capturable` says that a segment has
no host synchronisation, no data-dependent shape and no side effect on the host: it may be recorded once and
replayed. Eager forward runs the segments in order; a graph manager or an overlapping schedule does it from
outside, and no layer mentions either. A layer with experts reads: attention, router, preprocess | dispatch,
experts, combine, where the last three are not capturable if experts are divided over ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from fastmp.profiling import region

__all__ = ["Segment", "SegmentedLayer"]

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Segment:
    """One step of a layer: `run` takes the tensors that the segment before it returned."""

    name: str
    run: Callable[..., Tensors]
    capturable: bool = True


class SegmentedLayer(nn.Module):
    """A layer that consists of `segments()`; forward runs them in order, each a range for profilers.

    Takes the tensors of the first segment as positional arguments; returns what the last one returns, without
    the tuple where it is a single tensor.
    """

    def segments(self) -> tuple[Segment, ...]:
        raise NotImplementedError(f"{type(self).__name__} does not define its segments")

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor | Tensors:
        for segment in self.segments():
            with region(f"fastmp.segment.{type(self).__name__}.{segment.name}"):
                tensors = segment.run(*tensors)
        return tensors[0] if len(tensors) == 1 else tensors
