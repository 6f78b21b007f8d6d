"""Triton kernels of the grouped products, and their launches.

The products over an expert's rows are a fixed number of programs that walk over the tiles of all experts;
where those lie, each program finds out from `offsets` by itself. Where the tile configuration leaves room
(`overlaps_tiles`), the K steps of all tiles of a program are one loop, so that the next tile is loaded while
this one is stored. The rows of nobody are one more expert,
whose product has no terms. A tile may load rows of the next expert, but stores its own rows only.
The gradient of the weights is one program a tile. There the rows are the terms, and a last block is loaded
with zeros in place of rows of the next expert, which may be NaN.
On Hopper and later operands come by TMA (host descriptors) where addresses allow it; `wgmma`
and `tcgen05` follow from the sizes of the blocks. Else they come through pointers.
No warps only load (`warp_specialize`): with Triton 3.6 that fails to compile for Hopper where numbers reduced
from a vector, as an expert's rows are, go to both sides; on Blackwell it starts anew with every tile.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from fastmp.ops.core import launcher
from fastmp.ops.core._triton import (
    INTERPRETED,
    MAX_COUNT,
    MAX_EXPERTS,
    MAX_SIZE,
    MAX_WALKING,
    cdiv,
    check_count,
    jit,
    limits,
    next_power_of_2,
    tl,
)
from fastmp.ops.core.registry import compute_dtype
from fastmp.ops.core.rowwise import vector_width
from fastmp.ops.core.tma import MAX_ROWS, descriptor, load_ragged, ragged, use_tma
from fastmp.ops.grouped_mm_epilogues import REDUCE_PARTS, reduce_sums, store_parts, store_sums
from fastmp.ops.grouped_mm_tiles import (
    ROWS_EACH,
    WGRAD_ROWS_EACH,
    Blocks,
    overlaps_tiles,
    product_blocks,
    row_class,
    wgrad_blocks,
)

_GROUP = 16  # tiles that share a block of the weight and are walked over first, so that it stays in L2


@jit
def _maximum(a, b):
    return tl.maximum(a, b)


@jit
def _expert_ends(offsets, experts, num_experts, num_rows):
    """Find where the rows of `experts` end; nobody's rows are those of number `num_experts`, and end last."""
    ends = tl.load(offsets + experts, mask=(experts >= 0) & (experts < num_experts), other=0)
    ends = tl.where(experts < num_experts, ends, num_rows)
    return tl.associative_scan(tl.maximum(tl.minimum(ends, num_rows), 0), 0, _maximum)


@jit
def _tile_of(number, tiles_m, tiles_n, GROUP: tl.constexpr):
    """Return (row, column) of a tile: GROUP rows of tiles after another, column by column."""
    group = number // (GROUP * tiles_n)
    height = tl.minimum(tiles_m - group * GROUP, GROUP)
    within = number % (GROUP * tiles_n)
    return group * GROUP + within % height, within // height


@jit
def _place_of(
    tile, experts, ends, last_tiles, tiles_n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """Return a tile's expert, where that expert's rows end, and the tile's first row and column."""
    expert = tl.sum((last_tiles <= tile).to(tl.int32), 0)
    start = tl.sum(tl.where(experts == expert - 1, ends, 0), 0)
    first = tl.sum(tl.where(experts == expert - 1, last_tiles, 0), 0)
    end = tl.sum(tl.where(experts == expert, ends, 0), 0)
    tile_m, tile_n = _tile_of(tile - first, tl.cdiv(end - start, BLOCK_M), tiles_n, GROUP)
    first_m = start + tile_m * BLOCK_M
    first_n = tile_n * BLOCK_N
    return expert, end, first_m, first_n


@jit
def _load_block(data, rows, cols, num_rows, num_cols, pitch, VECTOR: tl.constexpr):
    """Load what is at `rows` and `cols`; one lies along the block's rows, the other along its columns.

    pitch: vectors from row to row.
    """
    mask = (rows < num_rows) & (cols < num_cols)
    return tl.load(data + rows.to(tl.int64) * pitch * VECTOR + cols, mask=mask, other=0.0)


@jit
def _load_weight(
    w, expert, first_n, first_k, num_n, num_k, w_jump, w_pitch,
    TMA: tl.constexpr, TRANSPOSED: tl.constexpr, W_VECTOR: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Load (BLOCK_K, BLOCK_N) of the right operand of an expert's product: w[e]^T, or w[e] if TRANSPOSED."""
    ns, ks = first_n + tl.arange(0, BLOCK_N), first_k + tl.arange(0, BLOCK_K)
    if not TMA:
        matrix = w + expert.to(tl.int64) * w_jump * W_VECTOR
    if TMA and TRANSPOSED:
        block = w.load([expert, first_k, first_n]).reshape(BLOCK_K, BLOCK_N)
    elif TMA:
        block = w.load([expert, first_n, first_k]).reshape(BLOCK_N, BLOCK_K).T
    elif TRANSPOSED:
        block = _load_block(matrix, ks[:, None], ns[None, :], num_k, num_n, w_pitch, W_VECTOR)
    else:
        block = _load_block(matrix, ns[:, None], ks[None, :], num_n, num_k, w_pitch, W_VECTOR).T
    return block


@limits(
    n_vectors=MAX_SIZE, k_vectors=MAX_SIZE, num_experts=MAX_EXPERTS, num_rows=MAX_COUNT,
    programs=MAX_WALKING, lengths=MAX_COUNT, tiles=MAX_COUNT, owned=MAX_COUNT, turns=MAX_COUNT,
    group=MAX_SIZE, first_m=MAX_COUNT, first_n=16 * MAX_SIZE,
)  # fmt: skip
@jit
def grouped_mm_kernel(
    x, w, bias, offsets, y, h, num_rows, num_experts, n_vectors, k_vectors, x_pitch, w_jump, w_pitch,
    FORM: tl.constexpr, GATED: tl.constexpr, KEEP: tl.constexpr, HAS_BIAS: tl.constexpr,
    TRANSPOSED: tl.constexpr, FLAT: tl.constexpr, TMA: tl.constexpr, COMPUTE: tl.constexpr,
    N_VECTOR: tl.constexpr, K_VECTOR: tl.constexpr, W_VECTOR: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Store y = form(h), h = x times the weight of each row's expert, plus bias: num_n columns, num_k terms.

    GATED: the columns of h are [gate | up], a tile has a block of each, and y = form(gate) * up. Sizes
    and pitches count vectors of N_VECTOR (columns), K_VECTOR and W_VECTOR elements: that proves alignment.
    """
    width, num_k = n_vectors * N_VECTOR, k_vectors * K_VECTOR
    num_n, experts = 2 * width if GATED else width, tl.arange(0, BLOCK_E)
    # Rows and tiles of every expert, from offsets on the device; `last_tiles`: where its tiles end.
    ends = _expert_ends(offsets, experts, num_experts, num_rows)
    starts = _expert_ends(offsets, experts - 1, num_experts, num_rows)
    tiles_n = tl.cdiv(width, BLOCK_N)
    lengths = ends - starts
    tiles = tl.cdiv(lengths, BLOCK_M) * tiles_n
    last_tiles = tl.cumsum(tiles, 0)
    PARTS: tl.constexpr = 1 if FORM == "none" else 4 if GATED and FORM == "gelu" else 2
    steps = tl.cdiv(num_k, BLOCK_K)
    pid, programs, num_tiles = tl.program_id(0), tl.num_programs(0), tl.max(last_tiles, 0)
    first_tile = pid
    if FLAT:
        # 1. One loop over the K steps of all tiles of experts: loads of the next tile are issued while this
        # one is stored. Its last step stores a tile, the next step begins another one.
        owned = tl.sum(tl.where(experts < num_experts, tiles, 0), 0)
        turns = tl.cdiv(tl.maximum(owned - pid, 0), programs) * steps
        tile, step = pid - programs, steps - 1
        expert, end, first_m, first_n = 0, 0, 0, 0
        acc = tl.zeros([BLOCK_M, BLOCK_N], COMPUTE)
        up = tl.zeros([BLOCK_M, BLOCK_N], COMPUTE)
        for _ in range(0, turns):
            step = tl.where(step == steps - 1, 0, step + 1)
            if step == 0:
                tile += programs
                expert, end, first_m, first_n = _place_of(
                    tile, experts, ends, last_tiles, tiles_n, BLOCK_M, BLOCK_N, GROUP
                )
            first_k = step * BLOCK_K
            a = x.load([first_m, first_k])
            b = _load_weight(
                w, expert, first_n, first_k, num_n, num_k, w_jump, w_pitch, TMA, TRANSPOSED, W_VECTOR,
                BLOCK_N, BLOCK_K,
            )  # fmt: skip
            acc = tl.dot(a, b, acc, input_precision="ieee", out_dtype=COMPUTE)
            if GATED:
                b = _load_weight(
                    w, expert, width + first_n, first_k, num_n, num_k, w_jump, w_pitch, TMA, TRANSPOSED,
                    W_VECTOR, BLOCK_N, BLOCK_K,
                )  # fmt: skip
                up = tl.dot(a, b, up, input_precision="ieee", out_dtype=COMPUTE)
            if step == steps - 1:
                store_parts(
                    y, h, bias, expert, num_experts, acc, up, first_m + tl.arange(0, BLOCK_M), end, first_n,
                    width, FORM, GATED, KEEP, HAS_BIAS, BLOCK_M, BLOCK_N, PARTS,
                )  # fmt: skip
                acc = tl.zeros([BLOCK_M, BLOCK_N], COMPUTE)
                up = tl.zeros([BLOCK_M, BLOCK_N], COMPUTE)
        first_tile = owned + pid
    # 2. A tile after another: where FLAT, those of the rows of nobody, which have no terms.
    for tile in range(first_tile, num_tiles, programs):
        expert, end, first_m, first_n = _place_of(
            tile, experts, ends, last_tiles, tiles_n, BLOCK_M, BLOCK_N, GROUP
        )
        rows = first_m + tl.arange(0, BLOCK_M)
        # The loop over terms: x[rows] times w[expert]^T.
        acc = tl.zeros([BLOCK_M, BLOCK_N], COMPUTE)
        up = tl.zeros([BLOCK_M, BLOCK_N], COMPUTE)
        if not FLAT:
            for step in range(0, tl.where(expert < num_experts, steps, 0)):
                first_k = step * BLOCK_K
                if TMA:
                    a = x.load([first_m, first_k])
                else:
                    ks = first_k + tl.arange(0, BLOCK_K)
                    a = _load_block(x, rows[:, None], ks[None, :], end, num_k, x_pitch, K_VECTOR)
                b = _load_weight(
                    w, expert, first_n, first_k, num_n, num_k, w_jump, w_pitch, TMA, TRANSPOSED, W_VECTOR,
                    BLOCK_N, BLOCK_K,
                )  # fmt: skip
                acc = tl.dot(a, b, acc, input_precision="ieee", out_dtype=COMPUTE)
                if GATED:
                    b = _load_weight(
                        w, expert, width + first_n, first_k, num_n, num_k, w_jump, w_pitch, TMA, TRANSPOSED,
                        W_VECTOR, BLOCK_N, BLOCK_K,
                    )  # fmt: skip
                    up = tl.dot(a, b, up, input_precision="ieee", out_dtype=COMPUTE)
        # Epilogue: bias and activation in registers; only rows of this expert are stored.
        store_parts(
            y, h, bias, expert, num_experts, acc, up, rows, end, first_n, width, FORM, GATED, KEEP, HAS_BIAS,
            BLOCK_M, BLOCK_N, PARTS,
        )  # fmt: skip


@limits(
    n_vectors=MAX_SIZE, k_vectors=MAX_SIZE, num_rows=MAX_COUNT, length=MAX_COUNT,
    remaining=MAX_COUNT, rows=MAX_COUNT, tiles=MAX_COUNT, group=MAX_SIZE, first_n=16 * MAX_SIZE,
    first_k=16 * MAX_SIZE,
)  # fmt: skip
@jit
def grouped_wgrad_kernel(
    grad, x, offsets, out, num_rows, n_vectors, k_vectors, grad_pitch, x_pitch, out_jump, out_pitch,
    ACCUMULATE: tl.constexpr, REDUCE: tl.constexpr, INTERPRETED: tl.constexpr, TMA: tl.constexpr,
    COMPUTE: tl.constexpr, N_VECTOR: tl.constexpr, K_VECTOR: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Store one tile of the sum over an expert's rows of grad^T x, or add it to `out`. See grouped_mm_kernel.

    With TMA, `grad` and `x` are ragged descriptors. With REDUCE, `out` is a descriptor, too, to whose float32
    numbers the TMA unit adds: this program, the only one of its tile, does not read them.
    """
    num_n, num_k = n_vectors * N_VECTOR, k_vectors * K_VECTOR
    # Which expert's gradient, which rows are its terms, and which tile of it this program makes.
    tiles_n, tiles_k = tl.cdiv(num_n, BLOCK_N), tl.cdiv(num_k, BLOCK_K)
    tiles = tiles_n * tiles_k
    pid = tl.program_id(0)
    expert = pid // tiles
    experts = tl.arange(0, BLOCK_E)
    ends = tl.load(offsets + experts, mask=experts <= expert, other=0)
    ends = tl.minimum(ends, num_rows)
    end = tl.maximum(tl.max(ends, 0), 0)
    start = tl.maximum(tl.max(tl.where(experts < expert, ends, 0), 0), 0)
    length = end - start
    if ACCUMULATE:
        if length == 0:
            return
    tile_n, tile_k = _tile_of(pid % tiles, tiles_n, tiles_k, GROUP)
    first_n = tile_n * BLOCK_N
    first_k = tile_k * BLOCK_K
    ns, ks = first_n + tl.arange(0, BLOCK_N), first_k + tl.arange(0, BLOCK_K)
    acc = tl.zeros([BLOCK_N, BLOCK_K], COMPUTE)
    for row in range(0, length, BLOCK_R):
        if TMA:
            a = load_ragged(grad, row, first_n, length, end, BLOCK_R, BLOCK_N)
            b = load_ragged(x, row, first_k, length, end, BLOCK_R, BLOCK_K)
            a = a.T  # not before: what comes between two loads gives each a barrier of its own
        else:  # the gradient across: transposed later, it would not be loaded ahead on an A100
            rows = start + row + tl.arange(0, BLOCK_R)
            a = _load_block(grad, rows[None, :], ns[:, None], end, num_n, grad_pitch, N_VECTOR)
            b = _load_block(x, rows[:, None], ks[None, :], end, num_k, x_pitch, K_VECTOR)
        acc = tl.dot(a, b, acc, input_precision="ieee", out_dtype=COMPUTE)
    if REDUCE:
        reduce_sums(out, acc, expert, first_n, first_k, INTERPRETED, BLOCK_N, BLOCK_K)
    else:
        store_sums(
            out + expert.to(tl.int64) * out_jump * K_VECTOR, acc, ns, first_k, num_n, num_k, out_pitch,
            K_VECTOR, ACCUMULATE, BLOCK_N, BLOCK_K, PARTS=2 if TMA else 4,
        )  # fmt: skip


@cache
def _gpu(index: int) -> tuple[int, int]:
    properties = torch.cuda.get_device_properties(index)
    return properties.major * 10 + properties.minor, properties.multi_processor_count


def architecture(tensor: Tensor) -> int:
    """Return the compute capability of the tensor's GPU as one number (90 is 9.0)."""
    return _gpu(tensor.device.index)[0] if tensor.is_cuda else launcher.architecture_elsewhere


def _tile_architecture(arch: int, tma: bool) -> int:
    """Return the architecture that tiles are for: addresses take registers that the widest have not left."""
    return arch if tma else 80


def num_programs(tensor: Tensor, tiles: int, each: int) -> int:
    """Return how many programs walk over `tiles`: at most as many as run at a time; interpreted, a few."""
    return min(tiles, each * _gpu(tensor.device.index)[1] if tensor.is_cuda else 4)


def _aligned(a: Tensor, b: Tensor) -> bool:
    return not (a.data_ptr() | b.data_ptr()) & 15


def _along_rows(tensor: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Return the tensor with unit column stride, copied only where it has another, and its strides."""
    strides = tensor.stride()
    if strides[-1] != 1:
        tensor = tensor.contiguous()
        strides = tensor.stride()
    return tensor, strides


def _block_e(num_experts: int) -> int:
    """Return the length of a vector that holds all experts, and nobody."""
    return max(16, next_power_of_2(num_experts + 1))


# What a launch has that no count changes is worked out once, by the next three functions.


def _constants(itemsize: int, tma: bool, num_experts: int, blocks: Blocks) -> dict[str, Any]:
    """Make the constants that both kernels have."""
    compute = tl.float64 if itemsize == 8 else tl.float32
    return {
        "TMA": tma, "COMPUTE": compute, "BLOCK_E": _block_e(num_experts), "GROUP": _GROUP,
        "num_warps": blocks.num_warps, "num_stages": blocks.num_stages,
    }  # fmt: skip


@cache
def _plan_product(
    rows_each: float, w_shape: tuple[int, int, int], itemsize: int, x_pitch: int,
    w_strides: tuple[int, int, int], arch: int, aligned: bool, transposed: bool, form: str, gated: bool,
    keep: bool, has_bias: bool,
) -> tuple[Blocks, int, int, tuple[int, ...], dict[str, Any]]:  # fmt: skip
    """Return blocks, tiles side by side, programs a multiprocessor, arguments behind num_rows, constants."""
    (num_experts, num_n, num_k), (w_jump, w_pitch, _) = w_shape, w_strides
    tma = num_k > 0 and use_tma(arch, itemsize, aligned, x_pitch, w_jump, w_pitch)
    if transposed:
        num_n, num_k = num_k, num_n
    width = num_n // 2 if gated else num_n
    blocks = product_blocks(rows_each, width, num_k, itemsize, _tile_architecture(arch, tma), gated)
    w_vector = vector_width(itemsize, num_n if transposed else num_k, w_jump, w_pitch)
    k_vector = vector_width(itemsize, num_k, x_pitch, *(() if transposed else (w_jump, w_pitch)))
    n_vector = vector_width(itemsize, width, *((w_jump, w_pitch) if transposed else ()))
    sizes = (
        num_experts, width // n_vector, num_k // k_vector, x_pitch // k_vector, w_jump // w_vector,
        w_pitch // w_vector,
    )  # fmt: skip
    constants = {
        "FORM": form, "GATED": gated, "KEEP": keep, "HAS_BIAS": has_bias, "TRANSPOSED": transposed,
        "FLAT": tma and overlaps_tiles(arch, form, gated, has_bias and transposed),
        "N_VECTOR": n_vector, "K_VECTOR": k_vector, "W_VECTOR": w_vector, "BLOCK_M": blocks.rows,
        "BLOCK_N": blocks.columns, "BLOCK_K": blocks.terms,
    }  # fmt: skip
    constants |= _constants(itemsize, tma, num_experts, blocks)
    programs = blocks.programs_each(itemsize, arch, gated)
    return blocks, cdiv(width, blocks.columns), programs, sizes, constants


def _product(
    x: Tensor, w: Tensor, bias: Tensor | None, offsets: Tensor, transposed: bool, form: str, gated: bool,
    keep: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Return y = form(h), or form(gate) * up, and h = x times the weights + bias: None unless `keep`."""
    x_shape, w_shape = x.shape, w.shape
    num_rows, num_experts, columns = x_shape[0], w_shape[0], w_shape[2 if transposed else 1]
    y = x.new_empty(num_rows, columns // 2 if gated else columns)
    h = x.new_empty(num_rows, columns) if keep else None
    if y.numel() == 0:
        return y, h
    (x, x_strides), (w, w_strides) = _along_rows(x), _along_rows(w)
    blocks, tiles, programs, sizes, constants = _plan_product(
        row_class(ROWS_EACH, num_rows, num_experts), w_shape, x.element_size(), x_strides[0], w_strides,
        architecture(x), _aligned(x, w), transposed, form, gated, keep, bias is not None,
    )  # fmt: skip
    check_count("grouped_mm", "rows", num_rows)
    tiles *= cdiv(num_rows, blocks.rows) + num_experts
    check_count("grouped_mm", "tiles", tiles)
    programs = num_programs(x, tiles, programs)
    check_count("grouped_mm", "steps of a program", cdiv(tiles, programs) * cdiv(x_shape[1], blocks.terms))
    if constants["TMA"]:
        x = descriptor(x, x_shape, x_strides, blocks.rows, blocks.terms)
        w_block = (blocks.terms, blocks.columns) if transposed else (blocks.columns, blocks.terms)
        w = descriptor(w, w_shape, w_strides, 1, *w_block)
    launcher.launch(
        grouped_mm_kernel, programs,
        (x, w, None if bias is None else bias.contiguous(), offsets.contiguous(), y, h, num_rows, *sizes),
        constants,
    )  # fmt: skip
    return y, h


def launch(x: Tensor, w: Tensor, offsets: Tensor, transposed: bool) -> Tensor:
    return _product(x, w, None, offsets, transposed, "none", False, False)[0]


def launch_bias(x: Tensor, w: Tensor, bias: Tensor, offsets: Tensor, transposed: bool) -> Tensor:
    return _product(x, w, bias, offsets, transposed, "none", False, False)[0]


def launch_mlp_in(
    x: Tensor, w: Tensor, bias: Tensor | None, offsets: Tensor, form: str, gated: bool, keep: bool
) -> tuple[Tensor, Tensor]:
    y, h = _product(x, w, bias, offsets, False, form, gated, keep)
    return y, x.new_empty(0) if h is None else h


@cache
def _plan_wgrad(
    rows_each: float, shape: tuple[int, int, int], strides: tuple[int, int, int], itemsize: int,
    grad_pitch: int, x_pitch: int, arch: int, aligned: bool, accumulate: bool, reduces: bool,
) -> tuple[Blocks, int, tuple[int, ...], dict[str, Any]]:  # fmt: skip
    """Return blocks, tiles in all, arguments behind num_rows, constants, for a gradient of such a shape.

    reduces: whether it is float32 and aligned to 16 bytes, so that the TMA unit can add to it.
    """
    (num_experts, num_n, num_k), (out_jump, out_pitch, _) = shape, strides
    tma = use_tma(arch, itemsize, aligned, grad_pitch, x_pitch)
    blocks = wgrad_blocks(rows_each, num_n, num_k, itemsize, _tile_architecture(arch, tma))
    n_vector = vector_width(itemsize, num_n, grad_pitch)
    k_vector = vector_width(itemsize, num_k, x_pitch, out_jump, out_pitch)
    sizes = (
        num_n // n_vector, num_k // k_vector, grad_pitch // n_vector, x_pitch // k_vector,
        out_jump // k_vector, out_pitch // k_vector,
    )  # fmt: skip
    constants = {
        "ACCUMULATE": accumulate,
        "REDUCE": accumulate and tma and reduces and all(n > 0 and n % 4 == 0 for n in (out_jump, out_pitch)),
        "INTERPRETED": INTERPRETED, "N_VECTOR": n_vector, "K_VECTOR": k_vector, "BLOCK_N": blocks.rows,
        "BLOCK_K": blocks.columns, "BLOCK_R": blocks.terms,
    }  # fmt: skip
    constants |= _constants(itemsize, tma, num_experts, blocks)
    tiles = num_experts * cdiv(num_n, blocks.rows) * cdiv(num_k, blocks.columns)
    return blocks, tiles, sizes, constants


def _wgrad(out: Tensor, grad: Tensor, x: Tensor, offsets: Tensor, accumulate: bool) -> None:
    if out.numel() == 0:
        return
    (grad, (grad_pitch, _)), (x, (x_pitch, _)) = _along_rows(grad), _along_rows(x)
    num_rows, shape = x.shape[0], out.shape
    check_count("grouped_mm_wgrad", "rows", num_rows)
    blocks, tiles, sizes, constants = _plan_wgrad(
        row_class(WGRAD_ROWS_EACH, num_rows, shape[0]), shape, out.stride(), x.element_size(), grad_pitch,
        x_pitch, architecture(x), 0 < num_rows <= MAX_ROWS and _aligned(grad, x), accumulate,
        out.dtype == torch.float32 and out.data_ptr() & 15 == 0,
    )  # fmt: skip
    if constants["TMA"]:
        grad = ragged(grad, grad_pitch, shape[1], blocks.terms, blocks.rows)
        x = ragged(x, x_pitch, shape[2], blocks.terms, blocks.columns)
    if constants["REDUCE"]:
        out = descriptor(out, shape, out.stride(), 1, blocks.rows, blocks.columns // REDUCE_PARTS)
    launcher.launch(
        grouped_wgrad_kernel, tiles,
        (grad, x, offsets.contiguous(), out, num_rows, *sizes),
        constants,
    )  # fmt: skip


def launch_wgrad(grad: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
    out = x.new_empty(offsets.shape[0], grad.shape[1], x.shape[1])
    _wgrad(out, grad, x, offsets, False)
    return out


def launch_wgrad_(out: Tensor, grad: Tensor, x: Tensor, offsets: Tensor) -> None:
    if out.stride(2) == 1:
        _wgrad(out, grad, x, offsets, True)
        return
    sums = x.new_empty(out.shape, dtype=compute_dtype(x.dtype))  # of a gradient that lies transposed
    _wgrad(sums, grad, x, offsets, False)
    out += sums  # in the dtype of the sums, and rounded once
