"""Sample arguments of the gated activations, swiglu and geglu."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from fastmp.ops import geglu, swiglu
from fastmp.ops.core.fp8 import E4M3, E5M2
from fastmp.testing.functions import Draw, Function


def samples(op: str, dtype: torch.dtype, generator: torch.Generator) -> Iterator[tuple]:
    if op == "gated_activation_quantized":
        yield from _quantized(dtype, generator)
        return
    for rows, width, gap, with_bias, joined in (
        (64, 256, 0, True, True),
        (37, 65, 5, True, True),
        (33, 64, 8, True, False),
        (33, 32, 0, False, True),
        (0, 8, 0, True, False),
    ):
        for activation in ("silu", "gelu_tanh", "gelu"):
            x, grad, up = (
                (torch.randn(rows, columns + gap, generator=generator) * 2).to(dtype)[:, :columns]
                for columns in ((2 if joined else 1) * width, width, width)
            )
            bias = torch.randn(2 * width, generator=generator).to(dtype) if with_bias else None
            arguments = (x, bias, activation, None if joined else up)
            yield arguments if op == "gated_activation" else (grad, *arguments)


def _quantized(dtype: torch.dtype, generator: torch.Generator) -> Iterator[tuple]:
    for rows, width, gap, with_bias, joined, block, form in (
        (64, 256, 0, True, True, 128, E4M3),
        (37, 128, 8, False, True, 128, E5M2),
        (33, 64, 8, True, False, 32, E4M3),
        (0, 128, 0, False, True, 128, E4M3),
    ):
        for activation in ("silu", "gelu_tanh", "gelu"):
            x, up = (
                (torch.randn(rows, columns + gap, generator=generator) * 2).to(dtype)[:, :columns]
                for columns in ((2 if joined else 1) * width, width)
            )
            bias = torch.randn(2 * width, generator=generator).to(dtype) if with_bias else None
            yield x, bias, activation, None if joined else up, block, form


def _halves(x, up, bias):
    if up is not None:
        x = torch.cat((x, up), -1)
    return (x if bias is None else x + bias).chunk(2, -1)


def _eager_swiglu(x, up, bias):
    gate, up = _halves(x, up, bias)
    return F.silu(gate) * up


def _eager_geglu(x, up, bias, approximate):
    gate, up = _halves(x, up, bias)
    return F.gelu(gate, approximate=approximate) * up


def _draw(draw: Draw) -> tuple[tuple, dict]:
    rows, width = (
        (draw.rows or 256, 512) if draw.large else (draw.size(33), draw.size(128 if draw.small else 512))
    )
    lead = (rows,) if draw.flag() else (1, rows)
    options = {"bias": draw.tensor(2 * width) if draw.flag() else None}
    if draw.flag():
        return (draw.tensor(*lead, width, scale=2.0), draw.tensor(*lead, width, scale=2.0)), options
    return (draw.tensor(*lead, 2 * width, scale=2.0), None), options


def _draw_geglu(draw: Draw) -> tuple[tuple, dict]:
    tensors, options = _draw(draw)
    return tensors, options | {"approximate": draw.choice(["tanh", "none"])}


FUNCTIONS = (
    Function("swiglu", swiglu, _eager_swiglu, _draw),
    Function("geglu", geglu, _eager_geglu, _draw_geglu),
)
