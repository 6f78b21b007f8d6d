"""Sample arguments of log-probabilities and entropies from hidden states."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastmp.ops import linear_log_probs
from fastmp.ops.core.registry import OPS, compute_dtype
from fastmp.testing.functions import Draw, Function
from fastmp.testing.samples.linear_cross_entropy import draw_head


def samples(op: str, dtype: torch.dtype, generator: torch.Generator) -> Iterator[tuple]:
    """Yield rows with gaps, padding, a shard of padding, no tokens, one column, special values."""
    wide = compute_dtype(dtype)
    stats_of = OPS["log_probs_stats"].implementations["reference"]
    #   tokens, columns, gap between rows, first id, vocabulary, with a temperature, with the entropy
    for tokens, columns, gap, start, vocabulary, tempered, with_entropy in (
        (17, 1000, 0, 0, 1000, False, False),
        (17, 1000, 0, 1000, 4000, True, True),
        (18, 257, 7, 0, 250, True, False),
        (3, 7001, 4, 0, 7001, False, True),
        (5, 64, 0, 64, 60, False, True),
        (0, 128, 0, 0, 128, True, True),
        (1, 1, 0, 0, 1, False, True),
        (7, 7000, 1, 0, 6999, True, True),
    ):
        logits = torch.randn(tokens, columns + gap, generator=generator, dtype=torch.float64) * 3
        target = torch.randint(vocabulary, (tokens,), generator=generator)
        if tokens >= 5:
            target[0], target[3] = -100, vocabulary
            logits[1], logits[2, 0], logits[4, : columns // 2] = -torch.inf, torch.inf, -torch.inf
        logits = logits.to(dtype)[:, :columns]
        scale, grad, grad_entropy = torch.rand(3, tokens, generator=generator, dtype=wide) + 0.5
        per_token = scale if tempered else None
        if op == "log_probs_stats":
            yield logits, target, per_token, start, vocabulary, with_entropy
            continue
        top, total, _, weighted = stats_of(logits, target, per_token, start, vocabulary, True).unbind(1)
        entropies = (total.log() - weighted / total, grad_entropy) if with_entropy else (None, None)
        top = top.masked_fill(top == -torch.inf, 0)
        yield logits, target, top, total.log(), grad, *entropies, per_token, start, vocabulary, -100


def _eager(
    hidden: Tensor, weight: Tensor, target: Tensor, *, temperature: Any, return_entropy: bool,
    ignore_index: int, vocab_size: int | None, workspace: int | None,
) -> Any:  # fmt: skip
    """Compute from all logits, in the dtype of sums, without a gradient for ignored tokens."""
    ignored = target == ignore_index
    logits = F.linear(hidden, weight)[..., :vocab_size].masked_fill(ignored[..., None], 0)
    logits = logits.to(compute_dtype(logits.dtype))
    tensor = isinstance(temperature, Tensor)
    log_p = (logits / (temperature[..., None] if tensor else temperature)).log_softmax(-1)
    chosen = log_p.gather(-1, target.masked_fill(ignored, 0)[..., None])[..., 0].masked_fill(ignored, 0)
    if not return_entropy:
        return chosen
    p = log_p.exp()
    return chosen, -(p * log_p.masked_fill(p == 0, 0)).sum(-1).masked_fill(ignored, 0)


def _draw(draw: Draw) -> tuple[tuple, dict[str, Any]]:
    (hidden, weight, target), options = draw_head(draw)
    of_tokens = draw.tensor(*target.shape, grad=False).nan_to_num(1, 1, 1).abs().clamp(0.25, 4)
    return (hidden, weight, target), {
        **options,
        "temperature": draw.choice([1.0, 0.7, of_tokens]),
        "return_entropy": draw.flag(),
    }


FUNCTIONS = (Function("linear_log_probs", linear_log_probs, _eager, _draw),)
