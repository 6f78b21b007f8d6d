"""Triton kernels of the router, and their launches; see `router`.

A program takes a strip of one sequence's tokens, a few at a time, with all their experts in registers. Up to
512 experts of a token are in one warp, so a step has few barriers. Scores are compared as integers of the
same order, because a maximum of 32-bit integers over a warp is one instruction. Integers of 16-bit logits
hold the expert as well, so that a round takes one maximum instead of a maximum and a minimum. The k rounds
only find indices; the chosen logits are read again afterwards, from a cache.

A strip's sums and counts go to its row of partial sums, and a second kernel adds the rows in order, many
columns at once. So nothing is set to zero first, no atomic operation is needed, and no program adds alone.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fastmp.ops.core import launcher
from fastmp.ops.core._triton import MAX_STRIP, MAX_WALKING, cdiv, jit, limits, next_power_of_2, tl
from fastmp.ops.core.registry import compute_dtype
from fastmp.ops.core.rowwise import arithmetic, as_rows, empty_like, strip_shape, vector_width

ELEMENTWISE = ("sigmoid", "sqrtsoftplus")  # scores that are functions of their own logit alone
_SUM_BLOCK = (256, 16)  # strips, of which there are at most 256, and columns of a program that adds them


@jit
def _exp(x):
    return tl.exp2(x * 1.4426950408889634)


@jit
def _sigmoid(x):
    return 1.0 / (1.0 + _exp(-x))


@jit
def _score(x, SOFTPLUS: tl.constexpr):
    """Compute sigmoid(x), or with SOFTPLUS sqrt(log(1 + e^x)); 0 for -inf."""
    if SOFTPLUS:
        u = _exp(-tl.abs(x))
        w = 1.0 + u  # rounded: log(w) u / (w - 1) is log(1 + u) all the same, also for small u
        return tl.sqrt(tl.where(x > 0.0, x, 0.0) + tl.where(w == 1.0, u, tl.log(w) * (u / (w - 1.0))))
    else:
        return _sigmoid(x)


@jit
def _sortable(x):
    """Map x to integers of the same order: NaN above all, -0 equal to 0, with free values below -inf."""
    if x.dtype == tl.float64:
        bits = tl.where(x == 0, 0, x.to(tl.int64, bitcast=True))
        keys = tl.where(bits < 0, bits ^ 0x7FFFFFFFFFFFFFFF, bits)
        return tl.where(x != x, 0x7FFFFFFFFFFFFFFF, keys)
    else:
        bits = tl.where(x == 0, 0, x.to(tl.int32, bitcast=True))
        keys = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
        return tl.where(x != x, 0x7FFFFFFF, keys)


@jit
def _unsorted(keys):
    """Undo `_sortable`."""
    if keys.dtype == tl.int64:
        return tl.where(keys < 0, keys ^ 0x7FFFFFFFFFFFFFFF, keys).to(tl.float64, bitcast=True)
    else:
        return tl.where(keys < 0, keys ^ 0x7FFFFFFF, keys).to(tl.float32, bitcast=True)


@jit
def _softmax(x):
    """Compute each row's maximum, the exponentials relative to it, their sum and the log-sum-exp.

    Padding is -inf. A row with NaN is all NaN. So is one with infinity, but its log-sum-exp is infinite.
    """
    highest = _unsorted(tl.max(_sortable(x), 1))  # NaN if there is any
    top = tl.where(highest == float("-inf"), 0.0, highest)
    e = _exp(x - top[:, None])
    total = tl.sum(e, 1)
    return top, e, total, tl.where(tl.abs(highest) == float("inf"), highest, top + tl.log(total))


@jit
def _shares(scores, top, e, SOFTPLUS: tl.constexpr):
    """Divide elementwise scores by their sum, also where all of them underflow; 0 in a row of -inf.

    Below -40 sigmoid(x) and softplus(x) are e^x to the last bit of float64; `e` is relative to the largest.
    """
    relative = e
    if SOFTPLUS:
        relative = tl.sqrt(e)
    relative = tl.where((top < -40.0)[:, None], relative, scores)
    total = tl.sum(relative, 1)
    return relative / tl.where(total == 0.0, 1.0, total)[:, None]


@jit
def _columns(places, GROUPS: tl.constexpr, SIZE: tl.constexpr, EACH: tl.constexpr):
    """Return the expert of each column, and a mask of the columns that have one.

    Each group is padded to a power of two of columns, so that keys can be reshaped.
    """
    if GROUPS > 1:  # a group begins every EACH places
        return places // EACH * SIZE + places % EACH, (places % EACH < SIZE) & (places // EACH < GROUPS)
    else:
        return places, places < SIZE


@jit
def _numbered(keys, places, LOWEST: tl.constexpr):
    """Pack the column, up to 8191, into the low 13 bits of each key, which are unused for 16-bit logits.

    This makes keys unique, and among equal ones the first is the largest.
    """
    return tl.where(keys == LOWEST, LOWEST, (keys & -8192) | (8191 - places))


@jit
def _take_best(keys, places, TAKEN: tl.constexpr, END: tl.constexpr, NUMBERED: tl.constexpr):
    """Find each row's first largest key, and put TAKEN in its place."""
    best = tl.max(keys, 1)
    if NUMBERED:
        return 8191 - (best & 8191), tl.where(keys == best[:, None], TAKEN, keys)
    else:
        best = tl.min(tl.where(keys == best[:, None], places, END), 1)
        return best, tl.where(places == best[:, None], TAKEN, keys)


@jit
def _close_groups(
    keys, BLOCK_M: tl.constexpr, ALL: tl.constexpr, EACH: tl.constexpr, GROUPS: tl.constexpr,
    SIZE: tl.constexpr, OPEN: tl.constexpr, TOP_TWO: tl.constexpr, LOGITS: tl.constexpr,
    SOFTPLUS: tl.constexpr, LOWEST: tl.constexpr,
):  # fmt: skip
    """Set the keys (BLOCK_M, ALL * EACH) of experts outside the OPEN best groups to the lowest.

    A group's score is its best key; with TOP_TWO the sum of its two best, of their scores with LOGITS.
    """
    grouped = tl.reshape(keys, (BLOCK_M, ALL, EACH))
    first = tl.max(grouped, 2)
    groups = tl.arange(0, ALL)[None, :]
    if TOP_TWO:
        value = _unsorted(first)
        value = _score(value, SOFTPLUS) if LOGITS else value
        if SIZE > 1:
            places = tl.arange(0, EACH)[None, None, :]
            best = tl.min(tl.where(grouped == first[:, :, None], places, EACH), 2)
            second = _unsorted(tl.max(tl.where(places == best[:, :, None], LOWEST, grouped), 2))
            value += _score(second, SOFTPLUS) if LOGITS else second
        first = tl.where(groups < GROUPS, _sortable(value), LOWEST)
    for _ in range(OPEN):
        _, first = _take_best(first, groups, LOWEST + 1, ALL, False)
    opened = (first == LOWEST + 1)[:, :, None]
    return tl.reshape(tl.where(opened, grouped, LOWEST), (BLOCK_M, ALL * EACH))


@limits(programs=MAX_WALKING, num_sequences=MAX_WALKING, strip_steps=MAX_STRIP)
@jit(dynamic="num_steps strip_steps", fixed="num_sequences pitch")
def router_kernel(
    logits, bias, indices, probs,
    partials, loads, wishes,  # (num_strips, num_sequences * experts); wishes or None
    squares,  # (num_programs,)
    num_steps, num_sequences, strip_steps, pitch, scale: tl.float64,
    K: tl.constexpr, K_BLOCK: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr, OPEN: tl.constexpr,
    ELEMENTWISE: tl.constexpr, SOFTPLUS: tl.constexpr, AFTER: tl.constexpr, NORMALIZE: tl.constexpr,
    VECTOR: tl.constexpr, BLOCK_M: tl.constexpr, PARTS: tl.constexpr, ALL: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """Route a strip of one sequence. Logits are (num_steps, num_sequences) rows; their pitch counts vectors.

    Of a strip's tokens, `partials` are the sums of scores, `loads` the counts, `wishes` those for the
    balancing losses, and `squares` the sum for the z-loss. Two keys are below that of -inf: LOWEST cannot be
    chosen, LOWEST + 1 has been.
    """
    COMPUTE: tl.constexpr = probs.dtype.element_ty
    WIDTH: tl.constexpr = ALL * EACH
    EXPERTS: tl.constexpr = GROUPS * SIZE
    LOWEST: tl.constexpr = -(1 << 63) if COMPUTE == tl.float64 else -(1 << 31)
    HAS_BIAS: tl.constexpr = bias is not None
    # Keys of logits of 16 bits have room for their places; a bias makes them numbers of more bits.
    ROOM: tl.constexpr = (logits.dtype.element_ty.primitive_bitwidth == 16) & (WIDTH <= 8192)
    NUMBERED: tl.constexpr = ROOM and not HAS_BIAS
    places = tl.arange(0, WIDTH)
    cols, here = _columns(places, GROUPS, SIZE, EACH)
    # Threads of a warp load a part of a token's logits at once: a token is not spread over warps.
    part = tl.arange(0, PARTS)[None, :, None] * (WIDTH // PARTS)
    part_cols, part_here = _columns(part + tl.arange(0, WIDTH // PARTS)[None, None, :], GROUPS, SIZE, EACH)
    # 1. This program's tokens: a strip of one sequence, BLOCK_M at a time.
    sequence = tl.program_id(0) % num_sequences
    strip = (tl.program_id(0) // num_sequences).to(tl.int64)
    slots = tl.arange(0, K_BLOCK)[None, :]
    shift = tl.zeros([WIDTH], COMPUTE)
    if HAS_BIAS:
        shift = tl.load(bias + cols, mask=here, other=0.0)
    factor = tl.full([1, 1], scale, COMPUTE)
    sums = tl.zeros([BLOCK_M, WIDTH], COMPUTE)
    chosen_by = tl.zeros([BLOCK_M, WIDTH], tl.int32)
    wished_by = tl.zeros([BLOCK_M, WIDTH], tl.int32)
    z = tl.zeros([BLOCK_M], COMPUTE)
    for start in range(0, strip_steps, BLOCK_M):
        step = strip * strip_steps + start + tl.arange(0, BLOCK_M)
        there = step < num_steps
        tokens = (step * num_sequences + sequence)[:, None]
        row = logits + tokens * pitch * VECTOR
        # 2. Scores of all experts, and the sums for the balancing losses.
        mask = there[:, None, None] & part_here
        x = tl.load(row[:, :, None] + part_cols, mask=mask, other=float("-inf"))
        x = tl.reshape(x, (BLOCK_M, WIDTH)).to(COMPUTE)
        top, e, total, lse = _softmax(x)
        if ELEMENTWISE:
            scores = _score(x, SOFTPLUS)
            shares = _shares(scores, top, e, SOFTPLUS)
        else:
            scores = e / total[:, None]
            shares = scores
        sums += tl.where(there[:, None], shares, 0.0)
        z += tl.where(there, lse * lse, 0.0)
        # 3. Keys to choose by, as integers of the same order: scores or logits, bias, closed groups.
        keys = x
        if HAS_BIAS:
            keys = (x if AFTER else scores) + shift[None, :]
        keys = tl.where(here[None, :], _sortable(keys), LOWEST)
        if OPEN < GROUPS:
            keys = _close_groups(
                keys, BLOCK_M, ALL, EACH, GROUPS, SIZE, OPEN, ELEMENTWISE, not HAS_BIAS, SOFTPLUS, LOWEST
            )  # fmt: skip
        if NUMBERED:
            keys = _numbered(keys, places[None, :], LOWEST)
        # 4. Top k in K rounds: take the best expert of each token, the first of equal ones.
        chosen = tl.zeros([BLOCK_M, K_BLOCK], tl.int32)
        for slot in range(K):
            best, keys = _take_best(keys, places[None, :], LOWEST + 1, WIDTH, NUMBERED)
            chosen = tl.where(slots == slot, best[:, None], chosen)
        chosen_by += tl.where(there[:, None] & (keys == LOWEST + 1), 1, 0)
        # 5. Once more without bias and groups, for the counts of the balancing losses.
        if wishes is not None:
            keys = tl.where(here[None, :], _sortable(x), LOWEST)
            if ROOM:
                keys = _numbered(keys, places[None, :], LOWEST)
            for _ in range(K):
                _, keys = _take_best(keys, places[None, :], LOWEST + 1, WIDTH, ROOM)
            wished_by += tl.where(there[:, None] & (keys == LOWEST + 1), 1, 0)
        if GROUPS > 1:
            chosen = chosen // EACH * SIZE + chosen % EACH
        # 6. Probabilities of the chosen experts, whose logits are read again, from a cache.
        out = there[:, None] & (slots < K)
        value = tl.load(row + chosen, mask=out, other=float("-inf")).to(COMPUTE)
        if ELEMENTWISE:
            value = _score(value, SOFTPLUS)
            if NORMALIZE:
                value /= (tl.sum(value, 1) + 1e-20)[:, None]
        elif NORMALIZE:
            value = _exp(value - tl.max(value, 1)[:, None])
            value /= tl.sum(value, 1)[:, None]
        else:
            value = _exp(value - top[:, None]) / total[:, None]
        tl.store(indices + tokens * K + slots, chosen, mask=out)
        tl.store(probs + tokens * K + slots, value * factor, mask=out)
    # 7. This strip's row of partial sums, and counts as integers.
    row_of_sums = (strip * num_sequences + sequence) * EXPERTS + cols
    tl.store(partials + row_of_sums, tl.sum(sums, 0), mask=here)
    tl.store(loads + row_of_sums, tl.sum(chosen_by, 0), mask=here)
    if wishes is not None:
        tl.store(wishes + row_of_sums, tl.sum(wished_by, 0), mask=here)
    tl.store(squares + tl.program_id(0), tl.sum(z, 0))


@limits(num_strips=MAX_WALKING, num_blocks=MAX_WALKING, num_sums=MAX_STRIP)
@jit(dynamic="num_strips num_blocks", fixed="num_sums")
def router_sums_kernel(
    partials, loads, wishes,  # (num_strips, num_sums); wishes or None
    squares,  # (num_blocks,)
    score_sums, counts, balance_counts, z_sum,
    num_strips, num_blocks, num_sums,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Add the strips of BLOCK_N columns in a fixed order; one more program adds the squares."""
    # 1. Add blocks of BLOCK_M strips from top to bottom; the last program has no columns.
    cols = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    here = cols < num_sums
    scores = tl.zeros([BLOCK_M, BLOCK_N], partials.dtype.element_ty)
    chosen = tl.zeros([BLOCK_M, BLOCK_N], tl.int32)
    wished = tl.zeros([BLOCK_M, BLOCK_N], tl.int32)
    for start in range(0, num_strips, BLOCK_M):
        strips = start + tl.arange(0, BLOCK_M)
        mask = (strips < num_strips)[:, None] & here[None, :]
        offsets = strips[:, None].to(tl.int64) * num_sums + cols[None, :]
        scores += tl.load(partials + offsets, mask=mask, other=0.0)
        chosen += tl.load(loads + offsets, mask=mask, other=0)
        if wishes is not None:
            wished += tl.load(wishes + offsets, mask=mask, other=0)
    # 2. Reduce each block of running sums to one row.
    tl.store(score_sums + cols, tl.sum(scores, 0), mask=here)
    tl.store(counts + cols, tl.sum(chosen, 0), mask=here)
    if wishes is not None:
        tl.store(balance_counts + cols, tl.sum(wished, 0), mask=here)
    # 3. The sum for the z-loss.
    if tl.program_id(0) == tl.num_programs(0) - 1:
        z = tl.zeros([BLOCK_M], squares.dtype.element_ty)
        for start in range(0, num_blocks, BLOCK_M):
            blocks = start + tl.arange(0, BLOCK_M)
            z += tl.load(squares + blocks, mask=blocks < num_blocks, other=0.0)
        tl.store(z_sum, tl.sum(z, 0))


@jit(dynamic="num_steps", fixed="num_sequences pitch")
def router_backward_kernel(
    grad_probs, grad_sums, grad_z, logits, indices, dx,
    num_steps, num_sequences, pitch, scale: tl.float64,
    K: tl.constexpr, EXPERTS: tl.constexpr, ELEMENTWISE: tl.constexpr, SOFTPLUS: tl.constexpr,
    NORMALIZE: tl.constexpr, COMPUTE: tl.constexpr, VECTOR: tl.constexpr, BLOCK_M: tl.constexpr,
    WIDTH: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Compute dx of BLOCK_M tokens of one sequence; gradients that are None are 0."""
    cols = tl.arange(0, WIDTH)
    here = cols < EXPERTS
    sequence = tl.program_id(0) % num_sequences
    step = (tl.program_id(0) // num_sequences).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    there = step < num_steps
    tokens = step * num_sequences + sequence
    part = tl.arange(0, PARTS)[None, :, None] * (WIDTH // PARTS)
    part_cols = part + tl.arange(0, WIDTH // PARTS)[None, None, :]
    mask = there[:, None, None] & (part_cols < EXPERTS)
    # 1. A block of tokens: logits, and upstream gradients of the probabilities, at their experts.
    x = tl.load(logits + (tokens * pitch * VECTOR)[:, None, None] + part_cols, mask=mask, other=float("-inf"))
    x = tl.reshape(x, (BLOCK_M, WIDTH)).to(COMPUTE)
    given = tl.zeros([BLOCK_M, WIDTH], COMPUTE)
    chosen = tl.zeros([BLOCK_M, WIDTH], tl.int1)
    if grad_probs is not None:
        factor = tl.full([1], scale, COMPUTE)
        for slot in range(K):
            expert = tl.load(indices + tokens * K + slot, mask=there, other=0)
            grad = tl.load(grad_probs + tokens * K + slot, mask=there, other=0.0) * factor
            found = cols[None, :] == expert[:, None]
            given = tl.where(found, grad[:, None], given)
            chosen |= found
    # 2. Gradient of the scores of all experts (`slope`), which the balancing losses sum.
    top, e, total, lse = _softmax(x)
    weights = e / total[:, None]
    scores = _score(x, SOFTPLUS) if ELEMENTWISE else weights
    slope = tl.zeros([BLOCK_M, WIDTH], COMPUTE)
    if grad_sums is not None:
        slope += tl.load(grad_sums + sequence * EXPERTS + cols, mask=here, other=0.0)[None, :]
    # 3. Backward through the normalisation of the chosen scores, and the scores, to the logits.
    if ELEMENTWISE:
        if SOFTPLUS:  # the derivative of sqrt(softplus), 0 where that underflows
            derivative = tl.where(scores == 0.0, 0.0, _sigmoid(x) / (2.0 * scores))
            of_log = tl.where(x < -40.0, 0.5, derivative / scores)
        else:
            derivative = scores * (1.0 - scores)
            of_log = 1.0 - scores
        if NORMALIZE:
            norm = (tl.sum(tl.where(chosen, scores, 0.0), 1) + 1e-20)[:, None]
            mean = tl.sum(tl.where(chosen, scores * given, 0.0), 1)[:, None] / norm
            given = tl.where(chosen, (given - mean) / norm, 0.0)
        out = given * derivative
        if grad_sums is not None:
            shares = _shares(scores, top, e, SOFTPLUS)
            out += shares * (slope - tl.sum(shares * slope, 1)[:, None]) * of_log
    elif NORMALIZE:
        own = tl.where(chosen, x, float("-inf"))
        own = tl.where(chosen, _exp(own - tl.max(own, 1)[:, None]), 0.0)
        own /= tl.sum(own, 1)[:, None]
        mean = tl.sum(tl.where(chosen, own * given, 0.0), 1)[:, None]
        out = scores * (slope - tl.sum(scores * slope, 1)[:, None])
        out += tl.where(chosen, own * (given - mean), 0.0)
    else:
        slope += given
        out = scores * (slope - tl.sum(scores * slope, 1)[:, None])
    # 4. Z-loss.
    if grad_z is not None:
        out += weights * (2.0 * tl.load(grad_z) * lse)[:, None]
    out = tl.reshape(out, (BLOCK_M, PARTS, WIDTH // PARTS))
    tl.store(dx + (tokens * EXPERTS)[:, None, None] + part_cols, out, mask=mask)


# `block_shape` gives all its blocks for these numbers of tokens: from 8 to 128 a step.
TOKENS = tuple(256 * tokens for tokens in (8, 16, 32, 64, 128))


def block_shape(num_tokens: int, width: int, itemsize: int) -> tuple[int, int]:
    """Choose (tokens, warps) of a forward step for experts padded to `width`, numbers of `itemsize` bytes.

    A thread has eight experts (float64: 4), or twice as many where a token would otherwise need two warps.
    Eight warps hide latency in the k rounds. There are fewer tokens, but one a warp, where that makes more
    programs, up to 256.
    """
    per_warp = 256 if itemsize < 8 else 128
    num_warps = min(max(8, width // per_warp), 16)
    most = num_warps if width == 2 * per_warp else max(1, min(num_warps * per_warp // width, 128))
    return min(most, max(8, next_power_of_2(cdiv(num_tokens, 256)))), num_warps


def backward_block_shape(width: int, itemsize: int) -> tuple[int, int]:
    """Choose (tokens, warps) of a backward program for experts padded to `width`.

    Programs are small, for there are no rounds to hide: a token a warp, several where experts are few, one
    token on more warps where they are many. With two tokens and two warps 8192 tokens of 256 experts took
    14.3 us on an H200, those of 128 experts 7.8 us; with eight warps, and 8 and 16 tokens, 18.6 and 11.6 us.
    """
    per_warp = 256 if itemsize < 8 else 128
    if width > 2 * per_warp:
        return 1, min(width // per_warp, 16)
    return max(2, per_warp // width), 2


def parts(width: int, itemsize: int, vector: int, size: int) -> int:
    """Return the number of parts in which a warp loads a token: 32 accesses of vectors within a group."""
    return max(1, width // (32 * math.gcd(16 // itemsize, vector, size)))


def _sizes(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Return (steps, sequences, experts); logits (T, E) are one sequence."""
    return shape[0], shape[1] if len(shape) == 3 else 1, shape[-1]


@lru_cache(maxsize=1024)
def plan(
    shape: tuple[int, ...], pitch: int, dtype: torch.dtype, k: int, score: str, num_groups: int,
    group_topk: int, normalize: bool,
) -> tuple[int, int, tuple[int, ...], dict[str, Any]]:  # fmt: skip
    """Return programs, number of strips, numbers and constants of the forward kernel."""
    num_steps, num_sequences, experts = _sizes(shape)
    wide = compute_dtype(dtype)
    groups = num_groups if group_topk < num_groups else 1
    size = experts // groups
    all_groups, each = next_power_of_2(groups), max(next_power_of_2(size), 16 if groups == 1 else 1)
    width = all_groups * each
    block_m, num_warps = block_shape(num_steps * num_sequences, width, wide.itemsize)
    # a quarter of the usual number of strips: all programs run at once
    num_strips, strip_steps = strip_shape(num_steps, 4 * num_sequences, block_m, 1)
    if num_sequences > MAX_WALKING:
        raise ValueError(
            f"topk_router: expected at most {MAX_WALKING} sequences, got {num_sequences}: fold them into one"
        )
    vector = vector_width(dtype.itemsize, experts, pitch)
    constants = {
        "K": k, "K_BLOCK": next_power_of_2(k), "GROUPS": groups, "SIZE": size,
        "OPEN": min(group_topk, groups), "ELEMENTWISE": score in ELEMENTWISE,
        "SOFTPLUS": score == "sqrtsoftplus", "AFTER": score == "logits",
        "NORMALIZE": normalize, "VECTOR": vector, "BLOCK_M": block_m,
        "PARTS": parts(width, dtype.itemsize, vector, size), "ALL": all_groups, "EACH": each,
        "num_warps": num_warps,
    }  # fmt: skip
    numbers = num_steps, num_sequences, strip_steps, pitch // vector
    return num_strips * num_sequences, num_strips, numbers, constants


def check_bias(logits: Tensor, expert_bias: Tensor | None) -> None:
    """Raise the RuntimeError of the C++ implementation unless a raw call's bias has its dtype and size."""
    wide, experts = compute_dtype(logits.dtype), logits.shape[-1]
    if expert_bias is not None and (expert_bias.dtype, expert_bias.numel()) != (wide, experts):
        wanted, got = (
            torch.empty(0, dtype=dtype).type().removeprefix("torch.").removesuffix("Tensor")
            for dtype in (wide, expert_bias.dtype)
        )
        raise RuntimeError(
            f"topk_router: expert_bias must have {experts} numbers of {wanted}, got {expert_bias.numel()} of "
            f"{got}"
        )


def launch(
    logits: Tensor,
    expert_bias: Tensor | None,
    k: int,
    score: str,
    num_groups: int,
    group_topk: int,
    normalize: bool,
    scale: float,
    balance: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    check_bias(logits, expert_bias)
    shape, dtype = logits.shape, logits.dtype
    chosen, sums = (*shape[:-1], k), shape[1:]
    indices = logits.new_empty(size=chosen, dtype=torch.int32)
    probs = logits.new_empty(size=chosen, dtype=compute_dtype(dtype))
    counts, score_sums, z_sum = indices.new_empty(*sums), probs.new_empty(*sums), probs.new_empty(size=())
    balance_counts = indices.new_empty(sums if balance else 0)
    if logits.numel() == 0:
        return indices, probs, counts.zero_(), score_sums.zero_(), z_sum.zero_(), balance_counts.zero_()
    rows, pitch = as_rows(logits)
    programs, num_strips, numbers, constants = plan(
        shape, pitch, dtype, k, score, num_groups, group_topk, normalize
    )
    num_sums = counts.numel()
    partials = (
        probs.new_empty(num_strips, num_sums), indices.new_empty(num_strips, num_sums),
        indices.new_empty(num_strips, num_sums) if balance else None, probs.new_empty(programs),
    )  # fmt: skip
    launcher.launch(
        router_kernel, programs,
        (
            rows, None if expert_bias is None else expert_bias.contiguous(), indices, probs, *partials,
            *numbers, scale,
        ),
        constants,
    )  # fmt: skip
    block_m, block_n = _SUM_BLOCK
    launcher.launch(
        router_sums_kernel, cdiv(num_sums, block_n) + 1,
        (
            *partials, score_sums, counts, balance_counts if balance else None, z_sum, num_strips, programs,
            num_sums,
        ),
        {"BLOCK_M": block_m, "BLOCK_N": block_n, "num_warps": 8},
    )  # fmt: skip
    return indices, probs, counts, score_sums, z_sum, balance_counts


@lru_cache(maxsize=1024)
def _plan_backward(
    shape: tuple[int, ...], pitch: int, dtype: torch.dtype, k: int, score: str, normalize: bool
) -> tuple[int, tuple[int, ...], dict[str, Any]]:
    """Return programs, numbers and constants of the backward kernel."""
    num_steps, num_sequences, experts = _sizes(shape)
    width = max(16, next_power_of_2(experts))
    block_m, num_warps = backward_block_shape(width, compute_dtype(dtype).itemsize)
    vector = vector_width(dtype.itemsize, experts, pitch)
    constants = {
        "K": k, "EXPERTS": experts, "ELEMENTWISE": score in ELEMENTWISE,
        "SOFTPLUS": score == "sqrtsoftplus", "NORMALIZE": normalize,
        "COMPUTE": arithmetic(dtype), "VECTOR": vector, "BLOCK_M": block_m, "WIDTH": width,
        "PARTS": parts(width, dtype.itemsize, vector, experts), "num_warps": num_warps,
    }  # fmt: skip
    return cdiv(num_steps, block_m) * num_sequences, (num_steps, num_sequences, pitch // vector), constants


def launch_backward(
    grad_probs: Tensor | None,
    grad_sums: Tensor | None,
    grad_z: Tensor | None,
    logits: Tensor,
    indices: Tensor,
    score: str,
    normalize: bool,
    scale: float,
) -> Tensor:
    dx = empty_like(logits)
    if logits.numel() == 0:
        return dx
    rows, pitch = as_rows(logits)
    programs, numbers, constants = _plan_backward(
        logits.shape, pitch, logits.dtype, indices.shape[-1], score, normalize and grad_probs is not None
    )
    launcher.launch(
        router_backward_kernel, programs,
        (
            None if grad_probs is None else grad_probs.contiguous(),
            None if grad_sums is None else grad_sums.contiguous(), grad_z, rows, indices.contiguous(), dx,
            *numbers, scale,
        ),
        constants,
    )  # fmt: skip
    return dx
