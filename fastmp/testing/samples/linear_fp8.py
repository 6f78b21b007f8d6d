"""Sample arguments of linear_fp8, and quantised operands of any values."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def _scale(amax: Tensor, dtype: torch.dtype, block: int) -> Tensor:
    """Return the least powers of two that bring `amax` below the largest number; NaN unless it is finite."""
    mantissa, exponent = torch.frexp(amax / torch.finfo(dtype).max)
    scale = torch.ldexp(torch.ones_like(amax), exponent - (mantissa == 0.5).int())
    scale = torch.where(amax == 0, 1.0, torch.where(amax.isfinite(), scale, torch.nan))
    return scale.to(torch.float32 if block == 128 else torch.float8_e8m0fnu)


def _cast(values: Tensor, dtype: torch.dtype) -> Tensor:
    largest = torch.finfo(dtype).max
    return values.clamp(-largest, largest).to(dtype)


def quantized_rows(x: Tensor, block: int = 128, dtype: torch.dtype = E4M3) -> tuple[Tensor, Tensor]:
    """Return q (M, K) and its scales (M, K / block), which are M-major."""
    num_rows, k = x.shape
    tiles = x.float().reshape(num_rows, k // block, block)
    scale = _scale(tiles.abs().amax(-1), dtype, block)
    q = _cast(tiles / scale.float()[..., None], dtype).reshape(num_rows, k)
    rows = -(-num_rows // (16 // scale.itemsize)) * (16 // scale.itemsize)
    s = scale.new_empty(k // block, rows)[:, :num_rows].t()
    return q, s.copy_(scale)


def quantized_weight(w: Tensor, block: int = 128) -> tuple[Tensor, Tensor, Tensor]:
    """Return w (..., N, K) quantised, its transposed copy, and its scales (..., N / block, K / block)."""
    *lead, n, k = w.shape
    tiles = w.float().reshape(*lead, n // block, block, k // block, block)
    scale = _scale(tiles.abs().amax((-3, -1)), E4M3, block)
    q = _cast(tiles / scale.float()[..., :, None, :, None], E4M3).reshape(w.shape)
    return q, q.transpose(-1, -2).contiguous(), scale


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
        w, w_t, w_scale = quantized_weight(weight, block)
        yield *quantized_rows(x, block, row_dtype), w, w_scale, dtype
        yield *quantized_rows(random(rows, n), block, row_dtype), w_t, w_scale.t(), dtype
