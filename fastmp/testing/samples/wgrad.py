"""Sample arguments of the gradient of a linear layer's weight, and of its product of a few rows."""

from __future__ import annotations

from collections.abc import Iterator

import torch


def samples(op: str, dtype: torch.dtype, generator: torch.Generator) -> Iterator[tuple]:
    """Yield the arguments of an op of the family."""
    return _few_rows(dtype, generator) if op == "few_rows_linear" else _gradients(dtype, generator)


def _few_rows(dtype: torch.dtype, generator: torch.Generator) -> Iterator[tuple]:
    """Yield many rows, then few: with and without a partial vector, gaps between rows, and empty sizes."""
    sizes = (
        (20, 24, 40, 0),
        (1, 48, 64, 0),
        (8, 5, 33, 3),
        (3, 3, 1030, 0),
        (5, 1, 1, 0),
        (0, 4, 4, 0),
        (2, 3, 0, 0),
    )
    for number, (rows, columns, terms, gap) in enumerate(sizes):
        x, weight = (
            torch.randn(size, terms + gap, generator=generator, dtype=torch.float64).to(dtype)[:, :terms]
            for size in (rows, columns)
        )
        bias = torch.randn(columns, generator=generator, dtype=torch.float64).to(dtype)
        yield x, weight, None if number % 2 else bias


def _gradients(dtype: torch.dtype, generator: torch.Generator) -> Iterator[tuple]:
    """Yield sums in float32, as narrow as the operands, and transposed."""
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
