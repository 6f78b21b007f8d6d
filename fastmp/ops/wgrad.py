"""Gradients of the weights of linear layers: added to `main_grad` in its dtype, and deferred where asked.

Over the microbatches of a step a weight sums up its gradient in the `main_grad` of its parameter. For a
16-bit weight that is float32, where no product is rounded, or as narrow as the weight: then an addition is
made in float32 and rounded once. None needs a launch of its own.

Deferred: backward makes the gradient of the input now, and the weight's when it is asked. The pipeline
stage before this one waits only for the former; the latter can fill a time in which this stage would idle
(Qi et al. 2023, arXiv:2401.10241). Inside `defer_wgrad(queue)` the products with large weights (linear
layers and those of experts) put the work of the weight's gradient into the queue. Everything else, biases
and norms, gets its gradient in backward as ever.

Without any gradient, a product of a few rows takes as long as reading the weight. On a CPU a kernel of its
own comes closer to that than the BLAS does.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor

from fastmp.ops.core import checks
from fastmp.ops.core.registry import Differentiable, autocast, compute_dtype, raise_if_create_graph, register
from fastmp.profiling import traced

__all__ = [
    "WgradQueue", "current_queue", "deferral", "defer_wgrad", "kept_operands", "leaf_of", "linear",
    "main_grad_of", "weight_grad",
]  # fmt: skip

Make = Callable[[], Tensor | None]
_FEW = 8  # rows of a product, for which its kernel on a CPU packs nothing
_WIDENED = 1 << 22  # elements of a gradient that plain torch on a CPU converts to fp32 at a time


@contextmanager
def _parts_in_float32(dtype: torch.dtype) -> Iterator[None]:
    """Inside, torch's 16-bit products on a GPU add up the parts of a long sum in float32, not in `dtype`."""
    option = f"allow_{'bf16' if dtype == torch.bfloat16 else 'fp16'}_reduced_precision_reduction"
    matmul = torch.backends.cuda.matmul
    allowed = getattr(matmul, option)
    split = getattr(matmul, option + "_split_k", None)  # newer releases of torch set both at once
    setattr(matmul, option, False if split is None else (False, split))
    try:
        yield
    finally:
        setattr(matmul, option, allowed if split is None else (allowed, split))


def reference(total: Tensor, grad: Tensor, x: Tensor) -> None:
    """Add grad^T x to the total (O, I), for grad (T, O) and x (T, I); it has their dtype or float32.

    The sum goes on from the total in float32 (float64 for float64): only what is stored is rounded.
    """
    wide = compute_dtype(grad.dtype)
    if total.is_cuda and total.dtype == grad.dtype:
        with _parts_in_float32(total.dtype) if total.dtype.itemsize == 2 else nullcontext():
            total.addmm_(grad.t(), x)
    elif total.is_cuda:
        torch.addmm(total, grad.t(), x, out_dtype=total.dtype, out=total)
    else:
        x, step = x.to(wide), max(1, _WIDENED // max(1, len(grad)))
        for rows, columns in zip(total.split(step), grad.split(step, 1), strict=True):
            sums = rows.to(wide).addmm_(columns.t().to(wide), x)
            if sums is not rows:
                rows.copy_(sums)


register(
    "accumulate_weight_grad_(Tensor(a!) total, Tensor grad, Tensor x) -> ()",
    reference=reference,
    fake=lambda total, grad, x: None,
    flops=lambda total, grad, x: 2 * grad.shape[0] * grad.shape[1] * x.shape[1],
)


register(
    "few_rows_linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor",
    reference=lambda x, weight, bias: F.linear(x, weight, bias),
    flops=lambda x, weight, bias: 2 * x.shape[0] * weight.shape[0] * weight.shape[1],
)


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
        """Make the gradients and add each to the weight's `main_grad` if it has one, else to its `grad`.

        The hooks behind a weight's accumulated gradient are called once, as in a backward pass: after the
        last of its gradients in `tasks`, also where an op has added that by itself.
        """
        left = Counter(id(weight) for weight, _ in tasks)
        while tasks:
            weight, make = tasks.pop(0)
            grad = make()
            if grad is None:
                pass
            elif hasattr(weight, "main_grad"):
                weight.main_grad.add_(grad)
            elif weight.grad is None:
                weight.grad = grad.to(weight.dtype)
            else:
                weight.grad.add_(grad)
            left[id(weight)] -= 1
            if not left[id(weight)]:
                for hook in (weight._post_accumulate_grad_hooks or {}).values():
                    hook(weight)


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
    with the same values. The node takes `leaf_of` that in its place. The gradient of a weight that is
    computed from others, as by autocast, cannot be deferred, because the rest of the backward pass needs it.
    Compilers and torch.func get every gradient.
    """
    if _queue is None or not (weight.is_leaf and weight.requires_grad) or _needs_every_gradient():
        return None
    return functools.partial(_queue.put, weight)


def leaf_of(weight: Tensor) -> Tensor:
    """Return the weight as another leaf, for a node that defers its gradient.

    Autograd calls the hooks behind a leaf's gradient after every backward pass that reaches it. Those of the
    weight have to wait until `WgradQueue.run` has made the gradient.
    """
    return weight.detach().requires_grad_()


def main_grad_of(weight: Tensor) -> Tensor | None:
    """The `main_grad` of a weight, to which backward adds its gradient; None: autograd is to get that.

    Call it in forward with the parameter itself, as `deferral`. What a compiler or torch.func sees leaves the
    gradient to autograd, and a `GradBuffer` adds it afterwards.
    """
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is None or not weight.requires_grad:
        return None
    return None if _needs_every_gradient() else main_grad


def _needs_every_gradient() -> bool:
    """Whether a compiler or torch.func looks on: gradients are part of what they return."""
    return torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()


def weight_grad(grad_TO: Tensor, x_TI: Tensor, main_grad: Tensor | None) -> Tensor | None:
    """The gradient (O, I) of a linear layer's weight; None where it has been added to `main_grad`.

    The operands may be wider than the weight and its `main_grad`, as a router's are.
    """
    if main_grad is None:
        return grad_TO.t() @ x_TI
    if main_grad.dtype.itemsize < grad_TO.dtype.itemsize:
        main_grad.add_(grad_TO.t() @ x_TI)  # in the dtype of the product, and rounded once
    else:
        torch.ops.fastmp.accumulate_weight_grad_(main_grad, grad_TO, x_TI)
    return None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` whose weight's gradient goes to `weight.main_grad` where there is one, and can be deferred.

    The product is added to `main_grad`, a tensor of the weight's shape, in float32 (float64 for float64) and
    rounded to the dtype of `main_grad`; autograd gets none. Any backward pass does so, also one that asks for
    the gradient of x alone.

    Raises:
        ValueError: a `main_grad` of another shape or on another device than the weight, or one that has
            neither the dtype of the product's operands nor, if that has 16 bits, float32.
    """
    main_grad, defer = main_grad_of(weight), deferral(weight)
    if not torch.is_grad_enabled():
        return _without_gradient(x, weight, bias)
    if main_grad is None and defer is None:
        return F.linear(x, weight, bias)
    narrow = autocast(x, weight, bias)
    if defer is None and _in_cpp is not None:
        try:  # costs nothing while nothing is raised
            return _in_cpp(*narrow, main_grad)
        except ValueError:
            checks.check_main_grad("linear", main_grad, weight=narrow[1])
            raise
    if main_grad is None and narrow[1] is not weight:  # the rest of the backward pass needs the gradient
        return F.linear(x, weight, bias)
    checks.check_main_grad("linear", main_grad, weight=narrow[1])
    if defer is not None:
        narrow = narrow[0], leaf_of(narrow[1]), narrow[2]
    x, kept = kept_operands(*narrow[:2])
    return _linear(x, *narrow[1:], kept, main_grad, defer)


def kept_operands(x: Tensor, weight: Tensor) -> tuple[Tensor, torch.autograd.graph.Node | None]:
    """x for a product, and the node that has saved its operands, where a recomputation is under way.

    A recomputation ends with the last tensor that is saved, so it leaves out a last product whose operands
    are saved beforehand. Autograd saves those of a Function after its forward.
    """
    if torch._C._autograd._top_saved_tensors_default_hooks(False) is None or not x.requires_grad:
        return x, None
    kept = _Kept.apply(x, weight)
    return kept, kept.grad_fn


def _without_gradient(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    rows = x.numel() // max(1, weight.shape[1])
    alike = x.is_cpu and x.dtype == weight.dtype == (weight if bias is None else bias).dtype
    alike = alike and not torch.is_autocast_enabled("cpu")
    if not (alike and 0 < rows <= _FEW) or checks.is_dtensor(weight) or _needs_every_gradient():
        return F.linear(x, weight, bias)
    y = torch.ops.fastmp.few_rows_linear(x.reshape(rows, weight.shape[1]), weight, bias)
    return y.view(*x.shape[:-1], weight.shape[0])


class _Kept(torch.autograd.Function):
    """x, where the operands of the product that follows are saved, see `kept_operands`."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def _forward(x, weight, bias, kept, main_grad, defer):
    return F.linear(x, weight, bias)


def _setup(ctx, inputs, output):
    x, weight, _, ctx.kept, ctx.main_grad, ctx.defer = inputs
    if ctx.kept is None:
        ctx.save_for_backward(x, weight if ctx.needs_input_grad[0] else None)


@traced("fastmp.linear_backward")
def _backward(ctx, grad):
    raise_if_create_graph("linear")
    x, weight = (ctx.kept or ctx).saved_tensors
    grad_TO, x_TI = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
    grad_x = (grad_TO @ weight).view(x.shape) if ctx.needs_input_grad[0] else None
    grad_bias = grad_TO.sum(0) if ctx.needs_input_grad[2] else None
    make = functools.partial(weight_grad, grad_TO, x_TI, ctx.main_grad)
    return grad_x, make() if ctx.defer is None else ctx.defer(make), grad_bias, None, None, None


_linear = Differentiable("linear", _forward, _setup, _backward)
# The same node in C++, csrc/autograd/linear.cpp, for what is not deferred; None where that is not built.
_in_cpp = getattr(torch.ops.fastmp_autograd, "linear", None) and torch.ops.fastmp_autograd.linear.default._op
