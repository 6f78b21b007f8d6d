"""Sample arguments of the grouped products."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastmp.ops import grouped_mlp_in, grouped_mm
from fastmp.testing.functions import Draw, Function

# (rows, rows of a weight, columns of a weight, columns between rows, where experts end)
_SHAPES = (
    (256, 16, 24, 0, (1, 1, 256)),
    (97, 34, 65, 3, (0, 40, 40, 41, 90)),
    (64, 48, 32, 0, (64, 64)),
    (28, 16, 24, 4, (2, 2, 20)),
    (5, 2, 1, 0, (0, 0)),
    (0, 8, 16, 0, (0,)),
)


def samples(op: str, dtype: torch.dtype, generator: torch.Generator) -> Iterator[tuple]:
    """Yield all sizes; in the first the last row is the last expert's, and the first expert has one row."""

    def random(*shape: int, gap: int = 0) -> Tensor:
        shape = (*shape[:-1], shape[-1] + gap)
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        return values.to(dtype)[..., : shape[-1] - gap]

    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for rows, n, k, gap, ends in _SHAPES:
        offsets = torch.tensor(ends, dtype=torch.int32)
        x, w, grad = random(rows, k, gap=gap), random(len(ends), n, k, gap=gap), random(rows, n, gap=gap)
        bias = random(len(ends), n)
        if op == "grouped_mm":
            yield x, w, offsets, False
            yield grad, w, offsets, True
        elif op == "grouped_mm_bias":
            yield x, w, bias, offsets, False
            yield grad, w, random(len(ends), k), offsets, True
        elif op == "grouped_mlp_in":
            yield x, w, None, offsets, "silu", True, True
            yield x, w, bias, offsets, "gelu_tanh", False, True
            yield x, w, bias, offsets, "gelu", True, False
        elif op == "grouped_mm_wgrad":
            yield grad, x, offsets
        else:
            total = random(len(ends), n, k)
            yield total.to(wide), grad, x, offsets
            if dtype != wide:
                yield total, grad, x, offsets


def _of_each_row(offsets: Tensor, rows: int) -> Tensor:
    """Return the expert of each row, or the number of experts for a row without one."""
    return torch.searchsorted(
        offsets, torch.arange(rows, dtype=torch.int32, device=offsets.device), right=True
    )


def eager_grouped_mm(
    x: Tensor, w: Tensor, offsets: Tensor, transposed: bool, bias: Tensor | None = None
) -> Tensor:
    starts = [0, *offsets.tolist()]
    parts = [
        x[start:end] @ (weight if transposed else weight.t())
        for weight, start, end in zip(w, starts, starts[1:], strict=False)
    ]
    columns = w.shape[2 if transposed else 1]
    y = torch.cat([*parts, x.new_zeros(len(x) - starts[-1], columns)])
    if bias is None:
        return y
    return y + torch.cat([bias, bias.new_zeros(1, columns)])[_of_each_row(offsets, len(x))]


def _eager_grouped_mlp_in(
    x: Tensor, w: Tensor, offsets: Tensor, form: str, gated: bool, bias: Tensor | None
) -> Tensor:
    h = eager_grouped_mm(x, w, offsets, False, bias)
    gate, up = h.chunk(2, -1) if gated else (h, None)
    gelu = {"gelu": "none", "gelu_tanh": "tanh"}
    y = F.silu(gate) if form == "silu" else F.gelu(gate, approximate=gelu[form])
    return y if up is None else y * up


def draw_offsets(draw: Draw, rows: int, experts: int) -> Tensor:
    """Draw offsets of all kinds of routing, including no rows at all and all rows to one expert."""
    kind = draw.choice(["any", "equal", "one", "none", "all"])
    if kind == "equal":
        ends = [rows // experts * (expert + 1) for expert in range(experts)]
    elif kind == "one":
        first = draw.source.randrange(experts)
        ends = [rows if expert >= first else 0 for expert in range(experts)]
    elif kind == "none":
        ends = [0] * experts
    else:
        ends = sorted(draw.source.randrange(rows + 1) for _ in range(experts))
        ends[-1] = rows if kind == "all" else ends[-1]
    return torch.tensor(ends, dtype=torch.int32, device=draw.device)


def _draw(draw: Draw) -> tuple[int, int, int, Tensor]:
    """Draw (M, N, K, offsets)."""
    if draw.large:
        rows = draw.rows or 1031
        ends = [rows * share // 100 for share in (30, 30, 31, 88, 97)]
        return rows, 128, 97, torch.tensor(ends, dtype=torch.int32, device=draw.device)
    experts = draw.choice([1, 2, 3, 7])
    rows = draw.size(64 if draw.small else 128)
    return rows, draw.size(64), draw.size(64), draw_offsets(draw, rows, experts)


def _draw_grouped_mm(draw: Draw) -> tuple[tuple, dict[str, Any]]:
    rows, n, k, offsets = _draw(draw)
    transposed = draw.flag()
    width = n if transposed else k
    x = draw.tensor(rows, width)
    w = draw.tensor(len(offsets), n, k, scale=max(width, 1) ** -0.5)
    bias = draw.tensor(len(offsets), k if transposed else n) if draw.flag() else None
    return (x, w, offsets), {"transposed": transposed, "bias": bias}


def _draw_grouped_mlp_in(draw: Draw) -> tuple[tuple, dict[str, Any]]:
    rows, n, k, offsets = _draw(draw)
    form, gated = draw.choice(["silu", "gelu", "gelu_tanh"]), draw.flag()
    n = 2 * n if gated else n
    bias = draw.tensor(len(offsets), n) if draw.flag() else None
    x, w = draw.tensor(rows, k), draw.tensor(len(offsets), n, k, scale=2 * max(k, 1) ** -0.5)
    return (x, w, offsets), {"form": form, "gated": gated, "bias": bias}


FUNCTIONS = (
    Function("grouped_mm", grouped_mm, eager_grouped_mm, _draw_grouped_mm),
    Function("grouped_mlp_in", grouped_mlp_in, _eager_grouped_mlp_in, _draw_grouped_mlp_in),
)
