"""What is captured for the steps of one shape, and what of it a backend has to provide."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from fastmp.graphs.pieces import Shapes, spec_of
from fastmp.graphs.plan import GraphPlan, Replay, TensorSpec
from fastmp.ops.wgrad import WgradQueue

if TYPE_CHECKING:
    from fastmp.graphs.recording import RandomStreams

__all__ = ["Backend", "Captured", "Gradients", "Graph", "Slot", "Variant", "Weak"]

Weak = Callable[[], Tensor]


class Graph(Protocol):
    def capture(self) -> AbstractContextManager[None]: ...
    def replay(self) -> None: ...


class Backend(Protocol):
    """What captures and replays.

    runs_at_capture: the work of a capture is done as well as noted. owner: its manager, which sets it.
    """

    runs_at_capture: bool
    owner: weakref.ref[Any] | None

    @property
    def rng(self) -> RandomStreams | None: ...

    @property
    def nbytes(self) -> int:
        """Of the memory that graphs share."""

    def watch(self) -> AbstractContextManager[Any]:
        """Around an eager forward whose like will be captured; what it yields goes to `graph`."""

    def prepare(self) -> None:
        """Before a step in which graphs are captured; nothing is on its way between ranks."""

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
    live: list[Tensor]  # outputs with their autograd graph, until the backward is captured
    kept: list[Tensor]  # the same of all outputs: eager code may use any
    static: list[Tensor]  # and of inputs
    queue: WgradQueue | None  # the weight gradients that the backward defers
    places: set[int]  # addresses of the storages of outputs that are made here
    aliased: bool  # two outputs, or an output and an input, are views of one storage
    trained: bool  # it has parameters that are
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


class Slot:
    """A replay of the plan, with what every step asks of it: kept flat, for it is asked at every replay.

    static: where its graph reads: the buffers of the plan, but at the places `in_place`, which another graph
        writes to.
    """

    __slots__ = (
        *("addresses", "graph", "in_place", "key", "kind", "name", "region", "round", "run", "static"),
        "step",
    )

    def __init__(self, replay: Replay, name: str, buffers: Sequence[Tensor], round: int) -> None:
        self.step, self.run, self.graph, self.round = replay.step, replay.run, replay.graph, round
        self.kind = replay.step.kind
        self.key = replay.step.microbatch, replay.step.chunk, replay.run
        self.name = f"{replay.step}, run {name!r}"
        self.region = f"fastmp.graph.{self.name}"
        self.static = [buffers[buffer] for buffer in replay.buffers]
        self.addresses = [buffer.data_ptr() for buffer in self.static]
        self.in_place: frozenset[int] = frozenset()

    def fill(self, tensors: Sequence[Tensor | None]) -> list[Tensor]:
        """The static buffers, with the tensors in them: those not in place are copied, together. Called where
        autograd does not record."""
        late: list[Tensor] = []
        new: list[Tensor] = []
        for buffer, address, tensor in zip(self.static, self.addresses, tensors, strict=True):
            if tensor is None:
                buffer.zero_()
            elif tensor.data_ptr() != address or tensor.stride() != buffer.stride():
                late.append(buffer)
                new.append(tensor)
        if late:
            copy_together(late, new)
        return self.static

    def astray(self, tensors: Sequence[Tensor | None]) -> list[int]:
        """Those of `in_place` where the other graph has not left the tensor this time."""
        return [
            place
            for place in self.in_place
            if (tensor := tensors[place]) is None
            or tensor.data_ptr() != self.addresses[place]
            or tensor.stride() != self.static[place].stride()
            or tensor.is_conj()
            or tensor.is_neg()
        ]

    def reads(self, place: int, tensor: Tensor, in_place: bool) -> None:
        """From now on in `tensor`: a buffer of the plan, or what another graph writes to."""
        self.static[place], self.addresses[place] = tensor, tensor.data_ptr()
        self.in_place = self.in_place | {place} if in_place else self.in_place - {place}


def copy_together(into: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """`tensors` go `into` others of the same shapes and dtypes: as words of four bytes in one launch, however
    many dtypes there are, and those that are no such words in one for each dtype."""
    if len(into) == 1:
        into[0].copy_(tensors[0])
        return
    if len({buffer.dtype for buffer in into}) == 1:
        torch._foreach_copy_(into, tensors)
        return
    groups: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for pair in zip(into, tensors):
        if all(map(_is_words, pair)):
            pair = tuple([each.view(-1).view(torch.int32) for each in pair])
        own = groups.setdefault(pair[0].dtype, ([], []))
        own[0].append(pair[0])
        own[1].append(pair[1])
    for buffers, own in groups.values():
        torch._foreach_copy_(buffers, own)


def copies_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copied together."""
    if len(tensors) < 2:
        return [tensor.clone() for tensor in tensors]
    own = [torch.empty_like(tensor) for tensor in tensors]
    copy_together(own, tensors)
    return own


def _is_words(tensor: Tensor) -> bool:
    places = tensor.nbytes, tensor.data_ptr(), tensor.storage_offset() * tensor.element_size()
    lazy = tensor.is_conj() or tensor.is_neg()
    return tensor.is_contiguous() and not lazy and not any(place % 4 for place in places)


class Variant:
    """What belongs to the steps of one shape."""

    def __init__(
        self,
        plan: GraphPlan,
        shapes: dict[tuple[int, int], Shapes],
        device: torch.device,
    ) -> None:
        self.plan, self.shapes = plan, shapes
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
        self.graphs_of = [{plan.replays[i].graph for i in own} for own in rounds]
        self.slots = [
            Slot(replay, plan.chunks[replay.step.chunk][replay.run].name, self.buffers, number)
            for number, own in enumerate(rounds)
            for replay in plan.replays[own.start : own.stop]
        ]
        self.expected = {place: [_expected(*each) for each in own.inputs] for place, own in shapes.items()}

    def takes(self, chunk: int, run: int, tensors: Sequence[Tensor]) -> bool:
        """Whether the graphs of a run are made for such inputs."""
        expected = self.expected[chunk, run]
        if len(expected) != len(tensors):
            return False
        for tensor, (shape, dtype, stride, needs, spec) in zip(tensors, expected):
            if tensor.shape != shape or tensor.dtype is not dtype or tensor.requires_grad is not needs:
                return False
            if tensor.stride() != stride and spec_of(tensor) != spec:
                return False
        return True

    def read_in_place(self, graph: int, place: int, weak: Tensor) -> None:
        """The backward `graph` finds a gradient where the graph that makes it leaves it, all times that it is
        replayed: the graphs of a round follow each other as they were captured."""
        for slot in self.slots:
            if slot.graph == graph:
                slot.reads(place, weak, in_place=True)

    def drop(self, number: int) -> None:
        """The graphs of a round, unless there are all of them."""
        graphs = self.graphs_of[number]
        if graphs <= self.done:
            return
        self.drops += 1
        self.done -= graphs
        for graph in graphs:
            self.captured.pop(graph, None)
        for slot, replay in zip(self.slots, self.plan.replays):
            if slot.graph in graphs:
                for place, buffer in enumerate(replay.buffers):
                    slot.reads(place, self.buffers[buffer], in_place=False)


def _expected(spec: TensorSpec, needs: bool) -> tuple:
    stride = spec.strides or torch.empty(spec.shape, device="meta").stride()
    return torch.Size(spec.shape), getattr(torch, spec.dtype), stride, needs, spec
