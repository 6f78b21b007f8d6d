"""scaled_masked_softmax: softmax(scale * x) over the visible keys, for attention that SDPA does not support.

Hidden keys (mask, causal) get exactly 0 and no gradient, whatever their scores; a row without visible keys is
0, not NaN. The backward needs only the output: dx = scale * y * (dy - sum(dy * y)). Rows of up to 16384 keys
stay in registers: one read, one write. A broadcast mask is read by its strides and never expanded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fastmp.ops.core import checks, launcher
from fastmp.ops.core._triton import (
    MAX_COUNT,
    MAX_SIZE,
    cdiv,
    check_count,
    jit,
    limits,
    next_power_of_2,
    tl,
)
from fastmp.ops.core.registry import compute_dtype, register
from fastmp.ops.core.rowwise import arithmetic, as_rows, empty_like, sum_rows, vector_width
from fastmp.profiling import traced


def _hidden(x: Tensor, mask: Tensor | None, causal: bool) -> Tensor | None:
    """Return the mask of hidden keys, broadcastable to x; None if all keys are visible."""
    if causal:
        queries, keys = x.shape[-2:]
        ahead = torch.ones(queries, keys, dtype=torch.bool, device=x.device).triu(keys - queries + 1)
        return ahead if mask is None else mask | ahead
    return mask


def reference(x: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    """Return the softmax of the visible scores, computed in float32 (float64) and rounded once."""
    if x.numel() == 0:
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)
    scores = x.to(compute_dtype(x.dtype)) * scale
    hidden = _hidden(x, mask, causal)
    if hidden is not None:
        scores.masked_fill_(hidden, -math.inf)
    nothing = (scores == -math.inf).all(-1, keepdim=True)
    y = scores.softmax(-1).masked_fill_(nothing if hidden is None else nothing | hidden, 0)
    return y.to(x.dtype).contiguous()


def reference_backward(grad: Tensor, y: Tensor, scale: float, causal: bool) -> Tensor:
    """Return the gradient of x: 0 for hidden keys and where y is 0, whatever `grad` contains there."""
    wide = y.to(compute_dtype(y.dtype))
    if (hidden := _hidden(y, None, causal)) is not None:
        wide = wide.masked_fill(hidden, 0)
    nothing = wide == 0
    slope = grad.to(wide.dtype).masked_fill(nothing, 0)
    along_row = sum_rows((slope * wide).flatten(0, -2).t()).view(*y.shape[:-1], 1)
    return slope.sub_(along_row).mul_(wide).mul_(scale).masked_fill_(nothing, 0).to(y.dtype).contiguous()


@jit
def _exp(x):
    """Return e^x by exp2."""
    return tl.exp2(x * 1.4426950408889634)


@jit
def _ends(query, num_queries, num_keys, CAUSAL: tl.constexpr):
    """Return the number of leading keys visible to each query before the mask; 0 beyond the last query."""
    end = tl.zeros_like(query) + num_keys
    if CAUSAL:
        end = tl.minimum(end, num_keys - tl.maximum(num_queries - 1 - query, 0))
    return tl.where(query < num_queries, end, 0)


@jit
def _scores(
    x, mask, keys, end, mask_key, scale,
    HAS_MASK: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Return scaled scores (rows, keys) with -inf for hidden keys, and the mask of visible keys.

    Loads are masked by whole vectors: a mask that may end inside a vector would split every access.
    """
    vectors = (keys // VECTOR * VECTOR)[None, :] < end[:, None]
    visible = keys[None, :] < end[:, None]
    scores = tl.load(x + keys[None, :], mask=vectors, other=0.0)
    if HAS_MASK:
        visible &= tl.load(mask + keys.to(tl.int64)[None, :] * mask_key, mask=vectors, other=1) == 0
    return tl.where(visible, scores.to(scale.dtype) * scale, float("-inf")), visible


@limits(num_vectors=MAX_SIZE, num_queries=MAX_COUNT)
@jit(dynamic="num_queries", fixed="num_vectors x_pitch num_inner mask_outer mask_inner mask_query mask_key")
def softmax_kernel(
    x,  # (outer, inner, num_queries, num_keys), rows x_pitch vectors apart
    mask,  # uint8, broadcast over x by its strides; or None
    y,  # as x, contiguous
    num_queries, num_vectors, x_pitch,
    num_inner, mask_outer, mask_inner, mask_query, mask_key,  # inner size; strides of the mask
    scale: tl.float64,
    HAS_MASK: tl.constexpr, CAUSAL: tl.constexpr, COMPUTE: tl.constexpr, VECTOR: tl.constexpr,
    WHOLE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute the softmax of BLOCK_M queries of one (outer, inner) pair.

    num_vectors and x_pitch count vectors of VECTOR elements. WHOLE: a block holds whole rows; otherwise rows
    are read twice, block by block (online softmax).
    """
    # 1. Locate the queries and their rows of x, mask and y; keys before `end` are visible.
    num_keys = num_vectors * VECTOR
    blocks = tl.cdiv(num_queries, BLOCK_M)
    pair = (tl.program_id(0) // blocks).to(tl.int64)
    query = (tl.program_id(0) % blocks) * BLOCK_M + tl.arange(0, BLOCK_M)
    rows = (pair * num_queries + query)[:, None]
    x += rows * x_pitch * VECTOR
    y += rows * num_vectors * VECTOR
    if HAS_MASK:
        mask += (pair // num_inner) * mask_outer + (pair % num_inner) * mask_inner
        mask += query.to(tl.int64)[:, None] * mask_query
    end = _ends(query, num_queries, num_keys, CAUSAL)
    written = (query < num_queries)[:, None]
    scale = tl.full([1, 1], scale, COMPUTE)
    keys = tl.arange(0, BLOCK_N)
    # 2. Rows in registers: maximum, exponentials, sum, normalise.
    if WHOLE:
        scores, visible = _scores(x, mask, keys, end, mask_key, scale, HAS_MASK, VECTOR)
        top = tl.max(scores, 1)
        e = _exp(scores - tl.where(top == float("-inf"), 0.0, top)[:, None])
        total = tl.sum(e, 1)
        share = tl.where(total == 0, 0.0, 1.0 / total)[:, None]
        out = tl.where(visible, e * share, 0.0)  # in a row with NaN, hidden keys stay 0
        tl.store(y + keys[None, :], out, mask=written & (keys < num_keys)[None, :])
    else:
        # 2a. Long rows, online softmax: maximum and sum in one pass, the sum rescaled when the maximum rises.
        top = tl.full([BLOCK_M], float("-inf"), COMPUTE)
        total = tl.zeros([BLOCK_M], COMPUTE)
        for start in range(0, tl.max(end, 0), BLOCK_N):
            scores, _ = _scores(x, mask, start + keys, end, mask_key, scale, HAS_MASK, VECTOR)
            higher = tl.maximum(top, tl.max(scores, 1))
            finite = tl.where(higher == float("-inf"), 0.0, higher)
            total = total * _exp(top - finite) + tl.sum(_exp(scores - finite[:, None]), 1)
            top = higher
        # 2b. Second pass: normalise and store.
        finite = tl.where(top == float("-inf"), 0.0, top)[:, None]
        share = tl.where(total == 0, 0.0, 1.0 / total)[:, None]
        for start in range(0, num_keys, BLOCK_N):
            scores, visible = _scores(x, mask, start + keys, end, mask_key, scale, HAS_MASK, VECTOR)
            out = tl.where(visible, _exp(scores - finite) * share, 0.0)
            tl.store(y + (start + keys)[None, :], out, mask=written & (start + keys < num_keys)[None, :])


@jit
def _load_pair(grad, y, keys, end, COMPUTE: tl.constexpr, VECTOR: tl.constexpr):
    """Load (grad, y), both 0 where y is 0 or its key is hidden; by whole vectors, as `_scores`."""
    vectors = (keys // VECTOR * VECTOR)[None, :] < end[:, None]
    weight = tl.load(y + keys[None, :], mask=vectors, other=0.0).to(COMPUTE)
    weight = tl.where(keys[None, :] < end[:, None], weight, 0.0)
    g = tl.load(grad + keys[None, :], mask=vectors, other=0.0).to(COMPUTE)
    return tl.where(weight == 0, 0.0, g), weight


@limits(num_vectors=MAX_SIZE, num_queries=MAX_COUNT)
@jit(dynamic="num_queries", fixed="num_vectors grad_pitch y_pitch")
def softmax_backward_kernel(
    grad, y,  # (outer, inner, num_queries, num_keys), rows grad_pitch and y_pitch vectors apart
    dx,  # the same shape, contiguous
    num_queries, num_vectors, grad_pitch, y_pitch, scale: tl.float64,
    CAUSAL: tl.constexpr, COMPUTE: tl.constexpr, VECTOR: tl.constexpr,
    WHOLE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute dx of BLOCK_M queries of one (outer, inner) pair; WHOLE as in `softmax_kernel`."""
    # 1. Locate the queries and their rows.
    num_keys = num_vectors * VECTOR
    blocks = tl.cdiv(num_queries, BLOCK_M)
    pair = (tl.program_id(0) // blocks).to(tl.int64)
    query = (tl.program_id(0) % blocks) * BLOCK_M + tl.arange(0, BLOCK_M)
    rows = (pair * num_queries + query)[:, None]
    grad += rows * grad_pitch * VECTOR
    y += rows * y_pitch * VECTOR
    dx += rows * num_vectors * VECTOR
    end = _ends(query, num_queries, num_keys, CAUSAL)
    written = (query < num_queries)[:, None]
    scale = tl.full([1, 1], scale, COMPUTE)
    keys = tl.arange(0, BLOCK_N)
    # 2. dx = scale y (grad - sum(grad y)); for long rows the sum takes a pass of its own.
    if WHOLE:
        g, weight = _load_pair(grad, y, keys, end, COMPUTE, VECTOR)
        slope = (g - tl.sum(g * weight, 1)[:, None]) * (weight * scale)
        out = tl.where(weight == 0, 0.0, slope)
        tl.store(dx + keys[None, :], out, mask=written & (keys < num_keys)[None, :])
    else:
        total = tl.zeros([BLOCK_M], COMPUTE)
        for start in range(0, tl.max(end, 0), BLOCK_N):
            g, weight = _load_pair(grad, y, start + keys, end, COMPUTE, VECTOR)
            total += tl.sum(g * weight, 1)
        for start in range(0, num_keys, BLOCK_N):
            g, weight = _load_pair(grad, y, start + keys, end, COMPUTE, VECTOR)
            out = tl.where(weight == 0, 0.0, (g - total[:, None]) * (weight * scale))
            tl.store(dx + (start + keys)[None, :], out, mask=written & (start + keys < num_keys)[None, :])


def block_shape(num_queries: int, num_keys: int, itemsize: int) -> tuple[int, int, int, bool]:
    """Return (BLOCK_M, BLOCK_N, num_warps, WHOLE) with 16 elements per thread.

    More would take the registers of other programs. Rows of up to 512 keys take one warp; 32 warps hold a row
    of 16384 keys (float64: 16 hold 8192). Longer rows are read in blocks of 4096 (2048).
    """
    longest = 16384 if itemsize < 8 else 8192
    block_n = max(16, next_power_of_2(num_keys))
    if block_n > longest:
        return 1, longest // 4, longest // 2048, False
    block_m = min(max(2048 // block_n, 1), next_power_of_2(num_queries))
    return block_m, block_n, max(4, block_n // 512), True


@lru_cache(maxsize=1024)
def _mask_strides(
    mask_shape: tuple[int, ...], mask_strides: tuple[int, ...], shape: tuple[int, ...]
) -> tuple[int, ...]:
    """Return (inner size, strides of the mask) with x seen as (outer, inner, queries, keys).

    () if the mask is broadcast over the leading dimensions in more than two alternating groups.
    """
    sizes = (1,) * (len(shape) - len(mask_shape)) + mask_shape
    strides = (0,) * (len(shape) - len(mask_shape)) + mask_strides
    wide = [step if n > 1 else 0 for n, step in zip(sizes, strides, strict=True)]
    groups: list[tuple[int, int]] = []  # (size, stride) of leading dimensions, as few as can be
    for size, stride in zip(shape[:-2], wide, strict=False):
        if size == 1:
            continue
        if groups and groups[-1][1] == stride * size:
            groups[-1] = (groups[-1][0] * size, stride)
        else:
            groups.append((size, stride))
    if len(groups) > 2:
        return ()
    (_, outer), (size, inner) = [(1, 0), (1, 0), *groups][-2:]
    return size, outer, inner, *wide[-2:]


@lru_cache(maxsize=1024)
def _plan(
    num_keys: int, max_queries: int, dtype: torch.dtype, causal: bool, *pitches: int
) -> tuple[tuple[int, ...], dict[str, Any]]:
    """Return (vectors per row, pitches in vectors) and the constants, for at most `max_queries` queries."""
    vector = vector_width(dtype.itemsize, num_keys, *pitches)
    block_m, block_n, num_warps, whole = block_shape(max_queries, num_keys, dtype.itemsize)
    constants = {
        "CAUSAL": causal, "COMPUTE": arithmetic(dtype), "VECTOR": vector, "WHOLE": whole,
        "BLOCK_M": block_m, "BLOCK_N": block_n, "num_warps": num_warps,
    }  # fmt: skip
    return (num_keys // vector, *[pitch // vector for pitch in pitches]), constants


def launch(x: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    y, num_elements = empty_like(x), x.numel()
    if num_elements == 0:
        return y
    (rows, pitch), shape = as_rows(x), x.shape
    num_keys = shape[-1]
    num_rows = num_elements // num_keys
    plain = mask is None and not causal  # all rows are independent of their position
    num_queries = num_rows if plain else shape[-2]
    check_count("softmax", "queries", num_queries)
    strides: tuple[int, ...] = (1, 0, 0, 0, 0)
    if mask is not None:
        strides = _mask_strides(mask.shape, mask.stride(), shape)
        if not strides:
            mask = mask.expand(shape).contiguous()
            strides = _mask_strides(shape, mask.stride(), shape)
        mask = mask.view(torch.uint8)
    numbers, constants = _plan(num_keys, next_power_of_2(num_queries), x.dtype, causal, pitch)
    programs = num_rows // num_queries * cdiv(num_queries, constants["BLOCK_M"])
    launcher.launch(
        softmax_kernel, programs,
        (rows, mask, y, num_queries, *numbers, *strides, scale),
        {"HAS_MASK": mask is not None, **constants},
    )  # fmt: skip
    return y


def launch_backward(grad: Tensor, y: Tensor, scale: float, causal: bool) -> Tensor:
    dx, num_elements = empty_like(y), y.numel()
    if num_elements == 0:
        return dx
    shape = y.shape
    num_keys = shape[-1]
    num_rows = num_elements // num_keys
    num_queries = shape[-2] if causal else num_rows
    check_count("softmax", "queries", num_queries)
    (grad, grad_pitch), (rows, pitch) = as_rows(grad), as_rows(y)
    numbers, constants = _plan(num_keys, next_power_of_2(num_queries), y.dtype, causal, grad_pitch, pitch)
    programs = num_rows // num_queries * cdiv(num_queries, constants["BLOCK_M"])
    launcher.launch(
        softmax_backward_kernel, programs,
        (grad, rows, dx, num_queries, *numbers, scale),
        constants,
    )  # fmt: skip
    return dx


def _seen(x: Tensor, causal: bool) -> int:
    """Return the number of scores visible before the mask."""
    queries, keys = x.shape[-2:]
    rows = min(queries, keys)  # only the last `keys` queries see any key
    return math.prod(x.shape[:-2]) * (rows * keys - rows * (rows - 1) // 2 if causal else queries * keys)


def _flops(x: Tensor, mask: Tensor | None, scale: float, causal: bool) -> int:
    return 6 * _seen(x, causal)


def _flops_backward(grad: Tensor, y: Tensor, scale: float, causal: bool) -> int:
    return 5 * _seen(y, causal)


def _traffic(x: Tensor, mask: Tensor | None, scale: float, causal: bool) -> int:
    """Read the visible scores and the stored elements of the mask, write y."""
    stored = 0 if mask is None else math.prod(n for n, s in zip(mask.shape, mask.stride(), strict=True) if s)
    return (_seen(x, causal) + x.numel()) * x.element_size() + stored


def _traffic_backward(grad: Tensor, y: Tensor, scale: float, causal: bool) -> int:
    """Read grad and y of visible keys, write dx."""
    return (2 * _seen(y, causal) + y.numel()) * y.element_size()


register(
    "scaled_masked_softmax_backward(Tensor grad, Tensor y, float scale, bool causal) -> Tensor",
    contract="y (..., Q, K) floating; grad (..., Q, K) y",
    shard="grad/2 y -> rows",
    reference=reference_backward,
    triton=launch_backward,
    flops=_flops_backward,
    traffic=_traffic_backward,
)


_scaled_masked_softmax = register(
    "scaled_masked_softmax(Tensor x, Tensor? mask, float scale, bool causal) -> Tensor",
    contract="x (..., Q, K) floating; mask (~) bool",
    shard="x/2 ~mask -> rows",
    reference=reference,
    triton=launch,
    flops=_flops,
    traffic=_traffic,
    autograd_formula="scaled_masked_softmax_backward(grad, out, scale, causal) -> x",
)


def _broadcastable(mask: Sequence[int], shape: Sequence[int]) -> bool:
    return len(mask) <= len(shape) and all(
        m in (1, n) for m, n in zip(reversed(mask), reversed(shape), strict=False)
    )


@traced("fastmp.scaled_masked_softmax")
def scaled_masked_softmax(
    x: Tensor, mask: Tensor | None = None, *, scale: float = 1.0, causal: bool = False
) -> Tensor:
    """Return the softmax of scale * x over the last dimension, without hidden keys. Differentiable once in x.

    Args:
        x: scores (..., queries, keys), float64, float32, bfloat16 or float16, any strides (last stride 1
            avoids a copy).
        mask: bool, broadcastable to x's shape; True hides a key, as in Megatron-LM (SDPA: True shows it).
        scale: factor of the scores.
        causal: query i sees keys up to i + keys - queries (bottom-right aligned, so the last query sees every
            key). Combines with `mask`.

    Returns:
        A new contiguous tensor of x's shape and dtype; autocast does not apply. Arithmetic is in float32
        (float64 for float64 inputs) and rounded once. Hidden keys are exactly 0 and get no gradient. A row
        without visible keys, or with scores of -inf only, is 0, not NaN.

    Raises:
        ValueError: shapes, dtypes or devices do not match.

    Example:

        scores = torch.randn(2, 4, 8, 8)  # (batch, heads, queries, keys)
        probs = fastmp.ops.scaled_masked_softmax(scores, scale=64**-0.5, causal=True)
        assert (probs.triu(1) == 0).all()

    Vaswani et al., "Attention Is All You Need", 2017; fused with scale and mask: Shoeybi et al.,
    "Megatron-LM", 2019.
    """
    op = "scaled_masked_softmax"
    checks.check_floating(op, "x", x)
    checks.require(x.dim() > 1, "{}: x must be (..., queries, keys), got shape {}", op, x.shape)
    if mask is not None:
        bool_ = mask.dtype == torch.bool
        checks.require(bool_, "{}: mask must be torch.bool (True hides), got {}", op, mask.dtype)
        wanted = x.shape if not _broadcastable(mask.shape, x.shape) else mask.shape
        checks.check_shape(op, wanted, to=("x", x), mask=mask)
        checks.check_same_device(op, x=x, mask=mask)
    return _scaled_masked_softmax(x, mask, scale, causal)
