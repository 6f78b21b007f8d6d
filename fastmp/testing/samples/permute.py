"""Sample arguments of the permute family."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fastmp.ops import OPS, permute, quantize_rows, unpermute
from fastmp.ops.core.fp8 import E4M3, E5M2
from fastmp.ops.core.registry import compute_dtype
from fastmp.testing.functions import Draw, Function

#   tokens, slots, experts, columns, gap between rows, assignments dropped, rows without an assignment
_CASES = (
    (33, 2, 4, 512, 0, 0, 0),
    (37, 6, 61, 129, 5, 40, 17),
    (400, 4, 9, 40, 0, 7, 0),
    (17, 1, 1, 64, 0, 0, 3),
    (9, 12, 12, 8, 1, 0, 5),
    (0, 8, 9, 16, 0, 0, 6),
    (5, 2, 3, 24, 0, 10, 4),
)


def _indices(tokens: int, slots: int, experts: int, dropped: int, generator: torch.Generator) -> Tensor:
    """Draw different experts for each token; dropped assignments have an index out of range."""
    scores = torch.rand(tokens, experts, generator=generator)
    indices = scores.argsort(1)[:, :slots].to(torch.int32).contiguous()
    places = torch.randperm(indices.numel(), generator=generator)[:dropped]
    indices.view(-1)[places] = -1
    indices.view(-1)[places[::2]] = experts
    return indices


#   columns, gap, block, format, FP8 already; in turn
_QUANTIZED = (
    (512, 0, 128, E4M3, False),
    (128, 8, 128, E5M2, True),
    (96, 3, 32, E4M3, False),
    (64, 16, 32, E4M3, True),
)


def _quantized(dtype: torch.dtype, generator: torch.Generator) -> Iterator[tuple]:
    rows_of = OPS["permutation"].implementations["reference"]
    for case, (tokens, slots, experts, _, _, dropped, spare) in enumerate(_CASES):
        columns, gap, block, form, given = _QUANTIZED[case % len(_QUANTIZED)]
        row_of = rows_of(_indices(tokens, slots, experts, dropped, generator), experts)[0]
        x = torch.randn(tokens, columns + gap, generator=generator, dtype=torch.float64).to(dtype)
        x, scales = x[:, :columns], None
        if given:
            x, scales = quantize_rows(x, block=block, dtype=form)
        yield x, scales, row_of, tokens * slots - dropped + spare, block, form


def samples(op: str, dtype: torch.dtype, generator: torch.Generator) -> Iterator[tuple]:
    if op == "permute_quantized":
        yield from _quantized(dtype, generator)
        return
    rows_of = OPS["permutation"].implementations["reference"]
    for tokens, slots, experts, columns, gap, dropped, spare in _CASES:
        indices = _indices(tokens, slots, experts, dropped, generator)
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


FUNCTIONS = (
    Function("permute", permute, _eager_permute, _draw_permute),
    Function("unpermute", unpermute, _eager_unpermute, _draw_unpermute),
)
