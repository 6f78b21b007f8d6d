"""Samples of pointwise ops: bias-GeLU, gated activations, clamped SwiGLU, bias-dropout-add."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from fastmp.ops import bias_dropout_add, bias_gelu, clamped_swiglu, geglu, swiglu
from fastmp.ops.core.fp8 import E4M3, E5M2
from fastmp.ops.dropout import keep_mask
from fastmp.testing.functions import Draw, Function, OpFamily


def activation_samples(op: str, dtype: torch.dtype, generator: torch.Generator) -> Iterator[tuple]:
    """Yield arguments of bias-GeLU and of its backward pass."""
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


def gated_samples(op: str, dtype: torch.dtype, generator: torch.Generator) -> Iterator[tuple]:
    """Yield arguments of SwiGLU and GeGLU, of their backward pass and of the op that quantizes its output."""
    if op == "gated_activation_quantized":
        yield from _gated_quantized(dtype, generator)
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


def _gated_quantized(dtype: torch.dtype, generator: torch.Generator) -> Iterator[tuple]:
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


def _draw_gated(draw: Draw) -> tuple[tuple, dict]:
    rows, width = (
        (draw.rows or 256, 512) if draw.large else (draw.size(33), draw.size(128 if draw.small else 512))
    )
    lead = (rows,) if draw.flag() else (1, rows)
    options = {"bias": draw.tensor(2 * width) if draw.flag() else None}
    if draw.flag():
        return (draw.tensor(*lead, width, scale=2.0), draw.tensor(*lead, width, scale=2.0)), options
    return (draw.tensor(*lead, 2 * width, scale=2.0), None), options


def _draw_geglu(draw: Draw) -> tuple[tuple, dict]:
    tensors, options = _draw_gated(draw)
    return tensors, options | {"approximate": draw.choice(["tanh", "none"])}


def clamped_swiglu_samples(op: str, dtype: torch.dtype, generator: torch.Generator) -> Iterator[tuple]:
    """Yield arguments of the clamped SwiGLU and of its backward pass."""
    for rows, width, gap in ((64, 256, 0), (37, 65, 5), (33, 64, 8), (0, 8, 0)):
        x, grad = (
            (torch.randn(rows, columns + gap, generator=generator) * 3).to(dtype)[:, :columns]
            for columns in (2 * width, width)
        )
        yield (x, 1.702, 2.5) if op == "clamped_swiglu" else (grad, x, 1.702, 2.5)


def clamp(x: Tensor, low: float, high: float) -> Tensor:
    """Clamp x with gradient 1 at the bounds themselves, where torch has 0 since 2.15."""
    return torch.where((x >= low) & (x <= high), x, x.detach().clamp(low, high))


def _eager_clamped_swiglu(x: Tensor, alpha: float, limit: float) -> Tensor:
    gate, up = clamp(x[..., ::2], -torch.inf, limit), clamp(x[..., 1::2], -limit, limit)
    return (up + 1) * (gate * torch.sigmoid(gate * alpha))


def _draw_clamped_swiglu(draw: Draw) -> tuple[tuple, dict]:
    if draw.large:
        rows, width = draw.rows or 256, 512
    else:
        rows, width = draw.size(33), draw.size(128 if draw.small else 512)
    lead = (rows,) if draw.flag() else (1, rows)
    options = {"alpha": draw.choice([1.702, 1.0]), "limit": draw.choice([7.0, 1.5])}
    return (draw.tensor(*lead, 2 * width, scale=2.0),), options


def dropout_samples(op: str, dtype: torch.dtype, generator: torch.Generator) -> Iterator[tuple]:
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


FAMILIES = {
    "activation": OpFamily(
        activation_samples, (Function("bias_gelu", bias_gelu, _eager_bias_gelu, _draw_bias_gelu),)
    ),
    "gated": OpFamily(
        gated_samples,
        (
            Function("swiglu", swiglu, _eager_swiglu, _draw_gated),
            Function("geglu", geglu, _eager_geglu, _draw_geglu),
        ),
    ),
    "clamped_swiglu": OpFamily(
        clamped_swiglu_samples,
        (Function("clamped_swiglu", clamped_swiglu, _eager_clamped_swiglu, _draw_clamped_swiglu),),
    ),
    "dropout": OpFamily(
        dropout_samples,
        (Function("bias_dropout_add", bias_dropout_add, _eager_bias_dropout_add, _draw_bias_dropout_add),),
    ),
}
