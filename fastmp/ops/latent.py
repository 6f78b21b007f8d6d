"""latent_norm_rope: RMSNorm of the latents and RoPE of the shared keys of multi-head latent attention.

A row of x is a token's latent, C elements, and the key that all its heads share, 2 R elements (DeepSeek-AI
2024, arXiv 2405.04434, section 2.1). One kernel reads the rows once and writes both results; backward, it
writes the gradient of x once, in place of two slices that are padded and added. Saved are x, weight, cos, sin
and rstd of each row. The parts are those of `rms_norm` and `rope`, whose references define the results.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fastmp.ops import norm, rope
from fastmp.ops.core import checks
from fastmp.ops.core.registry import autocast, compute_dtype, register
from fastmp.ops.latent_triton import check_sizes, launch, launch_backward
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
