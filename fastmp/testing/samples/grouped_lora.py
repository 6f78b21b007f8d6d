"""Sample arguments of the grouped GEMM with LoRA."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fastmp.ops import grouped_lora
from fastmp.testing.functions import Draw, Function
from fastmp.testing.samples.grouped_mm import draw_offsets, eager_grouped_mm

# (rows, rows of a weight, columns of a weight, rank, columns between rows, where experts end)
_SHAPES = (
    (256, 16, 24, 8, 0, (1, 1, 256)),
    (97, 34, 65, 5, 3, (0, 40, 40, 41, 90)),
    (64, 48, 32, 70, 0, (64, 64)),
    (28, 16, 24, 16, 4, (2, 2, 20)),
    (5, 2, 1, 1, 0, (0, 0)),
    (0, 8, 16, 4, 0, (0,)),
)


def samples(op: str, dtype: torch.dtype, generator: torch.Generator) -> Iterator[tuple]:
    """Yield the calls of forward and of the dgrad, for both layouts of the weight."""

    def random(*shape: int, gap: int = 0) -> Tensor:
        shape = (*shape[:-1], shape[-1] + gap)
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        return values.to(dtype)[..., : shape[-1] - gap]

    for rows, n, k, r, gap, ends in _SHAPES:
        offsets, experts = torch.tensor(ends, dtype=torch.int32), len(ends)
        x, w, grad = random(rows, k, gap=gap), random(experts, n, k, gap=gap), random(rows, n, gap=gap)
        low, a, b = random(rows, r), random(experts, r, k, gap=gap), random(experts, n, r, gap=gap)
        yield x, w, None, low, b, offsets, False, False
        yield grad, w, random(experts, k), low, a, offsets, True, True
        yield x, w.mT.contiguous(), random(experts, n), low, b.mT.contiguous(), offsets, True, True
        yield grad, w.mT.contiguous(), None, low, a.mT.contiguous(), offsets, False, False


def _eager(
    x: Tensor,
    w: Tensor,
    a: Tensor,
    b: Tensor,
    offsets: Tensor,
    *,
    scale: float,
    transposed: bool,
    bias: Tensor | None,
) -> Tensor:
    low = eager_grouped_mm(eager_grouped_mm(x, a, offsets, False), b, offsets, False)
    return eager_grouped_mm(x, w, offsets, transposed, bias) + scale * low


def _draw(draw: Draw) -> tuple[tuple, dict[str, Any]]:
    if draw.large:
        rows, n, k, r = draw.rows or 1031, 128, 97, 7
        ends = [rows * share // 100 for share in (30, 30, 31, 88, 97)]
        offsets = torch.tensor(ends, dtype=torch.int32, device=draw.device)
    else:
        rows, n, k = draw.size(64 if draw.small else 128), draw.size(64), draw.size(64)
        r, offsets = draw.size(17, 1), draw_offsets(draw, rows, draw.choice([1, 2, 3, 7]))
    experts, transposed = len(offsets), draw.flag()
    shape = (experts, k, n) if transposed else (experts, n, k)
    w = draw.tensor(*shape, scale=max(k, 1) ** -0.5, grad=False)
    a, b = draw.tensor(experts, r, k, scale=max(k, 1) ** -0.5), draw.tensor(experts, n, r, scale=r**-0.5)
    bias = draw.tensor(experts, n) if draw.flag() else None
    options = {"scale": draw.choice([1.0, 2.0, 0.3]), "transposed": transposed, "bias": bias}
    return (draw.tensor(rows, k), w, a, b, offsets), options


FUNCTIONS = (Function("grouped_lora", grouped_lora, _eager, _draw),)
