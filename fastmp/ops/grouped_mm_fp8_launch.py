"""Launches of the FP8 GEMM kernel: a descriptor, its plan, and the launch, as in `grouped_mm_launch`."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastmp.ops.core import fp8, launcher
from fastmp.ops.core._triton import INTERPRETED, cdiv
from fastmp.ops.core.rowwise import vector_width
from fastmp.ops.core.tma import descriptor, use_tma
from fastmp.ops.grouped_mm_fp8_triton import grouped_mm_fp8_kernel
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
