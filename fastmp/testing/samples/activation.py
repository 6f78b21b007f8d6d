"""Sample arguments of the bias-GeLU family."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from fastmp.ops import bias_gelu
from fastmp.testing.functions import Draw, Function


def samples(op: str, dtype: torch.dtype, generator: torch.Generator) -> Iterator[tuple]:
    for rows, columns, gap, with_bias in (
        (64, 512, 0, True),
        (37, 129, 5, True),
        (33, 64, 0, False),
        (0, 8, 0, True),
    ):
        for approximate in ("tanh", "none"):
            x, grad = (
                (torch.randn(rows, columns + gap, generator=generator) * 2).to(dtype)[:, :columns]
                for _ in range(2)
            )
            bias = torch.randn(columns, generator=generator).to(dtype) if with_bias else None
            yield (x, bias, approximate) if op == "bias_gelu" else (grad, x, bias, approximate)


def _eager_bias_gelu(x, bias, approximate):
    return F.gelu(x if bias is None else x + bias, approximate=approximate)


def _draw_bias_gelu(draw: Draw) -> tuple[tuple, dict]:
    rows, columns = (
        (draw.rows or 256, 1024) if draw.large else (draw.size(33), draw.size(200 if draw.small else 1031))
    )
    x = draw.tensor(rows, columns, scale=2.0) if draw.flag() else draw.tensor(1, rows, columns, scale=2.0)
    bias = draw.tensor(columns) if draw.flag() else None
    return (x, bias), {"approximate": draw.choice(["tanh", "none"])}


FUNCTIONS = (Function("bias_gelu", bias_gelu, _eager_bias_gelu, _draw_bias_gelu),)
