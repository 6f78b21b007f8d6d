"""Experts whose activations lie in a ring buffer until their backward: the activation stash.

With worst-case receive buffers, autograd would keep worst-case tensors for every layer and microbatch. Here
the ring of the rank, which all layers and microbatches share, has the rows really received. They are copied
into it; what gated experts make of them is written there by their GEMMs, and read there by those of backward
(see `fastmp.ops.stashed_mlp`). Entries are allocated on the device (see `fastmp.ops.stash`), so all of it can
be in CUDA graphs.

The ring has a tensor for each kind of activation: rows (H), pre-activation (P F, for P projections) and
activation (F). Backward replaces the pre-activation by its gradient. Where weight gradients are deferred,
there is one more, the gradient of the outputs (H).

M rows of capacity, L experts of this rank, H hidden, F hidden units of an expert on this rank.
"""

from __future__ import annotations

import heapq
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from fastmp.config.dispatchers import STASH_TICKETS
from fastmp.nn.moe.dispatchers.dispatcher import no_compile
from fastmp.nn.moe.experts import GroupedExperts
from fastmp.nn.recompute import is_recomputed
from fastmp.nn.segment import is_rerun
from fastmp.ops.core.registry import autocast
from fastmp.ops.grouped_mm import activation_backward
from fastmp.ops.stash import (
    HIGH_WATER,
    OVERFLOWED,
    new_state,
    stash_pull,
    stash_push,
    stash_release,
    stash_reserve,
)
from fastmp.ops.wgrad import MainGrad, always_add, deferral, leaf_of, main_grad_of
from fastmp.profiling import traced
from fastmp.status import process_status

__all__ = ["ActivationStash", "keeps_activations", "stashed_experts"]

_ROWS, _H, _Y, _GRAD = range(4)  # of the rings


class ActivationStash:
    """The ring buffer of a rank, for the experts of all its layers; allocated by the first forward.

    Args:
        size: called as size(balanced, capacity), with the rows that a layer receives of a microbatch under a
            balanced load, and at most; returns the rows of the ring.
        defers_wgrad: weight gradients are deferred, which takes H columns more.

    Attributes:
        rings: (rows, w) for each kind of activation; none before the first forward.
        state: see `fastmp.ops.stash`.

    Example (the Trainer attaches one):
        >>> stash = ActivationStash(lambda balanced, capacity: 4 * balanced)
        >>> stash.nbytes
        0
    """

    rings: tuple[Tensor, ...]
    state: Tensor

    def __init__(self, size: Callable[[int, int], int], *, defers_wgrad: bool = False) -> None:
        self.size, self.defers_wgrad, self.rings = size, defers_wgrad, ()
        self._free = list(range(STASH_TICKETS))  # tickets, a heap
        self._of_graphs = weakref.WeakKeyDictionary[object, list[int]]()  # free ones that a graph has
        self._grown = 0

    def __deepcopy__(self, memo: dict[int, object]) -> ActivationStash:
        return self  # a copied layer shares the ring

    @property
    def rows(self) -> int:
        """The rows of the ring."""
        return len(self.rings[0]) if self.rings else 0

    @property
    def nbytes(self) -> int:
        """The bytes of the ring and of its state."""
        return sum(ring.nbytes for ring in self.rings) + self.state.nbytes if self.rings else 0

    @property
    def overflowed(self) -> Tensor | None:
        """() int64 on the device: entries that did not fit, until it is zeroed; their steps are void."""
        return self.state[OVERFLOWED] if self.rings else None

    @property
    def high_water(self) -> Tensor | None:
        """() int64 on the device: the most rows in use so far, with the first that did not fit."""
        return self.state[HIGH_WATER] if self.rings else None

    def allocate(self, like: Tensor, widths: Sequence[int], balanced: int, capacity: int) -> None:
        """Allocate the ring, unless it is there already; `widths` of rows, pre-activation and activation.

        Raises:
            ValueError: layers that share the ring have rows of other widths or another dtype.
            RuntimeError: a graph is being captured.
        """
        widths = (*widths, widths[0]) if self.defers_wgrad else tuple(widths)
        if not self.rings:
            captures = like.is_cuda and torch.cuda.is_current_stream_capturing()
            if captures or process_status.graph is not None:
                raise RuntimeError(
                    "ActivationStash: the ring cannot be allocated during capture; run one batch eagerly "
                    "first"
                )
            rows = max(self._grown, self.size(balanced, capacity), 1)
            self.rings = tuple(like.new_empty(rows, width, requires_grad=False) for width in widths)
            self.state = new_state(STASH_TICKETS, like.device)
        own = tuple(ring.shape[1] for ring in self.rings), self.rings[0].dtype
        if own != (widths, like.dtype):
            raise ValueError(
                "ActivationStash: layers that share the ring have activations of one kind, expected widths "
                f"{own[0]} of {own[1]}, got {widths} of {like.dtype}"
            )

    def grow(self, rows: int) -> None:
        """Replace the ring by one of at least `rows`. Nothing may be in flight, and no graph may use it."""
        if rows > self.rows:
            self.rings, self._grown = (), rows

    def entry(self) -> StashEntry:
        """Return a new entry, with a ticket that no entry in flight and no other captured graph has."""
        graph = process_status.graph
        free = self._free if graph is None else self._of_graphs.get(graph) or self._free
        if not free:
            raise RuntimeError(f"ActivationStash: more than {STASH_TICKETS} entries in flight or in graphs")
        ticket = heapq.heappop(free)
        if graph is not None and free is self._free:  # the graph has it as long as it lives
            weakref.finalize(graph, heapq.heappush, self._free, ticket)
        return StashEntry(self, ticket)

    def give_back(self, ticket: int, graph: object | None) -> None:
        """Let later entries have a ticket: those in the same graph, if it is one of a graph."""
        free = self._free if graph is None else self._of_graphs.setdefault(graph, [])
        heapq.heappush(free, ticket)


class StashEntry:
    """The rows and the ticket of one forward of experts in a stash."""

    def __init__(self, stash: ActivationStash, ticket: int) -> None:
        self.stash, self.ticket, self.released = stash, ticket, False
        self.rings, self.state = stash.rings, stash.state  # `grow` may replace them
        graph = process_status.graph
        self._graph = None if graph is None else weakref.ref(graph)
        # Other code may capture, too: a ticket in its graph is never given back.
        captures = self.state.is_cuda and torch.cuda.is_current_stream_capturing()
        self._is_lost = graph is None and captures

    def reserve(self, offsets: Tensor) -> tuple[Tensor, Tensor]:
        return stash_reserve(offsets, self.state, len(self.rings[0]), self.ticket)

    def release(self) -> None:
        """Free the rows, and the ticket: of a captured forward in the same graph, if it has the backward."""
        stash_release(self.state, self.ticket)
        graph = process_status.graph
        own = graph is None if self._graph is None else graph is not None and self._graph() is graph
        if own and not self.released and not self._is_lost:
            self.stash.give_back(self.ticket, graph)
        self.released = True

    def __del__(self) -> None:
        """Free the rows of a forward that gets no backward."""
        if not self.released and process_status.graph is None:
            with suppress(Exception):  # the interpreter may be ending
                self.release()


def keeps_activations(experts: GroupedExperts) -> bool:
    """Return True if a forward of `experts` now keeps activations for long, as a recomputed one does not."""
    return not is_rerun() and experts.training and torch.is_grad_enabled() and not is_recomputed()


@no_compile
def stashed_experts(
    experts: GroupedExperts, rows_MH: Tensor, offsets_L: Tensor, stash: ActivationStash, balanced: int
) -> Tensor:
    """Return `experts(rows_MH, offsets_L)`, whose backward reads the ring of `stash`.

    balanced: rows under a balanced load, from which the first forward sizes the ring.
    """
    main_grads = [MainGrad(main_grad_of(weight), weight) for weight in _weights(experts)]
    rows_MH, *weights = autocast(rows_MH, *_weights(experts))
    defer = [deferral(weight) for weight in weights]
    weights = [weight if each is None else leaf_of(weight) for weight, each in zip(weights, defer)]
    widths = rows_MH.shape[1], weights[0].shape[1], weights[1].shape[2]
    stash.allocate(rows_MH, widths, balanced, len(rows_MH))
    output_MH: Tensor = _StashedExperts.apply(rows_MH, *weights, offsets_L, experts, stash, main_grads, defer)
    return output_MH


def _weights(experts: GroupedExperts) -> tuple[Tensor, Tensor]:
    return experts.fc1, experts.fc2


class _StashedExperts(Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows_MH: Tensor,
        fc1: Tensor,
        fc2: Tensor,
        offsets_L: Tensor,
        experts: GroupedExperts,
        stash: ActivationStash,
        main_grads: list[MainGrad],
        defer: list[Callable[..., None] | None],
    ) -> Tensor:
        # 1. Where the real rows will lie; a void entry has none, and makes the step void.
        entry, spec, ops = stash.entry(), experts.spec, torch.ops.fastmp
        start, offsets_L = entry.reserve(offsets_L)
        # 2. The MLP of each expert: (M, H) -> (M, P F) -> (M, F) -> (M, H), in the ring where it is gated.
        rings = entry.rings
        stash_push(rows_MH, rings[_ROWS], start, offsets_L)
        if _in_ring(experts):
            ops.stash_mlp_in(rows_MH, fc1, offsets_L, start, rings[_H], rings[_Y], spec.form)
            output_MH: Tensor = ops.stash_mm(rings[_Y], fc2, offsets_L, start, False, len(rows_MH))
        else:
            if spec.form is None:
                h = ops.grouped_mm(rows_MH, fc1, offsets_L, False)
                y = experts.activate(h)
            else:
                y, h = ops.grouped_mlp_in(rows_MH, fc1, None, offsets_L, spec.form, False, True)
            output_MH = ops.grouped_mm(y, fc2, offsets_L, False)
            stash_push(h, rings[_H], start, offsets_L)
            stash_push(y, rings[_Y], start, offsets_L)
        ctx.save_for_backward(fc1, fc2, start, offsets_L)
        ctx.experts, ctx.entry, ctx.main_grads, ctx.defer = experts, entry, main_grads, defer
        ctx.rewinds = entry.state, *entry.rings  # what a backward changes: see cuda_graphs/restore.py
        return output_MH

    @staticmethod
    @once_differentiable
    @traced("fastmp.stashed_experts_backward")
    def backward(  # type: ignore[override]
        ctx: Any, grad_MH: Tensor
    ) -> tuple[Tensor | None, ...]:
        fc1, fc2, start, offsets_L = ctx.saved_tensors
        entry, main_grads, wanted = ctx.entry, ctx.main_grads, ctx.needs_input_grad[1:3]
        rings, capacity = entry.rings, len(grad_MH)
        # 1. The gradient of the pre-activation, in its place: (M, H) -> (M, F) -> (M, P F).
        grad_y = torch.ops.fastmp.grouped_mm(grad_MH, fc2, offsets_L, True)
        _activation_backward(ctx.experts, grad_y, rings[_H], start, offsets_L)
        # 2. The gradient of the rows: (M, P F) -> (M, H).
        grad_rows = None
        if ctx.needs_input_grad[0]:
            grad_rows = torch.ops.fastmp.stash_mm(rings[_H], fc1, offsets_L, start, True, capacity)
        # 3. The gradients of the weights, now or from what is kept until later.
        grad_output, output_start = grad_MH, None
        if any(each is not None for each, needed in zip(ctx.defer, wanted) if needed):
            stash_push(grad_MH, rings[_GRAD], start, offsets_L)
            grad_output, output_start = rings[_GRAD], start
        operands = (rings[_H], rings[_ROWS], start), (grad_output, rings[_Y], output_start)
        to_do = sum(wanted)

        def weight_gradient(number: int) -> Tensor | None:
            nonlocal to_do
            left, right, left_start = operands[number]
            grad = _wgrad(main_grads[number], left, right, offsets_L, left_start, start, capacity)
            to_do -= 1
            if not to_do:
                entry.release()
            return grad

        grads: list[Tensor | None] = []
        for number, needed in enumerate(wanted):
            if needed and ctx.defer[number] is not None:
                ctx.defer[number](partial(weight_gradient, number))
            grads.append(weight_gradient(number) if needed and ctx.defer[number] is None else None)
        if not any(wanted):
            entry.release()
        return grad_rows, *grads, None, None, None, None, None


def _in_ring(experts: GroupedExperts) -> bool:
    """Return True if kernels write the activations to the ring themselves: of fused gated units."""
    return experts.spec.num_gates > 0 and experts.spec.form is not None


def _activation_backward(
    experts: GroupedExperts, grad: Tensor, h: Tensor, start: Tensor, offsets: Tensor
) -> None:
    """Replace the pre-activation in a ring by its gradient, given that of the activation."""
    spec = experts.spec
    if _in_ring(experts):
        torch.ops.fastmp.stash_gate_backward_(grad, h, start, offsets, spec.form)
        return
    pulled = stash_pull(h, start, offsets, len(grad))
    if spec.form is not None:
        dh = activation_backward(grad, pulled, spec.form, False)
    else:
        with torch.enable_grad():
            pulled.requires_grad_()
            (dh,) = torch.autograd.grad(experts.activate(pulled), pulled, grad)
    stash_push(dh, h, start, offsets)


def _wgrad(kept: MainGrad, *operands: Any) -> Tensor | None:
    """Return the gradient of the weights, or None after adding it to `main_grad`."""
    main_grad = kept.total()
    if main_grad is None:
        result: Tensor = torch.ops.fastmp.stash_wgrad(*operands)
        return result
    always_add(main_grad)
    torch.ops.fastmp.stash_wgrad_(main_grad, *operands)
    return None
