"""Linear layer fused with cross-entropy: only the logits of one chunk of tokens exist at a time.

If the upstream gradient of every token's loss is known (`loss_grad`), or known up to a factor (a mean or
sum), the logits of a chunk are computed once: they give the loss, become their own gradient in place, and
feed both GEMMs of the backward pass, for 6NVH FLOPs in all. Otherwise the forward pass saves two numbers of
every token, and the backward pass recomputes the logits (8NVH). If one chunk holds all tokens, the forward
pass saves its logits instead, which are no larger than the workspace.

The wgrad is summed over the chunks in fp32 (fp64 for fp64), in `weight.main_grad` where there is one; if that
is narrower, in separate memory, so that it is rounded once. Compilers see one op, not the loop over chunks,
so that a graph serves any number of tokens.

N tokens, H hidden size, V columns of this shard of the vocabulary (padding included), P shards.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor

from fastmp.ops.core import checks
from fastmp.ops.core.contracts import LARGEST
from fastmp.ops.core.registry import (
    OPS,
    Differentiable,
    compute_dtype,
    raise_if_create_graph,
    without_autocast,
)
from fastmp.ops.cross_entropy import check_options, checked_divisor
from fastmp.ops.cross_entropy_reference import check_upstream_grad
from fastmp.ops.linear_cross_entropy_chunks import (
    ALONE,
    HeadCall,
    LossOptions,
    Shards,
    Targets,
    fake_gradients,
    head_of,
    is_opaque,
    kept_logits,
    make_both,
    make_loss,
    make_loss_gradients,
    opaque,
    per_token,
    present,
    scale_once,
    split_options,
    taken,
)
from fastmp.ops.reduction import check_reduction, number_of_targets, reduced
from fastmp.ops.wgrad import linear, main_grad_of
from fastmp.profiling import traced

_PLAIN = (Tensor, torch.nn.Parameter)
_NUMBERS = (float, int)
_FEW_LOGITS = 1 << 20  # up to here by two ops: 4 MiB in fp32

_OPTIONS = (
    "int vocab_start, int vocab_size, int ignore_index, float label_smoothing, float z_loss, int workspace"
)
_WANTED = "bool want_hidden, bool want_weight"


def _loss(hidden, weight, bias, target, token_weight, *options):
    return make_loss(hidden, weight, bias, Targets(target, token_weight), LossOptions(*options), ALONE, False)


def _loss_gradients(hidden, weight, bias, target, token_weight, grad_loss, merged, main_grad, *more):
    options, wanted = split_options(LossOptions, more)
    tokens = Targets(target, token_weight, grad_loss, merged)
    grads = make_loss_gradients(hidden, weight, bias, tokens, main_grad, options, ALONE, wanted, None)
    return present(hidden, grads)


def _fake_loss_gradients(hidden, weight, bias, target, token_weight, grad_loss, merged, main_grad, *more):
    return fake_gradients(hidden, weight, bias, main_grad, *split_options(LossOptions, more)[1])


def _both(hidden, weight, bias, target, token_weight, grad_loss, main_grad, *more):
    options, wanted = split_options(LossOptions, more)
    tokens = Targets(target, token_weight, grad_loss)
    return present(hidden, make_both(hidden, weight, bias, tokens, main_grad, options, ALONE, wanted))


def _fake_both(hidden, weight, bias, target, token_weight, grad_loss, main_grad, *more):
    wanted = split_options(LossOptions, more)[1]
    return per_token(hidden), *fake_gradients(hidden, weight, bias, main_grad, *wanted)


_compiled_loss = opaque(
    "linear_cross_entropy_loss(Tensor hidden, Tensor weight, Tensor? bias, Tensor target,"
    f" Tensor? token_weight, {_OPTIONS}) -> (Tensor, Tensor)",
    _loss,
    lambda hidden, *others: (per_token(hidden), per_token(hidden, 2)),
)
_compiled_gradients = opaque(
    "linear_cross_entropy_gradients(Tensor hidden, Tensor weight, Tensor? bias, Tensor target,"
    " Tensor? token_weight, Tensor grad_loss, Tensor merged, Tensor(a!)? main_grad,"
    f" {_OPTIONS}, {_WANTED}) -> (Tensor, Tensor, Tensor)",
    _loss_gradients,
    _fake_loss_gradients,
)
_compiled_both = opaque(
    "linear_cross_entropy_both(Tensor hidden, Tensor weight, Tensor? bias, Tensor target,"
    " Tensor? token_weight, Tensor grad_loss, Tensor(a!)? main_grad,"
    f" {_OPTIONS}, {_WANTED}) -> (Tensor, Tensor, Tensor, Tensor)",
    _both,
    _fake_both,
)


def _forward_unknown(hidden, weight, bias, target, token_weight, main_grad, call: HeadCall):
    """Return the loss (N,) for any upstream gradient, merged statistics, and tensors kept for backward."""
    if is_opaque(call.shards):
        return _compiled_loss(hidden, weight, bias, target, token_weight, *call.options)
    tokens = Targets(target, token_weight)
    return make_loss(hidden, weight, bias, tokens, call.options, call.shards, any(call.wanted))


def _setup_unknown(ctx, inputs, output):
    hidden, weight, bias, target, token_weight, ctx.main_grad, ctx.call = inputs
    _, merged, *kept = output
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    hidden = kept[1] if len(kept) > 1 else hidden
    ctx.save_for_backward(hidden, weight, bias, target, token_weight, merged, kept[0] if kept else None)


@traced("fastmp.linear_cross_entropy_backward")
def _backward_unknown(ctx, grad_loss, *_):
    if grad_loss is None:
        return (None,) * 7
    raise_if_create_graph("linear_cross_entropy")
    hidden, weight, bias, target, token_weight, merged, kept = ctx.saved_tensors
    call, main_grad = ctx.call, ctx.main_grad
    if is_opaque(call.shards):
        grads = _compiled_gradients(
            hidden,
            weight,
            bias,
            target,
            token_weight,
            grad_loss,
            merged,
            main_grad,
            *call.options,
            *call.wanted,
        )
        grads = taken(grads, call.wanted, main_grad, bias is not None)
    else:
        tokens = Targets(target, token_weight, grad_loss, merged)
        with without_autocast(hidden.device.type), torch.no_grad():
            kept = kept_logits(kept)
            grads = make_loss_gradients(
                hidden, weight, bias, tokens, main_grad, call.options, call.shards, call.wanted, kept
            )
    return (*grads, None, None, None, None)


def _forward_known(hidden, weight, bias, target, token_weight, loss_grad, main_grad, call: HeadCall):
    """Return the loss (N,), or reduced, and gradients of hidden, weight and bias, empty if absent."""
    if is_opaque(call.shards):
        loss, *grads = _compiled_both(
            hidden, weight, bias, target, token_weight, loss_grad, main_grad, *call.options, *call.wanted
        )
    else:
        tokens = Targets(target, token_weight, loss_grad)
        loss, *grads = make_both(
            hidden, weight, bias, tokens, main_grad, call.options, call.shards, call.wanted
        )
        grads = present(hidden, tuple(grads))
    return (reduced(loss, target, token_weight, call.options.ignore_index, call.reduction), *grads)


def _setup_known(ctx, inputs, output):
    _, _, bias, target, _, loss_grad, ctx.main_grad, ctx.call = inputs
    ctx.has_bias, ctx.spent = bias is not None, False
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(target, loss_grad, *output[1:])


@traced("fastmp.linear_cross_entropy_backward")
def _backward_known(ctx, grad_loss, *_):
    if grad_loss is None:
        return (None,) * 8
    raise_if_create_graph("linear_cross_entropy")
    if ctx.spent:
        raise RuntimeError(
            "linear_cross_entropy: with loss_grad the forward computes the gradients, which one backward "
            "consumes: there is no second backward; for two, leave out loss_grad"
        )
    target, loss_grad, *grads = ctx.saved_tensors
    if ctx.call.reduction == "none":
        check_upstream_grad(
            "linear_cross_entropy", grad_loss, loss_grad, target == ctx.call.options.ignore_index
        )
        ctx.spent = True
    else:
        grads = [scale_once(grad, grad_loss) for grad in grads]
    if torch.compiler.is_compiling():  # torch 2.10 cannot divide a graph whose backward returns what is saved
        grads = [grad.view_as(grad) for grad in grads]
    grads = taken(grads, ctx.call.wanted, ctx.main_grad, ctx.has_bias)
    return *grads, None, None, None, None, None


_unknown = Differentiable("linear_cross_entropy", _forward_unknown, _setup_unknown, _backward_unknown)
_known = Differentiable("linear_cross_entropy", _forward_known, _setup_known, _backward_known)


def _of_each(loss_grad: Tensor | float, targets: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the expected upstream gradient of every target's loss, (N,)."""
    if isinstance(loss_grad, Tensor):
        return loss_grad.reshape(-1).to(dtype)
    return torch.full(targets.shape, loss_grad, dtype=dtype, device=targets.device)


def _of_few_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, ignore_index: int,
    label_smoothing: float, z_loss: float, reduction: str, loss_grad: Any,
) -> Tensor | None:  # fmt: skip
    """Compute the loss of few logits by two ops, a GEMM and a loss: there CPU launch overhead dominates.

    Returns:
        The loss, or None if the logits are many or the arguments special, which includes invalid ones.
    """
    if not all(x is None or type(x) in _PLAIN for x in (hidden, weight, bias, target)):
        return None
    if not hidden.dim() == weight.dim() == target.dim() + 1 == 2 or torch.compiler.is_compiling():
        return None
    if torch._C._is_any_autocast_enabled() or torch._C._are_functorch_transforms_active():
        return None
    recorded = torch.is_grad_enabled() and (weight.requires_grad or hidden.requires_grad)
    main_grad = main_grad_of(weight) if recorded else None
    fits = bias is None or (bias.shape, bias.dtype, bias.device) == (
        weight.shape[:1], weight.dtype, weight.device
    )  # fmt: skip
    if isinstance(loss_grad, Tensor):
        fits = fits and (loss_grad.shape, loss_grad.device) == (target.shape, target.device)
        fits = fits and recorded and not loss_grad.requires_grad
    elif loss_grad is not None:
        fits = fits and -LARGEST <= loss_grad <= LARGEST
    (tokens, width), (columns, inner) = hidden.shape, weight.shape
    usual = (
        0 < tokens * columns <= _FEW_LOGITS
        and width == inner
        and target.shape[0] == tokens
        and hidden.dtype == weight.dtype
        and hidden.dtype in checks.FLOATING
        and target.dtype == torch.int64
        and hidden.device == weight.device == target.device
        and type(ignore_index) is int
        and type(label_smoothing) in _NUMBERS
        and type(z_loss) in _NUMBERS
        and 0 <= label_smoothing <= 1
        and 0 <= z_loss <= LARGEST
        and fits
        and (main_grad is None or (main_grad.shape, main_grad.device) == (weight.shape, weight.device))
        and (main_grad is None or main_grad.dtype in (weight.dtype, compute_dtype(weight.dtype)))
    )
    if not usual:
        return None
    if reduction != "none":
        check_reduction("linear_cross_entropy", reduction, loss_grad)
    divisor, may_look = None, target.is_cpu and torch._C._len_torch_dispatch_stack() == 0
    if may_look:
        divisor = checked_divisor("linear_cross_entropy", target, columns, ignore_index, reduction)
    logits = (F.linear if main_grad is None else linear)(hidden, weight, bias)
    options = columns, ignore_index, label_smoothing, z_loss
    if recorded and loss_grad is not None:
        upstream = _of_each(loss_grad, target, compute_dtype(hidden.dtype))
        return OPS["cross_entropy_loss_grad_"](logits, target, upstream, None, *options)
    loss = OPS["cross_entropy"](logits, target, None, None, 0, *options, False, divisor)[0]
    return loss if may_look else reduced(loss, target, None, ignore_index, reduction)


def linear_cross_entropy_of(
    shards: Shards,
    name: str,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None,
    label_smoothing: float,
    z_loss: float,
    ignore_index: int,
    token_weight: Tensor | None,
    vocab_size: int | None,
    reduction: str,
    loss_grad: Tensor | float | None,
    workspace: int | None,
) -> Tensor:
    """Compute `linear_cross_entropy` from one of several shards of the weight; errors begin with `name`.

    `target` has the ids of all tokens, `hidden` the rows that `shards.gather_hidden` gathers.
    """
    hidden, weight, bias, main_grad, wanted, vocab_start, vocab_size, workspace = head_of(
        name, shards, hidden, weight, target, ignore_index, vocab_size, workspace, bias
    )
    options = LossOptions(vocab_start, vocab_size, ignore_index, label_smoothing, z_loss, workspace)
    per_token = {"token_weight": token_weight, "loss_grad": loss_grad}
    check_options(name, hidden.dtype, target, label_smoothing, z_loss, **per_token)
    check_reduction(name, reduction, loss_grad)
    rows, targets = hidden.reshape(-1, hidden.shape[-1]), target.reshape(-1)
    dtype = compute_dtype(rows.dtype)
    if token_weight is not None:
        token_weight = token_weight.reshape(-1).to(dtype)
    # Gradients can be computed before their factor is known, except in float16, which may not hold them
    # unscaled, and with main_grad, which cannot be scaled after they were added.
    early = reduction != "none" and main_grad is None and rows.dtype != torch.float16
    if early:
        loss_grad = torch.ones((), dtype=dtype, device=rows.device)
        if reduction == "mean":
            loss_grad = loss_grad / number_of_targets(targets, token_weight, ignore_index, dtype)
        loss_grad = loss_grad.expand(targets.shape)
    # A checkpoint runs the forward again, which would add to main_grad twice: leave it to the backward.
    if main_grad is not None and not torch.compiler.is_compiling():
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
        if hooks is not None and hooks[0].__module__ == torch.utils.checkpoint.__name__:
            loss_grad = None
    with without_autocast(rows.device.type):
        if loss_grad is not None and any(wanted):
            call = HeadCall(options, shards, wanted, reduction)
            loss_grad = _of_each(loss_grad, targets, dtype)
            loss = _known(rows, weight, bias, targets, token_weight, loss_grad, main_grad, call)[0]
            return loss if early else loss.reshape(target.shape)
        loss = _unknown(
            rows, weight, bias, targets, token_weight, main_grad, HeadCall(options, shards, wanted)
        )[0]
        return reduced(loss, targets, token_weight, ignore_index, reduction).reshape(
            target.shape if reduction == "none" else ()
        )


@traced("fastmp.linear_cross_entropy")
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    ignore_index: int = -100,
    token_weight: Tensor | None = None,
    vocab_size: int | None = None,
    reduction: str = "mean",
    loss_grad: Tensor | float | None = None,
    workspace: int | None = None,
) -> Tensor:
    """Output projection fused with cross-entropy: the logits hidden weight^T + bias are never materialised.

    Under autocast it runs in the autocast dtype. The wgrad is summed in fp32 (fp64 for fp64). If the
    parameter has a `main_grad` (its shape; fp32 or the dtype of hidden), the gradient is added to that and
    rounded once, and autograd gets none.

    Args:
        hidden: (..., H) float64, float32, bfloat16 or float16.
        weight: (V, H) of the same dtype and device.
        target: (...) int64 ids.
        bias: (V,) of the same dtype and device.
        label_smoothing, z_loss, ignore_index, token_weight, vocab_size: as in `cross_entropy`.
        reduction: as in `cross_entropy`. With "mean" or "sum" the forward pass computes the gradients, as
            with `loss_grad`, and the backward pass scales them by the upstream gradient, once. In bfloat16
            that rounds them again unless it is a power of two. With a `main_grad`, or in float16, whose range
            needs the scale first, the logits are computed twice instead. A second backward pass needs
            `retain_graph=True`, as in torch; the first then copies what it would overwrite.
        loss_grad: the upstream gradient of every token's loss, with reduction="none", (...) or one number for
            all: 1 if the losses are summed. The forward pass then computes the gradients too, for 3/4 of the
            FLOPs, and adds to `main_grad` (with few logits the backward pass does). The backward pass returns
            them, once, even if the graph is retained; another upstream gradient raises RuntimeError (on a GPU
            a device-side assertion). Without `loss_grad`, the loss can receive any gradient. Without
            recording it has no effect.
        workspace: bytes of logits at a time, from which the size of a chunk follows. Default 64 MiB on a CPU,
            1 GiB elsewhere.

    Returns:
        (...), or 0-dim if reduced; float64 for float64, else float32. Ignored tokens count zero.

    Raises:
        ValueError: shapes, dtypes or options that do not fit, those of a `main_grad` included; on the CPU
            also a target outside the vocabulary that is not ignore_index (elsewhere such a token has loss and
            gradient NaN).

    Example:
        hidden = torch.randn(8, 16, requires_grad=True)
        weight = torch.randn(64, 16, requires_grad=True)
        loss = linear_cross_entropy(hidden, weight, torch.randint(64, (8,)))  # the mean
        loss.backward()

    Hsu et al., "Liger Kernel", 2024 (arXiv 2410.10989); Wijmans et al., "Cut Your Losses", 2024 (2411.09009).
    """
    if token_weight is None and vocab_size is None and workspace is None:
        options = (ignore_index, label_smoothing, z_loss, reduction, loss_grad)
        if (loss := _of_few_logits(hidden, weight, bias, target, *options)) is not None:
            return loss
    return linear_cross_entropy_of(
        ALONE, "linear_cross_entropy", hidden, weight, target, bias=bias, label_smoothing=label_smoothing,
        z_loss=z_loss, ignore_index=ignore_index, token_weight=token_weight, vocab_size=vocab_size,
        reduction=reduction, loss_grad=loss_grad, workspace=workspace,
    )  # fmt: skip
