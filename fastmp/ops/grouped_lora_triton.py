"""Triton kernel of a grouped GEMM with LoRA: x w[e]^T + low v[e]^T in one accumulator, and its launch.

The tile, the operands and the walk over the experts are those of `grouped_mm_triton`. The R terms of LoRA are
few: they are loaded through pointers after the K terms, and cost no pass over the result.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import Tensor

from fastmp.ops.core import launcher
from fastmp.ops.core._triton import (
    MAX_COUNT,
    MAX_EXPERTS,
    MAX_SIZE,
    MAX_WALKING,
    cdiv,
    jit,
    limits,
    next_power_of_2,
    tl,
)
from fastmp.ops.core.rowwise import vector_width
from fastmp.ops.core.tma import descriptor
from fastmp.ops.grouped_mm_epilogues import store_parts
from fastmp.ops.grouped_mm_launch import (
    STORE,
    GemmDesc,
    GemmPlan,
    aligned,
    along_rows,
    check_counts,
    gpu_of,
    plan_gemm,
)
from fastmp.ops.grouped_mm_tiles import row_class
from fastmp.ops.grouped_mm_triton import expert_ends, load_block, load_weight, place_of

_BLOCK_R = 64  # most terms of LoRA in a step
_FLAT_R = 32  # and next to the operands of the next tile in shared memory


@limits(
    n_vectors=MAX_SIZE, k_vectors=MAX_SIZE, r_vectors=MAX_SIZE, num_experts=MAX_EXPERTS, num_rows=MAX_COUNT,
    programs=MAX_WALKING, lengths=MAX_COUNT, tiles=MAX_COUNT, owned=MAX_COUNT, turns=MAX_COUNT,
    group=MAX_SIZE, first_m=MAX_COUNT, first_n=16 * MAX_SIZE,
)  # fmt: skip
@jit(
    dynamic="num_rows",
    fixed="num_experts n_vectors k_vectors x_pitch w_jump w_pitch r_vectors low_pitch v_jump v_pitch",
)
def grouped_lora_kernel(
    x,  # (M, K), rows x_pitch vectors apart, or a TMA descriptor
    w,  # (E, N, K), or (E, K, N) if TRANSPOSED; matrices w_jump, rows w_pitch vectors apart; or a descriptor
    bias,  # (E, N), if HAS_BIAS
    low,  # (M, R), rows low_pitch vectors apart
    v,  # (E, N, R), or (E, R, N) if V_TRANSPOSED; matrices v_jump, rows v_pitch vectors apart
    offsets,  # (E,) int32, where each expert's rows end
    y,  # (M, N)
    num_rows, num_experts, n_vectors, k_vectors, x_pitch, w_jump, w_pitch, r_vectors, low_pitch, v_jump,
    v_pitch,
    HAS_BIAS: tl.constexpr, TRANSPOSED: tl.constexpr, V_TRANSPOSED: tl.constexpr, FLAT: tl.constexpr,
    TMA: tl.constexpr, COMPUTE: tl.constexpr, N_VECTOR: tl.constexpr, K_VECTOR: tl.constexpr,
    W_VECTOR: tl.constexpr, R_VECTOR: tl.constexpr, V_VECTOR: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """Store y = x w[e]^T + low v[e]^T + bias[e]. Vectors: see `grouped_mm_kernel`."""
    num_n, num_k, num_r = n_vectors * N_VECTOR, k_vectors * K_VECTOR, r_vectors * R_VECTOR
    experts = tl.arange(0, BLOCK_E)
    # 1. Rows and tiles of every expert, from the offsets; last_tiles: where its tiles end.
    ends = expert_ends(offsets, experts, num_experts, num_rows, num_rows)
    starts = expert_ends(offsets, experts - 1, num_experts, num_rows, num_rows)
    tiles_n = tl.cdiv(num_n, BLOCK_N)
    lengths = ends - starts
    tiles = tl.cdiv(lengths, BLOCK_M) * tiles_n
    last_tiles = tl.cumsum(tiles, 0)
    steps = tl.cdiv(num_k, BLOCK_K)
    pid, programs, num_tiles = tl.program_id(0), tl.num_programs(0), tl.max(last_tiles, 0)
    first_tile = pid
    if FLAT:
        # 2. One loop over the K steps of all tiles of experts, see `grouped_mm_kernel`. A tile's last step
        # adds the terms of LoRA, at most BLOCK_R, while the next tile is loaded.
        owned = tl.sum(tl.where(experts < num_experts, tiles, 0), 0)
        turns = tl.cdiv(tl.maximum(owned - pid, 0), programs) * steps
        tile, step = pid - programs, steps - 1
        expert, end, first_m, first_n = 0, 0, 0, 0
        acc = tl.zeros([BLOCK_M, BLOCK_N], COMPUTE)
        for _ in range(0, turns):
            step = tl.where(step == steps - 1, 0, step + 1)
            if step == 0:
                tile += programs
                expert, end, first_m, first_n = place_of(
                    tile, experts, ends, last_tiles, tiles_n, BLOCK_M, BLOCK_N, GROUP
                )
            first_k = step * BLOCK_K
            a = x.load([first_m, first_k])
            b = load_weight(
                w, expert, first_n, first_k, num_n, num_k, w_jump, w_pitch, TMA, TRANSPOSED, W_VECTOR,
                BLOCK_N, BLOCK_K,
            )  # fmt: skip
            acc = tl.dot(a, b, acc, input_precision="ieee", out_dtype=COMPUTE)
            if step == steps - 1:
                rows = first_m + tl.arange(0, BLOCK_M)
                rs = tl.arange(0, BLOCK_R)
                terms = load_block(low, rows[:, None], rs[None, :], end, num_r, low_pitch, R_VECTOR)
                factor = load_weight(
                    v, expert, first_n, 0, num_n, num_r, v_jump, v_pitch, False, V_TRANSPOSED, V_VECTOR,
                    BLOCK_N, BLOCK_R,
                )  # fmt: skip
                acc = tl.dot(terms, factor, acc, input_precision="ieee", out_dtype=COMPUTE)
                store_parts(
                    y, None, bias, expert, num_experts, acc, acc, rows, end, first_n, num_n, "none", False,
                    False, HAS_BIAS, BLOCK_M, BLOCK_N, 1,
                )  # fmt: skip
                acc = tl.zeros([BLOCK_M, BLOCK_N], COMPUTE)
        first_tile = owned + pid
    # 3. One tile after another. With FLAT only tiles of rows of no expert are left, which have no terms.
    for tile in range(first_tile, num_tiles, programs):
        expert, end, first_m, first_n = place_of(
            tile, experts, ends, last_tiles, tiles_n, BLOCK_M, BLOCK_N, GROUP
        )
        rows = first_m + tl.arange(0, BLOCK_M)
        has_terms = expert < num_experts
        # 3a. Accumulate over K in steps of BLOCK_K.
        acc = tl.zeros([BLOCK_M, BLOCK_N], COMPUTE)
        if not FLAT:
            for step in range(0, tl.where(has_terms, steps, 0)):
                first_k = step * BLOCK_K
                if TMA:
                    a = x.load([first_m, first_k])
                else:
                    ks = first_k + tl.arange(0, BLOCK_K)
                    a = load_block(x, rows[:, None], ks[None, :], end, num_k, x_pitch, K_VECTOR)
                b = load_weight(
                    w, expert, first_n, first_k, num_n, num_k, w_jump, w_pitch, TMA, TRANSPOSED, W_VECTOR,
                    BLOCK_N, BLOCK_K,
                )  # fmt: skip
                acc = tl.dot(a, b, acc, input_precision="ieee", out_dtype=COMPUTE)
            # 3b. Continue with the terms of LoRA, mostly one step.
            for step in tl.range(0, tl.where(has_terms, tl.cdiv(num_r, BLOCK_R), 0), num_stages=1):
                first_r = step * BLOCK_R
                rs = first_r + tl.arange(0, BLOCK_R)
                a = load_block(low, rows[:, None], rs[None, :], end, num_r, low_pitch, R_VECTOR)
                b = load_weight(
                    v, expert, first_n, first_r, num_n, num_r, v_jump, v_pitch, False, V_TRANSPOSED, V_VECTOR,
                    BLOCK_N, BLOCK_R,
                )  # fmt: skip
                acc = tl.dot(a, b, acc, input_precision="ieee", out_dtype=COMPUTE)
        # 3c. Epilogue: add the bias; only rows of this expert are stored.
        store_parts(
            y, None, bias, expert, num_experts, acc, acc, rows, end, first_n, num_n, "none", False, False,
            HAS_BIAS, BLOCK_M, BLOCK_N, 1,
        )  # fmt: skip


def overlaps_lora(arch: int, r: int) -> bool:
    """Return True if a GEMM that loads the next tile while it stores this one can add r terms of LoRA there.

    Triton 3.6 fails to compile a GEMM inside of a branch for Blackwell.
    """
    return arch < 100 and r <= _FLAT_R


@cache
def _plan(r: int, v_strides: tuple[int, ...], v_transposed: bool, *fields: Any) -> GemmPlan:
    """Plan a launch for low (M, r), contiguous; fields: those of the `GemmDesc` of x and w."""
    desc = GemmDesc(*fields)
    gemm = plan_gemm(*fields)
    itemsize, (v_jump, v_pitch, _) = desc.itemsize, v_strides
    columns = desc.w_shape[2 if desc.transposed else 1]
    v_vector = vector_width(itemsize, columns if v_transposed else r, v_jump, v_pitch)
    r_vector = vector_width(itemsize, r, *(() if v_transposed else (v_jump, v_pitch)))
    sizes = r // r_vector, r // r_vector, v_jump // v_vector, v_pitch // v_vector
    ours = set(grouped_lora_kernel.arg_names) | {"num_warps", "num_stages"}
    constants = {name: value for name, value in gemm.constants.items() if name in ours}
    constants |= {
        "FLAT": constants["FLAT"] and overlaps_lora(desc.arch, r), "V_TRANSPOSED": v_transposed,
        "R_VECTOR": r_vector, "V_VECTOR": v_vector,
        "BLOCK_R": min(_BLOCK_R, max(16, next_power_of_2(max(r, 1)))),
    }  # fmt: skip
    return gemm._replace(sizes=(*gemm.sizes, *sizes), constants=constants)


def launch(
    x: Tensor, w: Tensor, bias: Tensor | None, low: Tensor, v: Tensor, offsets: Tensor, transposed: bool,
    v_transposed: bool,
) -> Tensor:  # fmt: skip
    num_rows, w_shape = x.shape[0], w.shape
    y = x.new_empty(num_rows, w_shape[2 if transposed else 1])
    if y.numel() == 0:
        return y
    low = low.contiguous()
    (x, x_strides), (w, w_strides), (v, v_strides) = along_rows(x), along_rows(w), along_rows(v)
    tile, tiles, programs, most, sizes, constants = _plan(
        low.shape[1], v_strides, v_transposed,
        row_class(num_rows, w_shape[0]), w_shape, w_strides, x_strides[0], x.element_size(),
        *gpu_of(x), aligned(x, w), transposed, bias is not None, STORE,
    )  # fmt: skip
    tiles *= cdiv(num_rows, tile.block_m) + w_shape[0]
    if num_rows > most:
        check_counts("grouped_mm_lora", num_rows, tiles, programs, cdiv(x.shape[1], tile.block_k))
    if constants["TMA"]:
        x = descriptor(x, x.shape, x_strides, tile.block_m, tile.block_k)
        w_block = (tile.block_k, tile.block_n) if transposed else (tile.block_n, tile.block_k)
        w = descriptor(w, w_shape, w_strides, 1, *w_block)
    launcher.launch(
        grouped_lora_kernel, min(tiles, programs),
        (
            x, w, None if bias is None else bias.contiguous(), low, v, offsets.contiguous(), y, num_rows,
            *sizes,
        ),
        constants,
    )  # fmt: skip
    return y
