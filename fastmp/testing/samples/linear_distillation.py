"""Sample arguments of the distillation losses over hidden states."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastmp.ops import linear_distillation, linear_topk_distillation
from fastmp.ops.core.registry import OPS, compute_dtype
from fastmp.testing.functions import Draw, Function


def samples(op: str, dtype: torch.dtype, generator: torch.Generator) -> Iterator[tuple]:
    """Yield rows with gaps, padding, a shard of padding, no tokens, one column, close and special values."""
    wide = compute_dtype(dtype)
    stats_of, sums_of = (
        OPS[name].implementations["reference"] for name in ("log_probs_stats", "distillation_sums")
    )
    #   tokens, columns, gaps between rows, first id, vocabulary, with a temperature, beta
    for tokens, columns, gaps, start, vocabulary, tempered, beta in (
        (17, 1000, (0, 0), 0, 1000, False, 0.0),
        (17, 1000, (0, 0), 1000, 4000, True, 1.0),
        (18, 257, (7, 7), 0, 250, True, 0.5),
        (3, 7001, (4, 4), 0, 7001, False, 0.1),
        (5, 64, (0, 0), 64, 60, False, 0.0),
        (0, 128, (0, 0), 0, 128, True, 0.5),
        (1, 1, (0, 0), 0, 1, False, 1.0),
        (7, 7000, (1, 2), 0, 6999, True, 0.9),
    ):
        x, y = (
            torch.randn(tokens, columns + gap, generator=generator, dtype=torch.float64) * 3 for gap in gaps
        )
        if tokens >= 5:  # nearly equal, equal, a token that both exclude, infinity, and nothing
            y[1, :columns] = x[1, :columns] + 1e-2 * y[1, :columns]
            y[0, :columns] = x[0, :columns]
            x[2, 0] = y[2, 0] = -torch.inf
            x[3, 1], y[4, : columns // 2] = torch.inf, -torch.inf
        x, y = (each.to(dtype)[:, :columns] for each in (x, y))
        scale, grad = torch.rand(2, tokens, generator=generator, dtype=wide) + 0.5
        grad *= 64  # else gradients are subnormal in float16
        per_token = scale if tempered else None
        ids = torch.zeros(tokens, dtype=torch.int64)
        normalisers = []
        for logits in (x, y):
            top, total, _ = stats_of(logits, ids, per_token, start, vocabulary, False).unbind(1)
            normalisers += [top.masked_fill(top == -torch.inf, 0), total.log()]
        place = per_token, beta, start, vocabulary
        given = x, y, torch.stack(normalisers, 1)
        if op == "distillation_sums":
            yield (*given, *place)
        else:
            yield (
                *given,
                sums_of(*given, *place)[:, 1].clone(memory_format=torch.contiguous_format),
                grad,
                *place,
            )


def _divergence(log_p: Tensor, log_q: Tensor, divergence: str, beta: float) -> Tensor:
    """Compute from the definitions, where 0 log 0 = 0; zero probabilities have no gradient."""

    def kl(log_w: Tensor, log_m: Tensor) -> Tensor:
        w = log_w.exp()
        absent = w == 0
        return (w * (log_w.masked_fill(absent, 0) - log_m.masked_fill(absent, 0))).sum(-1)

    if divergence == "forward_kl":
        return kl(log_q, log_p)
    if divergence == "reverse_kl":
        return kl(log_p, log_q)
    m = beta * log_q.exp() + (1 - beta) * log_p.exp()
    log_m = m.where(m > 0, 1).log()
    return beta * kl(log_q, log_m) + (1 - beta) * kl(log_p, log_m)


def _logits(
    hidden: Tensor, weight: Tensor, temperature: Any, mask: Tensor | None, vocab_size: int | None
) -> Tensor:
    """Return scaled logits in the dtype of sums; tokens that do not count have no gradient."""
    absent = torch.zeros_like(hidden[..., :1], dtype=torch.bool) if mask is None else ~mask[..., None]
    logits = F.linear(hidden.masked_fill(absent, 0), weight)[..., :vocab_size].masked_fill(absent, 0)
    logits = logits.to(compute_dtype(logits.dtype))
    of_each = temperature[..., None] if isinstance(temperature, Tensor) else temperature
    return logits / of_each


def _eager(
    hidden: Tensor, weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor, *, divergence: str,
    beta: float, temperature: Any, mask: Tensor | None, num_tokens: int | None, vocab_size: int | None,
    workspace: int | None, reduction: str,
) -> Tensor:  # fmt: skip
    log_p = _logits(hidden, weight, temperature, mask, vocab_size).log_softmax(-1)
    log_q = _logits(teacher_hidden, teacher_weight, temperature, mask, vocab_size).log_softmax(-1).detach()
    loss = _divergence(log_p, log_q, divergence, beta)
    return loss if mask is None else loss.masked_fill(~mask, 0)


def _eager_topk(
    hidden: Tensor, weight: Tensor, teacher_ids: Tensor, teacher_log_probs: Tensor, *, divergence: str,
    beta: float, temperature: Any, mask: Tensor | None, num_tokens: int | None, vocab_size: int | None,
    workspace: int | None, reduction: str,
) -> Tensor:  # fmt: skip
    logits = _logits(hidden, weight, temperature, mask, vocab_size)
    others = logits.scatter(-1, teacher_ids, -torch.inf)
    none = (others == -torch.inf).all(-1, keepdim=True) & logits.amax(-1, keepdim=True).isfinite()
    tail = others.masked_fill(none, 0).logsumexp(-1, keepdim=True).masked_fill(none, -torch.inf)
    log_p = torch.cat([logits.gather(-1, teacher_ids), tail], -1).log_softmax(-1)
    log_q = teacher_log_probs.to(log_p.dtype)
    least = 2.0**-23 if divergence == "reverse_kl" else 0.0
    of_tail = (-log_q.logsumexp(-1, keepdim=True).expm1()).clamp(min=least).log()
    if teacher_ids.shape[-1] == (vocab_size or len(weight)):
        of_tail = of_tail.fill_(-torch.inf)
    log_q = torch.cat([log_q, of_tail], -1).log_softmax(-1)
    loss = _divergence(log_p, log_q, divergence, beta)
    return loss if mask is None else loss.masked_fill(~mask, 0)


def _not_huge(values: Tensor) -> Tensor:
    """Return a leaf without the special numbers that are finite and large.

    Divergences from a distribution with such logits are differences of large numbers, in torch as here.
    """
    return values.masked_fill_(values.isfinite() & (values.abs() > 30), 1).requires_grad_()


def _draw_student(draw: Draw) -> tuple[Tensor, Tensor, dict[str, Any]]:
    tokens = draw.rows or 384 if draw.large else draw.size(31)
    size = 96 if draw.large else draw.size(32, least=1)
    columns = 1031 if draw.large else draw.size(128 if draw.small else 257, least=1)
    shape = (tokens,) if draw.flag() else (2, tokens)
    vocabulary = draw.choice([None, columns, max(columns - 3, 1)])
    hidden = _not_huge(draw.tensor(*shape, size, scale=size**-0.5, grad=False))
    weight = _not_huge(draw.tensor(columns, size, scale=3.0, grad=False))
    mask, number = None, None
    if draw.rows is None and draw.flag():
        mask = torch.randint(3, shape, generator=draw.generator) > 0
        number = int(mask.sum()) if draw.large or draw.device.type == "meta" or draw.flag() else None
        mask = mask.to(draw.device)
    of_tokens = draw.tensor(*shape, grad=False).nan_to_num(1, 1, 1).abs().clamp(0.25, 4)
    tokens_a_chunk = draw.choice([None, 100] if draw.large else [None, 1, 3, 16])
    divergence = draw.choice(["forward_kl", "reverse_kl", "jsd"])
    return hidden, weight, {
        "divergence": divergence,
        "beta": draw.choice([0.1, 0.5]),
        "temperature": draw.choice([1.0, 0.7, of_tokens]),
        "mask": mask,
        "num_tokens": number,
        "vocab_size": vocabulary,
        "workspace": None if tokens_a_chunk is None else tokens_a_chunk * columns * draw.dtype.itemsize,
        "reduction": "none",
    }  # fmt: skip


def _finite(draw: Draw, *shape: int, scale: float = 1.0) -> Tensor:
    """Draw numbers of the teacher, which are finite."""
    return draw.tensor(*shape, scale=scale, grad=False).nan_to_num(1, 1, 1).clamp(-30, 30)


def _draw(draw: Draw) -> tuple[tuple, dict[str, Any]]:
    hidden, weight, options = _draw_student(draw)
    size = 64 if draw.large else draw.size(32, least=1)
    teacher = _finite(draw, *hidden.shape[:-1], size, scale=size**-0.5)
    return (hidden, weight, teacher, _finite(draw, len(weight), size, scale=3.0)), options


def _draw_topk(draw: Draw) -> tuple[tuple, dict[str, Any]]:
    hidden, weight, options = _draw_student(draw)
    vocabulary = options["vocab_size"] or len(weight)
    k = min(draw.choice([1, 2, 4]), vocabulary)
    logits = _finite(draw, *hidden.shape[:-1], vocabulary, scale=3.0).to(compute_dtype(draw.dtype))
    log_probs, ids = logits.log_softmax(-1).topk(k)
    return (hidden, weight, ids, log_probs.to(draw.dtype)), options


FUNCTIONS = (
    Function("linear_distillation", linear_distillation, _eager, _draw),
    Function("linear_topk_distillation", linear_topk_distillation, _eager_topk, _draw_topk),
)
