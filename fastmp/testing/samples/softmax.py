"""Sample arguments of scaled_masked_softmax."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from fastmp.ops import scaled_masked_softmax
from fastmp.testing.functions import Draw, Function


def samples(op: str, dtype: torch.dtype, generator: torch.Generator) -> Iterator[tuple]:
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


def _draw(draw: Draw) -> tuple[tuple, dict]:
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


FUNCTIONS = (Function("scaled_masked_softmax", scaled_masked_softmax, eager_scaled_masked_softmax, _draw),)
