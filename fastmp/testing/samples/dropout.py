"""Sample arguments of the bias-dropout-add family."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from fastmp.ops import bias_dropout_add
from fastmp.ops.dropout import keep_mask
from fastmp.testing.functions import Draw, Function


def samples(op: str, dtype: torch.dtype, generator: torch.Generator) -> Iterator[tuple]:
    """Yield rows of multiples of four and others, residuals of two dtypes; without a seed p is 0."""
    for rows, columns, gap, p, with_bias in (
        (64, 512, 0, 0.1, True),
        (37, 129, 5, 0.5, True),
        (33, 68, 4, 0.9, False),
        (16, 64, 0, 1.0, True),
        (48, 96, 0, 0.0, True),
        (0, 8, 0, 0.1, True),
    ):
        for wide in (False, True) if dtype.itemsize == 2 else (False,):
            x, residual = (
                torch.randn(rows, columns + gap, generator=generator)[:, :columns] for _ in range(2)
            )
            bias = torch.randn(columns, generator=generator).to(dtype) if with_bias else None
            seed = torch.randint(-(1 << 62), 1 << 62, (1,), generator=generator)
            residual = residual if wide else residual.to(dtype)
            forward = x.to(dtype), bias, residual, p, (seed if p else None)
            if op == "bias_dropout_add":
                yield forward
            elif op == "bias_dropout_add_into":
                yield *forward, torch.full(x.shape, torch.nan, dtype=residual.dtype)
            elif p:
                yield residual, p, seed, dtype, with_bias


def _eager_bias_dropout_add(x, bias, residual, *, p, training, seed):
    """Compute F.dropout with the mask of fastmp; where() drops NaN, too, a product would not."""
    h = x if bias is None else x + bias
    if training and p:
        h = torch.where(keep_mask(x.shape, p, seed), h / (1 - p) if p < 1 else h * 0, 0)
    return residual + h


def _draw_bias_dropout_add(draw: Draw) -> tuple[tuple, dict]:
    rows, columns = (
        (draw.rows or 256, 1024) if draw.large else (draw.size(33), draw.size(200 if draw.small else 1031))
    )
    shape = (rows, columns) if draw.flag() else (1, rows, columns)
    x, residual = draw.tensor(*shape), draw.tensor(*shape)
    bias = draw.tensor(columns) if draw.flag() else None
    p = 0.1 if draw.large else draw.choice([0.0, 0.1, 0.5, 1.0])
    seed = draw.ids(1, below=1 << 62) - (1 << 61)
    return (x, bias, residual), {"p": p, "training": draw.large or draw.flag(), "seed": seed}


FUNCTIONS = (Function("bias_dropout_add", bias_dropout_add, _eager_bias_dropout_add, _draw_bias_dropout_add),)
