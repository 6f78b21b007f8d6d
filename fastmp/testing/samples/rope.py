"""Sample arguments of the rope family."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from fastmp.ops import rope, rope_qk
from fastmp.ops.core.registry import compute_dtype
from fastmp.testing.functions import Draw, Function


def samples(op: str, dtype: torch.dtype, generator: torch.Generator) -> Iterator[tuple]:
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


def _draw(draw: Draw, count: int) -> tuple[tuple, dict]:
    if draw.large:
        lead, heads, half, rest = (draw.rows or 64, 2), [8, 2], 32, draw.choice([0, 5])
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


FUNCTIONS = (
    Function("rope", rope, _eager_rope, lambda draw: _draw(draw, 1)),
    Function("rope_qk", rope_qk, _eager_rope_qk, lambda draw: _draw(draw, 2)),
)
