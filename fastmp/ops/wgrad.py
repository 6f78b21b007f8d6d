"""Weight gradients of linear layers (wgrad): accumulated into `main_grad`, and deferred on request.

Over the microbatches of a step a weight accumulates its gradient in its parameter's `main_grad`. For a 16-bit
weight that is float32, where no GEMM is rounded, or as narrow as the weight: then the sum is computed in
float32 and rounded once. Neither needs a separate launch.

Deferred wgrad (Qi et al. 2023, arXiv:2401.10241): backward computes the dgrad at once and queues the wgrad.
The previous pipeline stage waits only for the dgrad, so the wgrad can fill a pipeline bubble. Inside
`defer_wgrad(queue)` the layers with large weights (linear layers and experts) put their wgrad into the queue.
Everything else, biases and norms, gets its gradient in backward.

Without recording, a GEMM of a few rows on a CPU runs in a kernel that is bound by reading the weight.
"""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from fastmp.ops.core import backends, checks
from fastmp.ops.core.registry import Differentiable, autocast, compute_dtype, raise_if_create_graph, register
from fastmp.profiling import traced

__all__ = [
    "FirstGradient", "MainGrad", "WgradQueue", "add_by", "add_gradient", "always_add", "check_late_hooks",
    "current_queue", "deferral", "defer_wgrad", "first_of", "kept_operands", "leaf_of", "linear",
    "main_grad_of", "weight_grad",
]  # fmt: skip

Make = Callable[[], Tensor | None]
_FEW = 8  # rows of a GEMM up to which the CPU kernel packs nothing
_WIDENED = 1 << 22  # elements of a gradient that the reference converts to fp32 at a time


@contextmanager
def _parts_in_float32(dtype: torch.dtype) -> Iterator[None]:
    """Make torch's 16-bit GEMMs on a GPU reduce split-K partial sums in float32, not in `dtype`."""
    option = f"allow_{'bf16' if dtype == torch.bfloat16 else 'fp16'}_reduced_precision_reduction"
    matmul = torch.backends.cuda.matmul
    allowed = getattr(matmul, option)
    split = getattr(matmul, option + "_split_k", None)  # newer releases of torch set both at once
    setattr(matmul, option, False if split is None else (False, split))
    try:
        yield
    finally:
        setattr(matmul, option, allowed if split is None else (allowed, split))


def reference(total: Tensor, grad: Tensor, x: Tensor, add: bool = True) -> None:
    """Add grad^T x to the total (O, I), of their dtype or float32, for grad (T, O) and x (T, I).

    Without `add` the total is overwritten, whatever it holds.

    The sum continues from the total in float32 (float64 for float64), and is rounded once, when stored.
    """
    wide = compute_dtype(grad.dtype)
    if total.is_cuda and total.dtype == grad.dtype:
        with _parts_in_float32(total.dtype) if total.dtype.itemsize == 2 else nullcontext():
            total.addmm_(grad.t(), x, beta=int(add))
    elif total.is_cuda:
        torch.addmm(total, grad.t(), x, out_dtype=total.dtype, beta=int(add), out=total)
    else:
        x, step = x.to(wide), max(1, _WIDENED // max(1, len(grad)))
        for rows, columns in zip(total.split(step), grad.split(step, 1), strict=True):
            sums = rows.to(wide).addmm_(columns.t().to(wide), x, beta=int(add))
            if sums is not rows:
                rows.copy_(sums)


register(
    "accumulate_weight_grad_(Tensor(a!) total, Tensor grad, Tensor x, bool add=True) -> ()",
    contract="grad (M, N) floating; x (M, K) grad; total (N, K) grad|wide(grad)",
    overwrites="total without add",
    reference=reference,
    fake=lambda total, grad, x, *_: None,
    flops=lambda total, grad, x, *_: 2 * grad.shape[0] * grad.shape[1] * x.shape[1],
)


register(
    "few_rows_linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor",
    contract="x (M, K) floating; weight (N, K) x; bias (N) x",
    reference=lambda x, weight, bias: F.linear(x, weight, bias),
    flops=lambda x, weight, bias: 2 * x.shape[0] * weight.shape[0] * weight.shape[1],
)


class WgradQueue:
    """Queue of the weight gradients that backward passes have deferred since the last `take`, in order.

    Example:
        queue = WgradQueue()
        with defer_wgrad(queue):
            loss = linear(x.requires_grad_(), model.weight).sum()
            loss.backward()  # computes x.grad alone
        WgradQueue.run(queue.take())  # computes model.weight.grad
    """

    def __init__(self) -> None:
        self._tasks: list[tuple[Tensor, Make]] = []

    def put(self, weight: Tensor, make: Make) -> None:
        """Queue `make`, which returns the gradient of the leaf `weight`, or None after adding it itself.

        Raises ValueError for a weight with a gradient hook, see `check_late_hooks`.
        """
        check_late_hooks(weight)
        self._tasks.append((weight, make))

    def take(self) -> list[tuple[Tensor, Make]]:
        """Empty the queue and return what was in it, for `run`."""
        tasks, self._tasks = self._tasks, []
        return tasks

    @staticmethod
    @torch.no_grad()
    def run(tasks: list[tuple[Tensor, Make]]) -> None:
        """Compute the gradients; add each to the weight's `main_grad` if it has one, else to its `grad`.

        A weight's post-accumulate-grad hooks are called once, as in a backward pass: after the last of its
        gradients in `tasks`, also if an op has added that by itself.
        """
        left = Counter(id(weight) for weight, _ in tasks)
        while tasks:
            weight, make = tasks.pop(0)
            grad = make()
            if grad is None:
                pass
            elif hasattr(weight, "main_grad"):
                add_gradient(weight.main_grad, grad)
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
    """Defer to `queue` the weight gradients of forwards run inside; with None, do not defer them.

    A backward pass with activation recomputation must run inside, too. The queue belongs to the process, not
    to a thread, because autograd recomputes on its own threads.
    """
    global _queue
    before, _queue = _queue, queue
    try:
        yield
    finally:
        _queue = before


def current_queue() -> WgradQueue | None:
    """Return the queue of the innermost `defer_wgrad`, or None."""
    return _queue


def deferral(weight: Tensor) -> Callable[[Make], None] | None:
    """Return the function that defers the gradient of `weight`, or None if it must not be deferred.

    Call it in forward with the parameter itself: the saved tensor in backward may be another tensor with the
    same values. The autograd node takes `leaf_of(weight)` instead. The gradient of a weight computed from
    others, as by autocast, cannot be deferred, because the rest of the backward pass needs it. Compilers and
    torch.func get every gradient, and so do hooks of the weight and `DistributedDataParallel`. Hooks that
    others register on the node that accumulates the gradient are not called.
    """
    if _queue is None or not (weight.is_leaf and weight.requires_grad):
        return None
    if weight._backward_hooks or _needs_every_gradient():
        return None
    if DistributedDataParallel._get_active_ddp_module() is not None:
        return None
    return functools.partial(_queue.put, weight)


def leaf_of(weight: Tensor) -> Tensor:
    """Return the weight as another leaf, for a node that defers its gradient.

    Autograd calls the post-accumulate-grad hooks of a leaf after every backward pass that reaches it. The
    hooks of the weight have to wait until `WgradQueue.run` has computed the gradient.
    """
    return weight.detach().requires_grad_()


def main_grad_of(weight: Tensor, *, compiles: bool = False) -> Tensor | None:
    """Return the `main_grad` to which backward adds the gradient of `weight`; None leaves it to autograd.

    Call it in forward with the parameter itself, as `deferral`. Autograd gets the gradient of a weight with
    hooks (`weight.register_hook`), whose result a `GradBuffer` adds afterwards; under a compiler or
    torch.func it gets every gradient.

    compiles: compiled code adds to `main_grad` as well, although no hooks can be seen while it is compiled;
        not with a `FirstGradient`, because it may hand over a copy of `main_grad`.
    """
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is None or not weight.requires_grad or weight._backward_hooks:
        return None
    if _needs_every_gradient() and not (compiles and first_of(main_grad) is None):
        return None
    return main_grad


def check_late_hooks(weight: Tensor) -> None:
    """Raise ValueError if the weight of a backward pass, or the one that autocast cast, has a gradient hook.

    Call it where a backward pass adds to `main_grad` or defers a gradient, which the hook would not get:
    `main_grad_of` and `deferral` see no hook that is registered after the forward pass, nor one of compiled
    code. The node in C++ of `linear` does not: there autograd calls such a hook with None.
    """
    if not weight._backward_hooks and weight.grad_fn is not None:
        weight = getattr(weight.grad_fn.next_functions[0][0], "variable", weight)
    checks.require(
        not weight._backward_hooks,
        "wgrad: weight has a gradient hook that compiled code, or a backward whose forward ran before it "
        "was registered, skips: its gradient is added to main_grad or deferred; register the hook before the "
        "forward, and don't compile the loss",
    )


class MainGrad(NamedTuple):
    """The parameter and its `main_grad`, or None, as a forward keeps them for `weight_grad`."""

    tensor: Tensor | None
    weight: Tensor

    def total(self) -> Tensor | None:
        """Return the tensor to add to, or None; ValueError for a weight that has got a hook."""
        if self.tensor is not None and self.weight._backward_hooks:
            check_late_hooks(self.weight)
        return self.tensor


class FirstGradient:
    """State of a main gradient's memory until its first gradient of a step.

    The first gradient overwrites, so that nothing sets gigabytes to zero and reads the zeros. A `GradBuffer`
    learns in a step which gradients do, and leaves out these alone when it sets others to zero.

    SUM: zeros or a sum, to which all gradients are added, in all steps: somebody adds without asking.
    ZEROS: zeros, which the first gradient may overwrite.
    UNDEFINED: numbers of an earlier step, which count as zeros.
    STORED: a sum whose first gradient has overwritten the memory.

    Attributes:
        state: one of them; a byte that the node of `linear` in C++ reads and writes, too, as `flag`.
    """

    SUM, ZEROS, UNDEFINED, STORED = range(4)

    def __init__(self, main_grad: Tensor) -> None:
        _FIRSTS[id(main_grad)] = self  # not an attribute of it, which would be saved and copied with it
        weakref.finalize(main_grad, _FIRSTS.pop, id(main_grad), None)
        self._memory = bytearray([self.ZEROS])
        self.flag = torch.frombuffer(self._memory, dtype=torch.uint8)

    @property
    def state(self) -> int:
        return self._memory[0]

    @state.setter
    def state(self, value: int) -> None:
        self._memory[0] = value


_FIRSTS: dict[int, FirstGradient] = {}  # by the id of the tensor


def first_of(main_grad: Tensor | None) -> FirstGradient | None:
    """Return the `FirstGradient` of a main gradient, or None if all its gradients are added."""
    return _FIRSTS.get(id(main_grad))


def add_by(main_grad: Tensor, run: Callable[[bool], object]) -> None:
    """Call `run(add)`, which adds a gradient to `main_grad`, or overwrites it with the first of a step."""
    first = first_of(main_grad)
    add = first is None or first.state in (first.SUM, first.STORED)
    run(add)
    if first is not None and not add:  # not before: if `run` raises, the memory is as undefined as it was
        first.state = first.STORED


def add_gradient(main_grad: Tensor, grad: Tensor) -> None:
    """Add a gradient of its shape and any dtype to `main_grad`, or overwrite it with the first of a step."""
    add_by(main_grad, lambda add: main_grad.add_(grad) if add else main_grad.copy_(grad))


@torch.no_grad()
def always_add(main_grad: Tensor | None) -> None:
    """Set an undefined `main_grad` to zero, and keep every gradient added from now on, in all steps.

    Call it before code that adds to `main_grad` by itself, or that is captured while it adds.
    """
    first = first_of(main_grad)
    if main_grad is None or first is None:
        return
    if first.state == first.UNDEFINED:
        main_grad.zero_()
    first.state = first.SUM


def _needs_every_gradient() -> bool:
    """Return True under a compiler or torch.func, whose results include the gradients."""
    return torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()


def weight_grad(grad_TO: Tensor, x_TI: Tensor, kept: MainGrad) -> Tensor | None:
    """Return the gradient (O, I) of a linear layer's weight, or None after adding it to `main_grad`.

    The operands may be wider than the weight and its `main_grad`, as a router's are.
    """
    main_grad = kept.total()
    if main_grad is None:
        return grad_TO.t() @ x_TI
    if main_grad.dtype.itemsize < grad_TO.dtype.itemsize:
        add_gradient(main_grad, grad_TO.t() @ x_TI)  # in the dtype of the GEMM, and rounded once
    else:
        op = torch.ops.fastmp.accumulate_weight_grad_
        add_by(main_grad, lambda add: op(main_grad, grad_TO, x_TI, add))
    return None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Apply `F.linear`; its wgrad is added to `weight.main_grad` if there is one, and can be deferred.

    The wgrad is added to `main_grad`, a tensor of the weight's shape, in float32 (float64 for float64), and
    rounded to its dtype; autograd gets none. Every backward pass does so, even one that asks for the gradient
    of x alone.

    Raises:
        ValueError: a `main_grad` of another shape or device than the weight, or that has neither the dtype of
            the GEMM's operands nor, if these have 16 bits, float32.

    Example:
        weight = torch.nn.Parameter(torch.randn(8, 4))
        weight.main_grad = torch.zeros(8, 4)
        linear(torch.randn(2, 4), weight).sum().backward()  # adds to weight.main_grad
    """
    main_grad, defer = main_grad_of(weight), None if _queue is None else deferral(weight)
    if not torch.is_grad_enabled():
        return _without_gradient(x, weight, bias)
    if main_grad is None and defer is None:
        return F.linear(x, weight, bias)
    narrow = autocast(x, weight, bias)
    if defer is None and _in_cpp is not None:
        try:  # costs nothing while nothing is raised
            return _in_cpp(*narrow, main_grad, _flag(main_grad))
        except ValueError:
            checks.check_main_grad("linear", main_grad, weight=narrow[1])
            raise
    if main_grad is None and narrow[1] is not weight:  # autocast's copy: the backward of the cast needs it
        return F.linear(x, weight, bias)
    checks.check_main_grad("linear", main_grad, weight=narrow[1])
    if defer is not None:
        narrow = narrow[0], leaf_of(narrow[1]), narrow[2]
    x, kept = kept_operands(narrow[0], *narrow[:2])
    return _linear(x, *narrow[1:], kept, MainGrad(main_grad, weight), defer)


def _flag(main_grad: Tensor | None) -> Tensor | None:
    first = first_of(main_grad)
    return None if first is None else first.flag


def kept_operands(x: Tensor, *operands: Tensor) -> tuple[Tensor, torch.autograd.graph.Node | None]:
    """Return x, and during activation recomputation the node that has saved the GEMM's operands, else None.

    A recomputation ends with the last saved tensor, so saving the operands first leaves out a final GEMM.
    Autograd saves those of a Function after its forward.
    """
    if torch._C._autograd._top_saved_tensors_default_hooks(False) is None or not x.requires_grad:
        return x, None
    kept = _Kept.apply(x, *operands)
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
    """Return x and save the operands of the GEMM that follows; see `kept_operands`."""

    @staticmethod
    def forward(ctx, x, *operands):
        ctx.save_for_backward(*operands)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad, *(None for _ in ctx.needs_input_grad[1:])


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
# The same node in C++ (csrc/autograd/linear.cpp), without deferral; None if that library is not built.
_in_cpp = None if backends.AUTOGRAD_ABSENT else backends.direct(torch.ops.fastmp_autograd.linear.default)
