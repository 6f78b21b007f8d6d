"""scaled_masked_softmax: softmax(scale * x) over the keys a query may see, where SDPA does not serve.

Hidden keys (mask, causal) get exactly 0 and no gradient whatever their scores hold, and a row with nothing
to see is 0, not NaN. The backward needs the output only: dx = scale * y * (dy - sum(dy * y)). Rows of up to
16384 keys stay in registers: one read, one write. The mask is read by its strides: one that is broadcast is
never made whole.
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
    """True where a query may not see a key, broadcastable to x; None where it may see all."""
    if causal:
        queries, keys = x.shape[-2:]
        ahead = torch.ones(queries, keys, dtype=torch.bool, device=x.device).triu(keys - queries + 1)
        return ahead if mask is None else mask | ahead
    return mask


def reference(x: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    """Softmax of the visible scores in float32 (float64), rounded once."""
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
    """Gradient of x. Hidden keys, and keys where y is 0, have none, whatever `grad` and `y` hold there."""
    wide = y.to(compute_dtype(y.dtype))
    if (hidden := _hidden(y, None, causal)) is not None:
        wide = wide.masked_fill(hidden, 0)
    nothing = wide == 0
    slope = grad.to(wide.dtype).masked_fill(nothing, 0)
    along_row = sum_rows((slope * wide).flatten(0, -2).t()).view(*y.shape[:-1], 1)
    return slope.sub_(along_row).mul_(wide).mul_(scale).masked_fill_(nothing, 0).to(y.dtype).contiguous()


@jit
def _exp(x):
    return tl.exp2(x * 1.4426950408889634)


@jit
def _ends(query, num_queries, num_keys, CAUSAL: tl.constexpr):
    """How many keys, from the first, each query may see before the mask; none beyond the last query."""
    end = tl.zeros_like(query) + num_keys
    if CAUSAL:
        end = tl.minimum(end, num_keys - tl.maximum(num_queries - 1 - query, 0))
    return tl.where(query < num_queries, end, 0)


@jit
def _scores(
    x, mask, keys, end, mask_key, scale,
    HAS_MASK: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Scores times `scale` (rows, keys), -inf where hidden, and where they are not.

    Loads go by whole vectors: a mask that may end within one would split every access.
    """
    vectors = (keys // VECTOR * VECTOR)[None, :] < end[:, None]
    visible = keys[None, :] < end[:, None]
    scores = tl.load(x + keys[None, :], mask=vectors, other=0.0)
    if HAS_MASK:
        visible &= tl.load(mask + keys.to(tl.int64)[None, :] * mask_key, mask=vectors, other=1) == 0
    return tl.where(visible, scores.to(scale.dtype) * scale, float("-inf")), visible


@limits(num_vectors=MAX_SIZE, num_queries=MAX_COUNT)
@jit
def softmax_kernel(
    x, mask, y, num_queries, num_vectors, x_pitch, num_inner, mask_outer, mask_inner, mask_query, mask_key,
    scale: tl.float64,
    HAS_MASK: tl.constexpr, CAUSAL: tl.constexpr, COMPUTE: tl.constexpr, VECTOR: tl.constexpr,
    WHOLE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """BLOCK_M queries of one (outer, inner) pair.

    Row length and pitch of x count vectors of VECTOR elements. WHOLE: a block holds whole rows; otherwise
    they are read twice, block by block.
    """
    # Which queries, and where their rows of x, mask and y begin; `end`: the keys before it are visible.
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
    # A row in registers: maximum, exponentials, sum, and out.
    if WHOLE:
        scores, visible = _scores(x, mask, keys, end, mask_key, scale, HAS_MASK, VECTOR)
        top = tl.max(scores, 1)
        e = _exp(scores - tl.where(top == float("-inf"), 0.0, top)[:, None])
        total = tl.sum(e, 1)
        share = tl.where(total == 0, 0.0, 1.0 / total)[:, None]
        out = tl.where(visible, e * share, 0.0)  # else a row with NaN would have it where it is hidden, too
        tl.store(y + keys[None, :], out, mask=written & (keys < num_keys)[None, :])
    else:
        # A long row: maximum and sum in one walk, rescaled as the maximum rises; a second walk writes.
        top = tl.full([BLOCK_M], float("-inf"), COMPUTE)
        total = tl.zeros([BLOCK_M], COMPUTE)
        for start in range(0, tl.max(end, 0), BLOCK_N):
            scores, _ = _scores(x, mask, start + keys, end, mask_key, scale, HAS_MASK, VECTOR)
            higher = tl.maximum(top, tl.max(scores, 1))
            finite = tl.where(higher == float("-inf"), 0.0, higher)
            total = total * _exp(top - finite) + tl.sum(_exp(scores - finite[:, None]), 1)
            top = higher
        finite = tl.where(top == float("-inf"), 0.0, top)[:, None]
        share = tl.where(total == 0, 0.0, 1.0 / total)[:, None]
        for start in range(0, num_keys, BLOCK_N):
            scores, visible = _scores(x, mask, start + keys, end, mask_key, scale, HAS_MASK, VECTOR)
            out = tl.where(visible, _exp(scores - finite) * share, 0.0)
            tl.store(y + (start + keys)[None, :], out, mask=written & (start + keys < num_keys)[None, :])


@jit
def _load_pair(grad, y, keys, end, COMPUTE: tl.constexpr, VECTOR: tl.constexpr):
    """Load (grad, y), both 0 where y is 0 or its key is hidden; whole vectors, as in `_scores`."""
    vectors = (keys // VECTOR * VECTOR)[None, :] < end[:, None]
    weight = tl.load(y + keys[None, :], mask=vectors, other=0.0).to(COMPUTE)
    weight = tl.where(keys[None, :] < end[:, None], weight, 0.0)
    g = tl.load(grad + keys[None, :], mask=vectors, other=0.0).to(COMPUTE)
    return tl.where(weight == 0, 0.0, g), weight


@limits(num_vectors=MAX_SIZE, num_queries=MAX_COUNT)
@jit
def softmax_backward_kernel(
    grad, y, dx, num_queries, num_vectors, grad_pitch, y_pitch, scale: tl.float64,
    CAUSAL: tl.constexpr, COMPUTE: tl.constexpr, VECTOR: tl.constexpr,
    WHOLE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dx of BLOCK_M queries, as in `softmax_kernel`."""
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
    # dx = y (grad - sum(grad y)) scale; the sum of a long row takes a walk of its own.
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
    """(BLOCK_M, BLOCK_N, num_warps, WHOLE): 32 elements a thread (float64: 16), a warp a row where it fits.

    16 warps hold a row of 16384 keys (float64: 8192); longer ones are walked 4096 (2048) at a time.
    """
    per_warp = 1024 if itemsize < 8 else 512
    block_n = max(16, next_power_of_2(num_keys))
    if block_n > 16 * per_warp:
        return 1, 4 * per_warp, 4, False
    block_m = min(max(4 * per_warp // block_n, 1), next_power_of_2(num_queries))
    return block_m, block_n, max(4, block_n // per_warp), True


@lru_cache(maxsize=1024)
def _mask_strides(
    mask_shape: tuple[int, ...], mask_strides: tuple[int, ...], shape: tuple[int, ...]
) -> tuple[int, ...]:
    """Return the inner size and the strides of a mask over x seen as (outer, inner, queries, keys).

    () for a mask that is broadcast over leading dimensions in more than two alternating groups.
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
    num_keys: int, most_queries: int, dtype: torch.dtype, causal: bool, *pitches: int
) -> tuple[tuple[int, ...], dict[str, Any]]:
    """Return vectors in a row and from row to row, and constants; any number of queries up to the most."""
    vector = vector_width(dtype.itemsize, num_keys, *pitches)
    block_m, block_n, num_warps, whole = block_shape(most_queries, num_keys, dtype.itemsize)
    constants = {
        "CAUSAL": causal,
        "COMPUTE": arithmetic(dtype),
        "VECTOR": vector,
        "WHOLE": whole,
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "num_warps": num_warps,
    }
    return (num_keys // vector, *[pitch // vector for pitch in pitches]), constants


def launch(x: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    y, num_elements = empty_like(x), x.numel()
    if num_elements == 0:
        return y
    (rows, pitch), shape = as_rows(x), x.shape
    num_keys = shape[-1]
    num_rows = num_elements // num_keys
    plain = mask is None and not causal  # then all rows are alike
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
    """Elements that may be seen before the mask."""
    queries, keys = x.shape[-2:]
    rows = min(queries, keys)  # the last of them see more than nothing
    return math.prod(x.shape[:-2]) * (rows * keys - rows * (rows - 1) // 2 if causal else queries * keys)


def _flops(x: Tensor, mask: Tensor | None, scale: float, causal: bool) -> int:
    return 6 * _seen(x, causal)


def _flops_backward(grad: Tensor, y: Tensor, scale: float, causal: bool) -> int:
    return 5 * _seen(y, causal)


def _traffic(x: Tensor, mask: Tensor | None, scale: float, causal: bool) -> int:
    """Read the scores that may be seen and what the mask has in memory, write y."""
    stored = 0 if mask is None else math.prod(n for n, s in zip(mask.shape, mask.stride(), strict=True) if s)
    return (_seen(x, causal) + x.numel()) * x.element_size() + stored


def _traffic_backward(grad: Tensor, y: Tensor, scale: float, causal: bool) -> int:
    """Read grad and y where they may be seen, write dx."""
    return (2 * _seen(y, causal) + y.numel()) * y.element_size()


register(
    "scaled_masked_softmax_backward(Tensor grad, Tensor y, float scale, bool causal) -> Tensor",
    reference=reference_backward,
    triton=launch_backward,
    flops=_flops_backward,
    traffic=_traffic_backward,
)


_scaled_masked_softmax = register(
    "scaled_masked_softmax(Tensor x, Tensor? mask, float scale, bool causal) -> Tensor",
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
    """Softmax over the last dimension of scale * x, hidden keys left out; differentiable once in x.

    Args:
        x: scores (..., queries, keys), float64, float32, bfloat16 or float16, any strides (last stride 1
            avoids a copy).
        mask: bool, broadcastable to x's shape: True hides a key, as in Megatron-LM (in SDPA True shows it).
        scale: factor of the scores.
        causal: query i sees keys up to i + keys - queries: aligned to the bottom right, so the last query
            sees every key. Combines with `mask`.

    Returns:
        A new contiguous tensor of x's shape and dtype, which autocast does not change. Arithmetic is in
        float32 (float64 for float64 inputs) and rounded once. Hidden keys are exactly 0 and get no gradient.
        A row that sees no key, or only scores of -inf, is 0 throughout, not NaN.

    Raises:
        ValueError: shapes, dtypes or devices do not fit.

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
