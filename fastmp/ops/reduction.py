"""Reduction of per-token losses ("none", "sum", "mean"), shared by the loss ops.

If the host may read the targets, as on a CPU, the loss kernel itself divides the sum of its losses by a
number and expands the gradient, which saves two ops.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fastmp.ops.core import checks

REDUCTIONS = ("none", "mean", "sum")


def check_reduction(op: str, reduction: str, loss_grad: Any = None) -> None:
    """Check the option, and that `loss_grad` comes with per-token losses."""
    checks.check_choice(op, "reduction", reduction, REDUCTIONS)
    message = "{}: loss_grad is the gradient of each token's loss: pass reduction='none' with it, got {!r}"
    checks.require(loss_grad is None or reduction == "none", message, op, reduction)


def number_of_targets(target: Tensor, token_weight: Tensor | None, ignore_index: int, dtype: Any) -> Tensor:
    """Return the divisor of a mean, 0-dim: number of targets not ignored, or the sum of their weights."""
    counted = target != ignore_index
    if token_weight is None:
        return counted.sum().to(dtype)
    return token_weight.to(dtype).where(counted, 0).sum()


def reduced(
    loss: Tensor, target: Tensor, token_weight: Tensor | None, ignore_index: int, reduction: str
) -> Tensor:
    """Return the per-token losses, or their sum or mean, a 0-dim tensor."""
    if reduction == "none":
        return loss
    total = loss.sum()
    if reduction == "sum":
        return total
    return total / number_of_targets(target, token_weight, ignore_index, loss.dtype)


def divided(loss: Tensor, divisor: float | None) -> Tensor:
    """Return the losses, or with a divisor their sum divided by it."""
    return loss if divisor is None else loss.sum() / divisor


def grad_of_each(grad_loss: Tensor, like: Tensor, divisor: float | None) -> Tensor:
    """Return the gradient of each loss, in the shape of `like`, from the gradient of `divided`."""
    return grad_loss if divisor is None else (grad_loss / divisor).expand(like.shape)
