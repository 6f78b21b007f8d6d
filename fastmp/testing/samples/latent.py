"""Sample arguments of latent_norm_rope."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from fastmp.ops import latent_norm_rope
from fastmp.ops.core.registry import OPS, compute_dtype
from fastmp.testing.functions import Draw, Function
from fastmp.testing.samples.rope import turned


def samples(op: str, dtype: torch.dtype, generator: torch.Generator) -> Iterator[tuple]:
    """Yield rows of usual and odd widths, with gaps, positions of each token, long latents, no keys, no rows.

    Latents are exact in each dtype, so that rstd can be held against that of float64.
    """

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).mul(16).round().clamp(-63, 63).div(8).to(dtype)

    forward = OPS["latent_norm_rope"].implementations["reference"]
    #    tokens, samples, columns, half of a key, gap between rows, own positions, float32 weight, pairs
    for tokens, batch, rank, half, gap, own, wide, interleaved in (
        (40, 2, 512, 32, 0, False, False, True),
        (40, 2, 512, 32, 0, True, True, False),
        (67, 3, 129, 5, 5, False, False, False),
        (67, 3, 36, 13, 0, True, False, True),
        (2, 2, 8201, 16, 0, False, False, False),
        (5, 1, 24, 0, 0, False, False, False),
        (0, 2, 16, 4, 0, False, False, True),
    ):
        x = drawn(tokens, batch, rank + 2 * half + gap)[..., : rank + 2 * half]
        grad_latent, grad_shared = drawn(tokens, batch, rank), drawn(tokens, batch, 2 * half)
        kind = torch.float32 if wide and dtype.itemsize == 2 else dtype
        weight = torch.randn(rank, generator=generator).to(kind)
        shape = (tokens, batch, half) if own else (tokens, half)
        angles = torch.randn(shape, generator=generator, dtype=torch.float64) * 3
        cos, sin = angles.cos().to(compute_dtype(dtype)), angles.sin().to(compute_dtype(dtype))
        if op == "latent_norm_rope":
            yield x, weight, cos, sin, 1e-5, interleaved
            continue
        _, _, rstd = forward(x, weight, cos, sin, 1e-5, interleaved)
        yield grad_latent, grad_shared, x, weight, cos, sin, rstd, interleaved


def _eager(x, weight, cos, sin, eps, interleaved):
    latent, shared = x[..., : len(weight)], x[..., len(weight) :]
    return F.rms_norm(latent, weight.shape, weight, eps), turned(shared, cos, sin, interleaved)


def _draw(draw: Draw) -> tuple[tuple, dict]:
    # The deviation of a row of one or two elements can be no more than their rounding.
    least = 1 if draw.dtype == torch.float64 else 5
    lead = (draw.size(17), draw.size(3))[: 1 + draw.flag()]
    rank, half = draw.size(200 if draw.small else 1031, least), draw.size(13 if draw.small else 64)
    if draw.large:
        lead, rank, half = (draw.rows or 128, 2), 512, 32
    turning = draw.choice([lead, lead[:1], (1,) * len(lead)])
    turns = torch.randn((*turning, half), generator=draw.generator, dtype=torch.float64) * 3
    angles = [t.to(draw.device, compute_dtype(draw.dtype)) for t in (turns.cos(), turns.sin())]
    x = draw.tensor(*lead, rank + 2 * half, scale=draw.choice([0.1, 2.0]))
    finite = Draw(draw.source, draw.dtype, device=str(draw.device), large=draw.large, small=draw.small)
    options = {"eps": draw.choice([1e-6, 1e-3]), "interleaved": draw.flag()}
    return (x, finite.tensor(rank), *angles), options


FUNCTIONS = (Function("latent_norm_rope", latent_norm_rope, _eager, _draw),)
