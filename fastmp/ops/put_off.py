"""Gradients of weights put off: a backward makes that of its input, and leaves the weight's for later.

A pipeline stage before this one waits for the gradient of the input alone; that of the weight fills a time in
which this stage would idle (Qi et al. 2023, arXiv:2401.10241). Inside `putting_off(queue)` the products with
large weights, linear layers and those of experts, put the making of the weight's gradient into the queue
instead of making it; everything else, biases and norms, gets its gradient in backward as ever.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["WeightQueue", "later", "linear", "putting_off", "putting_off_to"]

Make = Callable[[], Tensor | None]


class WeightQueue:
    """What backwards have put off since the last `take`, in order."""

    def __init__(self) -> None:
        self._tasks: list[tuple[Tensor, Make]] = []

    def put_off(self, weight: Tensor, make: Make) -> None:
        """`make()` gives the gradient of the leaf `weight`, or None where it has added it itself."""
        self._tasks.append((weight, make))

    def take(self) -> list[tuple[Tensor, Make]]:
        """Empty the queue; `run` makes what was in it."""
        tasks, self._tasks = self._tasks, []
        return tasks

    @staticmethod
    @torch.no_grad()
    def run(tasks: list[tuple[Tensor, Make]]) -> None:
        """Make the gradients and add them to `main_grad`, where the weight has one, or `grad`."""
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


_queue: WeightQueue | None = None


@contextmanager
def putting_off(queue: WeightQueue | None) -> Iterator[None]:
    """Inside, forwards make graphs whose backwards put off; None changes nothing.

    Backward runs inside as well if it recomputes forwards. One of the process, not of a thread: autograd
    recomputes on threads of its own.
    """
    global _queue
    before, _queue = _queue, queue
    try:
        yield
    finally:
        _queue = before


def putting_off_to() -> WeightQueue | None:
    """The queue that is in force."""
    return _queue


def later(weight: Tensor) -> Callable[[Make], None] | None:
    """What a backward calls to put off the gradient of `weight`; None where it is to be made at once.

    Asked for in forward, with the parameter itself: what backward gets back of saved tensors may be another
    tensor with its values. A weight that is made of others, as by autocast, must have its gradient when
    backward goes on.
    """
    if _queue is None or torch.compiler.is_compiling() or not (weight.is_leaf and weight.requires_grad):
        return None
    return functools.partial(_queue.put_off, weight)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` whose weight's gradient may be put off."""
    put_off = later(weight)
    autocast = not x.is_meta and torch.is_autocast_enabled(x.device.type)
    if put_off is None or not torch.is_grad_enabled() or autocast:
        return F.linear(x, weight, bias)
    return _Linear.apply(x, weight, bias, put_off)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, put_off):
        ctx.save_for_backward(x, weight)
        ctx.put_off = put_off
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad_TO, x_TI = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
        grad_x = (grad_TO @ weight).view_as(x) if ctx.needs_input_grad[0] else None
        ctx.put_off(lambda: grad_TO.t() @ x_TI)
        return grad_x, None, grad_TO.sum(0) if ctx.needs_input_grad[2] else None, None
