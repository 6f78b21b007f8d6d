"""Sample arguments of the grouped FP8 GEMMs."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fastmp.ops import quantize_rows, quantize_weight
from fastmp.ops.core.fp8 import E4M3, E5M2

# (rows, rows of a weight, columns of a weight, block, dtype of rows, where experts end)
_SHAPES = (
    (800, 128, 128, 128, E4M3, (1, 1, 800)),
    (97, 256, 128, 128, E5M2, (0, 40, 40, 41, 90)),
    (64, 64, 96, 32, E4M3, (64, 64)),
    (28, 128, 256, 128, E4M3, (2, 2, 20)),
    (0, 128, 128, 128, E4M3, (0,)),
)


def samples(op: str, dtype: torch.dtype, generator: torch.Generator) -> Iterator[tuple]:
    """Yield both directions; in one sample a block of q and one of w are NaN."""

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    for rows, n, k, block, row_dtype, ends in _SHAPES:
        offsets = torch.tensor(ends, dtype=torch.int32)
        x, weight = random(rows, k) * 3, random(len(ends), n, k) * k**-0.5
        if rows == 28:
            x[2, 7], weight[0, 3, 5] = torch.inf, torch.nan
        if op == "grouped_mlp_in_fp8":
            w, _, w_scale = quantize_weight(random(len(ends), 2 * n, k) * k**-0.5, block=block)
            # few distinct rows: where rounding lifts the largest number of a block, float64 has another scale
            x = x[:19].repeat(-(-rows // 19), 1)[:rows]
            form = ("silu", "gelu", "gelu_tanh")[rows % 3]
            yield *quantize_rows(x, block=block, dtype=row_dtype), w, w_scale, offsets, form, dtype
            continue
        w, w_t, w_scale = quantize_weight(weight, block=block)
        yield *quantize_rows(x, block=block, dtype=row_dtype), w, w_scale, offsets, dtype
        transposed = w_scale.transpose(-1, -2)
        yield *quantize_rows(random(rows, n), block=block, dtype=row_dtype), w_t, transposed, offsets, dtype
