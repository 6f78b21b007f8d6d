"""rope: rotary position embedding. Pairs of elements of each head are turned by the angle of their token.

A pair (a, b) becomes (a cos - b sin, b cos + a sin). Its elements lie half of the rotated part apart
(GPT-NeoX, Llama) or are neighbours (GPT-J, interleaved). The inverse of a rotation is its transpose: the
backward is the same kernel with sin negated, and only cos and sin are saved. Queries and keys go in one
launch. Rotary embedding: Su et al. 2021 (arXiv 2104.09864).

A tensor (..., D) is walked as rows of D elements. Leading dimensions are folded into at most three levels
(see `levels`), with the strides of x and those of cos and sin: any layout is read and, on request, written
where it lies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fastmp.ops.core import checks, launcher
from fastmp.ops.core._triton import MAX_COUNT, cdiv, jit, limits, next_power_of_2, tl
from fastmp.ops.core.registry import compute_dtype, register
from fastmp.ops.core.rowwise import arithmetic, empty_like
from fastmp.profiling import traced

NUM_WARPS = 4
_LEVELS = 3


def _turned(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, inverse: bool) -> Tensor:
    """Return the rotated elements of x, rounded once: (..., R)."""
    half = cos.shape[-1]
    shape = (*cos.shape[:-1], *[1] * (x.dim() - cos.dim()), half)
    cos, sin = cos.reshape(shape), (-sin if inverse else sin).reshape(shape)
    wide = x[..., : 2 * half].to(compute_dtype(x.dtype))
    pairs = wide.unflatten(-1, (half, 2)) if interleaved else wide.unflatten(-1, (2, half)).transpose(-1, -2)
    a, b = pairs.unbind(-1)
    y = torch.stack((a * cos - b * sin, b * cos + a * sin), -1)
    return (y if interleaved else y.transpose(-1, -2)).flatten(-2).to(x.dtype)


def _reference_of_one(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, inverse: bool) -> Tensor:
    return torch.cat((_turned(x, cos, sin, interleaved, inverse), x[..., 2 * cos.shape[-1] :]), -1)


def reference(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, interleaved: bool, inverse: bool
) -> tuple[Tensor, Tensor]:
    """Rotate q and k; the second result is empty without k."""
    options = (cos, sin, interleaved, inverse)
    return _reference_of_one(q, *options), q.new_empty(0) if k is None else _reference_of_one(k, *options)


def reference_(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, interleaved: bool, inverse: bool
) -> None:
    for x in _given(q, k):
        x[..., : 2 * cos.shape[-1]] = _turned(x, cos, sin, interleaved, inverse)


@jit
def _rotate(
    x, y, cos, sin, pid, num_rows, size_1, size_2, stride_0, stride_1, stride_2, turn_0, turn_1, turn_2,
    INTERLEAVED: tl.constexpr, INVERSE: tl.constexpr, IN_PLACE: tl.constexpr, HALF: tl.constexpr,
    DIM: tl.constexpr, VECTOR: tl.constexpr, TURN_VECTOR: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_HALF: tl.constexpr, COMPUTE: tl.constexpr, INDEX: tl.constexpr,
):  # fmt: skip
    """Rotate BLOCK_M rows.

    Strides of x count vectors, those of cos and sin theirs, which proves their alignment.
    """
    rows = pid.to(INDEX) * BLOCK_M + tl.arange(0, BLOCK_M)
    outer = rows // size_2
    i2, i1, i0 = rows % size_2, outer % size_1, (outer // size_1).to(tl.int64)
    start = (i0 * stride_0 + i1.to(tl.int64) * stride_1 + i2.to(tl.int64) * stride_2) * VECTOR
    turn = (i0 * turn_0 + i1.to(tl.int64) * turn_1 + i2.to(tl.int64) * turn_2) * TURN_VECTOR
    x_rows = x + start[:, None]
    y_rows = y + (start if IN_PLACE else rows.to(tl.int64) * DIM)[:, None]
    live = (rows < num_rows)[:, None]
    cols = tl.arange(0, BLOCK_HALF)[None, :]
    mask = live & (cols < HALF)
    c = tl.load(cos + turn[:, None] + cols, mask=mask, other=0.0)
    s = tl.load(sin + turn[:, None] + cols, mask=mask, other=0.0)
    if INVERSE:
        s = -s
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
            # Halves that are not aligned alike are not stored by the threads that have read them.
            tl.debug_barrier()
        tl.store(y_rows + cols, a * c - b * s, mask=mask)
        tl.store(y_rows + HALF + cols, b * c + a * s, mask=mask)
    if not IN_PLACE:
        for first in tl.static_range(2 * HALF, DIM, BLOCK_HALF):
            mask = live & (first + cols < DIM)
            tl.store(y_rows + first + cols, tl.load(x_rows + first + cols, mask=mask), mask=mask)


@limits(q_rows=MAX_COUNT, k_rows=MAX_COUNT, rows=MAX_COUNT, q_size_2=MAX_COUNT, k_size_2=MAX_COUNT)
@jit
def rope_kernel(
    q, q_out, k, k_out, cos, sin, q_rows, q_size_1, q_size_2, q_stride_0, q_stride_1, q_stride_2, k_rows,
    k_size_1, k_size_2, k_stride_0, k_stride_1, k_stride_2, turn_0, turn_1, turn_2,
    INTERLEAVED: tl.constexpr, INVERSE: tl.constexpr, IN_PLACE: tl.constexpr, HALF: tl.constexpr,
    DIM: tl.constexpr, VECTOR: tl.constexpr, TURN_VECTOR: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_HALF: tl.constexpr, COMPUTE: tl.constexpr, INDEX: tl.constexpr,
):  # fmt: skip
    """Rotate a block of rows: the programs of q come first, then those of k if it is there."""
    # Queries and keys share the launch; their sizes and strides differ, cos and sin do not.
    pid = tl.program_id(0)
    q_blocks = tl.cdiv(q_rows.to(INDEX), BLOCK_M)
    if pid < q_blocks:
        _rotate(
            q, q_out, cos, sin, pid, q_rows, q_size_1, q_size_2, q_stride_0, q_stride_1,
            q_stride_2, turn_0, turn_1, turn_2, INTERLEAVED, INVERSE, IN_PLACE, HALF, DIM, VECTOR,
            TURN_VECTOR, BLOCK_M, BLOCK_HALF, COMPUTE, INDEX,
        )  # fmt: skip
    elif k is not None:
        _rotate(
            k, k_out, cos, sin, pid - q_blocks, k_rows, k_size_1, k_size_2, k_stride_0, k_stride_1,
            k_stride_2, turn_0, turn_1, turn_2, INTERLEAVED, INVERSE, IN_PLACE, HALF, DIM, VECTOR,
            TURN_VECTOR, BLOCK_M, BLOCK_HALF, COMPUTE, INDEX,
        )  # fmt: skip


def block_shape(half: int, itemsize: int) -> tuple[int, int]:
    """Choose (BLOCK_M, BLOCK_HALF): each thread has two 16-byte loads of each half in flight."""
    block_half = max(16 // itemsize, next_power_of_2(half))
    return max(1, 2 * 32 * NUM_WARPS * 16 // itemsize // block_half), block_half


# Sizes and strides, per tensor, of one leading dimension, and the stride of cos and sin along it. The tensors
# may differ in size where that stride is 0.
Level = tuple[tuple[int, ...], tuple[int, ...], int]


def levels(
    shapes: Sequence[tuple[int, ...]],
    strides: Sequence[tuple[int, ...]],
    cos_shape: tuple[int, ...],
    cos_strides: tuple[int, ...],
) -> list[Level]:
    """Fold leading dimensions of tensors of one rank where a single stride steps through two of them."""
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
    """How a kernel walks over q, and k if it is there, of some layout.

    programs: how many there are. numbers: rows, sizes and strides of q, those of k (without it of q again),
    then the strides of cos and sin. constants: of the kernel.
    """

    programs: int
    numbers: tuple[int, ...]
    constants: dict[str, Any]


def _of_rank(rank: int, lengths: tuple[int, ...], filling: int) -> tuple[int, ...]:
    """Return sizes, or strides, of `rank` dimensions: those added before the last one have size 1."""
    return *lengths[:-1], *[filling] * (rank - len(lengths)), lengths[-1]


@lru_cache(maxsize=1024)
def _walk(
    q_shape: tuple[int, ...], q_strides: tuple[int, ...], k_shape: tuple[int, ...] | None,
    k_strides: tuple[int, ...] | None, cos_shape: tuple[int, ...], dtype: torch.dtype, cos_itemsize: int,
    interleaved: bool, inverse: bool, in_place: bool,
) -> _Walk | None:  # fmt: skip
    """Plan the walk; None if a tensor is empty, has row elements apart, or more levels than the kernel."""
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
    """Rotate q, and k, into tensors that are contiguous, as cos and sin are, or q and k themselves."""
    walk = _walk(
        q.shape, q.stride(), None if k is None else k.shape, None if k is None else k.stride(), cos.shape,
        q.dtype, cos.element_size(), interleaved, inverse, q_out is q,
    )  # fmt: skip
    if walk is None:
        _launch_apart(q_out, k_out, q, k, cos, sin, interleaved, inverse)
    else:
        numbers, constants = walk.numbers, walk.constants
        launcher.launch(rope_kernel, walk.programs, (q, q_out, k, k_out, cos, sin, *numbers), constants)


def _launch_apart(
    q_out: Tensor, k_out: Tensor | None, q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, *form: bool
) -> None:
    """Rotate what one launch does not: one tensor after the other, by a copy, or slice by slice."""
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


def _given(q: Tensor, k: Tensor | None) -> list[Tensor]:
    return [x for x in (q, k) if x is not None]


def _flops(q: Tensor, k: Tensor | None, cos: Tensor, *form) -> int:
    """Two products and a sum for each rotated element."""
    return sum(3 * math.prod(x.shape[:-1]) * 2 * cos.shape[-1] for x in _given(q, k))


def _traffic_in_place(q: Tensor, k: Tensor | None, cos: Tensor, *form) -> int:
    """Read and write the rotated part of q and k, and read cos and sin."""
    rows = sum(x.numel() // max(x.shape[-1], 1) * x.element_size() for x in _given(q, k))
    return 2 * rows * 2 * cos.shape[-1] + 2 * cos.numel() * cos.element_size()


_ANGLES = "Tensor cos, Tensor sin, bool interleaved, bool inverse"
_rope = register(
    f"rope(Tensor q, Tensor? k, {_ANGLES}) -> (Tensor turned_q, Tensor turned_k)",
    reference=reference,
    triton=launch,
    flops=_flops,
    autograd_formula={
        "k": "rope(grad_turned_q, grad_turned_k, cos, sin, interleaved, not inverse) -> q, k",
        "": "rope(grad_turned_q, None, cos, sin, interleaved, not inverse) -> q",
    },
)
_rope_ = register(
    f"rope_(Tensor(a!) q, Tensor(b!)? k, {_ANGLES}) -> ()",
    reference=reference_,
    triton=launch_,
    flops=_flops,
    traffic=_traffic_in_place,
)


class _InPlace(torch.autograd.Function):
    """Rotates one or two tensors where they lie. They come first: autograd takes the first for the view."""

    @staticmethod
    def forward(ctx, q, k, cos, sin, interleaved):
        _rope_(q, k, cos, sin, interleaved, False)
        ctx.interleaved = interleaved
        ctx.save_for_backward(cos, sin)
        if k is None:
            ctx.mark_dirty(q)
            return q
        ctx.mark_dirty(q, k)
        return q, k

    @staticmethod
    @traced("fastmp.rope_backward")
    def backward(ctx, grad_q, grad_k=None):
        dq, dk = _rope(grad_q, grad_k, *ctx.saved_tensors, ctx.interleaved, True)
        return dq, (None if grad_k is None else dk), None, None, None


def _check_one(name: str, x: Tensor, cos: Tensor, sin: Tensor) -> None:
    require = checks.require
    checks.check_floating("rope", name, x)
    require(sin.shape == cos.shape, "rope: cos {} and sin {} differ in shape", cos.shape, sin.shape)
    fewer = 0 < cos.dim() <= x.dim()
    require(fewer, "rope: cos {} has more dimensions than {} {}, or none", cos.shape, name, x.shape)
    turned, width = 2 * cos.shape[-1], x.shape[-1]
    rotates = "rope: cos {} rotates {} elements of a head, but {} {} has {}"
    require(turned <= width, rotates, cos.shape, turned, name, x.shape, width)
    fits = all(n in (1, m) for n, m in zip(cos.shape[:-1], x.shape, strict=False))
    require(fits, "rope: cos {} does not fit the leading dimensions of {} {}", cos.shape, name, x.shape)
    wanted = compute_dtype(x.dtype)
    for other, t in (("cos", cos), ("sin", sin)):
        if t.dtype not in (wanted, x.dtype):
            either = wanted if wanted == x.dtype else f"{wanted} or {x.dtype}"
            raise ValueError(f"rope: {other} must be {either} for {name} of {x.dtype}, got {t.dtype}")
    checks.check_same_device("rope", **{name: x}, cos=cos, sin=sin)


@checks.memoized
def _check(name: str, x: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor) -> None:
    """Check x alone, or queries x and keys k."""
    _check_one(name, x, cos, sin)
    if k is not None:
        _check_one("k", k, cos, sin)
        differ = "rope: q has {} {} but k has {} {}"
        checks.require(x.dtype == k.dtype, differ, "dtype", x.dtype, "dtype", k.dtype)
        checks.require(x.shape[-1] == k.shape[-1], differ, "width", x.shape[-1], "width", k.shape[-1])


def _check_angles(cos: Tensor, sin: Tensor) -> None:
    for name, t in (("cos", cos), ("sin", sin)):
        if t.requires_grad:
            raise ValueError(f"rope: {name} {tuple(t.shape)} requires a gradient, but receives none")


def _check_in_place(name: str, x: Tensor) -> None:
    shape, strides = tuple(x.shape), x.stride()
    apart = all(n <= 1 or stride for n, stride in zip(shape, strides, strict=True))
    checks.require(
        apart, "rope: in_place needs elements of their own, got {} with strides {}", shape, strides
    )
    trained = x.requires_grad and x.is_leaf and torch.is_grad_enabled()
    checks.require(
        not trained, "rope: in_place would overwrite {} {}, a leaf that requires grad", name, shape
    )


def _angles(x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Return cos and sin in the dtype of the arithmetic: copies, small as they are, of 16-bit ones."""
    wanted = compute_dtype(x.dtype)
    return cos.to(wanted), sin.to(wanted)


def _in_place(q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, interleaved: bool) -> list[Tensor]:
    given = _given(q, k)
    if not (torch.is_grad_enabled() and any(x.requires_grad for x in given)):
        _rope_(q, k, cos, sin, interleaved, False)
        return given
    if torch.compiler.is_compiling():  # which cannot trace a function that overwrites a view
        turned = _rope(q, k, cos, sin, interleaved, False)
        return [x.copy_(y) for x, y in zip(given, turned, strict=False)]
    # a function that overwrites a view may return no second tensor
    if k is None or q._is_view() or k._is_view():
        return [_InPlace.apply(x, None, cos, sin, interleaved) for x in given]
    return list(_InPlace.apply(q, k, cos, sin, interleaved))


@traced("fastmp.rope")
def rope(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False, in_place: bool = False) -> Tensor:
    """Rotary position embedding of queries or keys; differentiable in x. Under autocast x keeps its dtype.

    Args:
        x: (..., D), float64, float32, bfloat16 or float16, any strides (last stride 1 avoids a copy), e.g.
            (S, B, N, D) of N heads. A view that holds queries and keys next to each other, as a fused
            projection makes them, takes one call.
        cos, sin: (..., R / 2) of the angles, R <= D, float32 (float64 for float64 x), see `rope_cos_sin`, or
            of x's dtype, as transformers makes them: their rounding is then in the result. Their leading
            dimensions are the first ones of x, each of the same size or 1: (S, R / 2) for sequence-first x,
            (1, S, R / 2) for (B, S, N, D), (S, B, R / 2) where samples have positions of their own,
            (T, R / 2) for packed tokens (T, N, D). Elements of x from R on stay as they are.
        interleaved: the element at 2i turns with that at 2i + 1 (GPT-J), not that at i with the one at
            i + R / 2 (GPT-NeoX, Llama).
        in_place: overwrite x and return it: half the memory, and nothing is moved but the rotated part. A
            tensor that autograd needs elsewhere, and a leaf that requires grad, is an error. Where x is a
            view, autograd copies the gradient of what it is a view of.

    Returns:
        x's shape and dtype; a new tensor is contiguous. Arithmetic is in float32 (float64 for float64 x) and
        rounded once. The gradient is rotated back, into a new tensor.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, cos or sin require grad, or x cannot be overwritten.

    Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021.
    """
    _check("x", x, None, cos, sin)
    _check_angles(cos, sin)
    cos, sin = _angles(x, cos, sin)
    if in_place:
        _check_in_place("x", x)
        return _in_place(x, None, cos, sin, interleaved)[0]
    return _rope(x, None, cos, sin, interleaved, False)[0]


@traced("fastmp.rope_qk")
def rope_qk(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False, in_place: bool = False
) -> tuple[Tensor, Tensor]:
    """`rope` of queries (S, B, N, D) and keys (S, B, G, D) in one launch; G and N may differ.

    Arguments, results and errors as in `rope`. In place under autograd there is one launch for each where
    one of the two is a view.

    Raises:
        ValueError: also where q and k differ in dtype, device or D.
    """
    _check("q", q, k, cos, sin)
    _check_angles(cos, sin)
    cos, sin = _angles(q, cos, sin)
    if in_place:
        _check_in_place("q", q)
        _check_in_place("k", k)
        turned_q, turned_k = _in_place(q, k, cos, sin, interleaved)
        return turned_q, turned_k
    return _rope(q, k, cos, sin, interleaved, False)


def rope_cos_sin(
    positions: int | Tensor,
    dim: int,
    *,
    base: float = 10000.0,
    scaled: Callable[[Tensor], Tensor] | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> tuple[Tensor, Tensor]:
    """cos and sin of the angles p / base^(2i / dim), for `rope`; made once a step, used by every layer.

    Args:
        positions: the number of tokens S, for positions 0 to S - 1, or positions of any shape.
        dim: R, how many elements of each head turn; even.
        base: 10000 in RoFormer, 500000 in Llama 3.
        scaled: maps the angles of position 1, (dim / 2,) in float64, to others (see `fastmp.nn.rope`).
        dtype: float32, or float64 for float64 activations. Angles are computed in float64: those of float32
            are off by 0.01 at position 100,000.
        device: of the result; default that of `positions`.

    Returns:
        cos and sin, each (*positions.shape, dim / 2), S counting as shape (S,).

    Raises:
        ValueError: dim is odd or negative, or base is not positive.
    """
    if dim < 0 or dim % 2:
        raise ValueError(f"rope_cos_sin: dim must be even and not negative, got {dim}")
    if base <= 0:
        raise ValueError(f"rope_cos_sin: base must be positive, got {base} for dim {dim}")
    if not isinstance(positions, Tensor):
        positions = torch.arange(positions, device=device)
    positions = positions.to(device=device, dtype=torch.float64)
    exponents = torch.arange(0, dim, 2, dtype=torch.float64, device=positions.device) / max(dim, 1)
    frequencies = base**-exponents
    angles = positions[..., None] * (frequencies if scaled is None else scaled(frequencies))
    return angles.cos().to(dtype), angles.sin().to(dtype)
