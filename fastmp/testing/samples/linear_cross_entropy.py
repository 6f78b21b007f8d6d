"""Sample arguments of linear + cross-entropy."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from fastmp.ops import linear_cross_entropy
from fastmp.testing.functions import Draw, Function


def _eager(
    hidden: Tensor, weight: Tensor, target: Tensor, *, bias: Tensor | None, label_smoothing: float,
    z_loss: float, ignore_index: int, token_weight: Tensor | None, vocab_size: int | None,
    workspace: int | None, reduction: str,
) -> Tensor:  # fmt: skip
    """Ignored tokens have no gradient whatever their logits: torch would let NaN through."""
    ignored = (target == ignore_index).flatten()
    logits = F.linear(hidden, weight, bias)[..., :vocab_size].flatten(0, -2).masked_fill(ignored[:, None], 0)
    loss = F.cross_entropy(
        logits,
        target.flatten(),
        reduction=reduction,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
    )
    if z_loss:
        loss = loss + z_loss * logits.logsumexp(-1).square().masked_fill(ignored, 0)
    loss = loss.view(target.shape)
    return loss if token_weight is None else loss * token_weight


def draw_head(draw: Draw) -> tuple[tuple, dict[str, Any]]:
    """Hidden states, an output weight and targets, and the options of every loss over them."""
    tokens = draw.rows or 384 if draw.large else draw.size(31)
    size = 96 if draw.large else draw.size(32, least=1)
    columns = 1031 if draw.large else draw.size(128 if draw.small else 257, least=1)
    shape = (tokens,) if draw.flag() else (2, tokens)
    vocabulary = draw.choice([None, columns, max(columns - 3, 1)])
    target = draw.ids(*shape, below=vocabulary or columns)
    ignore_index = draw.choice([-100, 0])
    if draw.flag():
        target[..., ::3] = ignore_index
    hidden = draw.tensor(*shape, size, scale=size**-0.5)
    weight = draw.tensor(columns, size, scale=3.0)
    tokens_a_chunk = draw.choice([None, 100] if draw.large else [None, 1, 3, 16])
    return (hidden, weight, target), {
        "ignore_index": ignore_index,
        "vocab_size": vocabulary,
        "workspace": None if tokens_a_chunk is None else tokens_a_chunk * columns * draw.dtype.itemsize,
    }


def _draw(draw: Draw) -> tuple[tuple, dict[str, Any]]:
    (hidden, weight, target), options = draw_head(draw)
    return (hidden, weight, target), {
        **options,
        "bias": draw.tensor(len(weight)) if draw.flag() else None,
        "label_smoothing": draw.choice([0.0, 0.1, 1.0]),
        "z_loss": draw.choice([0.0, 1e-2]),
        "token_weight": draw.tensor(*target.shape, grad=False).nan_to_num(1, 1, 1) if draw.flag() else None,
        "reduction": "none",
    }


FUNCTIONS = (Function("linear_cross_entropy", linear_cross_entropy, _eager, _draw),)
