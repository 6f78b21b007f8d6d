"""Samples of normalisations over rows: RMSNorm and LayerNorm, and the scaled masked softmax."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F

from fastmp.ops import layer_norm, rms_norm, scaled_masked_softmax
from fastmp.ops.core.fp8 import E4M3, E5M2
from fastmp.ops.core.registry import OPS
from fastmp.testing.functions import Draw, Function, OpFamily


def norm_samples(op: str, dtype: torch.dtype, generator: torch.Generator) -> Iterator[tuple]:
    """Yield rows with gaps between them, rows too long for registers, few columns, no rows, no columns.

    The sum of x and residual is exact, so that statistics can be held against those of float64.
    """
    if op == "rms_norm_quantized":
        yield from _norm_quantized(dtype, generator)
        return
    backward = op.endswith("_backward")
    name = op.removesuffix("_backward")
    forward = OPS[name].implementations["reference"]
    #    rows, columns, gap between rows, residual, bias, float32 parameters
    for rows, columns, gap, with_residual, with_bias, wide in (
        (64, 512, 0, True, True, False),
        (64, 512, 0, False, True, True),
        (301, 129, 5, True, False, False),
        (3, 17001, 3, True, True, False),
        (5, 24, 0, False, True, False),
        (0, 8, 0, True, True, False),
        (2, 0, 0, False, True, False),
    ):
        drawn = torch.randn(4, rows, columns + gap, generator=generator).mul(16).round().clamp(-63, 63) / 8
        x, residual, grad, grad_total = drawn.to(dtype)[:, :, :columns]
        kind = torch.float32 if wide and dtype.itemsize == 2 else dtype
        weight, bias = (torch.randn(columns, generator=generator).to(kind) for _ in range(2))
        optional = () if name == "rms_norm" else (bias if with_bias else None,)
        arguments = (x, residual if with_residual else None, weight, *optional, 1e-5)
        if not backward:
            yield arguments
            continue
        _, total, stats = forward(*arguments)
        options = () if name == "rms_norm" else (with_bias,)
        total = total if with_residual else x
        yield grad, grad_total if with_residual else None, total, weight, stats, *options


def _norm_quantized(dtype: torch.dtype, generator: torch.Generator) -> Iterator[tuple]:
    #    rows, columns, gap between rows, residual, float32 parameters, block, format
    for rows, columns, gap, with_residual, wide, block, form in (
        (64, 512, 0, True, False, 128, E4M3),
        (33, 384, 8, False, True, 128, E5M2),
        (37, 96, 3, True, False, 32, E4M3),
        (3, 16512, 0, True, False, 128, E4M3),
        (0, 128, 0, True, False, 128, E4M3),
        (2, 0, 0, False, False, 32, E4M3),
    ):
        drawn = torch.randn(2, rows, columns + gap, generator=generator).mul(16).round().clamp(-63, 63) / 8
        x, residual = drawn.to(dtype)[:, :, :columns]
        kind = torch.float32 if wide and dtype.itemsize == 2 else dtype
        weight = torch.randn(columns, generator=generator).to(kind)
        yield x, residual if with_residual else None, weight, 1e-5, block, form


def _eager_rms_norm(x, weight, eps=1e-6, residual=None):
    if residual is None:
        return F.rms_norm(x, weight.shape, weight, eps)
    total = x + residual
    return F.rms_norm(total, weight.shape, weight, eps), total


def _layer_norm(x, weight, bias, eps):
    """Compute F.layer_norm; in float64, the truth, in steps: torch's backward cancels far from zero."""
    if x.dtype != torch.float64:
        return F.layer_norm(x, weight.shape, weight, bias, eps)
    centred = x - x.mean(-1, keepdim=True)
    y = centred * (centred.square().mean(-1, keepdim=True) + eps).rsqrt() * weight
    return y if bias is None else y + bias


def _eager_layer_norm(x, weight, bias=None, eps=1e-5, residual=None):
    if residual is None:
        return _layer_norm(x, weight, bias, eps)
    total = x + residual
    return _layer_norm(total, weight, bias, eps), total


def _norm_parameter(draw: Draw, columns: int) -> torch.Tensor:
    """Draw a finite parameter: with an infinite one, formulas differ in which gradients become NaN."""
    finite = Draw(draw.source, draw.dtype, device=str(draw.device), large=draw.large, small=draw.small)
    return finite.tensor(columns)


def _draw_rms_norm(draw: Draw) -> tuple[tuple, dict]:
    # The deviation of a row of one or two elements can be no more than their rounding.
    least = 0 if draw.dtype == torch.float64 else 5
    rows, columns = draw.size(33), draw.size(200 if draw.small else 1031, least)
    if draw.large:
        rows, columns = draw.rows or 256, 1024
    shape = (rows, columns) if draw.flag() else (rows, 1, columns)
    options = {"eps": draw.choice([1e-6, 1e-3])}
    if draw.flag():
        options["residual"] = draw.tensor(*shape)
    return (draw.tensor(*shape, scale=draw.choice([0.1, 2.0])), _norm_parameter(draw, columns)), options


def _draw_layer_norm(draw: Draw) -> tuple[tuple, dict]:
    (x, weight), options = _draw_rms_norm(draw)
    return (x, weight, _norm_parameter(draw, *weight.shape) if draw.flag() else None), options


def softmax_samples(op: str, dtype: torch.dtype, generator: torch.Generator) -> Iterator[tuple]:
    """Yield scores with masks that broadcast, causal masks, and no queries."""
    for shape, mask_shape, scale, causal in (
        ((2, 3, 16, 64), (2, 1, 1, 64), 0.125, False),
        ((2, 3, 17, 33), (2, 1, 17, 33), 1.0, True),
        ((5, 40), None, 2.0, True),
        ((40, 5), None, -0.5, True),
        ((3, 4, 1031), (4, 1), 0.3, False),
        ((2, 0, 8), (1, 8), 1.0, False),
    ):
        x = (torch.randn(shape, generator=generator, dtype=torch.float64) * 3).to(dtype)
        mask = None if mask_shape is None else torch.rand(mask_shape, generator=generator) < 0.3
        if op == "scaled_masked_softmax":
            yield x, mask, scale, causal
            continue
        y = torch.ops.fastmp.scaled_masked_softmax(x, mask, scale, causal)
        grad = torch.randn(shape[::-1], generator=generator, dtype=torch.float64).to(dtype)
        yield grad.permute(*reversed(range(len(shape)))), y, scale, causal


def eager_scaled_masked_softmax(x, mask=None, *, scale=1.0, causal=False):
    hidden = torch.zeros((), dtype=torch.bool, device=x.device) if mask is None else mask
    if causal:
        queries, keys = x.shape[-2:]
        ahead = torch.ones(queries, keys, dtype=torch.bool, device=x.device).triu(keys - queries + 1)
        hidden = hidden | ahead
    scores = (x * scale).masked_fill(hidden, -math.inf)
    nothing = (scores == -math.inf).all(-1, keepdim=True)
    return scores.masked_fill(nothing, 0).softmax(-1).masked_fill(hidden | nothing, 0)


def _draw_softmax(draw: Draw) -> tuple[tuple, dict]:
    batch, heads, queries, keys = (
        (2, 4, draw.rows or 128, 160)
        if draw.large
        else (draw.size(3), draw.size(3, 1), draw.size(17), draw.size(64 if draw.small else 1031))
    )
    shape = draw.choice([(batch, heads, queries, keys), (heads, queries, keys), (queries, keys)])
    if draw.large:
        shape = (batch, heads, queries, keys)
    x = draw.tensor(*shape, scale=3.0)
    mask = None
    if draw.flag():
        mask_shape = [n if draw.flag() else 1 for n in shape][draw.source.randrange(2) :]
        mask = draw.ids(*mask_shape, below=3) == 0
    return (x, mask), {"scale": draw.choice([1.0, 0.125, -0.7]), "causal": draw.flag()}


FAMILIES = {
    "norm": OpFamily(
        norm_samples,
        (
            Function("rms_norm", rms_norm, _eager_rms_norm, _draw_rms_norm),
            Function("layer_norm", layer_norm, _eager_layer_norm, _draw_layer_norm),
        ),
    ),
    "softmax": OpFamily(
        softmax_samples,
        (
            Function(
                "scaled_masked_softmax", scaled_masked_softmax, eager_scaled_masked_softmax, _draw_softmax
            ),
        ),
    ),
}
