"""Losses over a chunked output head as functions with a derivative, and the checks of their arguments.

If the upstream gradient of every token's loss is known, or known up to a factor (a mean or sum), the logits
of a chunk are computed once: they give the loss, become their own gradient in place, and feed both GEMMs of
the backward pass, for 6NVH FLOPs in all. Otherwise the forward pass saves a few numbers per token, and the
backward pass recomputes the logits (8NVH). If one chunk holds all tokens, the forward pass saves its logits
instead, which are no larger than the workspace.

What is saved may be overwritten in the last backward pass. While autograd retains the graph it is copied, so
that a second backward pass runs as in torch, and without `retain_graph` torch raises.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, get_type_hints

import torch
from torch import Tensor

from fastmp.ops.chunked_head import ALONE, WORKSPACE, WORKSPACE_CPU, HeadPass, Shards
from fastmp.ops.core import checks
from fastmp.ops.core.backends import LIBRARY
from fastmp.ops.core.registry import (
    Differentiable,
    autocast,
    can_read_values,
    compute_dtype,
    raise_if_create_graph,
    without_autocast,
)
from fastmp.ops.cross_entropy import check_range
from fastmp.ops.cross_entropy_reference import check_upstream_grad
from fastmp.ops.wgrad import main_grad_of
from fastmp.profiling import traced

Values = dict[str, Any]  # tensors and numbers by name


class HeadCall(NamedTuple):
    """The arguments of a call that are not tensors.

    options: of the op. wanted: if the hidden states and the weight want gradients. reduction: other than
    "none" if the upstream gradient is known up to a factor.
    """

    options: Any
    shards: Shards
    wanted: tuple[bool, bool]
    reduction: str = "none"


def is_retained() -> bool:
    """Return True if the running backward pass retains the graph, and must not overwrite saved tensors."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return True
    return torch._C._autograd._get_current_graph_task_keep_graph()


def scale_once(grad: Tensor, factor: Tensor) -> Tensor:
    """Multiply grad by a 0-dim factor, rounded once; in the memory of `grad` in the last backward pass."""
    if is_retained():
        return (grad.to(factor.dtype) * factor).to(grad.dtype)
    if can_read_values(factor) and factor == 1:  # that of `loss.backward()`
        return grad
    if grad.dtype == factor.dtype:
        return grad.mul_(factor)
    # torch.amp's gradient scaling rounds once; mul_ by a wider factor has a tenth of its speed on a CPU
    torch._amp_foreach_non_finite_check_and_unscale_([grad], factor.new_empty(1), factor)
    return grad


def per_token(hidden: Tensor, *numbers: int) -> Tensor:
    """Return an empty tensor of a number, or `numbers`, per row of `hidden`, for a fake."""
    return hidden.new_empty((hidden.shape[0], *numbers), dtype=compute_dtype(hidden.dtype))


def _present(like: Tensor, grads: Any) -> tuple[Tensor, ...]:
    """Replace absent gradients by empty tensors, as ops return them."""
    return tuple(like.new_empty(0) if grad is None else grad for grad in grads)


def _fake_gradients(values: Values) -> tuple[Tensor, ...]:
    hidden, weight, bias = values["hidden"], values["weight"], values.get("bias")
    has_dweight = values["want_weight"] and values.get("main_grad") is None
    return (
        hidden.new_empty(hidden.shape if values["want_hidden"] else (0,)),
        weight.new_empty(weight.shape if has_dweight else (0,)),
        weight.new_empty((0,) if bias is None else bias.shape),
    )


def _opaque(schema: str, run: Callable, fake: Callable) -> Callable[[Values], Any]:
    """Define an op for any device and return its caller; all functions take its arguments by name."""
    name = schema.partition("(")[0]
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    op = getattr(torch.ops.fastmp, name).default
    names, count = [each.name for each in op._schema.arguments], len(op._schema.returns)

    def by_name(function: Callable) -> Callable:
        return lambda *arguments: function(dict(zip(names, arguments)))[:count]

    LIBRARY.impl(name, by_name(run), "CompositeExplicitAutograd")
    torch.library.register_fake(f"fastmp::{name}", by_name(fake), lib=LIBRARY)
    return lambda values: op(*[values[each] for each in names])


def opaque_passes(
    head_of: Callable[[Values], type[HeadPass]], options: Any, fake: Callable, schemas: dict[str, str]
) -> dict[str, Callable[[Values], Any]]:
    """Define one op for each pass, which compilers see in place of a loop: a graph serves any token count.

    Args:
        head_of: returns the class of the passes from the arguments by name.
        options: the NamedTuple of its options.
        fake: returns empty outputs of the forward pass from them.
        schemas: by the name of the method of `HeadPass`. Arguments are named as its `values`; OPTIONS stands
            for the options, WANTED for `want_hidden` and `want_weight`.
    """
    numbers = ", ".join(f"{kind.__name__} {name}" for name, kind in get_type_hints(options).items())

    def runner(method: str) -> Callable[[Values], Any]:
        def run(values: Values) -> tuple[Tensor, ...]:
            head = head_of(values)(values, options(*(values[name] for name in options._fields)), ALONE)
            return _present(values["hidden"], getattr(head, method)())

        return run

    fakes = {
        "forward": fake,
        "gradients": _fake_gradients,
        "both": lambda values: (per_token(values["hidden"]), *_fake_gradients(values)),
    }
    wanted = "bool want_hidden, bool want_weight"
    return {
        method: _opaque(
            schema.replace("OPTIONS", numbers).replace("WANTED", wanted), runner(method), fakes[method]
        )
        for method, schema in schemas.items()
    }


class ChunkedLoss:
    """A loss of hidden states and an output weight as a function with a derivative.

    Args:
        name: of the autograd node, of errors and of ranges.
        head: the passes.
        opaque: the same as ops, from `opaque_passes`.
    """

    def __init__(self, name: str, head: type[HeadPass], opaque: dict[str, Callable]) -> None:
        self.name, self.head, self.opaque = name, head, opaque
        self.tensors = ("hidden", "weight", "bias", *head.inputs)
        backward = traced(f"fastmp.{name}_backward")(self._backward)
        self.function = Differentiable(name, self._forward, self._setup, backward)

    def outputs(
        self, head: HeadArguments, options: Any, inputs: tuple[Tensor | None, ...],
        loss_grad: Tensor | None = None, divisor: Tensor | None = None, reduction: str = "none",
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """Return the results, and what is saved."""
        rows, weight, bias, main_grad, wanted, shards, *_ = head
        call = HeadCall(options, shards, wanted, reduction)
        with without_autocast(rows.device.type):
            return self.function(rows, weight, bias, *inputs, loss_grad, divisor, main_grad, call)

    def reduced(
        self, head: HeadArguments, options: Any, inputs: tuple[Tensor | None, ...],
        shape: tuple[int, ...], reduction: str, number: Callable[[], Tensor],
        loss_grad: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Return the losses in `shape`, or reduced.

        Args:
            head, options, inputs: of the call.
            number: returns the divisor of a mean, 0-dim.
            loss_grad: (N,) the upstream gradient of each loss, if known; without a reduction only.
        """
        rows, dtype = head.rows, head.rows.dtype
        divisor = number() if reduction == "mean" else None
        # Gradients can be computed before their factor is known, except in float16, which may not hold them
        # unscaled, and with main_grad, which cannot be scaled after they were added.
        if not any(head.wanted):
            loss_grad = None
        elif reduction != "none" and head.main_grad is None and dtype != torch.float16:
            one = rows.new_ones((), dtype=compute_dtype(dtype)) if divisor is None else divisor.reciprocal()
            loss_grad = one.expand(math.prod(shape))
        loss = self.outputs(head, options, inputs, loss_grad, divisor, reduction)[0]
        if reduction != "none":
            return loss if loss_grad is not None else _reduced(loss, divisor)
        return loss if len(shape) == 1 else loss.reshape(shape)

    def _run(self, method: str, call: HeadCall, main_grad: Tensor | None, tensors: Any, **others: Any) -> Any:
        values = {**dict(zip(self.tensors, tensors)), **others, "main_grad": main_grad}
        values["want_hidden"], values["want_weight"] = call.wanted
        if call.shards is ALONE and torch.compiler.is_compiling():
            return self.opaque[method]({**values, **dict(zip(call.options._fields, call.options))})
        return getattr(self.head(values, call.options, call.shards), method)()

    def _forward(self, *arguments: Any) -> tuple[Tensor, ...]:
        """Return the results, and what the backward pass needs.

        With a known upstream gradient that are the gradients of hidden, weight and bias, empty if absent.
        """
        *tensors, grad_loss, divisor, main_grad, call = arguments
        if grad_loss is None:
            return self._run("forward", call, main_grad, tensors, keep=any(call.wanted))
        loss, *grads = self._run("both", call, main_grad, tensors, grad_loss=grad_loss)
        loss = loss if call.reduction == "none" else _reduced(loss, divisor)
        return loss, *_present(loss, grads)

    def _setup(self, ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
        *tensors, grad_loss, _, ctx.main_grad, ctx.call = inputs
        want_hidden, want_weight = ctx.call.wanted
        ctx.has_grad = (want_hidden, want_weight and ctx.main_grad is None, tensors[2] is not None)
        ctx.known, ctx.spent = grad_loss is not None, False
        ctx.mark_non_differentiable(*output[self.head.num_results(ctx.call.options) :])
        ctx.set_materialize_grads(False)
        if ctx.known:
            by_token = (tensors[3], grad_loss) if ctx.call.reduction == "none" else ()
            ctx.save_for_backward(*output[1:], *by_token)
        else:
            last = 1 + len(self.head.saved)
            logits, *gathered = output[last:] or (None,)
            ctx.save_for_backward(*(gathered or tensors[:1]), *tensors[1:], *output[1:last], logits)

    def _backward(self, ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        nothing = (None,) * (len(self.tensors) + 4)
        grads = grads[: self.head.num_results(ctx.call.options)]  # compilers pass others, too
        if all(grad is None for grad in grads):
            return nothing
        raise_if_create_graph(self.name)
        found = self._scaled(ctx, grads[0]) if ctx.known else self._recomputed(ctx, grads)
        found = (grad if there else None for grad, there in zip((*found, None), ctx.has_grad))
        return *found, *nothing[3:]

    def _recomputed(self, ctx: Any, grads: tuple[Tensor | None, ...]) -> Any:
        """Return the gradients for any upstream gradients, some of which may be None."""
        *tensors, logits = ctx.saved_tensors
        values = dict.fromkeys(self.head.grads)
        values.update(zip(self.head.grads, grads), logits=logits)
        values.update(zip(self.head.saved, tensors[len(self.tensors) :]))
        if grads[0] is None:
            values[self.head.grads[0]] = torch.zeros_like(tensors[-1])
        if logits is not None and is_retained():
            values["logits"] = logits.clone()
        with without_autocast(tensors[0].device.type), torch.no_grad():
            return self._run("gradients", ctx.call, ctx.main_grad, tensors, **values)

    def _scaled(self, ctx: Any, grad_loss: Any) -> list[Tensor]:
        """Return the gradients that the forward pass computed, for an upstream gradient known or scaled."""
        if ctx.spent:
            raise RuntimeError(
                f"{self.name}: with loss_grad the forward computes the gradients, which one backward "
                "consumes: there is no second backward; for two, leave out loss_grad"
            )
        grads = ctx.saved_tensors
        if ctx.call.reduction == "none":
            *grads, target, loss_grad = grads
            ignored = target == ctx.call.options.ignore_index
            check_upstream_grad(self.name, grad_loss, loss_grad, ignored)
            ctx.spent = True
        else:
            grads = [
                scale_once(grad, grad_loss) if there else grad for grad, there in zip(grads, ctx.has_grad)
            ]
        # torch 2.10 cannot divide a graph whose backward returns what is saved
        return [grad.view_as(grad) for grad in grads] if torch.compiler.is_compiling() else grads


def _reduced(loss: Tensor, divisor: Tensor | None) -> Tensor:
    return loss.sum() if divisor is None else loss.sum() / divisor


class HeadArguments(NamedTuple):
    """Rows of hidden states, output weight and bias after autocast, and the place in the vocabulary.

    main_grad: receives the weight's gradient. wanted: if the hidden states and the weight want gradients.
    """

    rows: Tensor
    weight: Tensor
    bias: Tensor | None
    main_grad: Tensor | None
    wanted: tuple[bool, bool]
    shards: Shards
    vocab_start: int
    vocab_size: int
    workspace: int


def check_head(
    name: str, shards: Shards, hidden: Tensor, weight: Tensor, target: Tensor | None, ignore_index: int,
    vocab_size: int | None, workspace: int | None, bias: Tensor | None = None,
) -> HeadArguments:  # fmt: skip
    """Check the arguments of a public function; errors begin with `name`. A loss may have no targets."""

    def require(condition: bool, message: str, *values: Any) -> None:
        checks.require(condition, f"{name}: " + message, *values)

    # 1. Cast. `main_grad` is that of the parameter, not of its autocast copy.
    recorded = torch.is_grad_enabled()
    main_grad = main_grad_of(weight, compiles=True) if recorded else None
    hidden, weight, bias = autocast(hidden, weight, bias)
    # 2. Tensors.
    checks.check_floating(name, "hidden", hidden)
    shape, columns = hidden.shape, weight.shape
    require(weight.dim() == 2, "weight must be (V, H), got shape {}", columns)
    fits = shape[-1:] == columns[1:]
    require(fits, "hidden {} does not fit weight {}: expected (..., H) and (V, H)", shape, columns)
    checks.check_same(name, hidden=hidden, weight=weight, bias=bias)
    checks.check_shape(name, columns[:1], to=("weight", weight), bias=bias)
    checks.check_main_grad(name, main_grad, weight=weight)
    if target is not None:
        checks.check_same_device(name, hidden=hidden, target=target)
        tokens = shards.tokens(tuple(shape))
        message = "expected target of shape {} for hidden {}, got {}; arguments are (hidden, weight, target)"
        require(tuple(target.shape) == tokens, message, tokens, shape, target.shape)
        require(target.dtype == torch.int64, "expected int64 target, got {}", target.dtype)
    # 3. Numbers.
    total = shards.size * columns[0]
    vocab_size = total if vocab_size is None else vocab_size
    if workspace is None:
        workspace = WORKSPACE_CPU if hidden.device.type == "cpu" else WORKSPACE
    checks.check_number(name, integer=True, vocab_size=vocab_size, ignore_index=ignore_index)
    within = 0 < vocab_size <= total
    require(within, "vocab_size is {}, but weight has {} rows in {} shards", vocab_size, total, shards.size)
    require(workspace >= 0, "workspace must not be negative, got {}", workspace)
    if target is not None:
        check_range(name, target, vocab_size, ignore_index)
    wanted = (hidden.requires_grad, weight.requires_grad) if recorded else (False, False)
    rows = hidden if hidden.dim() == 2 else hidden.reshape(-1, shape[-1])
    start = shards.rank * columns[0]
    return HeadArguments(rows, weight, bias, main_grad, wanted, shards, start, vocab_size, workspace)
