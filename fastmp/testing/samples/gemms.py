"""Samples of GEMMs: FP8 linear layers, wgrad, grouped GEMMs with LoRA and in FP8, and quantisation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastmp.ops import grouped_lora, grouped_mlp_in, grouped_mm
from fastmp.ops.core.fp8 import E4M3, E5M2
from fastmp.ops.core.registry import OPS
from fastmp.testing.functions import Draw, Function, OpFamily

#        rows, columns, block, format
_QUANTIZED_ROWS = (
    (37, 256, 128, E4M3), (18, 384, 128, E5M2), (33, 160, 32, E4M3), (17, 64, 32, E5M2), (0, 128, 128, E4M3),
)  # fmt: skip


def quantize_rows(x: Tensor, block: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantise by the reference, which has the bytes of every kernel: an interpreted one takes seconds."""
    return OPS["quantize_rows"].implementations["reference"](x, block, dtype)


def _quantize_weight(weight: Tensor, block: int) -> tuple[Tensor, Tensor, Tensor]:
    return OPS["quantize_weight"].implementations["reference"](weight, block)


def draw_blocks(*shape: int, generator: torch.Generator) -> Tensor:
    """Return normal numbers, each 32 columns times a power of two from 2^-12 to 2^12, with a row of zeros."""
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    groups = torch.randint(-12, 13, (*shape[:-1], -(-shape[-1] // 32)), generator=generator)
    x *= torch.exp2(groups.double()).repeat_interleave(32, -1)[..., : shape[-1]]
    x.view(-1, shape[-1])[1:2] = 0
    return x


def quantize_samples(op: str, dtype: torch.dtype, generator: torch.Generator) -> Iterator[tuple]:
    """Yield rows and weights of every block size and format."""
    if op == "quantize_weight":
        for shape, block in (((256, 384), 128), ((2, 128, 256), 128), ((96, 160), 32), ((17, 32, 64), 32)):
            yield draw_blocks(*shape, generator=generator).to(dtype), block
        return
    for rows, columns, block, form in _QUANTIZED_ROWS:
        x = draw_blocks(rows, columns + 8, generator=generator).to(dtype)[:, :columns]
        quantized = quantize_rows(x, block=block, dtype=form)
        yield (x, block, form) if op == "quantize_rows" else (*quantized, dtype)


def linear_fp8_samples(op: str, dtype: torch.dtype, generator: torch.Generator) -> Iterator[tuple]:
    """Yield both directions and blocks; in the last but one a block of q and one of w are NaN."""

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    for rows, n, k, block, row_dtype in (
        (300, 128, 128, 128, E4M3), (37, 128, 384, 128, E5M2), (45, 96, 64, 32, E4M3),
        (5, 256, 128, 128, E4M3), (0, 128, 128, 128, E4M3),
    ):  # fmt: skip
        x, weight = random(rows, k) * 3, random(n, k) * k**-0.5
        if rows == 5:
            x[2, 7], weight[3, 5] = torch.inf, torch.nan
        w, w_t, w_scale = _quantize_weight(weight, block=block)
        yield *quantize_rows(x, block=block, dtype=row_dtype), w, w_scale, dtype
        yield *quantize_rows(random(rows, n), block=block, dtype=row_dtype), w_t, w_scale.t(), dtype


def wgrad_samples(op: str, dtype: torch.dtype, generator: torch.Generator) -> Iterator[tuple]:
    """Yield arguments of the weight gradient, and of the GEMM of a few rows."""
    return _few_rows(dtype, generator) if op == "few_rows_linear" else _weight_gradients(dtype, generator)


def _few_rows(dtype: torch.dtype, generator: torch.Generator) -> Iterator[tuple]:
    """Yield many rows, then few: with and without a partial vector, gaps between rows, and empty sizes."""
    sizes = (
        (20, 24, 40, 0),
        (1, 48, 64, 0),
        (8, 5, 33, 3),
        (3, 3, 1030, 0),
        (5, 1, 1, 0),
        (0, 4, 4, 0),
        (2, 3, 0, 0),
    )
    for number, (rows, columns, terms, gap) in enumerate(sizes):
        x, weight = (
            torch.randn(size, terms + gap, generator=generator, dtype=torch.float64).to(dtype)[:, :terms]
            for size in (rows, columns)
        )
        bias = torch.randn(columns, generator=generator, dtype=torch.float64).to(dtype)
        yield x, weight, None if number % 2 else bias


def _weight_gradients(dtype: torch.dtype, generator: torch.Generator) -> Iterator[tuple]:
    """Yield sums in float32, as narrow as the operands, and transposed; and memory to overwrite."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    sizes = ((64, 384, 128, 0), (37, 129, 65, 3), (700, 50, 40, 0), (0, 16, 8, 0), (5, 1, 1, 0))
    for number, (tokens, columns, hidden, gap) in enumerate(sizes):
        grad, x = (
            torch.randn(tokens, size + gap, generator=generator, dtype=torch.float64).to(dtype)[:, :size]
            for size in (columns, hidden)
        )
        total = torch.randn(columns, hidden, generator=generator, dtype=torch.float64).to(wide)
        total = total.t().contiguous().t() if number == 2 else total
        for sums in (total,) if dtype == wide else (total, total.to(dtype)):
            yield sums, grad, x, True
            yield torch.full_like(sums, torch.nan), grad, x, False


# (rows, rows of a weight, columns of a weight, columns between rows, where experts end)
_GROUPED_SHAPES = (
    (256, 16, 24, 0, (1, 1, 256)),
    (97, 34, 65, 3, (0, 40, 40, 41, 90)),
    (64, 48, 32, 0, (64, 64)),
    (28, 16, 24, 4, (2, 2, 20)),
    (5, 2, 1, 0, (0, 0)),
    (0, 8, 16, 0, (0,)),
)


def grouped_mm_samples(op: str, dtype: torch.dtype, generator: torch.Generator) -> Iterator[tuple]:
    """Yield all sizes; in the first the last row is the last expert's, and the first expert has one row."""

    def random(*shape: int, gap: int = 0) -> Tensor:
        shape = (*shape[:-1], shape[-1] + gap)
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        return values.to(dtype)[..., : shape[-1] - gap]

    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for rows, n, k, gap, ends in _GROUPED_SHAPES:
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
            for sums in (total,) if dtype == wide else (total.to(wide), total):
                yield sums, grad, x, offsets, True
                yield torch.full_like(sums, torch.nan), grad, x, offsets, False


def _expert_of_row(offsets: Tensor, rows: int) -> Tensor:
    """Return the expert of each row, or the number of experts for a row without one."""
    return torch.searchsorted(
        offsets, torch.arange(rows, dtype=torch.int32, device=offsets.device), right=True
    )


def _eager_grouped_mm(
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
    return y + torch.cat([bias, bias.new_zeros(1, columns)])[_expert_of_row(offsets, len(x))]


def _eager_grouped_mlp_in(
    x: Tensor, w: Tensor, offsets: Tensor, form: str, gated: bool, bias: Tensor | None
) -> Tensor:
    h = _eager_grouped_mm(x, w, offsets, False, bias)
    gate, up = h.chunk(2, -1) if gated else (h, None)
    gelu = {"gelu": "none", "gelu_tanh": "tanh"}
    y = F.silu(gate) if form == "silu" else F.gelu(gate, approximate=gelu[form])
    return y if up is None else y * up


def _draw_offsets(draw: Draw, rows: int, experts: int) -> Tensor:
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


def _draw_grouped_sizes(draw: Draw) -> tuple[int, int, int, Tensor]:
    """Draw (M, N, K, offsets)."""
    if draw.large:
        rows = draw.rows or 1031
        ends = [rows * share // 100 for share in (30, 30, 31, 88, 97)]
        return rows, 128, 97, torch.tensor(ends, dtype=torch.int32, device=draw.device)
    experts = draw.choice([1, 2, 3, 7])
    rows = draw.size(64 if draw.small else 128)
    return rows, draw.size(64), draw.size(64), _draw_offsets(draw, rows, experts)


def _draw_grouped_mm(draw: Draw) -> tuple[tuple, dict[str, Any]]:
    rows, n, k, offsets = _draw_grouped_sizes(draw)
    transposed = draw.flag()
    width = n if transposed else k
    x = draw.tensor(rows, width)
    w = draw.tensor(len(offsets), n, k, scale=max(width, 1) ** -0.5)
    bias = draw.tensor(len(offsets), k if transposed else n) if draw.flag() else None
    return (x, w, offsets), {"transposed": transposed, "bias": bias}


def _draw_grouped_mlp_in(draw: Draw) -> tuple[tuple, dict[str, Any]]:
    rows, n, k, offsets = _draw_grouped_sizes(draw)
    form, gated = draw.choice(["silu", "gelu", "gelu_tanh"]), draw.flag()
    n = 2 * n if gated else n
    bias = draw.tensor(len(offsets), n) if draw.flag() else None
    x, w = draw.tensor(rows, k), draw.tensor(len(offsets), n, k, scale=2 * max(k, 1) ** -0.5)
    return (x, w, offsets), {"form": form, "gated": gated, "bias": bias}


# (rows, rows of a weight, columns of a weight, block, dtype of rows, where experts end)
_FP8_SHAPES = (
    (800, 128, 128, 128, E4M3, (1, 1, 800)),
    (97, 256, 128, 128, E5M2, (0, 40, 40, 41, 90)),
    (64, 64, 96, 32, E4M3, (64, 64)),
    (28, 128, 256, 128, E4M3, (2, 2, 20)),
    (0, 128, 128, 128, E4M3, (0,)),
)


def grouped_mm_fp8_samples(op: str, dtype: torch.dtype, generator: torch.Generator) -> Iterator[tuple]:
    """Yield both directions; in one sample a block of q and one of w are NaN."""

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    for rows, n, k, block, row_dtype, ends in _FP8_SHAPES:
        offsets = torch.tensor(ends, dtype=torch.int32)
        x, weight = random(rows, k) * 3, random(len(ends), n, k) * k**-0.5
        if rows == 28:
            x[2, 7], weight[0, 3, 5] = torch.inf, torch.nan
        if op == "grouped_mlp_in_fp8":
            w, _, w_scale = _quantize_weight(random(len(ends), 2 * n, k) * k**-0.5, block=block)
            # few distinct rows: where rounding lifts the largest number of a block, float64 has another scale
            x = x[:19].repeat(-(-rows // 19), 1)[:rows]
            form = ("silu", "gelu", "gelu_tanh")[rows % 3]
            yield *quantize_rows(x, block=block, dtype=row_dtype), w, w_scale, offsets, form, dtype
            continue
        w, w_t, w_scale = _quantize_weight(weight, block=block)
        yield *quantize_rows(x, block=block, dtype=row_dtype), w, w_scale, offsets, dtype
        transposed = w_scale.transpose(-1, -2)
        yield *quantize_rows(random(rows, n), block=block, dtype=row_dtype), w_t, transposed, offsets, dtype


# (rows, rows of a weight, columns of a weight, rank, columns between rows, where experts end)
_LORA_SHAPES = (
    (256, 16, 24, 8, 0, (1, 1, 256)),
    (97, 34, 65, 5, 3, (0, 40, 40, 41, 90)),
    (64, 48, 32, 70, 0, (64, 64)),
    (28, 16, 24, 16, 4, (2, 2, 20)),
    (5, 2, 1, 1, 0, (0, 0)),
    (0, 8, 16, 4, 0, (0,)),
)


def grouped_lora_samples(op: str, dtype: torch.dtype, generator: torch.Generator) -> Iterator[tuple]:
    """Yield the calls of forward and of the dgrad, for both layouts of the weight."""

    def random(*shape: int, gap: int = 0) -> Tensor:
        shape = (*shape[:-1], shape[-1] + gap)
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        return values.to(dtype)[..., : shape[-1] - gap]

    for rows, n, k, r, gap, ends in _LORA_SHAPES:
        offsets, experts = torch.tensor(ends, dtype=torch.int32), len(ends)
        x, w, grad = random(rows, k, gap=gap), random(experts, n, k, gap=gap), random(rows, n, gap=gap)
        low, a, b = random(rows, r), random(experts, r, k, gap=gap), random(experts, n, r, gap=gap)
        yield x, w, None, low, b, offsets, False, False
        yield grad, w, random(experts, k), low, a, offsets, True, True
        yield x, w.mT.contiguous(), random(experts, n), low, b.mT.contiguous(), offsets, True, True
        yield grad, w.mT.contiguous(), None, low, a.mT.contiguous(), offsets, False, False


def _eager_grouped_lora(
    x: Tensor,
    w: Tensor,
    a: Tensor,
    b: Tensor,
    offsets: Tensor,
    *,
    scale: float,
    transposed: bool,
    bias: Tensor | None,
) -> Tensor:
    low = _eager_grouped_mm(_eager_grouped_mm(x, a, offsets, False), b, offsets, False)
    return _eager_grouped_mm(x, w, offsets, transposed, bias) + scale * low


def _draw_grouped_lora(draw: Draw) -> tuple[tuple, dict[str, Any]]:
    if draw.large:
        rows, n, k, r = draw.rows or 1031, 128, 97, 7
        ends = [rows * share // 100 for share in (30, 30, 31, 88, 97)]
        offsets = torch.tensor(ends, dtype=torch.int32, device=draw.device)
    else:
        rows, n, k = draw.size(64 if draw.small else 128), draw.size(64), draw.size(64)
        r, offsets = draw.size(17, 1), _draw_offsets(draw, rows, draw.choice([1, 2, 3, 7]))
    experts, transposed = len(offsets), draw.flag()
    shape = (experts, k, n) if transposed else (experts, n, k)
    w = draw.tensor(*shape, scale=max(k, 1) ** -0.5, grad=False)
    a, b = draw.tensor(experts, r, k, scale=max(k, 1) ** -0.5), draw.tensor(experts, n, r, scale=r**-0.5)
    bias = draw.tensor(experts, n) if draw.flag() else None
    options = {"scale": draw.choice([1.0, 2.0, 0.3]), "transposed": transposed, "bias": bias}
    return (draw.tensor(rows, k), w, a, b, offsets), options


FAMILIES = {
    "quantize": OpFamily(quantize_samples),
    "linear_fp8": OpFamily(linear_fp8_samples),
    "wgrad": OpFamily(wgrad_samples),
    "grouped_mm": OpFamily(
        grouped_mm_samples,
        (
            Function("grouped_mm", grouped_mm, _eager_grouped_mm, _draw_grouped_mm),
            Function("grouped_mlp_in", grouped_mlp_in, _eager_grouped_mlp_in, _draw_grouped_mlp_in),
        ),
    ),
    "grouped_mm_fp8": OpFamily(grouped_mm_fp8_samples),
    "grouped_lora": OpFamily(
        grouped_lora_samples,
        (Function("grouped_lora", grouped_lora, _eager_grouped_lora, _draw_grouped_lora),),
    ),
}
