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
        empty = x.new_tensor([-torch.inf, 0, 0, 0, 0][: 5 if with_sum else 3])
        return empty.repeat(len(x), 1)
    top = x.amax(1)
    below = x - top.masked_fill(top == -torch.inf, 0)[:, None]
    column = target - vocab_start
    here = (column >= 0) & (column < real)
    target_logit = x.gather(1, column.where(here, 0)[:, None])[:, 0].where(here, 0)
    columns = [top, below.exp().sum(1), target_logit]
    if with_sum:
        columns += [below.sum(1), torch.full_like(top, real)]
    return torch.stack(columns, 1)


def reference_merge(stats, target, token_weight, vocab_size, ignore_index, label_smoothing, z_loss):
    tops = stats[..., 0]
    top = tops.amax(0)
    top = top.masked_fill(top == -torch.inf, 0)
    total = (stats[..., 1] * (tops - top).exp()).sum(0)
    # All terms are relative to the maximum: a log-sum-exp would round away what small losses consist of.
    log_total = total.log()
    lse = top + log_total
    loss = (1 - label_smoothing) * (log_total + (top - stats[..., 2].sum(0))) + z_loss * lse * lse
    if label_smoothing:
        gap = tops.masked_fill(tops == -torch.inf, 0) - top
        below = (stats[..., 3] + stats[..., 4] * gap).sum(0)
        loss = loss + label_smoothing * (log_total - below / vocab_size)
    if token_weight is not None:
        loss = loss * token_weight
    loss = loss.where((target >= 0) & (target < vocab_size), _NAN)
    merged = torch.stack([top.where(~total.isnan(), _NAN), total], 1)
    return loss.masked_fill(target == ignore_index, 0), merged


def reference(
    logits, target, stats, token_weight, vocab_start, vocab_size, ignore_index, label_smoothing, z_loss,
    grad_in_place, divisor=None,
):  # fmt: skip
    """Return loss and maximum and sum of each row, from stats or, without them, from whole rows.

    With a divisor, the loss is reduced.
    """
    if stats is None:
        stats = reference_stats(logits, target, vocab_start, vocab_size, label_smoothing > 0)[None]
    options = vocab_size, ignore_index, label_smoothing, z_loss
    loss, merged = reference_merge(stats, target, token_weight, *options)
    return divided(loss, divisor), merged


def reference_grad(
    logits, target, merged, grad_loss, token_weight, vocab_start, vocab_size, ignore_index, label_smoothing,
    z_loss, divisor=None,
):  # fmt: skip
    grad_loss = grad_of_each(grad_loss, target, divisor)
    real = real_columns(logits.shape[1], vocab_start, vocab_size)
    scale = grad_loss if token_weight is None else grad_loss * token_weight
    scale = scale.where((target >= 0) & (target < vocab_size), _NAN)[:, None]
    top, total = merged[:, :1], merged[:, 1:]
    probability = (logits[:, :real].to(merged.dtype) - top).exp() / total
    is_target = torch.arange(vocab_start, vocab_start + real, device=target.device) == target[:, None]
    grad = probability * (1 + 2 * z_loss * (top + total.log())) - label_smoothing / vocab_size
    grad = scale * (grad - (1 - label_smoothing) * is_target.to(merged.dtype))
    out = torch.zeros(logits.shape, dtype=logits.dtype, device=logits.device)
    out[:, :real] = grad.masked_fill((target == ignore_index)[:, None], 0)
    return out


def reference_grad_(logits, *options):
    logits.copy_(reference_grad(logits, *options))


def reference_loss_grad_(logits, target, loss_grad, token_weight, vocab_size, *options):
    stats = reference_stats(logits, target, 0, vocab_size, options[1] > 0)
    loss, merged = reference_merge(stats[None], target, token_weight, vocab_size, *options)
    reference_grad_(logits, target, merged, loss_grad, token_weight, 0, vocab_size, *options)
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
