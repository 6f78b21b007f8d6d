"""Triton kernel of rope, and its launches for any layout.

A kernel walks over a tensor (..., D) as rows of D elements. Leading dimensions are folded into at most three
levels (see `levels`), each with a stride of x and one of cos and sin, so any layout is read without a copy,
and rotated in place on request.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fastmp.ops.core import launcher
from fastmp.ops.core._triton import MAX_COUNT, cdiv, jit, limits, next_power_of_2, tl
from fastmp.ops.core.rowwise import arithmetic, empty_like

NUM_WARPS = 4
_LEVELS = 3


@jit
def rotate_rows(
    x, y, cos, sin, pid, num_rows, size_1, size_2, stride_0, stride_1, stride_2, turn_0, turn_1, turn_2,
    INTERLEAVED: tl.constexpr, INVERSE: tl.constexpr, IN_PLACE: tl.constexpr, HALF: tl.constexpr,
    DIM: tl.constexpr, PITCH: tl.constexpr, VECTOR: tl.constexpr, TURN_VECTOR: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_HALF: tl.constexpr, COMPUTE: tl.constexpr, INDEX: tl.constexpr,
):  # fmt: skip
    """Rotate BLOCK_M rows of x into y, whose rows are PITCH elements apart unless IN_PLACE.

    Strides of x count vectors of VECTOR elements, those of cos and sin of TURN_VECTOR, which proves
    alignment.
    """
    # 1. Row number -> index of each level -> offsets in x, and in cos and sin.
    rows = tl.cast(pid, INDEX) * BLOCK_M + tl.arange(0, BLOCK_M)
    outer = rows // size_2
    i2, i1, i0 = rows % size_2, outer % size_1, (outer // size_1).to(tl.int64)
    start = (i0 * stride_0 + i1.to(tl.int64) * stride_1 + i2.to(tl.int64) * stride_2) * VECTOR
    turn = (i0 * turn_0 + i1.to(tl.int64) * turn_1 + i2.to(tl.int64) * turn_2) * TURN_VECTOR
    x_rows = x + start[:, None]
    y_rows = y + (start if IN_PLACE else rows.to(tl.int64) * PITCH)[:, None]
    live = (rows < num_rows)[:, None]
    cols = tl.arange(0, BLOCK_HALF)[None, :]
    mask = live & (cols < HALF)
    # 2. Load the angles.
    c = tl.load(cos + turn[:, None] + cols, mask=mask, other=0.0)
    s = tl.load(sin + turn[:, None] + cols, mask=mask, other=0.0)
    if INVERSE:
        s = -s
    # 3. Load the pairs, rotate, store.
    if INTERLEAVED:
        both = tl.arange(0, 2 * BLOCK_HALF)[None, :]
        mask = live & (both < 2 * HALF)
        pairs = tl.load(x_rows + both, mask=mask, other=0.0).to(COMPUTE)
        a, b = tl.split(tl.reshape(pairs, [BLOCK_M, BLOCK_HALF, 2]))
        turned = tl.reshape(tl.join(a * c - b * s, b * c + a * s), [BLOCK_M, 2 * BLOCK_HALF])
        tl.store(y_rows + both, turned, mask=mask)
    else:
        a = tl.load(x_rows + cols, mask=mask, other=0.0).to(COMPUTE)
        b = tl.load(x_rows + HALF + cols, mask=mask, other=0.0).to(COMPUTE)
        if IN_PLACE and HALF % VECTOR != 0:
            # If the halves differ in alignment, a thread stores elements that other threads have loaded.
            tl.debug_barrier()
        tl.store(y_rows + cols, a * c - b * s, mask=mask)
        tl.store(y_rows + HALF + cols, b * c + a * s, mask=mask)
    # 4. Copy the elements beyond the rotated part.
    if not IN_PLACE:
        for first in tl.static_range(2 * HALF, DIM, BLOCK_HALF):
            mask = live & (first + cols < DIM)
            tl.store(y_rows + first + cols, tl.load(x_rows + first + cols, mask=mask), mask=mask)


@limits(q_rows=MAX_COUNT, k_rows=MAX_COUNT, rows=MAX_COUNT, q_size_2=MAX_COUNT, k_size_2=MAX_COUNT)
@jit(
    dynamic=(
        "q_rows q_size_1 q_stride_0 q_stride_1 q_stride_2 k_rows k_size_1 k_stride_0 k_stride_1 k_stride_2 "
        "turn_0 turn_1 turn_2"
    ),
    fixed="q_size_2 k_size_2",
)
def rope_kernel(
    q, q_out, k, k_out,  # (rows, DIM); k or None; outputs contiguous, or the inputs if IN_PLACE
    cos, sin,  # (tokens, HALF), contiguous
    q_rows, q_size_1, q_size_2, q_stride_0, q_stride_1, q_stride_2,  # levels of q: sizes, and strides
    k_rows, k_size_1, k_size_2, k_stride_0, k_stride_1, k_stride_2,  # levels of k
    turn_0, turn_1, turn_2,  # strides of cos and sin along the levels
    INTERLEAVED: tl.constexpr, INVERSE: tl.constexpr, IN_PLACE: tl.constexpr, HALF: tl.constexpr,
    DIM: tl.constexpr, VECTOR: tl.constexpr, TURN_VECTOR: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_HALF: tl.constexpr, COMPUTE: tl.constexpr, INDEX: tl.constexpr,
):  # fmt: skip
    """Rotate BLOCK_M rows of q or k: programs of q come first, then those of k."""
    pid = tl.program_id(0)
    q_blocks = tl.cdiv(q_rows.to(INDEX), BLOCK_M)
    if pid < q_blocks:
        rotate_rows(
            q, q_out, cos, sin, pid, q_rows, q_size_1, q_size_2, q_stride_0, q_stride_1,
            q_stride_2, turn_0, turn_1, turn_2, INTERLEAVED, INVERSE, IN_PLACE, HALF, DIM, DIM,
            VECTOR, TURN_VECTOR, BLOCK_M, BLOCK_HALF, COMPUTE, INDEX,
        )  # fmt: skip
    elif k is not None:
        rotate_rows(
            k, k_out, cos, sin, pid - q_blocks, k_rows, k_size_1, k_size_2, k_stride_0, k_stride_1,
            k_stride_2, turn_0, turn_1, turn_2, INTERLEAVED, INVERSE, IN_PLACE, HALF, DIM, DIM,
            VECTOR, TURN_VECTOR, BLOCK_M, BLOCK_HALF, COMPUTE, INDEX,
        )  # fmt: skip


def block_shape(half: int, itemsize: int) -> tuple[int, int]:
    """Return (BLOCK_M, BLOCK_HALF) with two 16-byte loads of each half in flight per thread."""
    block_half = max(16 // itemsize, next_power_of_2(half))
    return max(1, 2 * 32 * NUM_WARPS * 16 // itemsize // block_half), block_half


# A leading dimension: sizes and strides, one per tensor, and the stride of cos and sin. Sizes of q and k may
# differ if that stride is 0.
Level = tuple[tuple[int, ...], tuple[int, ...], int]


def levels(
    shapes: Sequence[tuple[int, ...]],
    strides: Sequence[tuple[int, ...]],
    cos_shape: tuple[int, ...],
    cos_strides: tuple[int, ...],
) -> list[Level]:
    """Fold adjacent leading dimensions that a single stride can traverse; all tensors have the same rank.

    Example:

        # (S, B, N, D) contiguous with cos (S, R / 2): batch and heads fold into one level
        found = levels([(8, 2, 4, 64)], [(512, 256, 64, 1)], (8, 32), (32, 1))
        assert found == [((8,), (512,), 32), ((8,), (64,), 0)]
    """
    found: list[Level] = []
    for dim in range(len(shapes[0]) - 1):
        sizes, steps = tuple(shape[dim] for shape in shapes), tuple(each[dim] for each in strides)
        turn = cos_strides[dim] if dim < len(cos_shape) - 1 and cos_shape[dim] > 1 else 0
        if all(n == 1 for n in sizes):
            continue
        outer_sizes, outer_steps, outer_turn = found[-1] if found else ((), (), -1)
        folds = outer_turn == sizes[0] * turn and all(
            1 in (m, n) or outer == n * inner
            for m, n, outer, inner in zip(outer_sizes, sizes, outer_steps, steps, strict=True)
        )
        if folds:
            steps = tuple(
                outer if n == 1 else inner for n, outer, inner in zip(sizes, outer_steps, steps, strict=True)
            )
            sizes = tuple(m * n for m, n in zip(outer_sizes, sizes, strict=True))
            found.pop()
        found.append((sizes, steps, turn))
    return found


@dataclass(frozen=True)
class _Walk:
    """Launch parameters of `rope_kernel` for one layout of q and k.

    programs: size of the grid. numbers: rows, sizes and strides of q and k (of q twice without k), then the
    strides of cos and sin. constants: constexpr arguments.
    """

    programs: int
    numbers: tuple[int, ...]
    constants: dict[str, Any]


def _of_rank(rank: int, lengths: tuple[int, ...], filling: int) -> tuple[int, ...]:
    """Return sizes or strides padded to `rank` dimensions, with `filling` inserted before the last one."""
    return *lengths[:-1], *[filling] * (rank - len(lengths)), lengths[-1]


@lru_cache(maxsize=1024)
def _walk(
    q_shape: tuple[int, ...], q_strides: tuple[int, ...], k_shape: tuple[int, ...] | None,
    k_strides: tuple[int, ...] | None, cos_shape: tuple[int, ...], dtype: torch.dtype, cos_itemsize: int,
    interleaved: bool, inverse: bool, in_place: bool,
) -> _Walk | None:  # fmt: skip
    """Plan the walk; None if a tensor is empty, has strided rows, or has more levels than the kernel."""
    shapes, strides = [q_shape], [q_strides]
    if k_shape is not None and k_strides is not None:
        rank = max(len(q_shape), len(k_shape))
        shapes = [_of_rank(rank, shape, 1) for shape in (q_shape, k_shape)]
        strides = [_of_rank(rank, each, 0) for each in (q_strides, k_strides)]
    cos_strides = tuple(math.prod(cos_shape[dim + 1 :]) for dim in range(len(cos_shape)))
    found = levels(shapes, strides, cos_shape, cos_strides)
    apart = any(each[-1] != 1 for each in strides)
    if apart or len(found) > _LEVELS or any(0 in shape for shape in shapes):
        return None
    padding = [((1,) * len(shapes), (0,) * len(shapes), 0)] * (_LEVELS - len(found))
    sizes, steps, turns = zip(*padding, *found, strict=True)
    vector = math.gcd(16 // dtype.itemsize, *(step for level in steps for step in level))
    turn_vector = math.gcd(16 // cos_itemsize, *turns)
    rows = [math.prod(shape[:-1]) for shape in shapes]
    described = [
        (num_rows, sizes[1][i], sizes[2][i], *(level[i] // vector for level in steps))
        for i, num_rows in enumerate(rows)
    ]
    half = cos_shape[-1]
    block_m, block_half = block_shape(half, dtype.itemsize)
    constants = {
        "INTERLEAVED": interleaved, "INVERSE": inverse, "IN_PLACE": in_place, "HALF": half,
        "DIM": q_shape[-1], "VECTOR": vector, "TURN_VECTOR": turn_vector, "BLOCK_M": block_m,
        "BLOCK_HALF": block_half, "COMPUTE": arithmetic(dtype),
        "INDEX": tl.int32 if max(rows) <= MAX_COUNT else tl.int64, "num_warps": NUM_WARPS,
    }  # fmt: skip
    numbers = *described[0], *described[-1], *(turn // turn_vector for turn in turns)
    return _Walk(sum(cdiv(n, block_m) for n in rows), numbers, constants)


def _launch_into(
    q_out: Tensor, k_out: Tensor | None, q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor,
    interleaved: bool, inverse: bool,
) -> None:  # fmt: skip
    """Rotate q and k into contiguous outputs, or in place; cos and sin are contiguous."""
    walk = _walk(
        q.shape, q.stride(), None if k is None else k.shape, None if k is None else k.stride(), cos.shape,
        q.dtype, cos.element_size(), interleaved, inverse, q_out is q,
    )  # fmt: skip
    if walk is None:
        _launch_separately(q_out, k_out, q, k, cos, sin, interleaved, inverse)
    else:
        numbers, constants = walk.numbers, walk.constants
        launcher.launch(rope_kernel, walk.programs, (q, q_out, k, k_out, cos, sin, *numbers), constants)


def _launch_separately(
    q_out: Tensor, k_out: Tensor | None, q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, *form: bool
) -> None:
    """Rotate layouts that one launch does not support: tensor by tensor, through a copy, or by slices."""
    if k is not None and k_out is not None:
        _launch_into(q_out, None, q, None, cos, sin, *form)
        _launch_into(k_out, None, k, None, cos, sin, *form)
    elif q.numel() == 0:
        pass
    elif q.stride()[-1] != 1:
        dense = q.contiguous()
        _launch_into(dense if q_out is q else q_out, None, dense, None, cos, sin, *form)
        if q_out is q:
            q.copy_(dense)
    else:
        for i in range(q.shape[0]):
            inner, (cos_i, sin_i) = q[i], (t if t.dim() == 1 else t[min(i, len(t) - 1)] for t in (cos, sin))
            _launch_into(inner if q_out is q else q_out[i], None, inner, None, cos_i, sin_i, *form)


def launch(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, interleaved: bool, inverse: bool
) -> tuple[Tensor, Tensor]:
    q_out, k_out = empty_like(q), None if k is None else empty_like(k)
    _launch_into(q_out, k_out, q, k, cos.contiguous(), sin.contiguous(), interleaved, inverse)
    return q_out, q.new_empty(0) if k_out is None else k_out


def launch_(q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, interleaved: bool, inverse: bool) -> None:
    _launch_into(q, k, q, k, cos.contiguous(), sin.contiguous(), interleaved, inverse)
