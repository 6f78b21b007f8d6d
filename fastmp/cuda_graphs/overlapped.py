"""CUDA graphs with EP communication overlap: compute is captured, all-to-alls run eagerly next to replays.

The compute parts of `fastmp.nn.overlap` take the place of chains, and their order, which follows from the
schedule alone, that of steps. Weight gradients have graphs of their own, as with split backwards. Tensors
that cross from one part to the next are copied on the compute stream, because a graph may overwrite its
memory while the communication stream still reads.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from fastmp.cuda_graphs.executor import StepExecutor
from fastmp.cuda_graphs.manager import GraphManager
from fastmp.cuda_graphs.partition import Span, partition_sections
from fastmp.nn.overlap import OverlappedLayers
from fastmp.nn.segment import LayerChain, Tensors
from fastmp.schedule.schedule import Step
from fastmp.schedule.stream_schedule import compute_ops, graph_order

__all__ = ["OverlappedGraphManager"]


class OverlappedGraphManager(GraphManager):
    """A `GraphManager` of layers that run in parts, with the all-to-alls outside of its graphs.

    Args:
        overlap: runs the layers.
        steps: the steps that this rank overlaps, from `Schedule.together(rank)`.
        options: all other arguments, errors and limits are those of `GraphManager`; its chunks are the
            compute parts here, also in `order` and `plan`.
    """

    def __init__(self, overlap: OverlappedLayers, steps: Iterable[Sequence[Step]], **options: Any) -> None:
        self.overlap, self._places = overlap, compute_ops(overlap.sections)
        self._numbers = {place: number for number, place in enumerate(self._places)}
        super().__init__(overlap.chains, graph_order(steps, overlap.sections), **options)

    def _routes(self) -> list[tuple[Any, Callable[..., Any]]]:
        run = functools.partial(_run_part, weakref.ref(self), weakref.ref(self.overlap))
        return [(self.overlap, run)]

    def _partition(self) -> None:
        spans: list[list[Span]] = []
        for chunk, chain in enumerate(self.chains):
            sections = [self.overlap.links(*place) for place in self._places if place[0] == chunk]
            spans += partition_sections(chain, sections, self.scope, self.span_size)
        self._set_spans(spans)

    def run_part(
        self, chunk: int, part: int, tensors: Tensors, shared: Mapping[str, Any]
    ) -> tuple[Tensors, Tensors]:
        """Run a part: compute through graphs, an all-to-all eagerly on its own stream."""
        run_eagerly = functools.partial(self.overlap.run_part, chunk, part, tensors, shared)
        number = self._numbers.get((chunk, part))
        if number is not None:
            made = self._forward(number, tensors, shared)
            if made is not None:
                return made
        if number is not None or not isinstance(self._runner, StepExecutor):
            with self.running():
                return run_eagerly()
        with self._runner.unshared(self.overlap.links(chunk, part)[0].full_name, tensors):
            return run_eagerly()

    def _chain_of(self, chunk: int) -> LayerChain:
        return self.chains[self._places[chunk][0]]


def _run_part(
    manager: weakref.ref[OverlappedGraphManager],
    overlap: weakref.ref[OverlappedLayers],
    chunk: int,
    part: int,
    tensors: Tensors,
    shared: Mapping[str, Any],
) -> tuple[Tensors, Tensors]:
    """Run a part of a chain, without keeping the manager and its graphs alive."""
    own, layers = manager(), overlap()
    assert layers is not None
    if own is None:
        return layers.run_part(chunk, part, tensors, shared)
    return own.run_part(chunk, part, tensors, shared)
