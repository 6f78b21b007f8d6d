"""Sample arguments of the router."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from fastmp.ops import topk_router
from fastmp.ops.core.registry import OPS, compute_dtype
from fastmp.testing.functions import Draw, Function


def _levels(*shape: int, generator: torch.Generator) -> Tensor:
    """Draw sixteenths: exact in every dtype, often equal, never so close that only rounding decides."""
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * 24).round() / 16


def samples(op: str, dtype: torch.dtype, generator: torch.Generator) -> Iterator[tuple]:
    #    shape, gap between rows, k, score, groups, of them open, bias, normalised, scale
    for shape, gap, k, score, groups, opened, with_bias, normalize, scale in (
        ((96, 64), 0, 4, "softmax", 1, 1, False, False, 1.0),
        ((37, 61), 3, 5, "sigmoid", 1, 1, True, True, 2.5),
        ((20, 3, 32), 0, 6, "sigmoid", 8, 4, True, True, 1.0),
        ((37, 61), 3, 5, "sqrtsoftplus", 1, 1, True, True, 2.5),
        ((18, 2, 24), 0, 4, "sqrtsoftplus", 4, 2, True, False, 1.0),
        ((33, 160), 8, 6, "softmax", 8, 3, False, False, 16.0),
        ((17, 2, 7), 1, 7, "logits", 1, 1, True, True, 1.0),
        ((65, 8), 0, 2, "logits", 1, 1, False, True, 1.0),
        ((19, 1), 0, 1, "sigmoid", 1, 1, False, False, 1.0),
        ((23, 130), 0, 36, "softmax", 1, 1, False, True, 1.0),
        ((0, 16), 0, 2, "softmax", 1, 1, False, False, 1.0),
    ):
        *lead, experts = shape
        wide = compute_dtype(dtype)
        logits = _levels(*lead, experts + gap, generator=generator).to(dtype)[..., :experts]
        # a level a group: sums of two scores do not come close to each other either
        bias = torch.randperm(groups if groups > 1 else experts, generator=generator).to(wide) / groups
        bias = bias.repeat_interleave(experts // len(bias)) if with_bias else None
        if op == "topk_router":
            balance = bias is not None or opened < groups
            yield logits, bias, k, score, groups, opened, normalize, scale, balance
            continue
        route = OPS["topk_router"].implementations["reference"]
        wide_bias = None if bias is None else bias.double()
        indices = route(logits.double(), wide_bias, k, score, groups, opened, normalize, scale, False)[0]
        grads = [
            torch.randn(size, generator=generator, dtype=torch.float64).to(wide)
            for size in ((*lead, k), logits.shape[1:], ())
        ]
        yield *grads, logits, indices, score, normalize, scale
        yield grads[0], None, None, logits, indices, score, normalize, scale
        yield None, *grads[1:], logits, indices, score, normalize, scale


def _eager_router(logits, k, *, score, pre_softmax, num_groups, group_topk, expert_bias, normalize, scale):
    """Choose by masks and stable sorts; a logit of +inf or NaN leaves its token's sums undefined."""
    scores = logits.softmax(-1) if score == "softmax" else _elementwise(logits, score)
    after = score == "softmax" and not pre_softmax
    by = logits if after else scores
    by = by if expert_bias is None else by + expert_bias
    keys = (logits if expert_bias is None else by).detach() + 0.0  # else -0 may be less than 0 on a GPU
    order = keys.sort(dim=-1, descending=True, stable=True).indices
    if num_groups > 1:
        grouped = (keys if score == "softmax" else by).detach().unflatten(-1, (num_groups, -1))
        best = grouped.sort(dim=-1, descending=True).values[..., : 1 if score == "softmax" else 2].sum(-1)
        best = best.sort(dim=-1, descending=True, stable=True).indices[..., :group_topk]
        group = order // (logits.shape[-1] // num_groups)
        hidden = (group[..., None] != best[..., None, :]).all(-1)
        order = order.gather(-1, hidden.int().sort(dim=-1, stable=True).indices)
    indices = order[..., :k]
    if score == "softmax" and (after or normalize):
        probs = logits.gather(-1, indices).softmax(-1)
    else:
        probs = scores.gather(-1, indices)
        probs = probs / (probs.sum(-1, keepdim=True) + 1e-20) if normalize else probs
    if score != "softmax":
        scores = scores / (scores.sum(-1, keepdim=True) + 1e-20)
    experts = torch.arange(logits.shape[-1], device=logits.device)
    best = (logits.detach() + 0.0).sort(dim=-1, descending=True, stable=True).indices[..., :k]
    counts, balance_counts = ((chosen[..., None] == experts).sum((0, -2)) for chosen in (indices, best))
    z_sum = logits.logsumexp(-1).square().sum()
    return indices, probs * scale, counts, scores.sum(0), z_sum, balance_counts


def _elementwise(logits, score):
    """Pad to whole vectors: after the last one torch rounds differently, and equal logits would be no tie."""
    experts = logits.shape[-1]
    padded = F.pad(logits, (0, -experts % 64))
    scores = padded.sigmoid() if score == "sigmoid" else torch.logaddexp(padded, padded * 0).sqrt()
    return scores[..., :experts]


def _draw_router(draw: Draw) -> tuple[tuple, dict]:
    groups = draw.choice([1, 1, 2, 4])
    each = 64 // groups if draw.large else draw.size(200 // groups if draw.small else 257 // groups, least=1)
    experts = groups * each
    opened = draw.choice(range(1, groups + 1))
    k = min(draw.choice([1, 2, 3, 8, experts]), each * opened)
    tokens = draw.rows or 2048 if draw.large else draw.size(33)
    shape = (tokens,) if draw.flag() else (tokens // 2, 2)
    logits = draw.tensor(*shape, experts)
    score, pre_softmax = draw.choice(
        [("softmax", True), ("softmax", False), ("sigmoid", True), ("sqrtsoftplus", True)]
    )
    bias = None
    if draw.dtype == torch.float64:
        bias = draw.tensor(experts, grad=False).nan_to_num(1, 1, 1) if draw.flag() else None
    else:
        with torch.no_grad():  # see _levels; sums of groups need levels of their own, too
            logits.mul_(16).round_().div_(16)
        if score != "softmax" and (groups > 1 or draw.flag()):
            bias = torch.randperm(groups, generator=draw.generator).repeat_interleave(each)
            bias = bias.to(draw.device, draw.dtype)
        elif not pre_softmax and draw.flag():
            bias = draw.ids(experts, below=3).to(draw.dtype)
    return (logits, k), {
        "score": score,
        "pre_softmax": pre_softmax,
        "num_groups": groups,
        "group_topk": opened,
        "expert_bias": bias,
        "normalize": draw.flag(),
        "scale": draw.choice([1.0, 2.5]),
    }


FUNCTIONS = (Function("topk_router", topk_router, _eager_router, _draw_router),)
