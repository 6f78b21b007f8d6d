"""Sample arguments of linear_fp8."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fastmp.ops import quantize_rows, quantize_weight
from fastmp.ops.core.fp8 import E4M3, E5M2


def samples(op: str, dtype: torch.dtype, generator: torch.Generator) -> Iterator[tuple]:
    """Yield both directions and blocks; in the last but one a block of q and one of w are NaN."""

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    for rows, n, k, block, row_dtype in (
        (300, 128, 128, 128, E4M3), (37, 128, 384, 128, E5M2), (45, 96, 64, 32, E4M3),
        (5, 256, 128, 128, E4M3), (0, 128, 128, 128, E4M3),
    ):  # fmt: skip
        x, weight = random(rows, k) * 3, random(n, k) * k**-0.5
        if rows == 5:
            x[2, 7], weight[3, 5] = torch.inf, torch.nan
        w, w_t, w_scale = quantize_weight(weight, block=block)
        yield *quantize_rows(x, block=block, dtype=row_dtype), w, w_scale, dtype
        yield *quantize_rows(random(rows, n), block=block, dtype=row_dtype), w_t, w_scale.t(), dtype
