"""Experts whose activations lie in a ring buffer until their backward: the activation stash.

With worst-case receive buffers, autograd would keep worst-case tensors for every layer and microbatch. Here
the rows really received are copied into the ring of the rank, which all layers and microbatches share, and
backward copies them into scratch that lives no longer than the backward of one layer. The ring is allocated
on the device (see `fastmp.ops.stash`), so all of it can be in CUDA graphs.

A row of the ring is [rows (H) | pre-activation (P F) | activation (F)], P projections; where weight gradients
are deferred, backward replaces the pre-activation by its gradient, and adds the gradient of the outputs (H).

M rows of capacity, L experts of this rank, H hidden, F hidden units of an expert on this rank.
"""

from __future__ import annotations

import heapq
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from fastmp.config.dispatchers import STASH_TICKETS
from fastmp.nn.moe.dispatchers.dispatcher import no_compile
from fastmp.nn.moe.experts import GroupedExperts
from fastmp.nn.recompute import is_recomputed
from fastmp.ops.core.registry import autocast
from fastmp.ops.grouped_mm import activation_backward, wgrad
from fastmp.ops.stash import (
    HIGH_WATER,
    OVERFLOWED,
    new_state,
    stash_pull,
    stash_push,
    stash_release,
    stash_reserve,
)
from fastmp.ops.wgrad import deferral, leaf_of
from fastmp.profiling import traced
from fastmp.status import process_status

__all__ = ["ActivationStash", "stashed_experts", "without_stash"]

_enabled = True


class ActivationStash:
    """The ring buffer of a rank, for the experts of all its layers; allocated by the first forward.

    Args:
        size: called as size(balanced, capacity), with the rows that a layer receives of a microbatch under a
            balanced load, and at most; returns the rows of the ring.
        defers_wgrad: weight gradients are deferred, which takes H columns more.

    Attributes:
        ring: (rows, W); None before the first forward.
        state: see `fastmp.ops.stash`.

    Example (the Trainer attaches one):
        >>> stash = ActivationStash(lambda balanced, capacity: 4 * balanced)
        >>> stash.nbytes
        0
    """

    ring: Tensor | None
    state: Tensor

    def __init__(self, size: Callable[[int, int], int], *, defers_wgrad: bool = False) -> None:
        self.size, self.defers_wgrad, self.ring = size, defers_wgrad, None
        self._free = list(range(STASH_TICKETS))  # a heap
        self._grown = 0

    def __deepcopy__(self, memo: dict[int, object]) -> ActivationStash:
        return self  # a copied layer shares the ring

    @property
    def rows(self) -> int:
        """The rows of the ring."""
        return 0 if self.ring is None else len(self.ring)

    @property
    def nbytes(self) -> int:
        """The bytes of the ring and of its state."""
        return 0 if self.ring is None else self.ring.nbytes + self.state.nbytes

    @property
    def overflowed(self) -> Tensor | None:
        """() int64 on the device: entries that did not fit since `reset`; their steps are void."""
        return None if self.ring is None else self.state[OVERFLOWED]

    @property
    def high_water(self) -> Tensor | None:
        """() int64 on the device: the most rows in use since `reset`, with those that did not fit."""
        return None if self.ring is None else self.state[HIGH_WATER]

    def allocate(self, like: Tensor, width: int, balanced: int, capacity: int) -> None:
        """Allocate the ring, unless it is there already.

        Raises:
            ValueError: layers that share the ring have rows of another width or dtype.
            RuntimeError: a graph is being captured.
        """
        if self.ring is None:
            if process_status.graph is not None:
                raise RuntimeError(
                    "ActivationStash: the ring cannot be allocated during capture; run one batch eagerly "
                    "first"
                )
            rows = max(self._grown, self.size(balanced, capacity), 1)
            self.ring = torch.empty(rows, width, dtype=like.dtype, device=like.device)
            self.state = new_state(STASH_TICKETS, like.device)
        elif (self.ring.shape[1], self.ring.dtype) != (width, like.dtype):
            raise ValueError(
                "ActivationStash: layers that share the ring have rows of one kind, expected "
                f"{self.ring.shape[1]} columns of {self.ring.dtype}, got {width} of {like.dtype}"
            )

    def grow(self, rows: int) -> None:
        """Replace the ring by one of at least `rows`. Nothing may be in flight, and no graph may use it."""
        if rows > self.rows:
            self.ring, self._grown = None, rows

    def reset(self) -> None:
        """Free all entries, and zero the overflow counter and the high-water mark; between steps."""
        if self.ring is not None:
            self.state.copy_(new_state(STASH_TICKETS, self.state.device))

    def entry(self) -> StashEntry:
        """Return a new entry, with a ticket that no entry and no captured graph has."""
        if not self._free:
            raise RuntimeError(f"ActivationStash: more than {STASH_TICKETS} entries in flight or in graphs")
        ticket = heapq.heappop(self._free)
        return StashEntry(self, ticket)

    def give_back(self, ticket: int) -> None:
        """Let later entries have a ticket."""
        heapq.heappush(self._free, ticket)


class StashEntry:
    """What one forward of experts keeps; the forward's graph, if it is captured, has the ticket for ever."""

    def __init__(self, stash: ActivationStash, ticket: int) -> None:
        assert stash.ring is not None
        self.stash, self.ticket, self.released = stash, ticket, False
        self.ring, self.state = stash.ring, stash.state  # `grow` may replace them
        if process_status.graph is not None:
            weakref.finalize(process_status.graph, stash.give_back, ticket)
        self.captured = process_status.graph is not None

    def reserve(self, offsets: Tensor) -> None:
        stash_reserve(offsets, self.state, len(self.ring), self.ticket)

    def push(self, x: Tensor, column: int) -> None:
        stash_push(x, self.state, self.ring, self.ticket, column)

    def pull(self, column: int, width: int, capacity: int) -> Tensor:
        return stash_pull(self.ring, self.state, self.ticket, column, width, capacity)

    def release(self) -> None:
        """Free the rows."""
        stash_release(self.state, self.ticket)
        if not self.released and not self.captured:
            self.stash.give_back(self.ticket)
        self.released = True

    def __del__(self) -> None:
        """Free the rows of a forward that gets no backward."""
        if not self.released and process_status.graph is None:
            with suppress(Exception):  # the interpreter may be ending
                self.release()


@contextmanager
def without_stash() -> Iterator[None]:
    """Let autograd keep the activations of forwards inside."""
    global _enabled
    before, _enabled = _enabled, False
    try:
        yield
    finally:
        _enabled = before


def keeps_activations(experts: GroupedExperts) -> bool:
    """Return True if a forward of `experts` now keeps activations for long, as a recomputed one does not."""
    return _enabled and experts.training and torch.is_grad_enabled() and not is_recomputed()


@no_compile
def stashed_experts(
    experts: GroupedExperts, rows_MH: Tensor, offsets_L: Tensor, stash: ActivationStash, balanced: int
) -> Tensor:
    """Return `experts(rows_MH, offsets_L)`, whose backward reads the ring of `stash`.

    balanced: rows under a balanced load, from which the first forward sizes the ring.
    """
    main_grads = [getattr(w, "main_grad", None) if w.requires_grad else None for w in _weights(experts)]
    rows_MH, *weights = autocast(rows_MH, *_weights(experts))
    defer = [deferral(weight) for weight in weights]
    weights = [weight if each is None else leaf_of(weight) for weight, each in zip(weights, defer)]
    hidden, (wide, narrow) = rows_MH.shape[1], (weights[0].shape[1], weights[1].shape[2])
    width = hidden + wide + narrow + (hidden if stash.defers_wgrad else 0)
    stash.allocate(rows_MH, width, balanced, len(rows_MH))
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
        main_grads: list[Tensor | None],
        defer: list[Callable[..., None] | None],
    ) -> Tensor:
        # 1. The MLP of each expert: (M, H) -> (M, P F) -> (M, F) -> (M, H).
        spec, ops = experts.spec, torch.ops.fastmp
        if spec.form is None:
            h = ops.grouped_mm(rows_MH, fc1, offsets_L, False)
            y = experts.activate(h)
        else:
            y, h = ops.grouped_mlp_in(rows_MH, fc1, None, offsets_L, spec.form, spec.num_gates > 0, True)
        output_MH: Tensor = ops.grouped_mm(y, fc2, offsets_L, False)
        # 2. Keep the real rows.
        entry = stash.entry()
        entry.reserve(offsets_L)
        column = 0
        for kept in (rows_MH, h, y):
            entry.push(kept, column)
            column += kept.shape[1]
        ctx.save_for_backward(fc1, fc2, offsets_L)
        ctx.experts, ctx.entry, ctx.main_grads, ctx.defer = experts, entry, main_grads, defer
        ctx.widths = rows_MH.shape[1], h.shape[1], y.shape[1]
        ctx.rewinds = entry.state, entry.ring  # what a backward changes: see cuda_graphs/restore.py
        return output_MH

    @staticmethod
    @once_differentiable
    @traced("fastmp.stashed_experts_backward")
    def backward(ctx: Any, grad_MH: Tensor) -> tuple[Tensor | None, ...]:
        fc1, fc2, offsets_L = ctx.saved_tensors
        entry, (hidden, wide, narrow), capacity = ctx.entry, ctx.widths, len(grad_MH)
        mm = torch.ops.fastmp.grouped_mm
        # 1. The gradients of the rows: (M, H) -> (M, F) -> (M, P F) -> (M, H).
        h = entry.pull(hidden, wide, capacity)
        dh = _activation_backward(ctx.experts, mm(grad_MH, fc2, offsets_L, True), h)
        grad_rows = mm(dh, fc1, offsets_L, True) if ctx.needs_input_grad[0] else None
        # 2. The gradients of the weights, now or from what is kept until later.
        operands: tuple[Callable[[], tuple[Tensor, Tensor]], ...] = (
            lambda: (dh, entry.pull(0, hidden, capacity)),
            lambda: (grad_MH, entry.pull(hidden + wide, narrow, capacity)),
        )
        wanted = ctx.needs_input_grad[1:3]
        if any(each is not None for each, needed in zip(ctx.defer, wanted) if needed):
            end = hidden + wide + narrow
            entry.push(dh, hidden)
            entry.push(grad_MH, end)
            operands = (
                lambda: (entry.pull(hidden, wide, capacity), entry.pull(0, hidden, capacity)),
                lambda: (entry.pull(end, hidden, capacity), entry.pull(hidden + wide, narrow, capacity)),
            )
        left, grads = sum(wanted), list[Tensor | None]()

        def weight_gradient(number: int) -> Tensor | None:
            nonlocal left
            grad = wgrad(*operands[number](), offsets_L, ctx.main_grads[number])
            left -= 1
            if not left:
                entry.release()
            return grad

        for number, needed in enumerate(wanted):
            if needed and ctx.defer[number] is not None:
                ctx.defer[number](lambda number=number: weight_gradient(number))
            grads.append(weight_gradient(number) if needed and ctx.defer[number] is None else None)
        if not any(wanted):
            entry.release()
        return grad_rows, *grads, None, None, None, None, None


def _activation_backward(experts: GroupedExperts, grad: Tensor, h: Tensor) -> Tensor:
    """Return the gradient of h, given that of the activation of h."""
    spec = experts.spec
    if spec.form is not None:
        return activation_backward(grad, h, spec.form, spec.num_gates > 0)
    with torch.enable_grad():
        h = h.detach().requires_grad_()
        (dh,) = torch.autograd.grad(experts.activate(h), h, grad)
    return dh
