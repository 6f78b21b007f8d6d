"""Sample arguments of the bias-GeLU family."""

from __future__ import annotations

from collections.abc import Iterator

import torch


def samples(op: str, dtype: torch.dtype, generator: torch.Generator) -> Iterator[tuple]:
    for rows, columns, gap, with_bias in (
        (64, 512, 0, True),
        (37, 129, 5, True),
        (33, 64, 0, False),
        (0, 8, 0, True),
    ):
        for approximate in ("tanh", "none"):
            x, grad = (
                (torch.randn(rows, columns + gap, generator=generator) * 2).to(dtype)[:, :columns]
                for _ in range(2)
            )
            bias = torch.randn(columns, generator=generator).to(dtype) if with_bias else None
            yield (x, bias, approximate) if op == "bias_gelu" else (grad, x, bias, approximate)
