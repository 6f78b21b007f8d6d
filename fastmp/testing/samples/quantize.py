"""Sample arguments of the quantisers."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fastmp.ops import quantize_rows
from fastmp.ops.core.fp8 import E4M3, E5M2

#        rows, columns, block, format
_ROWS = (
    (37, 256, 128, E4M3), (18, 384, 128, E5M2), (33, 160, 32, E4M3), (17, 64, 32, E5M2), (0, 128, 128, E4M3),
)  # fmt: skip


def blocks(*shape: int, generator: torch.Generator) -> Tensor:
    """Return normal numbers, each 32 columns times a power of two from 2^-12 to 2^12, with a row of zeros."""
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    groups = torch.randint(-12, 13, (*shape[:-1], -(-shape[-1] // 32)), generator=generator)
    x *= torch.exp2(groups.double()).repeat_interleave(32, -1)[..., : shape[-1]]
    x.view(-1, shape[-1])[1:2] = 0
    return x


def samples(op: str, dtype: torch.dtype, generator: torch.Generator) -> Iterator[tuple]:
    if op == "quantize_weight":
        for shape, block in (((256, 384), 128), ((2, 128, 256), 128), ((96, 160), 32), ((17, 32, 64), 32)):
            yield blocks(*shape, generator=generator).to(dtype), block
        return
    for rows, columns, block, form in _ROWS:
        x = blocks(rows, columns + 8, generator=generator).to(dtype)[:, :columns]
        quantized = quantize_rows(x, block=block, dtype=form)
        yield (x, block, form) if op == "quantize_rows" else (*quantized, dtype)
