"""Sums and means of the losses of tokens, for the losses of this package.

Where targets may be read, as on a CPU, a kernel of the loss divides the sum of its losses by a number and
spreads the gradient of the result: neither is an op of its own.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fastmp.host import HOST
from fastmp.ops.core import checks

REDUCTIONS = ("none", "mean", "sum")


def check_reduction(op: str, reduction: str, loss_grad: Any = None) -> None:
    """Check the option, and that `loss_grad` comes with per-token losses."""
    checks.check_choice(op, "reduction", reduction, REDUCTIONS)
    message = "{}: loss_grad is the gradient of each token's loss, which needs reduction='none', got {!r}"
    checks.require(loss_grad is None or reduction == "none", message, op, reduction)


def number_of_targets(target: Tensor, token_weight: Tensor | None, ignore_index: int, dtype: Any) -> Tensor:
    """The divisor of a mean, 0-dim: how many targets are not ignored, or the sum of their weights."""
    counted = target != ignore_index
    if token_weight is None:
        return counted.sum().to(dtype)
    return token_weight.to(dtype).where(counted, 0).sum()


def reduced(
    loss: Tensor, target: Tensor, token_weight: Tensor | None, ignore_index: int, reduction: str
) -> Tensor:
    """The losses of tokens, or their sum or mean, a 0-dim tensor."""
    if reduction == "none":
        return loss
    total = loss.sum()
    if reduction == "sum":
        return total
    return total / number_of_targets(target, token_weight, ignore_index, loss.dtype)


def divisor_of(target: Tensor, ignore_index: int, reduction: str) -> float | None:
    """The number that a kernel divides the sum of its losses by, if it makes one; reads targets on a CPU."""
    if reduction == "none":
        return None
    if reduction == "sum":
        return 1.0
    if HOST is None or not target.is_contiguous():
        return float((target != ignore_index).sum())
    return float(target.numel() - HOST.count_of(target.data_ptr(), target.numel(), ignore_index))


def divided(loss: Tensor, divisor: float | None) -> Tensor:
    """The losses, or with a divisor their sum over it."""
    return loss if divisor is None else loss.sum() / divisor


def grad_of_each(grad_loss: Tensor, like: Tensor, divisor: float | None) -> Tensor:
    """The gradient of each loss, of the shape of `like`, from that of what `divided` gives."""
    return grad_loss if divisor is None else (grad_loss / divisor).expand(like.shape)
