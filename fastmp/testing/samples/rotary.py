"""Samples of rotary position embeddings: RoPE, and latent attention's fused RMSNorm and RoPE."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from fastmp.ops import latent_norm_rope, rope, rope_qk
from fastmp.ops.core.registry import OPS, compute_dtype
from fastmp.testing.functions import Draw, Function, OpFamily


def rope_samples(op: str, dtype: torch.dtype, generator: torch.Generator) -> Iterator[tuple]:
    """Yield heads of usual and odd widths, rotated in part, with gaps in memory, and positions per sample."""

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def angles(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
        turns = random(*shape) * 3
        return turns.cos().to(compute_dtype(dtype)), turns.sin().to(compute_dtype(dtype))

    fused = random(33, 2, 3, 6, 64).to(dtype)  # keys and values of each of three groups after four queries
    cases = (
        (random(40, 2, 4, 128).to(dtype), random(40, 2, 1, 128).to(dtype), angles(40, 64)),
        (random(7, 3, 5, 80).to(dtype), random(7, 3, 2, 80).to(dtype), angles(7, 3, 10)),
        (fused[:, :, :, :4], fused[:, :, :, 4], angles(33, 32)),
        (random(2, 9, 21, 31).to(dtype).transpose(1, 2), None, angles(1, 21, 13)),
        (random(5, 36).to(dtype), None, angles(5, 18)),
        (random(0, 2, 4, 64).to(dtype), random(0, 2, 2, 64).to(dtype), angles(0, 32)),
    )
    for number, (q, k, (cos, sin)) in enumerate(cases):
        for interleaved in (False, True):
            yield q, k, cos, sin, interleaved, number % 2 == 1


def turned(x, cos, sin, interleaved):
    """Compute x cos + rotate_half(x) sin, in the dtype of x."""
    half = cos.shape[-1]
    shape = (*cos.shape[:-1], *[1] * (x.dim() - cos.dim()), 2 * half)
    pairwise = [t.repeat_interleave(2, -1) if interleaved else torch.cat((t, t), -1) for t in (cos, sin)]
    cos, sin = (t.to(x.dtype).reshape(shape) for t in pairwise)
    turned, rest = x[..., : 2 * half], x[..., 2 * half :]
    if interleaved:
        other = torch.stack((-turned[..., 1::2], turned[..., ::2]), -1).flatten(-2)
    else:
        other = torch.cat((-turned[..., half:], turned[..., :half]), -1)
    return torch.cat((turned * cos + other * sin, rest), -1)


def _eager_rope(x, cos, sin, interleaved):
    return turned(x, cos, sin, interleaved)


def _eager_rope_qk(q, k, cos, sin, interleaved):
    return turned(q, cos, sin, interleaved), turned(k, cos, sin, interleaved)


def _draw_rope(draw: Draw, count: int) -> tuple[tuple, dict]:
    if draw.large:
        lead: tuple[int, ...] = draw.rows or 64, 2
        heads, half, rest = [8, 2], 32, draw.choice([0, 5])
    else:
        lead = (draw.size(17), draw.size(3))[: 1 + draw.flag()]
        heads, rest = [draw.size(5) for _ in range(count)], draw.size(8)
        half = draw.size(13 if draw.small else 64)
    turns = torch.randn((*lead, half), generator=draw.generator, dtype=torch.float64) * 3
    if draw.flag():
        turns = turns[:, :1] if len(lead) == 2 else turns[:1]
    angles = [t.to(draw.device, compute_dtype(draw.dtype)) for t in (turns.cos(), turns.sin())]
    tensors = [draw.tensor(*lead, n, 2 * half + rest) for n in heads[:count]]
    return (*tensors, *angles), {"interleaved": draw.flag()}


def latent_samples(op: str, dtype: torch.dtype, generator: torch.Generator) -> Iterator[tuple]:
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


def _eager_latent_norm_rope(x, weight, cos, sin, eps, interleaved):
    latent, shared = x[..., : len(weight)], x[..., len(weight) :]
    return F.rms_norm(latent, weight.shape, weight, eps), turned(shared, cos, sin, interleaved)


def _draw_latent_norm_rope(draw: Draw) -> tuple[tuple, dict]:
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


FAMILIES = {
    "rope": OpFamily(
        rope_samples,
        (
            Function("rope", rope, _eager_rope, lambda draw: _draw_rope(draw, 1)),
            Function("rope_qk", rope_qk, _eager_rope_qk, lambda draw: _draw_rope(draw, 2)),
        ),
    ),
    "latent": OpFamily(
        latent_samples,
        (Function("latent_norm_rope", latent_norm_rope, _eager_latent_norm_rope, _draw_latent_norm_rope),),
    ),
}
