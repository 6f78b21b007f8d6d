"""Deferred weight gradients: backward makes the gradient of the input now, and the weight's when it is asked.

The pipeline stage before this one waits only for the gradient of the input. The gradient of the weight can
fill a time in which this stage would idle (Qi et al. 2023, arXiv:2401.10241). Inside `defer_wgrad(queue)` the
products with large weights (linear layers and those of experts) put the work of the weight's gradient into
the queue. Everything else, biases and norms, gets its gradient in backward as ever.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["WgradQueue", "current_queue", "deferral", "defer_wgrad", "linear"]

Make = Callable[[], Tensor | None]


class WgradQueue:
    """The weight gradients that backward passes have deferred since the last `take`, in order."""

    def __init__(self) -> None:
        self._tasks: list[tuple[Tensor, Make]] = []

    def put(self, weight: Tensor, make: Make) -> None:
        """`make()` returns the gradient of the leaf `weight`, or None where it has added it itself."""
        self._tasks.append((weight, make))

    def take(self) -> list[tuple[Tensor, Make]]:
        """Empty the queue and return what was in it, for `run`."""
        tasks, self._tasks = self._tasks, []
        return tasks

    @staticmethod
    @torch.no_grad()
    def run(tasks: list[tuple[Tensor, Make]]) -> None:
        """Make the gradients and add each to the weight's `main_grad` if it has one, else to its `grad`."""
        while tasks:
            weight, make = tasks.pop(0)
            grad = make()
            if grad is None:
                continue
            if hasattr(weight, "main_grad"):
                weight.main_grad.add_(grad)
            elif weight.grad is None:
                weight.grad = grad.to(weight.dtype)
            else:
                weight.grad.add_(grad)


_queue: WgradQueue | None = None


@contextmanager
def defer_wgrad(queue: WgradQueue | None) -> Iterator[None]:
    """Inside, backward passes of what forward computes defer weight gradients to `queue`; None: they do not.

    A backward pass that recomputes forwards must run inside, too. The queue belongs to the process, not to a
    thread, because autograd recomputes on threads of its own.
    """
    global _queue
    before, _queue = _queue, queue
    try:
        yield
    finally:
        _queue = before


def current_queue() -> WgradQueue | None:
    """The queue of the innermost `defer_wgrad`, or None."""
    return _queue


def deferral(weight: Tensor) -> Callable[[Make], None] | None:
    """The function by which a backward pass defers the gradient of `weight`; None: it must not be deferred.

    Call it in forward with the parameter itself: the saved tensor that backward gets may be another tensor
    with the same values. The gradient of a weight that is computed from others, as by autocast, cannot be
    deferred, because the rest of the backward pass needs it.
    """
    if _queue is None or torch.compiler.is_compiling() or not (weight.is_leaf and weight.requires_grad):
        return None
    return functools.partial(_queue.put, weight)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` that can defer the gradient of its weight."""
    defer = deferral(weight)
    autocast = not x.is_meta and torch.is_autocast_enabled(x.device.type)
    if defer is None or not torch.is_grad_enabled() or autocast:
        return F.linear(x, weight, bias)
    return _Linear.apply(x, weight, bias, defer)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, defer):
        ctx.save_for_backward(x, weight)
        ctx.defer = defer
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad_TO, x_TI = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
        grad_x = (grad_TO @ weight).view_as(x) if ctx.needs_input_grad[0] else None
        ctx.defer(lambda: grad_TO.t() @ x_TI)
        return grad_x, None, grad_TO.sum(0) if ctx.needs_input_grad[2] else None, None
