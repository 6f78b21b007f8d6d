"""rope: rotary position embedding, which rotates pairs of elements of each head by the angle of their token.

A pair (a, b) becomes (a cos - b sin, b cos + a sin). Pairs are half of the rotated part apart (GPT-NeoX,
Llama) or adjacent (GPT-J, interleaved). The inverse of a rotation is its transpose, so the backward is the
same kernel with sin negated, and only cos and sin are saved. Queries and keys share a launch. Rotary
embedding: Su et al. 2021 (arXiv 2104.09864).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from fastmp.ops.core import checks
from fastmp.ops.core.registry import compute_dtype, register
from fastmp.ops.rope_triton import launch, launch_
from fastmp.profiling import traced


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


def _given(q: Tensor, k: Tensor | None) -> list[Tensor]:
    return [x for x in (q, k) if x is not None]


def _flops(q: Tensor, k: Tensor | None, cos: Tensor, *form) -> int:
    """Count two products and a sum for each rotated element."""
    return sum(3 * math.prod(x.shape[:-1]) * 2 * cos.shape[-1] for x in _given(q, k))


def _traffic_in_place(q: Tensor, k: Tensor | None, cos: Tensor, *form) -> int:
    """Read and write the rotated part of q and k, and read cos and sin."""
    rows = sum(x.numel() // max(x.shape[-1], 1) * x.element_size() for x in _given(q, k))
    return 2 * rows * 2 * cos.shape[-1] + 2 * cos.numel() * cos.element_size()


_ANGLES = "Tensor cos, Tensor sin, bool interleaved, bool inverse"
_CONTRACT = (
    "q (..., D) floating; k (k..., D) q; cos (~..., R) wide(q); cos (~k..., R) wide(q); "
    "cos (c..., R) wide(q); sin (c..., R) cos; 0 < 2 * R <= D"
)
_rope = register(
    f"rope(Tensor q, Tensor? k, {_ANGLES}) -> (Tensor turned_q, Tensor turned_k)",
    contract=_CONTRACT,
    shard="q k cos~ sin~ -> rows rows?k",
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
    contract=_CONTRACT,
    reference=reference_,
    triton=launch_,
    flops=_flops,
    traffic=_traffic_in_place,
)


class _InPlace(torch.autograd.Function):
    """Rotate one or two tensors in place. They are the first arguments, as autograd requires of a view."""

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
    order = (
        "; {} is (S, B, N, D): of (B, S, N, D) pass {}.transpose(0, 1); of (B, N, S, D), permute(2, 0, 1, 3)"
    )
    misfit = "rope: cos {} does not fit the leading dimensions of {} {}" + order
    require(fits, misfit, cos.shape, name, x.shape, name, name)
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


def check_angles(op: str, cos: Tensor, sin: Tensor) -> None:
    """Check that cos and sin require no gradient."""
    for name, t in (("cos", cos), ("sin", sin)):
        if t.requires_grad:
            raise ValueError(f"{op}: {name} {tuple(t.shape)} requires a gradient, but receives none")


def _check_in_place(name: str, x: Tensor) -> None:
    shape, strides = tuple(x.shape), x.stride()
    distinct = all(n <= 1 or stride for n, stride in zip(shape, strides, strict=True))
    checks.require(
        distinct, "rope: in_place needs elements of their own, got {} with strides {}", shape, strides
    )
    trained = x.requires_grad and x.is_leaf and torch.is_grad_enabled()
    checks.require(
        not trained, "rope: in_place would overwrite {} {}, a leaf that requires grad", name, shape
    )


def angles(x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Return cos and sin in the dtype of the arithmetic; 16-bit ones are cast."""
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
    """Apply rotary position embedding to queries or keys. Differentiable in x.

    Args:
        x: (..., D), float64, float32, bfloat16 or float16, any strides (last stride 1 avoids a copy), e.g.
            (S, B, N, D) with N heads. Queries and keys side by side in one view, as from a fused projection,
            need only one call.
        cos, sin: (..., R / 2), R <= D, float32 (float64 for float64 x), from `rope_cos_sin`; or in x's dtype,
            as transformers makes them, with their rounding error. Their leading dimensions align with the
            first ones of x, each of the same size or 1:

            - (S, R / 2) for sequence-first x (S, B, N, D)
            - (1, S, R / 2) for (B, S, N, D)
            - (S, B, R / 2) if samples have different positions
            - (T, R / 2) for packed tokens (T, N, D)

            Elements of x from R on are copied.
        interleaved: rotate elements 2i and 2i + 1 together (GPT-J); default: i and i + R / 2 (GPT-NeoX,
            Llama).
        in_place: overwrite x and return it: half the memory, and only the rotated part is moved. Raises if x
            is a leaf that requires grad; autograd raises if it needs x elsewhere. If x is a view, autograd
            copies the gradient of its base.

    Returns:
        A tensor of x's shape and dtype, contiguous unless in place; autocast does not apply. Arithmetic is in
        float32 (float64 for float64 x) and rounded once.

    Raises:
        ValueError: shapes, dtypes or devices do not match, cos or sin require grad, or x cannot be
            overwritten.

    Example:

        q = torch.randn(8, 2, 4, 64)  # (S, B, N, D)
        cos, sin = fastmp.ops.rope_cos_sin(8, dim=64)
        q = fastmp.ops.rope(q, cos, sin)

    Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021.
    """
    _check("x", x, None, cos, sin)
    check_angles("rope", cos, sin)
    cos, sin = angles(x, cos, sin)
    if in_place:
        _check_in_place("x", x)
        return _in_place(x, None, cos, sin, interleaved)[0]
    return _rope(x, None, cos, sin, interleaved, False)[0]


@traced("fastmp.rope_qk")
def rope_qk(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False, in_place: bool = False
) -> tuple[Tensor, Tensor]:
    """Apply `rope` to queries (S, B, N, D) and keys (S, B, G, D) in one launch; G and N may differ.

    Arguments, results and errors as in `rope`. In place under autograd, views take one launch each.

    Raises:
        ValueError: as in `rope`, or q and k differ in dtype, device or D.

    Example:

        q, k = torch.randn(8, 2, 4, 64), torch.randn(8, 2, 1, 64)
        cos, sin = fastmp.ops.rope_cos_sin(8, dim=64)
        q, k = fastmp.ops.rope_qk(q, k, cos, sin)
    """
    _check("q", q, k, cos, sin)
    check_angles("rope", cos, sin)
    cos, sin = angles(q, cos, sin)
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
    """Return cos and sin of the angles p / base^(2i / dim), for `rope`.

    Compute them once per step, for all layers.

    Args:
        positions: number of tokens S, for positions 0 to S - 1; or a tensor of positions of any shape.
        dim: R, the number of rotated elements of each head; even.
        base: 10000 in RoFormer, 500000 in Llama 3.
        scaled: function of the inverse frequencies (dim / 2,), in float64, that returns scaled ones (see
            `fastmp.nn.rope`).
        dtype: float32, or float64 for float64 activations. Angles are computed in float64; in float32 they
            are off by 0.01 at position 100,000.
        device: device of the result; default: that of `positions`.

    Returns:
        cos and sin, each (*positions.shape, dim / 2), or (S, dim / 2).

    Raises:
        ValueError: dim is odd or negative, or base is not positive.

    Example:

        cos, sin = fastmp.ops.rope_cos_sin(8, dim=64)
        assert cos.shape == (8, 32)
    """
    if dim < 0 or dim % 2:
        raise ValueError(f"rope_cos_sin: dim must be even and not negative, got {dim}")
    checks.check_finite("rope_cos_sin", torch.float64, base=base)
    if base <= 0:
        raise ValueError(f"rope_cos_sin: base must be positive, got {base} for dim {dim}")
    if not isinstance(positions, Tensor):
        positions = torch.arange(positions, device=device)
    positions = positions.to(device=device, dtype=torch.float64)
    exponents = torch.arange(0, dim, 2, dtype=torch.float64, device=positions.device) / max(dim, 1)
    frequencies = base**-exponents
    angles = positions[..., None] * (frequencies if scaled is None else scaled(frequencies))
    return angles.cos().to(dtype), angles.sin().to(dtype)
