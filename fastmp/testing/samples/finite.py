"""Sample arguments of first_not_finite."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch


def samples(op: str, dtype: torch.dtype, generator: torch.Generator) -> Iterator[tuple]:
    """Yield buffers with no, one or several non-finite numbers, searched or not."""
    for size, bad, wanted in (
        (5000, {}, True),
        (5000, {4999: math.nan}, True),
        (13000, {12000: -math.inf, 4100: math.inf}, True),
        (300, {0: math.nan}, False),
        (0, {}, True),
    ):
        x = torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)
        for index, value in bad.items():
            x[index] = value
        yield x, torch.tensor(wanted)
