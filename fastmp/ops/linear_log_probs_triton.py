"""Triton kernels of `linear_log_probs` and their launches; one program a row, as in `cross_entropy_triton`.

The gradient overwrites the logits, the last block first, which may still be in a cache.
"""

from __future__ import annotations

from fastmp.ops.core import launcher
from fastmp.ops.core._triton import jit, tl
from fastmp.ops.core.registry import compute_dtype
from fastmp.ops.cross_entropy_triton import (
    fast_exp,
    finite_log,
    launch_sizes,
    load_edge,
    offsets,
    real_columns,
    row_start,
    row_stats,
    scaled,
    shape_of,
    store_edge,
)


@jit
def load_scale(scale, row):
    """Load the inverse temperature of a row: NaN unless it is positive."""
    factor = tl.load(scale + row)
    return tl.where(factor > 0, factor, float("nan"))


@jit(fixed="row_stride real vocab_start")
def stats_kernel(
    logits, target, scale, out, row_stride, real, vocab_start,
    WITH_ENTROPY: tl.constexpr, BLOCK: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """Compute the statistics (N, 3), or (N, 4) with WITH_ENTROPY, of one row of a shard."""
    ACC: tl.constexpr = out.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    # 1. The target's logit if this shard has that column, else 0.
    base, begin = row_start(logits, row, row_stride, VEC)
    column = tl.load(target + row) - vocab_start
    target_logit = tl.load(base + begin + column, mask=(column >= 0) & (column < real), other=0.0)
    # 2. Maximum and sums of the scaled row.
    factor = None if scale is None else load_scale(scale, row)
    top, total, weighted = row_stats(
        base, begin, begin + real, factor, ACC, False, WITH_ENTROPY, BLOCK, VEC, ""
    )
    out += row * (4 if WITH_ENTROPY else 3)
    tl.store(out, top)
    tl.store(out + 1, total)
    tl.store(out + 2, target_logit.to(ACC))
    if WITH_ENTROPY:
        tl.store(out + 3, weighted)


@jit(fixed="row_stride columns real vocab_start vocab_size ignore_index")
def grad_kernel(
    logits, target, top, log_total, grad_log_prob, entropy, grad_entropy, scale, row_stride, columns, real,
    vocab_start, vocab_size, ignore_index, BLOCK: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """Overwrite one row of logits with their gradient."""
    row = tl.program_id(0).to(tl.int64)
    base, begin = row_start(logits, row, row_stride, VEC)
    end = begin + real
    wanted = tl.load(target + row)
    live = wanted != ignore_index
    row_top, row_log_total = tl.load(top + row), tl.load(log_total + row)
    factor = None if scale is None else load_scale(scale, row)
    # 1. d / d logit = share [at the target] - p (share + by_entropy (log p + entropy)), all times the scale.
    share = scaled(tl.load(grad_log_prob + row), factor)
    spread = share
    if entropy is not None:
        by_entropy = scaled(tl.load(grad_entropy + row), factor)
        spread += by_entropy * tl.load(entropy + row)
    # 2. NaN for targets outside the vocabulary.
    outside = (wanted < 0) | (wanted >= vocab_size)
    spread = tl.where(outside, float("nan"), spread)
    column = wanted - vocab_start
    target_at = tl.where((column >= 0) & (column < real), column + begin, -1).to(tl.int32)
    # 3. The gradient, block by block from the end; padding columns get zeros.
    blocks = tl.cdiv(begin + columns, BLOCK)
    for block in range(0, blocks):
        start = (blocks - 1 - block) * BLOCK
        first, at = offsets(start, BLOCK, VEC)
        whole = (start >= begin) & (start + BLOCK <= end)
        if whole:
            x = tl.load(base + at, mask=live, other=0.0)
        else:
            x = load_edge(base, first, at, begin, tl.where(live, end, 0), 0.0, VEC, "")
        log_p = scaled(x.to(row_top.dtype) - row_top, factor) - row_log_total
        slope = spread
        if entropy is not None:
            slope += by_entropy * finite_log(log_p)
        grad = tl.where(at == target_at, share, 0.0) - fast_exp(log_p) * slope
        grad = tl.where(live, grad, 0.0)
        if whole:
            tl.store(base + at, grad)
        else:
            store_edge(base, first, at, tl.where(at < end, grad, 0.0), begin, begin + columns, VEC)


def _sizes(logits):
    block, vec, num_warps = launch_sizes(logits.shape[1], logits.element_size())
    return {"BLOCK": block, "VEC": 1 if logits.data_ptr() % 16 else vec, "num_warps": num_warps}


def packed(*per_token):
    return [None if values is None else values.contiguous() for values in per_token]


def launch_stats(logits, target, scale, vocab_start, vocab_size, with_entropy):
    tokens, columns = shape_of("log_probs_stats", logits)
    out = logits.new_empty(tokens, 4 if with_entropy else 3, dtype=compute_dtype(logits.dtype))
    real = real_columns(columns, vocab_start, vocab_size)
    if tokens:
        launcher.launch(
            stats_kernel, tokens, (logits, *packed(target, scale), out, logits.stride(0), real, vocab_start),
            {"WITH_ENTROPY": with_entropy, **_sizes(logits)},
        )  # fmt: skip
    return out


def launch_grad(logits, target, top, log_total, grad_log_prob, entropy, grad_entropy, scale, *shard):
    vocab_start, vocab_size, ignore_index = shard
    tokens, columns = shape_of("log_probs_grad_", logits)
    per_token = packed(target, top, log_total, grad_log_prob, entropy, grad_entropy, scale)
    real = real_columns(columns, vocab_start, vocab_size)
    if tokens:
        launcher.launch(
            grad_kernel, tokens,
            (logits, *per_token, logits.stride(0), columns, real, vocab_start, vocab_size, ignore_index),
            _sizes(logits),
        )  # fmt: skip
