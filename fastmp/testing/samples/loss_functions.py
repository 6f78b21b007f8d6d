"""Samples of losses: cross-entropy, its fusions with the output layer, log-probabilities, distillation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastmp.ops import (
    cross_entropy,
    linear_cross_entropy,
    linear_distillation,
    linear_log_probs,
    linear_topk_distillation,
)
from fastmp.ops.core.registry import OPS, compute_dtype
from fastmp.testing.functions import Draw, Function, OpFamily


def _cross_entropy_cases(
    dtype: torch.dtype, generator: torch.Generator, with_nan: bool
) -> Iterator[dict[str, Any]]:
    """Yield rows with gaps, padding, a shard of padding, no tokens, one column, special values, an offset."""
    statistics = torch.float64 if dtype == torch.float64 else torch.float32
    #   tokens, columns, gap between rows, first id, vocabulary, smoothing, z-loss, weighted, offset
    cases = (
        (16, 1000, 0, 0, 1000, 0.0, 0.0, False, 0.0),
        (16, 1000, 0, 1000, 4000, 0.1, 1e-3, True, 0.0),
        (17, 257, 7, 0, 250, 0.1, 0.0, True, 0.0),
        (3, 7001, 4, 0, 7001, 0.0, 1e-2, False, 0.0),
        (5, 64, 0, 64, 60, 0.0, 0.0, False, 0.0),
        (0, 128, 0, 0, 128, 0.0, 0.0, True, 0.0),
        (1, 1, 0, 0, 1, 0.0, 0.0, False, 0.0),
        (7, 7000, 1, 0, 6999, 0.1, 1e-3, True, 0.0),
        (4, 300, 0, 0, 300, 0.1, 0.0, False, 1e4),
    )
    for tokens, columns, gap, start, vocabulary, smoothing, z_loss, weighted, offset in cases:
        rows = torch.randn(tokens, columns + gap, generator=generator, dtype=torch.float64) * 3 + offset
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


def cross_entropy_samples(op: str, dtype: torch.dtype, generator: torch.Generator) -> Iterator[tuple]:
    """Yield arguments of the fused op, of its parts over a sharded vocabulary and of the gradient."""
    stats_of, merge = (
        OPS[f"cross_entropy_{name}"].implementations["reference"] for name in ("stats", "merge")
    )
    # a row with NaN may report any maximum: its sum is NaN, and so are its loss and gradient
    for case in _cross_entropy_cases(dtype, generator, with_nan=op != "cross_entropy_stats"):
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
        merged, shard = merge(stats, target, None, *options)[1], case["shard"][0]
        yield logits, target, merged, case["grad_loss"], case["weight"], shard, *options, None
        if len(target):
            yield logits, target, merged, case["grad_loss"][0], case["weight"], shard, *options, 2.5


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


def _draw_target(draw: Draw, tokens: int, columns: int) -> tuple[Tensor, int | None, int]:
    """Targets in one or two dimensions, some of them ignored; the vocabulary's size, and the ignored id."""
    shape = (tokens,) if draw.flag() else (2, tokens)
    vocabulary = draw.choice([None, columns, max(columns - 3, 1)])
    target = draw.ids(*shape, below=vocabulary or columns)
    ignore_index = draw.choice([-100, 0])
    if draw.flag():
        target[..., ::3] = ignore_index
    return target, vocabulary, ignore_index


def _draw_cross_entropy(draw: Draw) -> tuple[tuple, dict]:
    tokens = draw.rows or 256 if draw.large else draw.size(17)
    columns = 512 if draw.large else draw.size(200 if draw.small else 1031, least=1)
    columns += columns == tokens  # (2, n, n) may have its classes in either dimension
    target, vocabulary, ignore_index = _draw_target(draw, tokens, columns)
    shape = target.shape
    return (draw.tensor(*shape, columns, scale=3.0), target), {
        "label_smoothing": draw.choice([0.0, 0.1, 1.0]),
        "z_loss": draw.choice([0.0, 1e-2]),
        "ignore_index": ignore_index,
        "token_weight": draw.tensor(*shape, grad=False).nan_to_num(1, 1, 1) if draw.flag() else None,
        "vocab_size": vocabulary,
        "reduction": "none",
    }


def _eager_linear_cross_entropy(
    hidden: Tensor, weight: Tensor, target: Tensor, *, bias: Tensor | None, label_smoothing: float,
    z_loss: float, ignore_index: int, token_weight: Tensor | None, vocab_size: int | None,
    workspace: int | None, reduction: str,
) -> Tensor:  # fmt: skip
    """Ignored tokens have no gradient whatever their logits: torch would let NaN through."""
    ignored = (target == ignore_index).flatten()
    logits = F.linear(hidden, weight, bias)[..., :vocab_size].flatten(0, -2).masked_fill(ignored[:, None], 0)
    loss = F.cross_entropy(
        logits,
        target.flatten(),
        reduction=reduction,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
    )
    if z_loss:
        loss = loss + z_loss * logits.logsumexp(-1).square().masked_fill(ignored, 0)
    loss = loss.view(target.shape)
    return loss if token_weight is None else loss * token_weight


def _draw_head(draw: Draw) -> tuple[tuple, dict[str, Any]]:
    """Hidden states, an output weight and targets, and the options of every loss over them."""
    tokens = draw.rows or 384 if draw.large else draw.size(13 if draw.small else 31)
    size = 96 if draw.large else draw.size(32, least=1)
    columns = 1031 if draw.large else draw.size(128 if draw.small else 257, least=1)
    target, vocabulary, ignore_index = _draw_target(draw, tokens, columns)
    hidden = draw.tensor(*target.shape, size, scale=size**-0.5)
    weight = draw.tensor(columns, size, scale=3.0)
    tokens_a_chunk = draw.choice([None, 100] if draw.large else [None, 1, 3, 16])
    return (hidden, weight, target), {
        "ignore_index": ignore_index,
        "vocab_size": vocabulary,
        "workspace": None if tokens_a_chunk is None else tokens_a_chunk * columns * draw.dtype.itemsize,
    }


def _draw_linear_cross_entropy(draw: Draw) -> tuple[tuple, dict[str, Any]]:
    (hidden, weight, target), options = _draw_head(draw)
    return (hidden, weight, target), {
        **options,
        "bias": draw.tensor(len(weight)) if draw.flag() else None,
        "label_smoothing": draw.choice([0.0, 0.1, 1.0]),
        "z_loss": draw.choice([0.0, 1e-2]),
        "token_weight": draw.tensor(*target.shape, grad=False).nan_to_num(1, 1, 1) if draw.flag() else None,
        "reduction": "none",
    }


def linear_log_probs_samples(op: str, dtype: torch.dtype, generator: torch.Generator) -> Iterator[tuple]:
    """Yield rows with gaps, padding, a shard of padding, no tokens, one column, special values, an offset."""
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


def _eager_log_probs(
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


def _draw_log_probs(draw: Draw) -> tuple[tuple, dict[str, Any]]:
    (hidden, weight, target), options = _draw_head(draw)
    of_tokens = draw.tensor(*target.shape, grad=False).nan_to_num(1, 1, 1).abs().clamp(0.25, 4)
    return (hidden, weight, target), {
        **options,
        "temperature": draw.choice([1.0, 0.7, of_tokens]),
        "return_entropy": draw.flag(),
    }


def linear_distillation_samples(op: str, dtype: torch.dtype, generator: torch.Generator) -> Iterator[tuple]:
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


def _scaled_logits(
    hidden: Tensor, weight: Tensor, temperature: Any, mask: Tensor | None, vocab_size: int | None
) -> Tensor:
    """Return scaled logits in the dtype of sums; tokens that do not count have no gradient."""
    absent = torch.zeros_like(hidden[..., :1], dtype=torch.bool) if mask is None else ~mask[..., None]
    logits = F.linear(hidden.masked_fill(absent, 0), weight)[..., :vocab_size].masked_fill(absent, 0)
    logits = logits.to(compute_dtype(logits.dtype))
    of_each = temperature[..., None] if isinstance(temperature, Tensor) else temperature
    return logits / of_each


def _eager_distillation(
    hidden: Tensor, weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor, *, divergence: str,
    beta: float, temperature: Any, mask: Tensor | None, num_tokens: int | None, vocab_size: int | None,
    workspace: int | None, reduction: str,
) -> Tensor:  # fmt: skip
    log_p = _scaled_logits(hidden, weight, temperature, mask, vocab_size).log_softmax(-1)
    log_q = (
        _scaled_logits(teacher_hidden, teacher_weight, temperature, mask, vocab_size).log_softmax(-1).detach()
    )
    loss = _divergence(log_p, log_q, divergence, beta)
    return loss if mask is None else loss.masked_fill(~mask, 0)


def _eager_topk_distillation(
    hidden: Tensor, weight: Tensor, teacher_ids: Tensor, teacher_log_probs: Tensor, *, divergence: str,
    beta: float, temperature: Any, mask: Tensor | None, num_tokens: int | None, vocab_size: int | None,
    workspace: int | None, reduction: str,
) -> Tensor:  # fmt: skip
    logits = _scaled_logits(hidden, weight, temperature, mask, vocab_size)
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
    tokens = draw.rows or 384 if draw.large else draw.size(13 if draw.small else 31)
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
    """Draw the teacher's numbers, all finite."""
    return draw.tensor(*shape, scale=scale, grad=False).nan_to_num(1, 1, 1).clamp(-30, 30)


def _draw_distillation(draw: Draw) -> tuple[tuple, dict[str, Any]]:
    hidden, weight, options = _draw_student(draw)
    size = 64 if draw.large else draw.size(32, least=1)
    teacher = _finite(draw, *hidden.shape[:-1], size, scale=size**-0.5)
    return (hidden, weight, teacher, _finite(draw, len(weight), size, scale=3.0)), options


def _draw_topk_distillation(draw: Draw) -> tuple[tuple, dict[str, Any]]:
    hidden, weight, options = _draw_student(draw)
    vocabulary = options["vocab_size"] or len(weight)
    k = min(draw.choice([1, 2, 4]), vocabulary)
    logits = _finite(draw, *hidden.shape[:-1], vocabulary, scale=3.0).to(compute_dtype(draw.dtype))
    log_probs, ids = logits.log_softmax(-1).topk(k)
    return (hidden, weight, ids, log_probs.to(draw.dtype)), options


FAMILIES = {
    "cross_entropy": OpFamily(
        cross_entropy_samples,
        (Function("cross_entropy", cross_entropy, _eager_cross_entropy, _draw_cross_entropy),),
    ),
    "linear_cross_entropy": OpFamily(
        functions=(
            Function(
                "linear_cross_entropy",
                linear_cross_entropy,
                _eager_linear_cross_entropy,
                _draw_linear_cross_entropy,
            ),
        )
    ),
    "linear_log_probs": OpFamily(
        linear_log_probs_samples,
        (Function("linear_log_probs", linear_log_probs, _eager_log_probs, _draw_log_probs),),
    ),
    "linear_distillation": OpFamily(
        linear_distillation_samples,
        (
            Function("linear_distillation", linear_distillation, _eager_distillation, _draw_distillation),
            Function(
                "linear_topk_distillation",
                linear_topk_distillation,
                _eager_topk_distillation,
                _draw_topk_distillation,
            ),
        ),
    ),
}
