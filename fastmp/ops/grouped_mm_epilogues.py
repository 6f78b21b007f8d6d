"""Epilogues of the grouped GEMMs: bias, activation and store of a tile, in parts that fit into registers."""

from __future__ import annotations

from fastmp.ops.core._triton import jit, tl
from fastmp.ops.gated import activate


@jit
def _halves(block, BLOCK_M: tl.constexpr, HALF: tl.constexpr):
    """Split a block into the left and the right half of its columns."""
    return block.reshape(BLOCK_M, 2, HALF).permute(0, 2, 1).split()


@jit
def store_sums(
    out, sums, expert, first_n, first_k, num_n, num_k, jump, pitch, VECTOR: tl.constexpr,
    ACCUMULATE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Store a tile of a weight's gradient, or add it to `out`, in PARTS column blocks to save registers."""
    if PARTS == 1:
        ns, ks = first_n + tl.arange(0, BLOCK_N), first_k + tl.arange(0, BLOCK_K)
        matrix = out + tl.cast(expert, tl.int64) * jump * VECTOR
        places = matrix + ns[:, None].to(tl.int64) * pitch * VECTOR + ks[None, :]
        mask = (ns < num_n)[:, None] & (ks < num_k)[None, :]
        if ACCUMULATE:
            sums += tl.load(places, mask=mask, other=0.0).to(sums.dtype)
            if BLOCK_N * BLOCK_K < 512:  # several threads load an element that one of them overwrites
                tl.debug_barrier()
        tl.store(places, sums, mask=mask)
    else:
        HALF: tl.constexpr = BLOCK_K // 2
        MORE: tl.constexpr = PARTS // 2
        left, right = _halves(sums, BLOCK_N, HALF)
        store_sums(
            out, left, expert, first_n, first_k, num_n, num_k, jump, pitch, VECTOR, ACCUMULATE, BLOCK_N, HALF,
            MORE,
        )  # fmt: skip
        store_sums(
            out, right, expert, first_n, first_k + HALF, num_n, num_k, jump, pitch, VECTOR, ACCUMULATE,
            BLOCK_N, HALF, MORE,
        )  # fmt: skip


@jit
def store_described(
    out, sums, expert, first_n, first_k, ACCUMULATE: tl.constexpr, INTERPRETED: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Store a tile to the matrices of the descriptor `out`, or add it, in PARTS column blocks.

    The TMA unit reads a block from shared memory while the program continues. It adds in the second-level
    cache, in float32 rounded to nearest; numbers below 2^-126 may be flushed to zero there. Elements outside
    of the matrix are not written.
    """
    if PARTS == 1:
        block = sums.reshape(1, BLOCK_N, BLOCK_K)
        if ACCUMULATE and not INTERPRETED:
            out.atomic_add([expert, first_n, first_k], block)
        else:
            if ACCUMULATE:  # Triton's interpreter has no reductions by descriptors
                block += out.load([expert, first_n, first_k])
            out.store([expert, first_n, first_k], block.to(out.dtype))
    else:
        HALF: tl.constexpr = BLOCK_K // 2
        MORE: tl.constexpr = PARTS // 2
        left, right = _halves(sums, BLOCK_N, HALF)
        store_described(out, left, expert, first_n, first_k, ACCUMULATE, INTERPRETED, BLOCK_N, HALF, MORE)
        store_described(
            out, right, expert, first_n, first_k + HALF, ACCUMULATE, INTERPRETED, BLOCK_N, HALF, MORE
        )


@jit
def _store_activated(
    y, h, bias, expert, num_experts, acc, up, rows, end, first_n, width,
    FORM: tl.constexpr, GATED: tl.constexpr, KEEP: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Store columns from `first_n` on of y = form(h), times `up` if GATED, and of h if KEEP."""
    cols = first_n + tl.arange(0, BLOCK_N)
    mask = (rows < end)[:, None] & (cols < width)[None, :]
    num_n = 2 * width if GATED else width
    # 1. Add the bias of the expert.
    if HAS_BIAS:
        owned = (cols < width) & (expert < num_experts)
        shift = bias + expert.to(tl.int64) * num_n + cols
        acc += tl.load(shift, mask=owned, other=0.0).to(acc.dtype)[None, :]
        if GATED:
            up += tl.load(shift + width, mask=owned, other=0.0).to(acc.dtype)[None, :]
    # 2. Store the pre-activation for the backward pass.
    if KEEP:
        kept = h + rows[:, None].to(tl.int64) * num_n + cols[None, :]
        tl.store(kept, acc, mask=mask)
        if GATED:
            tl.store(kept + width, up, mask=mask)
    # 3. Activate, gate and store.
    if FORM != "none":
        acc = activate(acc, FORM)
    if GATED:
        acc *= up
    tl.store(y + rows[:, None].to(tl.int64) * width + cols[None, :], acc, mask=mask)


@jit
def store_parts(
    y, h, bias, expert, num_experts, acc, up, rows, end, first_n, width,
    FORM: tl.constexpr, GATED: tl.constexpr, KEEP: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Call `_store_activated` for PARTS column blocks: the activation's temporaries fit into registers."""
    if PARTS == 1:
        _store_activated(
            y, h, bias, expert, num_experts, acc, up, rows, end, first_n, width, FORM, GATED, KEEP, HAS_BIAS,
            BLOCK_N,
        )  # fmt: skip
    else:
        HALF: tl.constexpr = BLOCK_N // 2
        MORE: tl.constexpr = PARTS // 2
        acc_left, acc_right = _halves(acc, BLOCK_M, HALF)
        up_left, up_right = _halves(up, BLOCK_M, HALF)
        store_parts(
            y, h, bias, expert, num_experts, acc_left, up_left, rows, end, first_n, width, FORM, GATED, KEEP,
            HAS_BIAS, BLOCK_M, HALF, MORE,
        )  # fmt: skip
        store_parts(
            y, h, bias, expert, num_experts, acc_right, up_right, rows, end, first_n + HALF, width, FORM,
            GATED, KEEP, HAS_BIAS, BLOCK_M, HALF, MORE,
        )  # fmt: skip
