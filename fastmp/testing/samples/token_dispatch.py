"""Samples of expert parallelism: the router, permutation, moving blocks of rows, dispatch and combine."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from fastmp.ops import permute, topk_router, unpermute
from fastmp.ops.core.fp8 import E4M3, E5M2
from fastmp.ops.core.registry import OPS, compute_dtype
from fastmp.testing.functions import Draw, Function, OpFamily
from fastmp.testing.samples.gemms import quantize_rows


def _levels(*shape: int, generator: torch.Generator) -> Tensor:
    """Draw sixteenths: exact in every dtype, often equal, never so close that only rounding decides."""
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * 24).round() / 16


def router_samples(op: str, dtype: torch.dtype, generator: torch.Generator) -> Iterator[tuple]:
    """Yield arguments of the top-k router and of its backward pass."""
    #    shape, gap between rows, k, score, groups, of them open, bias, normalised, scale
    cases = (
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
    )
    # The second time all elementwise scores of a token are near or below the epsilon of probabilities.
    elementwise = [each for each in cases if each[3] in ("sigmoid", "sqrtsoftplus")]
    for (shape, gap, k, score, groups, opened, with_bias, normalize, scale), shift in (
        *((case, 0) for case in cases),
        *(((*case[:4], 1, 1, False, True, case[8]), -48) for case in elementwise),
    ):
        *lead, experts = shape
        wide = compute_dtype(dtype)
        logits = shift + _levels(*lead, experts + gap, generator=generator).to(dtype)[..., :experts]
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
    scores = logits.softmax(-1) if score == "softmax" else _elementwise_scores(logits, score)
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
    if score != "softmax":  # logarithms underflow later than scores
        logs = F.logsigmoid(logits) if score == "sigmoid" else torch.logaddexp(logits, logits * 0).log() / 2
        scores = logs.softmax(-1)
    experts = torch.arange(logits.shape[-1], device=logits.device)
    best = (logits.detach() + 0.0).sort(dim=-1, descending=True, stable=True).indices[..., :k]
    counts, balance_counts = ((chosen[..., None] == experts).sum((0, -2)) for chosen in (indices, best))
    z_sum = logits.logsumexp(-1).square().sum()
    return indices, probs * scale, counts, scores.sum(0), z_sum, balance_counts


def _elementwise_scores(logits, score):
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


#   tokens, slots, experts, columns, gap between rows, assignments dropped, rows without an assignment
_PERMUTE_CASES = (
    (33, 2, 4, 512, 0, 0, 0),
    (37, 6, 61, 129, 5, 40, 17),
    (400, 4, 9, 40, 0, 7, 0),
    (17, 1, 1, 64, 0, 0, 3),
    (9, 12, 12, 8, 1, 0, 5),
    (0, 8, 9, 16, 0, 0, 6),
    (5, 2, 3, 24, 0, 10, 4),
)


def _expert_indices(
    tokens: int, slots: int, experts: int, dropped: int, generator: torch.Generator
) -> Tensor:
    """Draw different experts for each token; dropped assignments have an index out of range."""
    scores = torch.rand(tokens, experts, generator=generator)
    indices = scores.argsort(1)[:, :slots].to(torch.int32).contiguous()
    places = torch.randperm(indices.numel(), generator=generator)[:dropped]
    indices.view(-1)[places] = -1
    indices.view(-1)[places[::2]] = experts
    return indices


#   columns, gap, block, format, FP8 already; in turn
_PERMUTE_FORMATS = (
    (512, 0, 128, E4M3, False),
    (128, 8, 128, E5M2, True),
    (96, 3, 32, E4M3, False),
    (64, 16, 32, E4M3, True),
)


def _permute_quantized(dtype: torch.dtype, generator: torch.Generator) -> Iterator[tuple]:
    rows_of = OPS["permutation"].implementations["reference"]
    for case, (tokens, slots, experts, _, _, dropped, spare) in enumerate(_PERMUTE_CASES):
        columns, gap, block, form, given = _PERMUTE_FORMATS[case % len(_PERMUTE_FORMATS)]
        row_of = rows_of(_expert_indices(tokens, slots, experts, dropped, generator), experts)[0]
        x = torch.randn(tokens, columns + gap, generator=generator, dtype=torch.float64).to(dtype)
        x, scales = x[:, :columns], None
        if given:
            x, scales = quantize_rows(x, block=block, dtype=form)
        yield x, scales, row_of, tokens * slots - dropped + spare, block, form


def permute_samples(op: str, dtype: torch.dtype, generator: torch.Generator) -> Iterator[tuple]:
    """Yield arguments of the permutation, and of the ops that move rows by it."""
    if op == "permute_quantized":
        yield from _permute_quantized(dtype, generator)
        return
    rows_of = OPS["permutation"].implementations["reference"]
    for tokens, slots, experts, columns, gap, dropped, spare in _PERMUTE_CASES:
        indices = _expert_indices(tokens, slots, experts, dropped, generator)
        if op == "permutation":
            yield indices, experts
            continue
        num_rows = tokens * slots - dropped + spare
        row_of = rows_of(indices, experts)[0]
        tall, wide = (
            torch.randn(rows, columns + gap, generator=generator, dtype=torch.float64).to(dtype)[:, :columns]
            for rows in (num_rows, tokens)
        )
        probs = torch.rand(tokens, slots, generator=generator, dtype=compute_dtype(dtype))
        if op == "permute":
            yield wide, row_of, num_rows
        elif op in ("unpermute", "unpermute_into"):
            out = () if op == "unpermute" else (wide.new_full(wide.shape, torch.nan),)
            yield from ((tall, row_of, weights, *out) for weights in (probs, None))
        elif op in ("unpermute_add", "unpermute_add_into"):
            out = () if op == "unpermute_add" else (wide.new_full(wide.shape, torch.nan),)
            yield from ((tall, row_of, weights, wide, *out) for weights in (probs, None))
        else:
            out = () if op == "unpermute_backward" else (torch.full_like(probs, torch.nan),)
            yield wide, tall, row_of, probs, *out


def _eager_permute(x: Tensor, row_of: Tensor, num_rows: int) -> Tensor:
    """Scatter by index_copy; a spare last row takes dropped assignments."""
    rows = row_of.long().where((row_of >= 0) & (row_of < num_rows), num_rows)
    out = x.new_zeros(num_rows + 1, x.shape[1])
    return out.index_copy(0, rows.flatten(), x.repeat_interleave(row_of.shape[1], 0))[:num_rows]


def _eager_unpermute(
    y: Tensor, row_of: Tensor, probs: Tensor | None, residual: Tensor | None = None
) -> Tensor:
    """Gather by indexing; a spare last row of zeros stands for dropped assignments."""
    rows = row_of.long().where((row_of >= 0) & (row_of < len(y)), len(y))
    parts = torch.cat((y, y.new_zeros(1, y.shape[1])))[rows]
    if probs is not None:
        parts = parts * probs.masked_fill(rows == len(y), 0)[..., None]
    sums = parts.sum(1).to(y.dtype)
    return sums if residual is None else sums + residual


def _draw_rows(draw: Draw) -> tuple[int, Tensor, int]:
    """Draw the number of columns, row_of and the number of rows."""
    if draw.large:
        tokens, slots, experts, columns = draw.rows or 192, 4, 8, 256
    else:
        tokens, slots, experts, columns = (
            draw.size(17),
            draw.size(13, 1),
            draw.size(17, 1),
            draw.size(200 if draw.small else 1031),
        )
    indices = draw.ids(tokens, slots, below=experts).to(torch.int32)
    if draw.flag():
        indices.view(-1)[::3] = -1
    row_of, _ = OPS["permutation"].implementations["reference"](indices, experts)
    return columns, row_of, row_of.numel() + draw.choice([0, 0, 3])


def _draw_permute(draw: Draw) -> tuple[tuple, dict]:
    columns, row_of, num_rows = _draw_rows(draw)
    return (draw.tensor(len(row_of), columns), row_of, num_rows), {}


def _draw_unpermute(draw: Draw) -> tuple[tuple, dict]:
    columns, row_of, num_rows = _draw_rows(draw)
    y = draw.tensor(num_rows, columns)
    added = {"residual": draw.tensor(len(row_of), columns)} if draw.flag() else {}
    if not draw.flag():
        return (y, row_of, None), added
    probs = draw.tensor(*row_of.shape, grad=False).to(compute_dtype(draw.dtype))
    return (y, row_of, probs.requires_grad_()), added


#   blocks, largest number of rows of a block, dropped blocks
_BLOCK_CASES = ((33, 40, 0), (129, 9, 20), (1, 700, 0), (8, 0, 0), (17, 3, 17))


def _block_tables(sizes: Tensor, order: Tensor, nowhere: Tensor) -> tuple[Tensor, Tensor, int]:
    """Return starts, places and the number of rows of blocks that move to `order`; `nowhere` are dropped."""
    starts = sizes.cumsum(0) - sizes
    places = torch.empty_like(starts)
    places[order] = sizes[order].cumsum(0) - sizes[order]
    places[nowhere] = -1
    return starts.to(torch.int32), places.to(torch.int32), int(sizes.sum())


def blocks_samples(op: str, dtype: torch.dtype, generator: torch.Generator) -> Iterator[tuple]:
    """Yield blocks of equal and unequal sizes, empty ones, and dropped ones."""
    for blocks, most, dropped in _BLOCK_CASES:
        sizes = torch.randint(0, most + 1, (blocks,), generator=generator)
        order, nowhere = (torch.randperm(blocks, generator=generator) for _ in range(2))
        yield _block_tables(sizes, order, nowhere[:dropped])


#   tokens, slots, etp, ep, experts, capacity, columns, gap between rows, sequence
_EXCHANGE_CASES = (
    (33, 2, 1, 4, 4, 80, 512, 0, 6),
    (37, 6, 1, 4, 64, 300, 129, 5, 1),
    (41, 4, 2, 2, 8, 90, 40, 0, (1 << 31) - 1),
    (17, 1, 1, 1, 3, 9, 64, 0, 0),
    (9, 8, 2, 4, 16, 128, 8, 1, 3),
    (0, 8, 1, 3, 9, 16, 16, 0, 4),
    (5, 2, 1, 5, 5, 8, 24, 0, -2),
    (2, 2, 1, 2, 2, 1, 1, 0, (1 << 31) - 2),
)
_TIMEOUT = 0.05  # seconds; no rank waits


def exchange_samples(op: str, dtype: torch.dtype, generator: torch.Generator) -> Iterator[tuple]:
    """Yield arguments of a rank all of whose peers lie at offset 0, in its own memory.

    So what is written to peers is seen in the arguments, whoever copies them. Rows of different peers have
    different numbers. The epochs say that the others came long ago: nobody waits.
    """
    for tokens, slots, etp, ep, experts, capacity, columns, gap, sequence in _EXCHANGE_CASES:

        def random(*shape: int, columns: int = columns, gap: int = gap) -> Tensor:
            shape = (*shape, columns + gap)
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)[..., :columns]

        ranks, rank = etp * ep, etp * ep // 2
        epochs = torch.full((ranks + 1,), 1000 + max(0, sequence), dtype=torch.int64).to(torch.int32)
        epochs[-1] = sequence
        if sequence > 1 << 30:
            epochs[:-1] = -(1 << 31) + 1000
        peer_offsets = torch.zeros(etp, ep, dtype=torch.int64)
        rows = torch.randn(2, capacity, columns, generator=generator, dtype=torch.float64).to(dtype)
        where = torch.full((tokens, slots), -1, dtype=torch.int32)
        numbers = torch.randperm(capacity, generator=generator)[: tokens * slots - 3]
        there = torch.randperm(tokens * slots, generator=generator)[: len(numbers)]
        numbers += torch.randint(ep, numbers.shape, generator=generator) * capacity
        where.view(-1)[there] = numbers[: len(there)].to(torch.int32)
        if tokens:
            where[0, 0] = ep * capacity
        probs = torch.rand(tokens, slots, generator=generator, dtype=compute_dtype(dtype))
        local = max(1, experts // ep)
        ends = torch.arange(1, local + 1, dtype=torch.int32) * (capacity + 5) // (local + 1)
        if op == "exchange_barrier":
            yield epochs, peer_offsets, rank, _TIMEOUT
        elif op == "exchange_counts":
            own, counts = (
                torch.randint(99, shape, generator=generator, dtype=torch.int32)
                for shape in ((experts,), (2, ranks, experts))
            )
            yield own, epochs, counts, peer_offsets, rank, _TIMEOUT
        elif op == "exchange_places":
            indices = torch.rand(tokens, experts, generator=generator).argsort(1)[:, :slots].to(torch.int32)
            indices = indices.contiguous()
            indices.view(-1)[::7] = experts
            row_of, offsets = OPS["permutation"].implementations["reference"](indices, experts)
            matrix = torch.randint(9, (ranks, experts), generator=generator).cumsum(1).to(torch.int32)
            matrix[rank] = offsets
            yield row_of, indices, matrix, rank, ep, capacity
        elif op == "exchange_push":
            x, y = random(tokens), random(tokens, slots)
            for weights, outputs in ((probs, y), (probs, None), (None, None)):
                yield x, where, weights, outputs, epochs, rows, peer_offsets
            half = x[:, : x.shape[1] // 2]  # narrower than the rows of the buffer
            yield half, where, probs, y[..., : half.shape[1]], epochs, rows, peer_offsets
        elif op == "exchange_take":
            yield rows, epochs, ends, rows.shape[2]
            yield rows, epochs, ends, rows.shape[2] // 2
        elif op == "exchange_give":
            yield random(capacity), ends, epochs, rows
        else:
            for weights, keep in ((probs, True), (probs, False), (None, False)):
                yield rows, epochs, peer_offsets, where, weights, keep


FAMILIES = {
    "router": OpFamily(router_samples, (Function("topk_router", topk_router, _eager_router, _draw_router),)),
    "permute": OpFamily(
        permute_samples,
        (
            Function("permute", permute, _eager_permute, _draw_permute),
            Function("unpermute", unpermute, _eager_unpermute, _draw_unpermute),
        ),
    ),
    "blocks": OpFamily(blocks_samples),
    "exchange": OpFamily(exchange_samples),
}
