"""Triton kernel of the FP8 GEMMs: q w[e]^T over each expert's rows, scaled block by block.

Tiles, experts and loops are those of `grouped_mm_triton`. The tensor cores of Hopper accumulate FP8 products
in some 14 bits, so the sum over a block of 128 terms is scaled and added in FP32 registers (promotion). Those
of Blackwell apply the scales of blocks of 32 terms (MXFP8) and accumulate in FP32.

Triton's interpreter has neither: operands come as bytes, are dequantised in integer code, and multiplied in
float32, in which products of FP8 numbers are exact.
"""

from __future__ import annotations

from fastmp.ops.core._triton import (
    MAX_COUNT,
    MAX_EXPERTS,
    MAX_SIZE,
    MAX_WALKING,
    jit,
    limits,
    tl,
)
from fastmp.ops.core.fp8 import fp8_values, quantize_tile, scale_values, store_scales
from fastmp.ops.gated import activate
from fastmp.ops.grouped_mm_epilogues import store_parts
from fastmp.ops.grouped_mm_triton import expert_ends, load_block, load_weight, place_of


@jit
def _load_scales(
    scales, outer, first_k, num_outer, num_k, outer_pitch, term_pitch, BLOCK: tl.constexpr,
    OUTER_BLOCK: tl.constexpr, EACH: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Load (outer, BLOCK_K / EACH) scales of terms from `first_k` on, one for each EACH terms of a block."""
    ks = first_k + tl.arange(0, BLOCK_K // EACH) * EACH
    mask = (outer < num_outer)[:, None] & (ks < num_k)[None, :]
    along = (outer // OUTER_BLOCK).to(tl.int64)[:, None] * outer_pitch
    return tl.load(scales + along + (ks // BLOCK).to(tl.int64)[None, :] * term_pitch, mask=mask, other=0)


@jit
def _multiply(
    acc, a, s, w, w_scale, expert, rows, end, first_n, first_k, num_n, num_k, s_row, s_pitch, w_jump, w_pitch,
    w_scale_jump, w_scale_n, w_scale_k,
    BLOCK: tl.constexpr, Q_E5M2: tl.constexpr, INTERPRETED: tl.constexpr, TMA: tl.constexpr,
    W_VECTOR: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return acc + a b, scaled, for a (BLOCK_M, BLOCK_K) and columns of w[e] from `first_n` on."""
    b = load_weight(
        w, expert, first_n, first_k, num_n, num_k, w_jump, w_pitch, TMA, False, W_VECTOR, BLOCK_N, BLOCK_K
    )
    w_scale += tl.cast(expert, tl.int64) * w_scale_jump
    if BLOCK == 128:
        # 1. Promotion: the sum over this block of terms, times both scales, is added in FP32. A tile lies in
        # one block of columns.
        step = tl.cast(first_k // BLOCK, tl.int64)
        row_scale = tl.load(s + rows.to(tl.int64) * s_row + step * s_pitch, mask=rows < end, other=0.0)
        scale = tl.load(w_scale + tl.cast(first_n // BLOCK, tl.int64) * w_scale_n + step * w_scale_k)
        if INTERPRETED:
            a, b = fp8_values(a, Q_E5M2), fp8_values(b, False)
        acc += tl.dot(a, b, input_precision="ieee") * (row_scale * scale)[:, None]
    else:
        # 2. MXFP8: the tensor cores take an exponent for each 32 terms.
        EACH: tl.constexpr = 1 if INTERPRETED else BLOCK
        ns = first_n + tl.arange(0, BLOCK_N)
        row_scales = _load_scales(s, rows, first_k, end, num_k, s_row, s_pitch, BLOCK, 1, EACH, BLOCK_K)
        scales = _load_scales(
            w_scale, ns, first_k, num_n, num_k, w_scale_n, w_scale_k, BLOCK, BLOCK, EACH, BLOCK_K
        )
        if INTERPRETED:
            a = fp8_values(a, Q_E5M2) * scale_values(row_scales)
            b = fp8_values(b, False) * scale_values(scales).T
            acc = tl.dot(a, b, acc, input_precision="ieee")
        else:
            FORMAT: tl.constexpr = "e5m2" if Q_E5M2 else "e4m3"
            acc = tl.dot_scaled(a, row_scales, FORMAT, b, scales, "e4m3", acc)
    return acc


@jit
def _store(
    y, y_scale, h, expert, num_experts, acc, up, rows, end, first_n, width, num_rows,
    FORM: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr, NATIVE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Store a tile of y; if GATED a tile of h = [gate | up], and y = form(gate) * up in FP8."""
    if not GATED:
        store_parts(
            y, None, None, expert, num_experts, acc, acc, rows, end, first_n, width, "none", False, False,
            False, BLOCK_M, BLOCK_N, 1,
        )  # fmt: skip
    else:
        # 1. Store the pre-activation for the backward pass.
        cols = first_n + tl.arange(0, BLOCK_N)
        mask = (rows < end)[:, None] & (cols < width)[None, :]
        wide_rows = rows.to(tl.int64)
        kept = h + wide_rows[:, None] * 2 * width + cols[None, :]
        tl.store(kept, acc, mask=mask)
        tl.store(kept + width, up, mask=mask)
        # 2. Activate and gate what was stored, rounded to its dtype, as an op of its own would, so that the
        # backward pass can compute y again. Columns beyond y add nothing to amax.
        dtype = h.dtype.element_ty
        acc, up = acc.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
        gated = (activate(acc, FORM) * up).to(dtype).to(tl.float32)
        gated = tl.where((cols < width)[None, :], gated, 0.0)
        # 3. Quantise the blocks of columns that the tile holds. Rows of other experts have scales elsewhere.
        values, scales = quantize_tile(gated, BLOCK, False, NATIVE)
        tl.store(y + wide_rows[:, None] * width + cols[None, :], values, mask=mask)
        own = tl.where(rows < end, wide_rows, num_rows)
        store_scales(y_scale, scales, own, first_n, num_rows, width, BLOCK)


@limits(
    n_vectors=MAX_SIZE // 2, k_vectors=MAX_SIZE, num_experts=MAX_EXPERTS, num_rows=MAX_COUNT,
    programs=MAX_WALKING, lengths=MAX_COUNT, tiles=MAX_COUNT, owned=MAX_COUNT, turns=MAX_COUNT,
    group=MAX_SIZE, first_m=MAX_COUNT, first_n=16 * MAX_SIZE,
)  # fmt: skip
@jit(
    dynamic="num_rows s_pitch",
    fixed="num_experts n_vectors k_vectors q_pitch w_jump w_pitch s_row w_scale_jump w_scale_n w_scale_k",
)
def grouped_mm_fp8_kernel(
    q,  # (M, K) FP8, rows q_pitch vectors apart, or a TMA descriptor
    s,  # (M, K / BLOCK), the scales of q, float32 or exponents
    w,  # (L, N, K) e4m3; matrices w_jump, rows w_pitch vectors apart; or a descriptor
    w_scale,  # (L, N / BLOCK, K / BLOCK), the scales of w
    offsets,  # (L,) int32, where each expert's rows end; None: one expert has all rows
    y,  # (M, N); if GATED (M, N / 2) bytes of e4m3
    y_scale,  # (M, N / 2 / BLOCK), M-major, if GATED
    h,  # (M, N), if GATED
    num_rows, s_pitch, num_experts, n_vectors, k_vectors, q_pitch, w_jump, w_pitch, s_row, w_scale_jump,
    w_scale_n, w_scale_k,
    FORM: tl.constexpr, GATED: tl.constexpr, NATIVE: tl.constexpr, BLOCK: tl.constexpr, Q_E5M2: tl.constexpr,
    INTERPRETED: tl.constexpr, FLAT: tl.constexpr, TMA: tl.constexpr, N_VECTOR: tl.constexpr,
    K_VECTOR: tl.constexpr, W_VECTOR: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Store y = q w[e]^T, both scaled; or h, and y = form(gate) * up in FP8.

    n_vectors counts columns of y. Sizes and pitches count vectors, which proves alignment.
    """
    width, num_k, experts = n_vectors * N_VECTOR, k_vectors * K_VECTOR, tl.arange(0, BLOCK_E)
    num_n = 2 * width if GATED else width
    # 1. Rows and tiles of every expert, from the offsets; last_tiles: where its tiles end.
    ends = expert_ends(offsets, experts, num_experts, num_rows, num_rows)
    starts = expert_ends(offsets, experts - 1, num_experts, num_rows, num_rows)
    tiles_n = tl.cdiv(width, BLOCK_N)
    lengths = ends - starts
    tiles = tl.cdiv(lengths, BLOCK_M) * tiles_n
    last_tiles = tl.cumsum(tiles, 0)
    steps = tl.cdiv(num_k, BLOCK_K)
    pid, programs, num_tiles = tl.program_id(0), tl.num_programs(0), tl.max(last_tiles, 0)
    first_tile = pid
    if FLAT:
        # 2. One loop over the K steps of all tiles of experts, so that loads of the next tile are issued
        # while this one is stored. A tile's last step stores it; the next step begins another tile.
        owned = tl.sum(tl.where(experts < num_experts, tiles, 0), 0)
        turns = tl.cdiv(tl.maximum(owned - pid, 0), programs) * steps
        tile, step = pid - programs, steps - 1
        expert, end, first_m, first_n = 0, 0, 0, 0
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for _ in range(0, turns):
            step = tl.where(step == steps - 1, 0, step + 1)
            if step == 0:
                tile += programs
                expert, end, first_m, first_n = place_of(
                    tile, experts, ends, last_tiles, tiles_n, BLOCK_M, BLOCK_N, GROUP
                )
            first_k = step * BLOCK_K
            rows = first_m + tl.arange(0, BLOCK_M)
            a = q.load([first_m, first_k])
            acc = _multiply(
                acc, a, s, w, w_scale, expert, rows, end, first_n, first_k, num_n, num_k, s_row, s_pitch,
                w_jump, w_pitch, w_scale_jump, w_scale_n, w_scale_k, BLOCK, Q_E5M2, INTERPRETED, TMA,
                W_VECTOR, BLOCK_N, BLOCK_K,
            )  # fmt: skip
            if GATED:
                up = _multiply(
                    up, a, s, w, w_scale, expert, rows, end, width + first_n, first_k, num_n, num_k, s_row,
                    s_pitch, w_jump, w_pitch, w_scale_jump, w_scale_n, w_scale_k, BLOCK, Q_E5M2, INTERPRETED,
                    TMA, W_VECTOR, BLOCK_N, BLOCK_K,
                )  # fmt: skip
            if step == steps - 1:
                _store(
                    y, y_scale, h, expert, num_experts, acc, up, rows, end, first_n, width, num_rows, FORM,
                    GATED, BLOCK, NATIVE, BLOCK_M, BLOCK_N,
                )  # fmt: skip
                acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
                up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        first_tile = owned + pid
    # 3. One tile after another. With FLAT only tiles of rows of no expert are left, which have no terms.
    for tile in range(first_tile, num_tiles, programs):
        expert, end, first_m, first_n = place_of(
            tile, experts, ends, last_tiles, tiles_n, BLOCK_M, BLOCK_N, GROUP
        )
        rows = first_m + tl.arange(0, BLOCK_M)
        # 3a. Accumulate over K in steps of BLOCK_K.
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        if not FLAT:
            for step in range(0, tl.where(expert < num_experts, steps, 0)):
                first_k = step * BLOCK_K
                if TMA:
                    a = q.load([first_m, first_k])
                else:
                    ks = first_k + tl.arange(0, BLOCK_K)
                    a = load_block(q, rows[:, None], ks[None, :], end, num_k, q_pitch, K_VECTOR)
                acc = _multiply(
                    acc, a, s, w, w_scale, expert, rows, end, first_n, first_k, num_n, num_k, s_row, s_pitch,
                    w_jump, w_pitch, w_scale_jump, w_scale_n, w_scale_k, BLOCK, Q_E5M2, INTERPRETED, TMA,
                    W_VECTOR, BLOCK_N, BLOCK_K,
                )  # fmt: skip
                if GATED:
                    up = _multiply(
                        up, a, s, w, w_scale, expert, rows, end, width + first_n, first_k, num_n, num_k,
                        s_row, s_pitch, w_jump, w_pitch, w_scale_jump, w_scale_n, w_scale_k, BLOCK, Q_E5M2,
                        INTERPRETED, TMA, W_VECTOR, BLOCK_N, BLOCK_K,
                    )  # fmt: skip
        # 3b. Store rows of this expert.
        _store(
            y, y_scale, h, expert, num_experts, acc, up, rows, end, first_n, width, num_rows, FORM, GATED,
            BLOCK, NATIVE, BLOCK_M, BLOCK_N,
        )  # fmt: skip
