"""The graphs of training steps with one input signature, and the static buffers that they read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec

from fastmp.cuda_graphs.backends.interface import Graph, Weak
from fastmp.cuda_graphs.hooks import ReplayedHooks
from fastmp.cuda_graphs.partition import SpanTrace, spec_of
from fastmp.ops.wgrad import WgradQueue
from fastmp.schedule.buffer_plan import BufferPlan, ReplayStep, TensorSpec

__all__ = ["Captured", "Gradients", "GraphSet", "Key", "ReplaySlot", "copies_of", "copy_together"]

Key = tuple[int, int, int]  # microbatch, chunk, span


@dataclass
class Captured:
    """The graphs of one forward and of its backward, and the places of their results.

    outputs: of the span, in order; an int is the number of an input that is passed on. The first
        `num_tensors` are for the next segment, the others are auxiliary outputs of layers.
    differentiable: for each new output, whether it has a gradient.
    live, kept, static: until the backward is captured, the outputs with a gradient, all outputs that the span
        makes (eager code may use any of them), and the inputs; each with its autograd graph.
    queue: the weight gradients that the backward defers.
    storages: the addresses of the storages of `kept`.
    aliased: two outputs, or an output and an input, are views of one storage.
    trained: parameters of the span require a gradient. needs: for each input, whether it does.
    grad_mask: for each output in `live`, whether it got a gradient when the backward was captured.
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

    def replay_forward(self) -> tuple[Tensor, ...]:
        """Replay the forward over its static buffers; return the new outputs, without copying them."""
        self.forward.replay()
        return tuple([output() for output in self.outputs if not isinstance(output, int)])

    def backpropagate(self, grads: Sequence[Tensor], keep: bool = False) -> None:
        """Run the backward by autograd, from the outputs in `grad_mask` with their `grads`.

        keep: retain the autograd graph, so that the backward may run again.
        """
        roots = [i for i, has in enumerate(self.grad_mask) if has]
        torch.autograd.backward([self.live[i] for i in roots], [grads[i] for i in roots], retain_graph=keep)

    def forget(self) -> None:
        """Release the autograd graph: the backward is captured, or done."""
        for each in self.static:
            each.grad = None
        self.live, self.kept, self.static = [], [], []


@dataclass
class Gradients:
    """The graph of a backward, or of its deferred weight gradients.

    inputs: the gradients of the span's inputs; None: no gradient.
    parameters: those whose gradient the graph leaves in its own memory; it adds the others to `main_grad`.
    visited: the parameters in the order in which their gradients were accumulated.
    """

    graph: Graph
    inputs: list[Weak | None]
    parameters: list[tuple[nn.Parameter, Weak]]
    visited: list[nn.Parameter]

    def replay(self) -> list[Tensor | None]:
        """Replay the graph and accumulate parameter gradients; return the input gradients, not copied."""
        self.graph.replay()
        if self.parameters:
            self.accumulate()
        return [grad and grad() for grad in self.inputs]

    @torch.no_grad()
    def accumulate(self) -> None:
        """Add copies of the gradients in the graph's memory to `param.grad`; a replay overwrites it."""
        sums: tuple[list[Tensor], list[Tensor]] = [], []
        for param, grad in self.parameters:
            if param.grad is None:
                param.grad = grad().clone()
            else:
                sums[0].append(param.grad)
                sums[1].append(grad())
        if sums[0]:
            torch._foreach_add_(*sums)


class ReplaySlot:
    """A replay of the plan, with everything that is looked up in every step.

    flight, lane, bundle: of the microbatch, by number (see `lanes.Flight`). pool: of the graph's memory.
    readers: the backwards that may read in place what this one leaves in its pool.
    static: the memory that the graph reads: buffers of the plan, except at the positions `in_place`, where it
        reads the output of another graph.
    """

    def __init__(self, plan: BufferPlan, replay: ReplayStep, buffers: Sequence[Tensor]) -> None:
        self.step, self.span, self.graph = replay.step, replay.span, replay.graph
        _, self.lane, self.bundle = plan.flights[replay.flight]
        self.flight, self.pool = replay.flight, plan.pool_of(replay)
        self.readers = (self.flight, self.step.chunk if self.pool != self.lane else None)
        self.kind = replay.step.kind
        self.key = replay.step.microbatch, replay.step.chunk, replay.span
        self.name = f"{replay.step}, span {plan.chunks[replay.step.chunk][replay.span].name!r}"
        self.region = f"fastmp.graph.{self.name}"
        self.static = [buffers[buffer] for buffer in replay.buffers]
        self.in_place: frozenset[int] = frozenset()

    def fill(self, tensors: Sequence[Tensor | None]) -> list[Tensor]:
        """Copy the tensors that are not in place yet, in one launch; return the static buffers.

        None stands for zeros. Call it with autograd off.
        """
        late: list[Tensor] = []
        new: list[Tensor] = []
        for buffer, tensor in zip(self.static, tensors, strict=True):
            if tensor is None:
                buffer.zero_()
            elif not _lies_in(tensor, buffer):
                late.append(buffer)
                storages = [each.untyped_storage().data_ptr() for each in (tensor, buffer)]
                moved = storages[0] == storages[1]  # another view of the same memory: copy it out first
                new.append(tensor.clone() if moved else tensor)
        if late:
            copy_together(late, new)
        return self.static

    def moved_inputs(self, tensors: Sequence[Tensor | None]) -> list[int]:
        """Return the positions of `in_place` whose tensor has moved from the output of the other graph."""
        return [
            place
            for place in self.in_place
            if (tensor := tensors[place]) is None or not _lies_in(tensor, self.static[place])
        ]

    def reads(self, place: int, tensor: Tensor, in_place: bool) -> None:
        """Set the memory that the graph reads: a buffer of the plan, or the output of another graph."""
        self.static[place] = tensor
        self.in_place = self.in_place | {place} if in_place else self.in_place - {place}


def _lies_in(tensor: Tensor, buffer: Tensor) -> bool:
    """Return True if the values of `tensor` are those in the memory of `buffer`."""
    here = tensor.data_ptr() == buffer.data_ptr() and tensor.stride() == buffer.stride()
    return here and not (tensor.is_conj() or tensor.is_neg())


def copy_together(into: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """Copy `tensors` into others of the same shapes and dtypes, in one launch for all dtypes.

    They are copied as four-byte words; unaligned tensors take one launch for each dtype.
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
    """Return copies of `tensors`, made in one launch."""
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
    """The plan, static buffers and captured graphs of training steps with one signature.

    traces: the warm-up trace of each span, by (chunk, span). autocast: the dtype that it cast to, or False.
    shared: the structure of the keywords that all layers share, without its tensors.
    captured: by the number of the forward's graph. done: the numbers of all captured graphs.
    graphs_of: the numbers of the graphs of each bundle.
    program: the `replay_program.ReplayProgram` of the captured graphs, once a step has asked for it.
    hooks: the hooks to call for each graph, from the first step on.
    drops: how often captures that had begun were given up.
    live_grads: gradients that the last captured backward has left for `live_grads_of`, by address. They are
        held, as the memory of a replay is, so that autograd does not add to them in place.
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
        self.live_grads_of: tuple[int, int | None] | None = None
        self.buffers = [
            torch.empty_strided(
                spec.shape, _strides(spec), dtype=getattr(torch, spec.dtype), device=device
            ).zero_()
            for spec in plan.buffers
        ]
        self.captured: dict[int, Captured] = {}
        self.program: Any = None
        self.hooks: ReplayedHooks | None = None
        self.done: set[int] = set()
        self.drops = 0
        self.graphs_of = plan.bundles()
        self.slots = [ReplaySlot(plan, replay, self.buffers) for replay in plan.replays]
        self.expected = {place: [_expected(*each) for each in own.inputs] for place, own in traces.items()}

    def copies_out(self, tensor: Tensor) -> bool:
        """Return True if a tensor in graph memory leaves the chain as a copy.

        Host tensors, such as token counts, do not: their reader waits for the graph's own copy to the host.
        """
        return tensor.device.type == self.device.type

    def matches(self, chunk: int, span: int, tensors: Sequence[Tensor]) -> bool:
        """Return True if `tensors` have the shapes, dtypes and strides that the span was captured for."""
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
        """Let the backward `graph` read a gradient in the memory of the graph that computes it, at `weak`.

        It holds for all its replays: the graphs of a bundle always follow each other as they were captured.
        """
        for slot in self.slots:
            if slot.graph == graph:
                slot.reads(place, weak, in_place=True)

    def drop(self, bundles: Iterable[int]) -> None:
        """Drop the graphs of the bundles that are not captured as a whole."""
        incomplete = [own for own in (self.graphs_of[bundle] for bundle in bundles) if not own <= self.done]
        if not incomplete:
            return
        graphs = set().union(*incomplete)
        self.drops += 1
        self.done -= graphs
        for graph in graphs:
            self.captured.pop(graph, None)
        for slot, replay in zip(self.slots, self.plan.replays):
            if slot.graph in graphs:
                for place, buffer in enumerate(replay.buffers):
                    slot.reads(place, self.buffers[buffer], in_place=False)


def _strides(spec: TensorSpec) -> tuple[int, ...]:
    return spec.strides or torch.empty(spec.shape, device="meta").stride()


def _expected(spec: TensorSpec, needs: bool) -> tuple:
    return torch.Size(spec.shape), getattr(torch, spec.dtype), _strides(spec), needs, spec
