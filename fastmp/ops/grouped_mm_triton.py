"""Triton kernels of the grouped GEMMs: x w[e]^T, and the gradient of w[e], over each expert's rows.

The GEMM is persistent: a fixed number of programs walks over the tiles of all experts, and each program finds
the experts' rows in `offsets` by itself. Where the tile configuration allows (`overlaps_tiles`), the K steps
of all tiles of a program are one loop, so that the next tile is loaded while this one is stored. Rows after
the last expert are one more expert, whose sum has no terms. A tile may load rows of the next expert, but
stores its own rows only.

The wgrad is persistent in the same way where operands come by TMA: all steps of a program's tiles are one
loop, and the TMA unit stores a tile, or adds it to the gradient, during the products of the next. Else it has
one program a tile. Its terms are the rows; the last block of an expert is loaded with zeros in place of rows
of the next expert, which may be NaN.

The head of an iteration computes its step from that of the last one. With `step += 1` at the end Triton 3.6
silently does not pipeline the loop: it loads a step, waits for it, and multiplies.

On Hopper and later operands come by TMA (host descriptors) where addresses allow it; `wgmma` and `tcgen05`
follow from the tile. Otherwise they come through pointers. `warp_specialize` is not used: Triton 3.6 fails to
compile it for Hopper where scalars reduced from a vector, as an expert's rows are, go to both sides, and on
Blackwell it starts again with every tile.
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
from fastmp.ops.core.tma import load_ragged
from fastmp.ops.grouped_mm_epilogues import store_described, store_parts, store_sums


@jit
def _maximum(a, b):
    return tl.maximum(a, b)


@jit
def expert_ends(offsets, experts, num_experts, num_rows, rest):
    """Return where the rows of `experts` end; rows of no expert are those of `num_experts`, up to `rest`.

    Without offsets all rows are the first expert's.
    """
    if offsets is None:
        ends = tl.where(experts >= 0, num_rows, 0)
    else:
        ends = tl.load(offsets + experts, mask=(experts >= 0) & (experts < num_experts), other=0)
        ends = tl.where(experts < num_experts, ends, rest)
    return tl.associative_scan(tl.maximum(tl.minimum(ends, num_rows), 0), 0, _maximum)


@jit
def _tile_of(number, tiles_m, tiles_n, GROUP: tl.constexpr):
    """Return (row, column) of a tile; GROUP rows of tiles, column by column, share weights in L2."""
    group = number // (GROUP * tiles_n)
    height = tl.minimum(tiles_m - group * GROUP, GROUP)
    within = number % (GROUP * tiles_n)
    return group * GROUP + within % height, within // height


@jit
def place_of(
    tile, experts, ends, last_tiles, tiles_n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """Return a tile's expert, the end of that expert's rows, and the tile's first row and column."""
    expert = tl.sum((last_tiles <= tile).to(tl.int32), 0)
    start = tl.sum(tl.where(experts == expert - 1, ends, 0), 0)
    first = tl.sum(tl.where(experts == expert - 1, last_tiles, 0), 0)
    end = tl.sum(tl.where(experts == expert, ends, 0), 0)
    tile_m, tile_n = _tile_of(tile - first, tl.cdiv(end - start, BLOCK_M), tiles_n, GROUP)
    first_m = start + tile_m * BLOCK_M
    first_n = tile_n * BLOCK_N
    return expert, end, first_m, first_n


@jit
def load_block(data, rows, cols, num_rows, num_cols, pitch, VECTOR: tl.constexpr):
    """Load data[rows, cols] of a matrix whose rows are `pitch` vectors apart; zeros outside of it.

    One of `rows` and `cols` lies along the block's rows, the other along its columns.
    """
    mask = (rows < num_rows) & (cols < num_cols)
    return tl.load(data + rows.to(tl.int64) * pitch * VECTOR + cols, mask=mask, other=0.0)


@jit
def load_weight(
    w, expert, first_n, first_k, num_n, num_k, w_jump, w_pitch,
    TMA: tl.constexpr, TRANSPOSED: tl.constexpr, W_VECTOR: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Load a (BLOCK_K, BLOCK_N) block of an expert's right operand: w[e]^T, or w[e] if TRANSPOSED."""
    ns, ks = first_n + tl.arange(0, BLOCK_N), first_k + tl.arange(0, BLOCK_K)
    if not TMA:
        matrix = w + expert.to(tl.int64) * w_jump * W_VECTOR
    if TMA and TRANSPOSED:
        block = w.load([expert, first_k, first_n]).reshape(BLOCK_K, BLOCK_N)
    elif TMA:
        block = w.load([expert, first_n, first_k]).reshape(BLOCK_N, BLOCK_K).T
    elif TRANSPOSED:
        block = load_block(matrix, ks[:, None], ns[None, :], num_k, num_n, w_pitch, W_VECTOR)
    else:
        block = load_block(matrix, ns[:, None], ks[None, :], num_n, num_k, w_pitch, W_VECTOR).T
    return block


@limits(
    n_vectors=MAX_SIZE, k_vectors=MAX_SIZE, num_experts=MAX_EXPERTS, num_rows=MAX_COUNT,
    programs=MAX_WALKING, lengths=MAX_COUNT, tiles=MAX_COUNT, owned=MAX_COUNT, turns=MAX_COUNT,
    group=MAX_SIZE, first_m=MAX_COUNT, first_n=16 * MAX_SIZE,
)  # fmt: skip
@jit(dynamic="num_rows", fixed="num_experts n_vectors k_vectors x_pitch w_jump w_pitch")
def grouped_mm_kernel(
    x,  # (M, K), rows x_pitch vectors apart, or a TMA descriptor
    w,  # (E, N, K), or (E, K, N) if TRANSPOSED; matrices w_jump, rows w_pitch vectors apart; or a descriptor
    bias,  # (E, N), if HAS_BIAS
    offsets,  # (E,) int32, where each expert's rows end
    y,  # (M, N), or (M, N / 2) if GATED
    h,  # (M, N), if KEEP
    x_start, y_start,  # () int64: the first row in a ring that x lies in, and y and h; or None
    num_rows, num_experts, n_vectors, k_vectors, x_pitch, w_jump, w_pitch,
    FORM: tl.constexpr, GATED: tl.constexpr, KEEP: tl.constexpr, HAS_BIAS: tl.constexpr,
    TRANSPOSED: tl.constexpr, FLAT: tl.constexpr, TMA: tl.constexpr, COMPUTE: tl.constexpr,
    N_VECTOR: tl.constexpr, K_VECTOR: tl.constexpr, W_VECTOR: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Store y = form(h) for h = x w[e]^T + bias[e]: num_n columns, num_k terms.

    With GATED the columns of h are [gate | up], a tile has a block of each, and y = form(gate) * up. Sizes
    and pitches count vectors of N_VECTOR (columns), K_VECTOR and W_VECTOR elements: that proves alignment.
    """
    width, num_k = n_vectors * N_VECTOR, k_vectors * K_VECTOR
    num_n, experts = 2 * width if GATED else width, tl.arange(0, BLOCK_E)
    # 0. In a ring, rows are counted from the start of an entry; those of no expert are another entry's.
    x_row, rest = 0, num_rows
    if x_start is not None:
        if TMA:
            x_row = tl.load(x_start).to(tl.int32)
        else:
            x += tl.load(x_start) * x_pitch * K_VECTOR
    if y_start is not None:
        y += tl.load(y_start) * width
        if KEEP:
            h += tl.load(y_start) * num_n
        rest = 0
    # 1. Rows and tiles of every expert, from the offsets; last_tiles: where its tiles end.
    ends = expert_ends(offsets, experts, num_experts, num_rows, rest)
    starts = expert_ends(offsets, experts - 1, num_experts, num_rows, rest)
    tiles_n = tl.cdiv(width, BLOCK_N)
    lengths = ends - starts
    tiles = tl.cdiv(lengths, BLOCK_M) * tiles_n
    last_tiles = tl.cumsum(tiles, 0)
    PARTS: tl.constexpr = 1 if FORM == "none" else 4 if GATED and FORM == "gelu" else 2
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
        acc = tl.zeros([BLOCK_M, BLOCK_N], COMPUTE)
        up = tl.zeros([BLOCK_M, BLOCK_N], COMPUTE)
        for _ in range(0, turns):
            step = tl.where(step == steps - 1, 0, step + 1)
            if step == 0:
                tile += programs
                expert, end, first_m, first_n = place_of(
                    tile, experts, ends, last_tiles, tiles_n, BLOCK_M, BLOCK_N, GROUP
                )
            first_k = step * BLOCK_K
            a = x.load([x_row + first_m, first_k])
            b = load_weight(
                w, expert, first_n, first_k, num_n, num_k, w_jump, w_pitch, TMA, TRANSPOSED, W_VECTOR,
                BLOCK_N, BLOCK_K,
            )  # fmt: skip
            acc = tl.dot(a, b, acc, input_precision="ieee", out_dtype=COMPUTE)
            if GATED:
                b = load_weight(
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
    # 3. One tile after another. With FLAT only tiles of rows of no expert are left, which have no terms.
    for tile in range(first_tile, num_tiles, programs):
        expert, end, first_m, first_n = place_of(
            tile, experts, ends, last_tiles, tiles_n, BLOCK_M, BLOCK_N, GROUP
        )
        rows = first_m + tl.arange(0, BLOCK_M)
        # 3a. Accumulate over K in steps of BLOCK_K.
        acc = tl.zeros([BLOCK_M, BLOCK_N], COMPUTE)
        up = tl.zeros([BLOCK_M, BLOCK_N], COMPUTE)
        if not FLAT:
            for step in range(0, tl.where(expert < num_experts, steps, 0)):
                first_k = step * BLOCK_K
                if TMA:
                    a = x.load([x_row + first_m, first_k])
                else:
                    ks = first_k + tl.arange(0, BLOCK_K)
                    a = load_block(x, rows[:, None], ks[None, :], end, num_k, x_pitch, K_VECTOR)
                b = load_weight(
                    w, expert, first_n, first_k, num_n, num_k, w_jump, w_pitch, TMA, TRANSPOSED, W_VECTOR,
                    BLOCK_N, BLOCK_K,
                )  # fmt: skip
                acc = tl.dot(a, b, acc, input_precision="ieee", out_dtype=COMPUTE)
                if GATED:
                    b = load_weight(
                        w, expert, width + first_n, first_k, num_n, num_k, w_jump, w_pitch, TMA, TRANSPOSED,
                        W_VECTOR, BLOCK_N, BLOCK_K,
                    )  # fmt: skip
                    up = tl.dot(a, b, up, input_precision="ieee", out_dtype=COMPUTE)
        # 3b. Epilogue: bias and activation in registers; only rows of this expert are stored.
        store_parts(
            y, h, bias, expert, num_experts, acc, up, rows, end, first_n, width, FORM, GATED, KEEP, HAS_BIAS,
            BLOCK_M, BLOCK_N, PARTS,
        )  # fmt: skip


@jit
def _add_all(a, b, c, d, more_a, more_b, more_c, more_d):
    return a + more_a, b + more_b, c + more_c, d + more_d


@jit
def _wgrad_place_of(
    tile, experts, ends, lengths, tiles, last_tiles, tiles_n, tiles_k,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Return a tile's expert, the end and the number of that expert's rows, and its first row and column."""
    first_tiles = last_tiles - tiles
    here = (first_tiles <= tile) & (tile < last_tiles)  # of one expert; one sum, as each has two barriers
    expert, end, length, first = tl.reduce(
        (
            tl.where(here, experts, 0), tl.where(here, ends, 0), tl.where(here, lengths, 0),
            tl.where(here, first_tiles, 0),
        ),
        0, _add_all,
    )  # fmt: skip
    tile_n, tile_k = _tile_of(tile - first, tiles_n, tiles_k, GROUP)
    first_n = tile_n * BLOCK_N
    first_k = tile_k * BLOCK_K
    return expert, end, length, first_n, first_k


@limits(
    n_vectors=MAX_SIZE, k_vectors=MAX_SIZE, num_experts=MAX_EXPERTS, num_rows=MAX_COUNT,
    programs=MAX_COUNT, tiles=MAX_COUNT, owned=MAX_COUNT, turns=MAX_COUNT, lengths=MAX_COUNT,
    length=MAX_COUNT, remaining=MAX_COUNT, rows=MAX_COUNT, group=MAX_SIZE, first_n=16 * MAX_SIZE,
    first_k=16 * MAX_SIZE,
)  # fmt: skip
@jit(dynamic="num_rows", fixed="num_experts n_vectors k_vectors grad_pitch x_pitch out_jump out_pitch")
def grouped_wgrad_kernel(
    grad,  # (M, N), rows grad_pitch vectors apart, or a ragged TMA descriptor
    x,  # (M, K), rows x_pitch vectors apart, or a ragged TMA descriptor
    offsets,  # (E,) int32, where each expert's rows end
    out,  # (E, N, K), matrices out_jump, rows out_pitch vectors apart; a TMA descriptor if OUT_TMA
    grad_start, x_start,  # () int64: the first rows in rings that grad and x lie in, or None
    num_rows, num_experts, n_vectors, k_vectors, grad_pitch, x_pitch, out_jump, out_pitch,
    ACCUMULATE: tl.constexpr, OUT_TMA: tl.constexpr, INTERPRETED: tl.constexpr, TMA: tl.constexpr,
    COMPUTE: tl.constexpr, N_VECTOR: tl.constexpr, K_VECTOR: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, GROUP: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """Store grad^T x over each expert's rows, or add it to `out`. Vectors: see grouped_mm_kernel.

    With OUT_TMA the TMA unit stores a tile, or adds it to the float32 numbers of `out`, which the program,
    the only one of the tile, does not read.
    """
    num_n, num_k, experts = n_vectors * N_VECTOR, k_vectors * K_VECTOR, tl.arange(0, BLOCK_E)
    # 0. In a ring, rows are counted from the start of an entry.
    grad_row, x_row = 0, 0
    if grad_start is not None:
        if TMA:
            grad_row = tl.load(grad_start).to(tl.int32)
        else:
            grad += tl.load(grad_start) * grad_pitch * N_VECTOR
    if x_start is not None:
        if TMA:
            x_row = tl.load(x_start).to(tl.int32)
        else:
            x += tl.load(x_start) * x_pitch * K_VECTOR
    # 1. Rows, steps and tiles of every expert. One without rows has no tile, or stores the zeros of a step.
    ends = expert_ends(offsets, experts, num_experts, num_rows, num_rows)
    lengths = ends - expert_ends(offsets, experts - 1, num_experts, num_rows, num_rows)
    fewest: tl.constexpr = 0 if ACCUMULATE else 1
    steps_of = tl.where(experts < num_experts, tl.cdiv(tl.maximum(lengths, fewest), BLOCK_R), 0)
    tiles_n, tiles_k = tl.cdiv(num_n, BLOCK_N), tl.cdiv(num_k, BLOCK_K)
    tiles = tl.where(steps_of > 0, tiles_n * tiles_k, 0)
    last_tiles = tl.cumsum(tiles, 0)
    pid, programs = tl.program_id(0), tl.num_programs(0)
    acc = tl.zeros([BLOCK_N, BLOCK_K], COMPUTE)
    if TMA:
        # 2. One loop over the steps of every `programs`-th tile: loads of the next tile are issued while this
        # one is stored. A tile's last step stores it; the next step begins another tile.
        owned = (last_tiles - pid + programs - 1) // programs
        owned -= (last_tiles - tiles - pid + programs - 1) // programs
        turns = tl.sum(owned * steps_of, 0)
        tile, step, steps, expert, end, length, first_n, first_k = pid - programs, 0, 1, 0, 0, 0, 0, 0
        for _ in range(0, turns):
            step = tl.where(step == steps - 1, 0, step + 1)
            if step == 0:
                tile += programs
                expert, end, length, first_n, first_k = _wgrad_place_of(
                    tile, experts, ends, lengths, tiles, last_tiles, tiles_n, tiles_k, BLOCK_N, BLOCK_K, GROUP
                )
                rows = tl.maximum(length, fewest)
                steps = tl.cdiv(rows, BLOCK_R)
            a = load_ragged(grad, step * BLOCK_R, first_n, length, grad_row + end, BLOCK_R, BLOCK_N)
            b = load_ragged(x, step * BLOCK_R, first_k, length, x_row + end, BLOCK_R, BLOCK_K)
            # after both loads: an op between them would give each load its own barrier
            acc = tl.dot(a.T, b, acc, out_dtype=COMPUTE)
            if step == steps - 1:
                if OUT_TMA:
                    store_described(
                        out, acc, expert, first_n, first_k, ACCUMULATE, INTERPRETED, BLOCK_N, BLOCK_K, PARTS
                    )
                else:
                    store_sums(
                        out, acc, expert, first_n, first_k, num_n, num_k, out_jump, out_pitch, K_VECTOR,
                        ACCUMULATE, BLOCK_N, BLOCK_K, PARTS,
                    )  # fmt: skip
                acc = tl.zeros([BLOCK_N, BLOCK_K], COMPUTE)
    elif pid < tl.max(last_tiles, 0):
        # 2'. One tile a program, which leaves registers for two programs on a multiprocessor.
        expert, end, length, first_n, first_k = _wgrad_place_of(
            pid, experts, ends, lengths, tiles, last_tiles, tiles_n, tiles_k, BLOCK_N, BLOCK_K, GROUP
        )
        ns, ks = first_n + tl.arange(0, BLOCK_N), first_k + tl.arange(0, BLOCK_K)
        for row in range(0, length, BLOCK_R):
            # load grad transposed: transposed later, it would not be prefetched on an A100
            rows = end - length + row + tl.arange(0, BLOCK_R)
            a = load_block(grad, rows[None, :], ns[:, None], end, num_n, grad_pitch, N_VECTOR)
            b = load_block(x, rows[:, None], ks[None, :], end, num_k, x_pitch, K_VECTOR)
            acc = tl.dot(a, b, acc, input_precision="ieee", out_dtype=COMPUTE)
        store_sums(
            out, acc, expert, first_n, first_k, num_n, num_k, out_jump, out_pitch, K_VECTOR, ACCUMULATE,
            BLOCK_N, BLOCK_K, PARTS,
        )  # fmt: skip
