"""Rows in FP8 on their way to the experts: the bytes of a row, then those of its scales.

Blocks lie within a row, so rows that are quantised and sent are those that are sent and quantised, bit for
bit. What arrives is dequantised: quantised again by the experts, the rows are the same numbers. Gradients
travel in the dtype of the layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from fastmp.config.precision import Fp8Recipe, row_bytes
from fastmp.distributed.collectives import all_to_all
from fastmp.ops import dequantize_rows, unpermute
from fastmp.ops.core.fp8 import E4M3

__all__ = ["fp8_all_to_all", "packed", "unpacked"]


def packed(q: Tensor, s: Tensor, multiple: int = 1) -> Tensor:
    """Join quantised rows (M, H) and their scales to bytes (M, W).

    W is `row_bytes(H)`, made a multiple of `multiple` by bytes that nobody reads.
    """
    width, used = q.shape[1], row_bytes(q.shape[1])
    rows = q.new_empty(len(q), -(-used // multiple) * multiple, dtype=torch.uint8)
    rows[:, :width] = q.view(torch.uint8)
    rows[:, width:used] = s.new_empty(s.shape).copy_(s).view(torch.uint8)
    return rows


def unpacked(rows: Tensor, width: int, recipe: Fp8Recipe, dtype: torch.dtype) -> Tensor:
    """Dequantise `packed` rows of `width` elements to (M, width) of `dtype`."""
    scales = rows[:, width : row_bytes(width)].contiguous()
    scales = scales.view(torch.float32 if recipe.block == 128 else torch.float8_e8m0fnu)
    return dequantize_rows(rows[:, :width].view(E4M3), scales, dtype=dtype)


def fp8_all_to_all(
    tokens: Tensor,
    row_of: Tensor,
    rows: tuple[Tensor, Tensor],
    send_sizes: Sequence[int],
    receive_sizes: Sequence[int],
    group: dist.ProcessGroup,
    recipe: Fp8Recipe,
    *,
    own_stream: bool = False,
) -> Tensor:
    """Send tokens' rows in FP8, 0.52 of BF16's bytes, and return those received, dequantised.

    Gradients go back in the dtype of the tokens, and are summed over the rows of each.

    Args:
        tokens: (T, H).
        row_of: (T, k), their rows, as for `permute`.
        rows: these rows, quantised: what `permute(tokens, row_of, M, quantize=True)` returns.
        send_sizes, receive_sizes, group, own_stream: as for `all_to_all`; sizes are not checked.
        recipe: whose block `rows` have.
    """
    route = list(send_sizes), list(receive_sizes), group, own_stream
    return _Fp8AllToAll.apply(tokens, row_of, *rows, recipe, route)


class _Fp8AllToAll(Function):
    @staticmethod
    def forward(
        ctx: Any,
        tokens: Tensor,
        row_of: Tensor,
        q: Tensor,
        s: Tensor,
        recipe: Fp8Recipe,
        route: tuple[Any, ...],
    ) -> Tensor:
        send, receive, group, own_stream = ctx.route = route
        ctx.save_for_backward(row_of)
        rows = all_to_all(packed(q, s), send, receive, group, check=False, own_stream=own_stream)
        return unpacked(rows, tokens.shape[1], recipe, tokens.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (row_of,), (send, receive, group, own_stream) = ctx.saved_tensors, ctx.route
        grad_rows = all_to_all(grad.contiguous(), receive, send, group, check=False, own_stream=own_stream)
        return unpermute(grad_rows, row_of), None, None, None, None, None
