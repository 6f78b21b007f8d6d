"""Sample arguments of the gated activations, swiglu and geglu."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from fastmp.ops import geglu, swiglu
from fastmp.testing.functions import Draw, Function


def samples(op: str, dtype: torch.dtype, generator: torch.Generator) -> Iterator[tuple]:
    for rows, width, gap, with_bias in (
        (64, 256, 0, True),
        (37, 65, 5, True),
        (33, 32, 0, False),
        (0, 8, 0, True),
    ):
        for activation in ("silu", "gelu_tanh", "gelu"):
            x, grad = (
                (torch.randn(rows, columns + gap, generator=generator) * 2).to(dtype)[:, :columns]
                for columns in (2 * width, width)
            )
            bias = torch.randn(2 * width, generator=generator).to(dtype) if with_bias else None
            yield (x, bias, activation) if op == "gated_activation" else (grad, x, bias, activation)


def _halves(x, bias):
    return (x if bias is None else x + bias).chunk(2, -1)


def _eager_swiglu(x, bias):
    gate, up = _halves(x, bias)
    return F.silu(gate) * up


def _eager_geglu(x, bias, approximate):
    gate, up = _halves(x, bias)
    return F.gelu(gate, approximate=approximate) * up


def _draw(draw: Draw) -> tuple:
    rows, width = (256, 512) if draw.large else (draw.size(33), draw.size(128 if draw.small else 512))
    lead = (rows,) if draw.flag() else (1, rows)
    x = draw.tensor(*lead, 2 * width, scale=2.0)
    return x, draw.tensor(2 * width) if draw.flag() else None


def _draw_geglu(draw: Draw) -> tuple[tuple, dict]:
    return _draw(draw), {"approximate": draw.choice(["tanh", "none"])}


FUNCTIONS = (
    Function("swiglu", swiglu, _eager_swiglu, lambda draw: (_draw(draw), {})),
    Function("geglu", geglu, _eager_geglu, _draw_geglu),
)
