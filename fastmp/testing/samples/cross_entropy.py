"""Sample arguments of the cross-entropy family."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from fastmp.ops.registry import OPS


def _cases(dtype: torch.dtype, generator: torch.Generator, with_nan: bool) -> Iterator[dict[str, Any]]:
    """Rows apart in memory, padding, a shard of padding only, no tokens, one column, special values."""
    statistics = torch.float64 if dtype == torch.float64 else torch.float32
    #   tokens, columns, gap between rows, first id, vocabulary, smoothing, z-loss, weighted
    cases = (
        (64, 1000, 0, 0, 1000, 0.0, 0.0, False),
        (64, 1000, 0, 1000, 4000, 0.1, 1e-3, True),
        (17, 257, 7, 0, 250, 0.1, 0.0, True),
        (3, 9001, 3, 0, 9001, 0.0, 1e-2, False),
        (5, 64, 0, 64, 60, 0.0, 0.0, False),
        (0, 128, 0, 0, 128, 0.0, 0.0, True),
        (1, 1, 0, 0, 1, 0.0, 0.0, False),
    )
    for tokens, columns, gap, start, vocabulary, smoothing, z_loss, weighted in cases:
        rows = torch.randn(tokens, columns + gap, generator=generator, dtype=torch.float64) * 3
        target = torch.randint(vocabulary, (tokens,), generator=generator)
        if tokens >= 5:
            target[0] = -100
            rows[1] = -torch.inf
            rows[2, 0] = torch.nan if with_nan else torch.inf
            target[3] = vocabulary
        yield {
            "logits": rows.to(dtype)[:, :columns],
            "target": target,
            "weight": torch.rand(tokens, generator=generator, dtype=statistics) if weighted else None,
            "grad_loss": torch.randn(tokens, generator=generator, dtype=statistics),
            "shard": (start, vocabulary),
            "options": (vocabulary, -100, smoothing, z_loss),
        }


def samples(op: str, dtype: torch.dtype, generator: torch.Generator) -> Iterator[tuple]:
    stats_of, merge = (
        OPS[f"cross_entropy_{name}"].implementations["reference"] for name in ("stats", "merge")
    )
    # which maximum a row with NaN reports is left open: its sum is NaN, and so is what follows from it
    for case in _cases(dtype, generator, with_nan=op != "cross_entropy_stats"):
        logits, target, options = case["logits"], case["target"], case["options"]
        with_sum = options[2] > 0
        if op == "cross_entropy_stats":
            yield logits, target, *case["shard"], with_sum
            continue
        own = stats_of(logits, target, *case["shard"], with_sum)
        stats = torch.stack(
            [stats_of(logits.flip(1), target, options[0], options[0], with_sum), own, own + 1]
        )
        if op == "cross_entropy_merge":
            yield stats, target, case["weight"], *options
            continue
        lse = merge(stats, target, None, *options)[1]
        yield logits, target, lse, case["grad_loss"], case["weight"], case["shard"][0], *options
