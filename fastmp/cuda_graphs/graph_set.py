"""The graphs of training steps whose inputs have one signature, and the static buffers that these read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec

from fastmp.cuda_graphs.backends.base import Graph, Weak
from fastmp.cuda_graphs.buffer_plan import BufferPlan, ReplayStep, TensorSpec
from fastmp.cuda_graphs.hooks import ReplayedHooks
from fastmp.cuda_graphs.partition import SpanTrace, spec_of
from fastmp.ops.wgrad import WgradQueue

__all__ = ["Captured", "Gradients", "GraphSet", "Key", "ReplaySlot", "copies_of", "copy_together"]

Key = tuple[int, int, int]  # microbatch, chunk, span


@dataclass
class Captured:
    """The graphs of one forward and of its backward, and where their results lie.

    outputs: of the span, in order; a number is that of an input which is handed on. The first `num_tensors`
        are for the next segment; the others are what layers return besides.
    differentiable: for each output that the span makes itself, whether it has a gradient.
    live, kept, static: until the backward is captured, the outputs with a gradient, all outputs that the span
        makes (eager code may use any of them), and the inputs; each with its autograd graph.
    queue: the weight gradients that the backward defers.
    storages: the addresses of the storages of `kept`.
    aliased: whether two outputs, or an output and an input, are views of one storage.
    trained: whether parameters of the span require a gradient. needs: which of its inputs do.
    grad_mask: which of the outputs in `live` got a gradient when the backward was captured.
    """

    forward: Graph
    outputs: list[Weak | int]
    num_tensors: int
    differentiable: list[bool]
    live: list[Tensor]
    kept: list[Tensor]
    static: list[Tensor]
    queue: WgradQueue | None
    storages: set[int]
    aliased: bool
    trained: bool
    needs: list[bool]
    grad_mask: list[bool] = field(default_factory=list)
    backward: Gradients | None = None
    weight: Gradients | None = None

    def backpropagate(self, grads: Sequence[Tensor], keep: bool = False) -> None:
        """Run the backward by autograd, for the gradients of the outputs in `grad_mask` among `grads`.

        keep: the autograd graph may run again.
        """
        roots = [i for i, has in enumerate(self.grad_mask) if has]
        torch.autograd.backward([self.live[i] for i in roots], [grads[i] for i in roots], retain_graph=keep)

    def forget(self) -> None:
        """Let go of the autograd graph: the backward is captured, or done."""
        for each in self.static:
            each.grad = None
        self.live, self.kept, self.static = [], [], []


@dataclass
class Gradients:
    """The graph of a backward, or of the deferred gradients of its weights.

    parameters: those whose gradient the graph leaves in memory of its own. It adds the others to `main_grad`.
    visited: the parameters in the order in which their gradients were accumulated.
    """

    graph: Graph
    inputs: list[Weak | None]
    parameters: list[tuple[nn.Parameter, Weak]]
    visited: list[nn.Parameter]


class ReplaySlot:
    """A replay of the plan, and all that is asked about it in every step.

    static: where the graph reads: buffers of the plan, except at the positions `in_place`, where it reads
        what another graph writes.
    """

    __slots__ = (
        *("addresses", "graph", "in_place", "key", "kind", "name", "region", "round", "span", "static"),
        "step",
    )

    def __init__(self, replay: ReplayStep, name: str, buffers: Sequence[Tensor], round: int) -> None:
        self.step, self.span, self.graph, self.round = replay.step, replay.span, replay.graph, round
        self.kind = replay.step.kind
        self.key = replay.step.microbatch, replay.step.chunk, replay.span
        self.name = f"{replay.step}, span {name!r}"
        self.region = f"fastmp.graph.{self.name}"
        self.static = [buffers[buffer] for buffer in replay.buffers]
        self.addresses = [buffer.data_ptr() for buffer in self.static]
        self.in_place: frozenset[int] = frozenset()

    def fill(self, tensors: Sequence[Tensor | None]) -> list[Tensor]:
        """Copy those tensors together that are not in place yet; return the static buffers.

        A tensor that is None stands for zeros. Call it where autograd does not record.
        """
        late: list[Tensor] = []
        new: list[Tensor] = []
        for buffer, address, tensor in zip(self.static, self.addresses, tensors, strict=True):
            if tensor is None:
                buffer.zero_()
            elif not _lies_at(tensor, address, buffer.stride()):
                late.append(buffer)
                storages = [each.untyped_storage().data_ptr() for each in (tensor, buffer)]
                moved = storages[0] == storages[1]  # another view of what was written there
                new.append(tensor.clone() if moved else tensor)
        if late:
            copy_together(late, new)
        return self.static

    def moved_inputs(self, tensors: Sequence[Tensor | None]) -> list[int]:
        """The positions of `in_place` whose tensor does not lie this time where the other graph leaves it."""
        return [
            place
            for place in self.in_place
            if (tensor := tensors[place]) is None
            or not _lies_at(tensor, self.addresses[place], self.static[place].stride())
        ]

    def reads(self, place: int, tensor: Tensor, in_place: bool) -> None:
        """From now on the graph reads `tensor`: a buffer of the plan, or what another graph writes."""
        self.static[place], self.addresses[place] = tensor, tensor.data_ptr()
        self.in_place = self.in_place | {place} if in_place else self.in_place - {place}


def _lies_at(tensor: Tensor, address: int, stride: tuple[int, ...]) -> bool:
    """Whether the values of a tensor are those in memory at an address."""
    here = tensor.data_ptr() == address and tensor.stride() == stride
    return here and not (tensor.is_conj() or tensor.is_neg())


def copy_together(into: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """Copy `tensors` into others of the same shapes and dtypes, in one launch for all dtypes.

    Tensors are copied as words of four bytes. Those that are no such words take one launch for each dtype.
    """
    if len(into) == 1:
        into[0].copy_(tensors[0])
        return
    if len({buffer.dtype for buffer in into}) == 1:
        torch._foreach_copy_(list(into), list(tensors))
        return
    groups: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for buffer, tensor in zip(into, tensors):
        if _is_words(buffer) and _is_words(tensor):
            buffer, tensor = (each.view(-1).view(torch.int32) for each in (buffer, tensor))
        buffers, sources = groups.setdefault(buffer.dtype, ([], []))
        buffers.append(buffer)
        sources.append(tensor)
    for buffers, sources in groups.values():
        torch._foreach_copy_(buffers, sources)


def copies_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copy `tensors` together."""
    if len(tensors) < 2:
        return [tensor.clone() for tensor in tensors]
    own = [torch.empty_like(tensor) for tensor in tensors]
    copy_together(own, tensors)
    return own


def _is_words(tensor: Tensor) -> bool:
    places = tensor.nbytes, tensor.data_ptr(), tensor.storage_offset() * tensor.element_size()
    lazy = tensor.is_conj() or tensor.is_neg()
    return tensor.is_contiguous() and not lazy and not any(place % 4 for place in places)


class GraphSet:
    """What belongs to training steps of one signature: the plan, the static buffers, the captured graphs.

    traces: the warm-up trace of each span, by (chunk, span). autocast: the dtype that it cast to, or False.
    shared: what all layers were given as keywords, without its tensors.
    captured: by the number of the forward's graph. done: the numbers of all graphs that are captured.
    program: the `replay_program.ReplayProgram` of the captured graphs, once a step has asked for it.
    hooks: which hooks each graph replays, from the first step on.
    drops: how many rounds were begun and could not be captured as a whole.
    live_grads: gradients that captured backwards of this round have left, by address. They are held, as the
        memory of a replay is, so that autograd does not add to them in place.
    """

    def __init__(
        self,
        plan: BufferPlan,
        traces: dict[tuple[int, int], SpanTrace],
        device: torch.device,
        autocast: torch.dtype | bool,
        shared: TreeSpec,
    ) -> None:
        self.plan, self.traces, self.device = plan, traces, device
        self.autocast, self.shared = autocast, shared
        self.live_grads: dict[int, Tensor] = {}
        self.buffers = [
            torch.empty_strided(
                spec.shape, spec.strides, dtype=getattr(torch, spec.dtype), device=device
            ).zero_()
            if spec.strides
            else torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype), device=device)
            for spec in plan.buffers
        ]
        self.captured: dict[int, Captured] = {}
        self.program: Any = None
        self.hooks: ReplayedHooks | None = None
        self.done: set[int] = set()
        self.drops = 0
        rounds = list(plan.rounds())
        self.graphs_of = [{plan.replays[i].graph for i in own} for own in rounds]
        self.slots = [
            ReplaySlot(replay, plan.chunks[replay.step.chunk][replay.span].name, self.buffers, number)
            for number, own in enumerate(rounds)
            for replay in plan.replays[own.start : own.stop]
        ]
        self.expected = {place: [_expected(*each) for each in own.inputs] for place, own in traces.items()}

    def copies_out(self, tensor: Tensor) -> bool:
        """Whether a tensor that a graph has made leaves the chain as a copy.

        A graph also copies numbers to the host: whoever reads them waits for them where they lie.
        """
        return tensor.device.type == self.device.type

    def matches(self, chunk: int, span: int, tensors: Sequence[Tensor]) -> bool:
        """Whether the graphs of a span were captured for inputs like these."""
        expected = self.expected[chunk, span]
        if len(expected) != len(tensors):
            return False
        for tensor, (shape, dtype, stride, needs, spec) in zip(tensors, expected):
            if tensor.shape != shape or tensor.dtype is not dtype or tensor.requires_grad is not needs:
                return False
            if tensor.stride() != stride and spec_of(tensor) != spec:
                return False
        return True

    def read_in_place(self, graph: int, place: int, weak: Tensor) -> None:
        """Let the backward `graph` read a gradient where the graph that makes it leaves it.

        That holds in all its replays, because the graphs of a round follow each other as they were captured.
        """
        for slot in self.slots:
            if slot.graph == graph:
                slot.reads(place, weak, in_place=True)

    def drop(self, number: int) -> None:
        """Drop the graphs of a round, unless all of them are captured."""
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
