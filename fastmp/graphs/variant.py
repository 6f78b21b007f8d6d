"""What is captured for the steps of one shape, and what of it a backend has to provide."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from fastmp.graphs.pieces import Piece, Shapes
from fastmp.graphs.plan import GraphPlan
from fastmp.ops.put_off import WeightQueue

if TYPE_CHECKING:
    from fastmp.graphs.recording import RandomStreams

__all__ = ["Backend", "Captured", "Gradients", "Graph", "Variant", "Weak"]

Weak = Callable[[], Tensor]


class Graph(Protocol):
    def capture(self) -> AbstractContextManager[None]: ...
    def replay(self) -> None: ...


class Backend(Protocol):
    """What captures and replays. `runs_at_capture`: the work of a capture is done as well as noted."""

    runs_at_capture: bool

    @property
    def rng(self) -> RandomStreams | None: ...

    @property
    def nbytes(self) -> int:
        """Of the memory that graphs share."""

    def watch(self) -> AbstractContextManager[Any]:
        """Around an eager forward whose like will be captured; what it yields goes to `graph`."""

    def graph(self, forward: Graph | None = None, watched: Any = None) -> Graph:
        """A new graph; the backward of `forward` where that is given."""

    def weak(self, tensor: Tensor) -> Weak:
        """Gives the tensor where it lies, without keeping its memory from others."""

    def reset(self) -> None:
        """All graphs are let go."""


@dataclass
class Captured:
    """The graphs of one forward and of its backward, and where what they make lies."""

    forward: Graph
    outputs: list[Weak | int]  # a number: the input that is handed on
    num_tensors: int  # of the outputs, those for the next segment; the others are what layers return beside
    differentiable: list[bool]  # of the outputs that are made here
    live: list[Tensor]  # outputs with their autograd graph, and inputs, until the backward is captured
    static: list[Tensor]
    queue: WeightQueue | None  # what the backward puts off
    given: list[bool] = field(default_factory=list)  # which gradients were there at capture
    backward: Gradients | None = None
    weight: Gradients | None = None


@dataclass
class Gradients:
    """The graph of a backward, or of its weights."""

    graph: Graph
    inputs: list[Weak | None]
    parameters: list[tuple[nn.Parameter, Weak]]  # without those whose gradient a graph adds to `main_grad`
    reached: list[nn.Parameter]  # in the order in which their gradients were accumulated


class Variant:
    """What belongs to the steps of one shape."""

    def __init__(
        self,
        plan: GraphPlan,
        shapes: dict[tuple[int, int], Shapes],
        pieces: Sequence[Sequence[Piece]],
        device: torch.device,
    ) -> None:
        self.plan, self.shapes = plan, shapes
        # Whether the gradients of inputs leave as copies: for each run whether what comes before it may keep
        # them. What comes before a chain is not known.
        self.copies = [
            [before is None or before.shares for before, own in zip([None, *chain], chain) if own.captured]
            for chain in pieces
        ]
        self.buffers = [
            torch.empty_strided(
                spec.shape, spec.strides, dtype=getattr(torch, spec.dtype), device=device
            ).zero_()
            if spec.strides
            else torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype), device=device)
            for spec in plan.buffers
        ]
        self.captured: dict[int, Captured] = {}  # by the number of the graph of the forward
        self.done: set[int] = set()  # the numbers of all graphs that are captured
        self.drops = 0
        rounds = list(plan.rounds())
        self.round_of = [number for number, own in enumerate(rounds) for _ in own]
        self.graphs_of = [{plan.replays[i].graph for i in own} for own in rounds]

    def drop(self, number: int) -> None:
        """The graphs of a round, unless there are all of them."""
        graphs = self.graphs_of[number]
        if not graphs <= self.done:
            self.drops += 1
            self.done -= graphs
            for graph in graphs:
                self.captured.pop(graph, None)
