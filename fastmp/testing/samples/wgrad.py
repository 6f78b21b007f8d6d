"""Sample arguments of the gradient of a linear layer's weight."""

from __future__ import annotations

from collections.abc import Iterator

import torch


def samples(op: str, dtype: torch.dtype, generator: torch.Generator) -> Iterator[tuple]:
    """Arguments of accumulate_weight_grad_: a sum that goes on in fp32, or as narrow as the operands, and one
    that lies transposed."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    sizes = ((64, 384, 128, 0), (37, 129, 65, 3), (700, 50, 40, 0), (0, 16, 8, 0), (5, 1, 1, 0))
    for number, (tokens, columns, hidden, gap) in enumerate(sizes):
        grad, x = (
            torch.randn(tokens, size + gap, generator=generator, dtype=torch.float64).to(dtype)[:, :size]
            for size in (columns, hidden)
        )
        total = torch.randn(columns, hidden, generator=generator, dtype=torch.float64).to(wide)
        total = total.t().contiguous().t() if number == 2 else total
        yield total, grad, x
        if dtype != wide:
            yield total.to(dtype), grad, x
