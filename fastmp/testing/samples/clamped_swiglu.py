"""Sample arguments of clamped_swiglu."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fastmp.ops import clamped_swiglu
from fastmp.testing.functions import Draw, Function


def samples(op: str, dtype: torch.dtype, generator: torch.Generator) -> Iterator[tuple]:
    for rows, width, gap in ((64, 256, 0), (37, 65, 5), (33, 64, 8), (0, 8, 0)):
        x, grad = (
            (torch.randn(rows, columns + gap, generator=generator) * 3).to(dtype)[:, :columns]
            for columns in (2 * width, width)
        )
        yield (x, 1.702, 2.5) if op == "clamped_swiglu" else (grad, x, 1.702, 2.5)


def clamp(x: Tensor, low: float, high: float) -> Tensor:
    """Clamp x with gradient 1 at the bounds themselves, where torch has 0 since 2.15."""
    return torch.where((x >= low) & (x <= high), x, x.detach().clamp(low, high))


def _eager(x: Tensor, alpha: float, limit: float) -> Tensor:
    gate, up = clamp(x[..., ::2], -torch.inf, limit), clamp(x[..., 1::2], -limit, limit)
    return (up + 1) * (gate * torch.sigmoid(gate * alpha))


def _draw(draw: Draw) -> tuple[tuple, dict]:
    if draw.large:
        rows, width = draw.rows or 256, 512
    else:
        rows, width = draw.size(33), draw.size(128 if draw.small else 512)
    lead = (rows,) if draw.flag() else (1, rows)
    options = {"alpha": draw.choice([1.702, 1.0]), "limit": draw.choice([7.0, 1.5])}
    return (draw.tensor(*lead, 2 * width, scale=2.0),), options


FUNCTIONS = (Function("clamped_swiglu", clamped_swiglu, _eager, _draw),)
