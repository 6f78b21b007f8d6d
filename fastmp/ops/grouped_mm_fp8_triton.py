"""Triton kernel of the FP8 GEMMs, q w[e]^T over each expert's rows scaled block by block, and its launches.

Tiles, experts and loops are those of `grouped_mm_triton`. The tensor cores of Hopper accumulate FP8 products
in some 14 bits, so the sum over a block of 128 terms is scaled and added in FP32 registers (promotion). Those
of Blackwell apply the scales of blocks of 32 terms (MXFP8) and accumulate in FP32.

Triton's interpreter has neither: operands come as bytes, are dequantised in integer code, and multiplied in
float32, in which products of FP8 numbers are exact.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastmp.ops.core import fp8, launcher
from fastmp.ops.core._triton import (
    INTERPRETED,
    MAX_COUNT,
    MAX_EXPERTS,
    MAX_SIZE,
    MAX_WALKING,
    cdiv,
    jit,
    limits,
    tl,
)
from fastmp.ops.core.fp8 import fp8_values, quantize_tile, scale_values, store_scales
from fastmp.ops.core.rowwise import vector_width
from fastmp.ops.core.tma import descriptor, use_tma
from fastmp.ops.gated import activate
from fastmp.ops.grouped_mm_epilogues import store_parts
from fastmp.ops.grouped_mm_launch import (
    GROUP,
    GemmPlan,
    aligned,
    along_rows,
    architecture,
    block_e,
    check_counts,
    gpu_of,
    max_rows,
)
from fastmp.ops.grouped_mm_tiles import fp8_tiles, row_class
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


# Compute capability from which tensor cores multiply FP8 of a block, as one number.
LEAST_ARCHITECTURE = {128: 89, 32: 100}


class Fp8GemmDesc(NamedTuple):
    """Everything an FP8 GEMM's launch depends on, except the number of rows; the key of its plan."""

    row_class: float  # of ROW_CLASSES
    w_shape: tuple[int, int, int]  # (L, N, K)
    w_strides: tuple[int, int, int]  # in elements; the last is 1
    q_pitch: int  # elements from row to row
    arch: int
    multiprocessors: int
    aligned: bool  # q and w begin on 16 bytes
    block: int  # 128 or 32
    e5m2: bool  # q is; else e4m3
    form: str  # of the activation if gated, else "none"


@cache
def _plan(*fields: Any) -> GemmPlan:
    desc = Fp8GemmDesc(*fields)
    (num_experts, num_n, num_k), (w_jump, w_pitch, _) = desc.w_shape, desc.w_strides
    gated = desc.form != "none"
    width = num_n // 2 if gated else num_n
    tma = num_k > 0 and use_tma(desc.arch, 1, desc.aligned, desc.q_pitch, w_jump, w_pitch)
    # 1. The tile.
    tile = fp8_tiles(desc.row_class, width, desc.block, gated)
    # 2. Sizes and pitches in vectors, which proves their alignment to the compiler.
    w_vector = vector_width(1, num_k, w_jump, w_pitch)
    k_vector = vector_width(1, num_k, desc.q_pitch, w_jump, w_pitch)
    n_vector = vector_width(1, width)
    sizes = (
        num_experts, width // n_vector, num_k // k_vector, desc.q_pitch // k_vector, w_jump // w_vector,
        w_pitch // w_vector,
    )  # fmt: skip
    # 3. Constants of the kernel.
    constants = {
        "FORM": desc.form, "GATED": gated, "NATIVE": not INTERPRETED and desc.arch >= 89,
        "BLOCK": desc.block, "Q_E5M2": desc.e5m2, "INTERPRETED": INTERPRETED, "FLAT": tma, "TMA": tma,
        "N_VECTOR": n_vector, "K_VECTOR": k_vector, "W_VECTOR": w_vector, "BLOCK_E": block_e(num_experts),
        "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k, "GROUP": GROUP,
        "num_warps": tile.num_warps, "num_stages": tile.num_stages,
    }  # fmt: skip
    # 4. The grid.
    tiles, programs = cdiv(width, tile.block_n), tile.programs_per_sm(1, desc.arch, gated)
    most = max_rows(tile, tiles, num_experts, num_k)
    return GemmPlan(tile, tiles, programs * desc.multiprocessors, most, sizes, constants)


def _check_architecture(name: str, q: Tensor, block: int) -> None:
    """Raise ValueError on a GPU whose tensor cores lack FP8, or scales of 32 terms."""
    if q.is_cuda and (arch := architecture(q)) < (least := LEAST_ARCHITECTURE[block]):
        advice = "; quantise with block=128" if 89 <= arch else ""
        raise ValueError(
            f"{name}: block {block} needs a GPU of compute capability {least / 10}, got {arch / 10}{advice}"
        )


def _bytes(tensor: Tensor) -> Tensor:
    """Return the tensor as Triton takes it: interpreted FP8 numbers, and exponents, are bytes."""
    exponents = tensor.dtype == torch.float8_e8m0fnu
    return tensor.view(torch.uint8) if exponents or (INTERPRETED and tensor.itemsize == 1) else tensor


def _gemm(
    name: str, q: Tensor, s: Tensor, w: Tensor, w_scale: Tensor, offsets: Tensor | None, form: str,
    out: tuple[Tensor, Tensor | None, Tensor | None],
) -> None:  # fmt: skip
    """Launch the GEMM of q (M, K) by w (L, N, K) into y, and if gated the scales of y, and h."""
    num_rows, (num_experts, _, num_k) = q.shape[0], w.shape
    if out[0].numel() == 0:
        return
    block = fp8.BLOCKS[s.dtype]
    _check_architecture(name, q, block)
    (q, q_strides), (w, w_strides) = along_rows(q), along_rows(w)
    tile, tiles, programs, most, sizes, constants = _plan(  # the fields of Fp8GemmDesc
        row_class(num_rows, num_experts), tuple(w.shape), w_strides, q_strides[0],
        *gpu_of(q), aligned(q, w), block, q.dtype == torch.float8_e5m2, form,
    )  # fmt: skip
    tiles *= cdiv(num_rows, tile.block_m) + num_experts
    if num_rows > most:
        check_counts(name, num_rows, tiles, programs, cdiv(num_k, tile.block_k))
    q, s, w, w_scale = _bytes(q), _bytes(s), _bytes(w), _bytes(w_scale)
    if constants["TMA"]:
        q_map = descriptor(q, q.shape, q_strides, tile.block_m, tile.block_k)
        w_map = descriptor(w, w.shape, w_strides, 1, tile.block_n, tile.block_k)
    else:
        q_map, w_map = q, w
    offsets = None if offsets is None else offsets.contiguous()
    launcher.launch(
        grouped_mm_fp8_kernel, min(tiles, programs),
        (
            q_map, s, w_map, w_scale, offsets, *out, num_rows, s.stride(1), *sizes, s.stride(0),
            *w_scale.stride(),
        ),
        constants,
    )  # fmt: skip


def launch(
    name: str, q: Tensor, s: Tensor, w: Tensor, w_scale: Tensor, offsets: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Multiply q (M, K) by w (L, N, K); without offsets all rows are the first expert's."""
    y = q.new_empty(q.shape[0], w.shape[1], dtype=out_dtype)
    _gemm(name, q, s, w, w_scale, offsets, "none", (y, None, None))
    return y


def launch_mlp_in(
    q: Tensor, s: Tensor, w: Tensor, w_scale: Tensor, offsets: Tensor, form: str, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    num_rows, num_n = q.shape[0], w.shape[1]
    block = fp8.BLOCKS[s.dtype]
    y, y_scale = fp8.empty_rows(q, (num_rows, num_n // 2), block, fp8.E4M3)
    h = q.new_empty(num_rows, num_n, dtype=out_dtype)
    out = y.view(torch.uint8), fp8.scale_bytes(y_scale), h
    _gemm("grouped_mlp_in_fp8", q, s, w, w_scale, offsets, form, out)
    return y, y_scale, h
