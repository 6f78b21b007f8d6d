"""References of the cross-entropy ops in plain torch; see `cross_entropy`."""

from __future__ import annotations

import torch
from torch import Tensor

from fastmp.ops.core import checks
from fastmp.ops.core.registry import compute_dtype
from fastmp.ops.cross_entropy_triton import real_columns
from fastmp.ops.reduction import divided, grad_of_each

_NAN = float("nan")


def reference_stats(logits, target, vocab_start, vocab_size, with_sum):
    real = real_columns(logits.shape[1], vocab_start, vocab_size)
    x = logits[:, :real].to(compute_dtype(logits.dtype))
    if real == 0:
        empty = x.new_tensor([-torch.inf, 0, 0, 0][: 4 if with_sum else 3])
        return empty.repeat(len(x), 1)
    top = x.amax(1)
    finite = top.masked_fill(top == -torch.inf, 0)
    column = target - vocab_start
    here = (column >= 0) & (column < real)
    target_logit = x.gather(1, column.where(here, 0)[:, None])[:, 0].where(here, 0)
    columns = [top, (x - finite[:, None]).exp().sum(1), target_logit]
    return torch.stack(columns + [x.sum(1)] * with_sum, 1)


def reference_merge(stats, target, token_weight, vocab_size, ignore_index, label_smoothing, z_loss):
    top = stats[..., 0].amax(0)
    top = top.masked_fill(top == -torch.inf, 0)
    lse = top + (stats[..., 1] * (stats[..., 0] - top).exp()).sum(0).log()
    loss = (1 - label_smoothing) * (lse - stats[..., 2].sum(0)) + z_loss * lse * lse
    if label_smoothing:
        loss = loss + label_smoothing * (lse - stats[..., 3].sum(0) / vocab_size)
    if token_weight is not None:
        loss = loss * token_weight
    loss = loss.where((target >= 0) & (target < vocab_size), _NAN)
    return loss.masked_fill(target == ignore_index, 0), lse


def reference(
    logits, target, stats, token_weight, vocab_start, vocab_size, ignore_index, label_smoothing, z_loss,
    grad_in_place, divisor=None,
):  # fmt: skip
    """Return loss and lse, from stats or, without them, from whole rows; with a divisor, the reduced loss."""
    if stats is None:
        stats = reference_stats(logits, target, vocab_start, vocab_size, label_smoothing > 0)[None]
    options = vocab_size, ignore_index, label_smoothing, z_loss
    loss, lse = reference_merge(stats, target, token_weight, *options)
    return divided(loss, divisor), lse


def reference_grad(
    logits, target, lse, grad_loss, token_weight, vocab_start, vocab_size, ignore_index, label_smoothing,
    z_loss, divisor=None,
):  # fmt: skip
    grad_loss = grad_of_each(grad_loss, target, divisor)
    real = real_columns(logits.shape[1], vocab_start, vocab_size)
    scale = grad_loss if token_weight is None else grad_loss * token_weight
    scale = scale.where((target >= 0) & (target < vocab_size), _NAN)[:, None]
    probability = (logits[:, :real].to(lse.dtype) - lse[:, None]).exp()
    is_target = torch.arange(vocab_start, vocab_start + real, device=target.device) == target[:, None]
    grad = probability * (1 + 2 * z_loss * lse[:, None]) - label_smoothing / vocab_size
    grad = scale * (grad - (1 - label_smoothing) * is_target.to(lse.dtype))
    out = torch.zeros(logits.shape, dtype=logits.dtype, device=logits.device)
    out[:, :real] = grad.masked_fill((target == ignore_index)[:, None], 0)
    return out


def reference_grad_(logits, *options):
    logits.copy_(reference_grad(logits, *options))


def reference_loss_grad_(logits, target, loss_grad, token_weight, vocab_size, *options):
    stats = reference_stats(logits, target, 0, vocab_size, options[1] > 0)
    loss, lse = reference_merge(stats[None], target, token_weight, vocab_size, *options)
    reference_grad_(logits, target, lse, loss_grad, token_weight, 0, vocab_size, *options)
    return loss


def check_upstream_grad(op: str, grad_loss: Tensor, expected: Tensor, ignored: Tensor) -> None:
    """Assert, without host-device synchronisation, that `grad_loss` equals `expected` up to rounding.

    Raises:
        RuntimeError: it does not, for a token that is not ignored.
    """
    same = (grad_loss - expected).abs() <= 8 * torch.finfo(expected.dtype).eps * expected.abs()
    torch._assert_async(
        (same | ignored).all(),
        f"{op}: the loss received an upstream gradient other than the loss_grad passed to it",
    )


def reference_check_upstream_grad_(grad, grad_loss, loss_grad, target, ignore_index):
    checks.check_floating("cross_entropy_promise_", "grad", grad)
    check_upstream_grad("cross_entropy", grad_loss, loss_grad, target == ignore_index)
