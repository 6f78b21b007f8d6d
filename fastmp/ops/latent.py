"""latent_norm_rope: RMSNorm of the latents and RoPE of the shared keys of multi-head latent attention.

A row of x is a token's latent, C elements, and the key that all its heads share, 2 R elements (DeepSeek-AI
2024, arXiv 2405.04434, section 2.1). One kernel reads the rows once and writes both results; backward, it
writes the gradient of x once, in place of two slices that are padded and added. Saved are x, weight, cos, sin
and rstd of each row. The parts are those of `rms_norm` and `rope`, whose references define the results.

The widths of a latent and of a shared key are constants of a model, so both kernels know them at compile
time. Rows of the two parts are tiled apart, each in 16-byte accesses: a tile of keys has many short rows.

- Forward: the first programs rotate tiles of keys, the others normalise tiles of latents.
- Backward: persistent programs walk over tiles of latents, then over tiles of keys. Each sums its part of the
  weight's gradient; `sum_strips` adds the programs' sums in order.

Latents too long for registers take the kernels of `rms_norm` and `rope` in turn.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fastmp.ops import norm, norm_triton, rope, rope_triton
from fastmp.ops.core import checks, launcher
from fastmp.ops.core._triton import MAX_COUNT, MAX_SIZE, MAX_WALKING, cdiv, check_count, jit, limits, tl
from fastmp.ops.core.registry import autocast, compute_dtype, register
from fastmp.ops.core.rowwise import arithmetic, as_rows, empty_like, sum_strips, vector_width
from fastmp.ops.norm_triton import load_rows, normalized_tile
from fastmp.ops.rope_triton import rotate_rows
from fastmp.profiling import traced

__all__ = ["latent_norm_rope"]


def reference(
    x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float, interleaved: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the normalised latents (..., C), the turned keys (..., 2 R), and rstd (...)."""
    check_sizes("latent_norm_rope", x, weight, cos, sin)
    rank = len(weight)
    latent, _, stats = norm.reference(False, x[..., :rank], None, weight, None, eps)
    shared, _ = rope.reference(x[..., rank:], None, cos, sin, interleaved, False)
    return latent, shared.contiguous(), stats.squeeze(0)


def reference_backward(
    grad_latent: Tensor, grad_shared: Tensor, x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor,
    rstd: Tensor, interleaved: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the gradients of x and of weight."""
    check_sizes("latent_norm_rope_backward", x, weight, cos, sin, grad_latent, grad_shared, rstd)
    latents, stats = x[..., : len(weight)], rstd.unsqueeze(0)
    d_latent, dweight = norm.reference_backward(False, grad_latent, None, latents, weight, stats)
    d_shared, _ = rope.reference(grad_shared, None, cos, sin, interleaved, True)
    return torch.cat((d_latent, d_shared), -1), dweight.squeeze(0)


@limits(num_rows=MAX_COUNT, rows=MAX_COUNT, rows_per_turn=MAX_COUNT, pitch=MAX_SIZE)
@jit(dynamic="num_rows rows_per_turn", fixed="pitch")
def latent_kernel(
    x,  # (num_rows, RANK + 2 * HALF), rows `pitch` vectors apart
    weight,  # (RANK,)
    cos, sin,  # (num_rows / rows_per_turn, HALF), contiguous
    latent, shared,  # (num_rows, RANK), (num_rows, 2 * HALF), contiguous
    rstd,  # (num_rows,)
    num_rows, rows_per_turn, pitch,
    EPS: tl.constexpr, RANK: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
    COMPUTE: tl.constexpr, INDEX: tl.constexpr, VECTOR: tl.constexpr, TURN_VECTOR: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TURN_M: tl.constexpr, TURN_HALF: tl.constexpr,
):  # fmt: skip
    """Rotate TURN_M keys, or normalise BLOCK_M latents; BLOCK_N covers a whole latent."""
    pid = tl.program_id(0)
    turns = tl.cdiv(num_rows.to(INDEX), TURN_M) if HALF > 0 else 0
    if pid < turns:
        # 1. Keys: row r lies at r * pitch, and turns by row r / rows_per_turn of cos and sin.
        rotate_rows(
            x + RANK, shared, cos, sin, pid, num_rows, 1, rows_per_turn,
            rows_per_turn.to(tl.int64) * pitch, 0, pitch, HALF // TURN_VECTOR, 0, 0,
            INTERLEAVED, False, False, HALF, 2 * HALF, 2 * HALF, VECTOR, TURN_VECTOR, TURN_M, TURN_HALF,
            COMPUTE, INDEX,
        )  # fmt: skip
    else:
        # 2. Latents: normalise, scale and store.
        rows = (pid - turns).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        cols = tl.arange(0, BLOCK_N)
        h, mask = normalized_tile(
            x, None, weight, None, rstd, rows, cols, num_rows, RANK, pitch, 0,
            EPS, False, False, COMPUTE, VECTOR,
        )  # fmt: skip
        tl.store(latent + rows[:, None] * RANK + cols[None, :], h, mask=mask)


@limits(
    num_rows=MAX_COUNT, rows=MAX_COUNT, rows_per_turn=MAX_COUNT, latent_pitch=MAX_SIZE,
    shared_pitch=MAX_SIZE, pitch=MAX_SIZE, programs=MAX_WALKING,
)  # fmt: skip
@jit(dynamic="num_rows rows_per_turn", fixed="latent_pitch shared_pitch pitch")
def latent_backward_kernel(
    grad_latent, grad_shared,  # (num_rows, RANK), (num_rows, 2 * HALF), rows *_pitch vectors apart
    x,  # (num_rows, RANK + 2 * HALF), rows `pitch` vectors apart
    weight,  # (RANK,)
    cos, sin,  # (num_rows / rows_per_turn, HALF), contiguous
    rstd,  # (num_rows,)
    dx,  # (num_rows, RANK + 2 * HALF), contiguous
    partials,  # (num_programs, RANK) in COMPUTE
    num_rows, rows_per_turn, latent_pitch, shared_pitch, pitch,
    RANK: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, COMPUTE: tl.constexpr,
    INDEX: tl.constexpr, VECTOR: tl.constexpr, TURN_VECTOR: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, TURN_M: tl.constexpr, TURN_HALF: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Compute dx of every num_programs-th tile, and this program's row of `partials`."""
    # 1. The weight and the sums of its gradient stay in registers over all tiles of latents.
    pid, programs = tl.program_id(0), tl.num_programs(0)
    cols = tl.arange(0, BLOCK_N)
    here = cols < RANK
    w = tl.load(weight + cols, mask=here, other=0.0).to(COMPUTE)[None, :]
    dweight = tl.zeros([BLOCK_M, BLOCK_N], COMPUTE)
    for block in tl.range(pid, tl.cdiv(num_rows, BLOCK_M), programs, num_stages=NUM_STAGES):
        rows = (block * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
        there = rows < num_rows
        mask = here[None, :] if BLOCK_M == 1 else there[:, None] & here[None, :]
        # 2. Normalise the rows again, by their statistics.
        g = load_rows(grad_latent, rows, cols, latent_pitch, mask, VECTOR, COMPUTE)
        h = load_rows(x, rows, cols, pitch, mask, VECTOR, COMPUTE)
        scale = tl.load(rstd + rows, mask=there, other=0.0)[:, None]
        h *= scale
        dweight += g * h
        # 3. dx = rstd (g w - h mean(g w h)).
        g *= w
        d = (g - h * (tl.sum(g * h, 1) / RANK)[:, None]) * scale
        tl.store(dx + rows[:, None] * (RANK + 2 * HALF) + cols[None, :], d, mask=mask)
    # 4. Store this program's sums; `sum_strips` adds the programs in order.
    tl.store(partials + pid.to(tl.int64) * RANK + cols, tl.sum(dweight, 0), mask=here)
    # 5. Turn the gradients of keys back.
    if HALF > 0:
        for block in range(pid, tl.cdiv(num_rows, TURN_M), programs):
            rotate_rows(
                grad_shared, dx + RANK, cos, sin, block, num_rows, 1, rows_per_turn,
                rows_per_turn.to(tl.int64) * shared_pitch, 0, shared_pitch, HALF // TURN_VECTOR, 0, 0,
                INTERLEAVED, True, False, HALF, 2 * HALF, RANK + 2 * HALF, VECTOR, TURN_VECTOR, TURN_M,
                TURN_HALF, COMPUTE, INDEX,
            )  # fmt: skip


def check_sizes(
    op: str, x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, grad_latent: Tensor | None = None,
    grad_shared: Tensor | None = None, rstd: Tensor | None = None,
) -> None:  # fmt: skip
    """Check shapes, as the C++ kernel does: cos has the first leading dimensions of x, all or fewer."""
    given = (grad_latent, grad_shared, rstd)
    shapes = tuple(None if t is None else tuple(t.shape) for t in given)
    _check_shapes(op, tuple(x.shape), tuple(weight.shape), tuple(cos.shape), tuple(sin.shape), shapes)


def _check_shapes(
    op: str, x: tuple[int, ...], weight: tuple[int, ...], cos: tuple[int, ...], sin: tuple[int, ...],
    others: tuple[tuple[int, ...] | None, ...] = (),
) -> None:  # fmt: skip
    """As `check_sizes`; others: the shapes of grad_latent, grad_shared and rstd, or of none."""
    fits = len(x) > 0 and 0 < len(cos) <= len(x) and cos[:-1] == x[: len(cos) - 1] and len(weight) == 1
    if not fits or sin != cos or weight[0] == 0 or x[-1] != weight[0] + 2 * cos[-1]:
        shapes = map(tuple, (weight, cos, sin, x))
        raise ValueError("{}: weight {}, cos {} and sin {} do not fit x {}".format(op, *shapes))
    wanted = (*x[:-1], weight[0]), (*x[:-1], 2 * cos[-1]), x[:-1]
    for name, shape, expected in zip(("grad_latent", "grad_shared", "rstd"), others, wanted, strict=False):
        if shape is not None and shape != expected:
            raise ValueError(f"{op}: expected {name} of shape {tuple(expected)}, got {tuple(shape)}")


_check_once = lru_cache(maxsize=1024)(_check_shapes)


@lru_cache(maxsize=1024)
def _constants(
    dtype: torch.dtype, rank: int, half: int, many: bool, pitches: tuple[int, ...], backward: bool,
    interleaved: bool, **others: Any,
) -> dict[str, Any] | None:  # fmt: skip
    """Return the constants of a kernel; None if latents are too long for registers.

    many: rows need 64-bit integers. pitches: in elements. others: further constants.
    """
    itemsize = dtype.itemsize
    if backward:
        block = norm_triton.backward_block_shape(rank, itemsize)
    else:
        block = norm_triton.block_shape(rank, itemsize, False)
    if block is None:
        return None
    turn_m, turn_half = rope_triton.block_shape(half, itemsize)
    return {
        **others, "RANK": rank, "HALF": half, "INTERLEAVED": interleaved, "COMPUTE": arithmetic(dtype),
        "INDEX": tl.int64 if many else tl.int32, "VECTOR": vector_width(itemsize, *pitches),
        "TURN_VECTOR": math.gcd(16 // compute_dtype(dtype).itemsize, half), "TURN_M": turn_m,
        "TURN_HALF": turn_half, "BLOCK_M": block[0], "BLOCK_N": block[1], "num_warps": block[2],
    }  # fmt: skip


def launch(
    x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float, interleaved: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the normalised latents, the turned keys, and rstd of each row."""
    _check_once("latent_norm_rope", x.shape, weight.shape, cos.shape, sin.shape)
    # 1. Plan; latents too long for registers take two launches.
    leading, rank, half = x.shape[:-1], weight.shape[0], cos.shape[-1]
    num_rows = math.prod(leading)
    rows, pitch = as_rows(x) if num_rows else (x, 0)
    many = num_rows > MAX_COUNT
    constants = _constants(x.dtype, rank, half, many, (pitch,), False, interleaved, EPS=eps)
    if constants is None:
        latent, _, stats = norm_triton.launch(False, x[..., :rank], None, weight, None, eps)
        shared, _ = rope_triton.launch(x[..., rank:], None, cos, sin, interleaved, False)
        return latent, shared, stats.squeeze(0)
    # 2. Results.
    latent, shared = x.new_empty(*leading, rank), x.new_empty(*leading, 2 * half)
    wide = compute_dtype(x.dtype)
    rstd = x.new_empty(leading) if wide == x.dtype else x.new_empty(leading, dtype=wide)
    if num_rows == 0:
        return latent, shared, rstd
    # 3. Programs of keys come first, then those of latents.
    turns = cdiv(num_rows, constants["TURN_M"]) if half else 0
    launcher.launch(
        latent_kernel, turns + cdiv(num_rows, constants["BLOCK_M"]),
        (rows, weight.contiguous(), cos.contiguous(), sin.contiguous(), latent, shared, rstd, num_rows,
         math.prod(leading[cos.dim() - 1 :]), pitch // constants["VECTOR"]),
        constants,
    )  # fmt: skip
    return latent, shared, rstd


def launch_backward(
    grad_latent: Tensor, grad_shared: Tensor, x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor,
    rstd: Tensor, interleaved: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the gradients of x and of weight."""
    others = grad_latent.shape, grad_shared.shape, rstd.shape
    _check_once("latent_norm_rope_backward", x.shape, weight.shape, cos.shape, sin.shape, others)
    # 1. Plan; latents too long for registers take the launches of two ops.
    leading, rank, half, num_rows = x.shape[:-1], weight.shape[0], cos.shape[-1], rstd.numel()
    if num_rows == 0:
        return empty_like(x), torch.zeros_like(weight)
    check_count("latent_norm_rope", "rows", num_rows)
    tensors, pitches = zip(*map(as_rows, (grad_latent, grad_shared, x)), strict=True)
    many, stages = num_rows > MAX_COUNT, norm_triton.num_stages(x.element_size())
    constants = _constants(x.dtype, rank, half, many, pitches, True, interleaved, NUM_STAGES=stages)
    if constants is None:
        latents, stats = x[..., :rank], rstd.unsqueeze(0)
        d_latent, dweight = norm_triton.launch_backward(False, grad_latent, None, latents, weight, stats)
        d_shared, _ = rope_triton.launch(grad_shared, None, cos, sin, interleaved, True)
        return torch.cat((d_latent, d_shared), -1), dweight.squeeze(0)
    # 2. Gradients of x, and sums of each program, which are added in order.
    dx, dweight = empty_like(x), weight.new_empty(rank)
    programs = norm_triton.num_programs(num_rows, constants["BLOCK_M"], constants["num_warps"])
    partials = rstd.new_empty(programs, rank)
    launcher.launch(
        latent_backward_kernel, programs,
        (
            *tensors, weight.contiguous(), cos.contiguous(), sin.contiguous(), rstd.contiguous(), dx,
            partials, num_rows, math.prod(leading[cos.dim() - 1 :]),
            *(pitch // constants["VECTOR"] for pitch in pitches),
        ),
        constants,
    )  # fmt: skip
    sum_strips(partials, dweight)
    return dx, dweight


def _fake(
    x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float, interleaved: bool
) -> tuple[Tensor, Tensor, Tensor]:
    check_sizes("latent_norm_rope", x, weight, cos, sin)
    shape, rank = x.shape[:-1], weight.shape[0]
    results = x.new_empty(*shape, rank), x.new_empty(*shape, 2 * cos.shape[-1])
    return *results, x.new_empty(shape, dtype=compute_dtype(x.dtype))


def _fake_backward(
    grad_latent: Tensor, grad_shared: Tensor, x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor,
    rstd: Tensor, interleaved: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    check_sizes("latent_norm_rope_backward", x, weight, cos, sin, grad_latent, grad_shared, rstd)
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


def _flops(each: int, x: Tensor, weight: Tensor, cos: Tensor) -> int:
    """Count `each` operations for an element of a latent, and three for one of a key."""
    return math.prod(x.shape[:-1]) * (each * weight.shape[0] + 3 * 2 * cos.shape[-1])


register(
    "latent_norm_rope_backward(Tensor grad_latent, Tensor grad_shared, Tensor x, Tensor weight, Tensor cos,"
    " Tensor sin, Tensor rstd, bool interleaved) -> (Tensor dx, Tensor dweight)",
    contract=(
        "x (..., D) floating; weight (C) floating; 0 < C; cos (~..., R) wide(x); cos (c..., R) wide(x); "
        "sin (c..., R) cos; D == C + 2 * R; grad_latent (..., C) x; grad_shared (..., H) x; H == 2 * R; "
        "rstd (...) wide(x)"
    ),
    shard="grad_latent grad_shared x cos~ sin~ rstd -> rows sum",
    reference=reference_backward,
    triton=launch_backward,
    fake=_fake_backward,
    flops=lambda grad_latent, grad_shared, *others: _flops(9, *others[:3]),
)
_latent_norm_rope = register(
    "latent_norm_rope(Tensor x, Tensor weight, Tensor cos, Tensor sin, float eps, bool interleaved)"
    " -> (Tensor latent, Tensor shared, Tensor rstd)",
    contract=(
        "x (..., D) floating; weight (C) floating; 0 < C; cos (~..., R) wide(x); cos (c..., R) wide(x); "
        "sin (c..., R) cos; D == C + 2 * R"
    ),
    shard="x cos~ sin~ -> rows rows rows",
    reference=reference,
    triton=launch,
    fake=_fake,
    flops=lambda *arguments: _flops(4, *arguments[:3]),
    autograd_formula="latent_norm_rope_backward(grad_latent, grad_shared, x, weight, cos, sin, rstd,"
    " interleaved) -> x, weight",
)


@checks.memoized
def _check(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> None:
    op, require = "latent_norm_rope", checks.require
    checks.check_floating(op, "x", x)
    require(eps >= 0, "{}: eps must not be negative, got {}", op, eps)
    if weight.dtype == torch.float32 and x.dtype in norm.NARROW:
        checks.check_same_device(op, x=x, weight=weight)
    else:
        checks.check_same(op, x=x, weight=weight)
    checks.check_same_device(op, x=x, cos=cos, sin=sin)
    filled = weight.dim() == 1 and weight.shape[0] > 0
    require(filled, "{}: expected weight of shape (C,), got {}", op, weight.shape)
    checks.check_shape(op, cos.shape, to=("cos", cos), sin=sin)
    fewer = 0 < cos.dim() <= x.dim()
    require(fewer, "{}: cos {} has more dimensions than x {}, or none", op, cos.shape, x.shape)
    wide = "{}: expected x (..., {}) for weight {} and cos {}, got {}"
    width = weight.shape[0] + 2 * cos.shape[-1]
    require(x.shape[-1] == width, wide, op, width, weight.shape, cos.shape, x.shape)
    fits = all(n in (1, m) for n, m in zip(cos.shape[:-1], x.shape, strict=False))
    require(fits, "{}: cos {} does not fit the leading dimensions of x {}", op, cos.shape, x.shape)
    wanted = compute_dtype(x.dtype)
    for name, t in (("cos", cos), ("sin", sin)):
        known = t.dtype in (wanted, x.dtype)
        require(known, "{}: {} must be {} for x of {}, got {}", op, name, wanted, x.dtype, t.dtype)


@traced("fastmp.latent_norm_rope")
def latent_norm_rope(
    x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, *, eps: float = 1e-6, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Normalise the latents of latent attention and rotate its shared keys. Differentiable once.

    Args:
        x: (..., C + 2 R), float64, float32, bfloat16 or float16, any strides (last stride 1 avoids a copy),
            e.g. (S, B, C + 2 R): the latent of a token, then the key that its heads share.
        weight: (C,), of the RMSNorm of latents; of x's dtype, or float32 with a 16-bit x. Its gradient has
            its dtype.
        cos, sin: (..., R) from `rope_cos_sin`, float32 (float64 for float64 x) or of x's dtype; their leading
            dimensions align with the first ones of x, each of the same size or 1, as in `rope`.
        eps: term added to the mean square.
        interleaved: rotate elements 2i and 2i + 1 of a key together; default: i and i + R.

    Returns:
        (latent, shared): `rms_norm(x[..., :C], weight, eps=eps)` and `rope(x[..., C:], cos, sin,
        interleaved=interleaved)`, new contiguous tensors of x's dtype. Arithmetic and the weight gradient's
        sums are in float32 (float64 for float64 x) and rounded once. Autocast casts x.

    Raises:
        ValueError: shapes, dtypes or devices do not match, eps is negative, or cos or sin require grad.

    Example:

        x, weight = torch.randn(8, 2, 32 + 16), torch.ones(32)
        latent, shared = fastmp.ops.latent_norm_rope(x, weight, *fastmp.ops.rope_cos_sin(8, dim=16))
        assert latent.shape == (8, 2, 32) and shared.shape == (8, 2, 16)
    """
    (x,) = autocast(x)
    if weight.dtype not in (x.dtype, torch.float32):
        (weight,) = autocast(weight)
    _check(x, weight, cos, sin, eps)
    rope.check_angles("latent_norm_rope", cos, sin)
    cos, sin = rope.angles(x, cos, sin)
    leading = x.shape[: cos.dim() - 1]
    if cos.shape[:-1] != leading:
        cos, sin = (t.expand(*leading, -1) for t in (cos, sin))
    latent, shared, _ = _latent_norm_rope(x, weight, cos, sin, eps, interleaved)
    return latent, shared
