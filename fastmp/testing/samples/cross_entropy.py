"""Sample arguments of the cross-entropy family."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastmp.ops import cross_entropy
from fastmp.ops.core.registry import OPS
from fastmp.testing.functions import Draw, Function


def _cases(dtype: torch.dtype, generator: torch.Generator, with_nan: bool) -> Iterator[dict[str, Any]]:
    """Yield rows with gaps, padding, a shard of padding, no tokens, one column, special values."""
    statistics = torch.float64 if dtype == torch.float64 else torch.float32
    #   tokens, columns, gap between rows, first id, vocabulary, smoothing, z-loss, weighted
    cases = (
        (16, 1000, 0, 0, 1000, 0.0, 0.0, False),
        (16, 1000, 0, 1000, 4000, 0.1, 1e-3, True),
        (17, 257, 7, 0, 250, 0.1, 0.0, True),
        (3, 7001, 4, 0, 7001, 0.0, 1e-2, False),
        (5, 64, 0, 64, 60, 0.0, 0.0, False),
        (0, 128, 0, 0, 128, 0.0, 0.0, True),
        (1, 1, 0, 0, 1, 0.0, 0.0, False),
        (7, 7000, 1, 0, 6999, 0.1, 1e-3, True),
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
    # a row with NaN may report any maximum: its sum is NaN, and so are its loss and gradient
    for case in _cases(dtype, generator, with_nan=op != "cross_entropy_stats"):
        logits, target, options = case["logits"], case["target"], case["options"]
        with_sum = options[2] > 0
        if op == "cross_entropy_loss_grad_":
            if case["shard"][0] == 0:  # the op takes whole vocabularies only
                yield logits, target, case["grad_loss"], case["weight"], *options
            continue
        if op == "cross_entropy_promise_":
            yield logits, case["grad_loss"].clone(), case["grad_loss"], target, -100
            continue
        if op == "cross_entropy_stats":
            yield logits, target, *case["shard"], with_sum
            continue
        if op == "cross_entropy" and case["shard"][0] == 0:
            yield logits, target, None, case["weight"], 0, *options, False, None
            yield logits, target, None, case["weight"], 0, *options, False, 2.5
        own = stats_of(logits, target, *case["shard"], with_sum)
        stats = torch.stack(
            [stats_of(logits.flip(1), target, options[0], options[0], with_sum), own, own + 1]
        )
        if op == "cross_entropy_merge":
            yield stats, target, case["weight"], *options
            continue
        if op == "cross_entropy":
            yield logits, target, stats, case["weight"], case["shard"][0], *options, False, None
            continue
        lse = merge(stats, target, None, *options)[1]
        yield logits, target, lse, case["grad_loss"], case["weight"], case["shard"][0], *options, None
        if len(target):
            yield logits, target, lse, case["grad_loss"][0], case["weight"], case["shard"][0], *options, 2.5


def _eager_cross_entropy(
    logits: Tensor, target: Tensor, *, label_smoothing, z_loss, ignore_index, token_weight, vocab_size,
    reduction,
) -> Tensor:  # fmt: skip
    """Compute the loss by torch, but without NaN in the gradient of ignored tokens, whatever their logits."""
    ignored = target == ignore_index
    x = logits[..., :vocab_size].masked_fill(ignored[..., None], 0).flatten(0, -2)
    loss = F.cross_entropy(
        x, target.flatten(), reduction=reduction, ignore_index=ignore_index, label_smoothing=label_smoothing
    ).view(target.shape)
    if z_loss:
        loss = loss + z_loss * x.logsumexp(-1).square().view(target.shape).masked_fill(ignored, 0)
    return loss if token_weight is None else loss * token_weight


def _draw_cross_entropy(draw: Draw) -> tuple[tuple, dict]:
    tokens = draw.rows or 256 if draw.large else draw.size(17)
    columns = 512 if draw.large else draw.size(200 if draw.small else 1031, least=1)
    columns += columns == tokens  # (2, n, n) may have its classes in either dimension
    shape = (tokens,) if draw.flag() else (2, tokens)
    vocabulary = draw.choice([None, columns, max(columns - 3, 1)])
    target = draw.ids(*shape, below=vocabulary or columns)
    ignore_index = draw.choice([-100, 0])
    if draw.flag():
        target[..., ::3] = ignore_index
    return (draw.tensor(*shape, columns, scale=3.0), target), {
        "label_smoothing": draw.choice([0.0, 0.1, 1.0]),
        "z_loss": draw.choice([0.0, 1e-2]),
        "ignore_index": ignore_index,
        "token_weight": draw.tensor(*shape, grad=False).nan_to_num(1, 1, 1) if draw.flag() else None,
        "vocab_size": vocabulary,
        "reduction": "none",
    }


FUNCTIONS = (Function("cross_entropy", cross_entropy, _eager_cross_entropy, _draw_cross_entropy),)
