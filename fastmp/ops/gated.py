"""swiglu and geglu: y = activation(gate) * up, and its backward.

gate and up are the halves of x + bias = [gate | up], or two tensors. Only the arguments are saved; the
backward recomputes the activation. SiLU and the tanh form of GeLU are h * sigmoid(w(h)): one exp2 and one
reciprocal give both the activation and its derivative. The bias gradient comes from the same pass (see
core/rowwise.py). Gated linear units: Dauphin et al. 2017 (arXiv 1612.08083); these two: Shazeer 2020 (arXiv
2002.05202).
"""

from __future__ import annotations

import math
from typing import Literal, overload

import torch
from torch import Tensor

from fastmp.ops import activation as gelu_family
from fastmp.ops import quantize as quantizers
from fastmp.ops.activation import gelu, gelu_parts
from fastmp.ops.core import checks, fp8
from fastmp.ops.core import rowwise as rows
from fastmp.ops.core._triton import MAX_SIZE, MAX_STRIP, jit, limits, tl
from fastmp.ops.core.fp8 import group_tile, quantize_tile, store_scales
from fastmp.ops.core.registry import autocast, compute_dtype, register
from fastmp.ops.core.rowwise import sum_rows
from fastmp.profiling import traced

_GELU_FORM = {"gelu_tanh": "tanh", "gelu": "none"}
_FUNCTION = {"silu": "swiglu", "gelu_tanh": "geglu", "gelu": "geglu"}


def _parts(x: Tensor, up: Tensor | None) -> tuple[Tensor, ...]:
    """Return gate and up as views."""
    half = x.shape[-1] // 2
    return (x[..., :half], x[..., half:]) if up is None else (x, up)


def _shifted(x: Tensor, up: Tensor | None, bias: Tensor | None) -> list[Tensor]:
    """Return gate and up with the bias added, in the dtype of the arithmetic."""
    wide = [part.to(compute_dtype(x.dtype)) for part in _parts(x, up)]
    shifts = (None, None) if bias is None else bias.to(wide[0].dtype).chunk(2)
    return [h if shift is None else h + shift for h, shift in zip(wide, shifts, strict=True)]


def _activated(gate: Tensor, activation: str) -> Tensor:
    if activation == "silu":
        return gate / gate.neg().exp_().add_(1)
    return gelu_family.reference(gate, None, _GELU_FORM[activation])


def _slope(gate: Tensor, activation: str) -> Tensor:
    if activation != "silu":
        return gelu_family.gelu_slope(gate, _GELU_FORM[activation])
    e = gate.abs().neg_().exp_()
    r = (1 + e).reciprocal_()  # sigmoid(|gate|)
    e.mul_(r)
    return torch.where(gate > 0, r, e).add_(e.mul_(r).mul_(gate))


def reference(x: Tensor, bias: Tensor | None, activation: str, up: Tensor | None = None) -> Tensor:
    """Return activation(gate) * up, rounded once; x is [gate | up], or the gate if `up` is passed."""
    gate, factor = _shifted(x, up, bias)
    return _activated(gate, activation).mul_(factor).to(x.dtype).contiguous()


def reference_backward(
    grad: Tensor, x: Tensor, bias: Tensor | None, activation: str, up: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return gradients of x, up and bias; empty for an absent up or bias."""
    gate, factor = _shifted(x, up, bias)
    dgate = _slope(gate, activation).mul_(factor).mul_(grad)
    dup = _activated(gate, activation).mul_(grad)
    both = torch.cat((dgate, dup), -1)
    dbias = x.new_empty(0) if bias is None else sum_rows(both.unsqueeze(0).flatten(0, -2)).to(x.dtype)
    if up is None:
        return both.to(x.dtype), x.new_empty(0), dbias
    return dgate.to(x.dtype).contiguous(), dup.to(x.dtype).contiguous(), dbias


@jit
def activate(h, FORM: tl.constexpr):
    """Return the activation of h: "silu", "gelu_tanh" or "gelu"."""
    if FORM == "silu":
        return h * (1.0 / (1.0 + tl.exp2(-1.4426950408889634 * h)))
    else:
        return gelu(h, FORM == "gelu_tanh")


@jit
def _factors(h, FORM: tl.constexpr):
    """Return (p, q) such that the activation is h p and its derivative p + h q."""
    if FORM == "silu":
        e = tl.exp2(-1.4426950408889634 * tl.abs(h))
        r = 1.0 / (1.0 + e)  # sigmoid(|h|)
        return tl.where(h > 0, r, e * r), e * r * r
    else:
        return gelu_parts(h, FORM == "gelu_tanh")


@jit
def gate_gradients(grad, gate, up, FORM: tl.constexpr):
    """Return the gradients of gate and up; one exponential serves both."""
    # activation = gate p, derivative = p + gate q
    p, q = _factors(gate, FORM)
    return grad * (up * (p + gate * q)), grad * (gate * p)


@jit
def _activated_tile(
    gates, ups, bias, rows, cols, mask, num_cols, gate_pitch, up_pitch, JOINED: tl.constexpr,
    HAS_BIAS: tl.constexpr, FORM: tl.constexpr, COMPUTE: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Load gate and up at rows and cols, add the biases, and return activation(gate) * up in COMPUTE."""
    gates += rows[:, None] * gate_pitch * VECTOR + cols[None, :]
    if JOINED:
        ups = gates + num_cols
    else:
        ups += rows[:, None] * up_pitch * VECTOR + cols[None, :]
    gate = tl.load(gates, mask=mask, other=0.0).to(COMPUTE)
    up = tl.load(ups, mask=mask, other=0.0).to(COMPUTE)
    if HAS_BIAS:
        gate += tl.load(bias + cols, mask=cols < num_cols, other=0.0).to(COMPUTE)[None, :]
        up += tl.load(bias + num_cols + cols, mask=cols < num_cols, other=0.0).to(COMPUTE)[None, :]
    return activate(gate, FORM) * up


@limits(num_vectors=MAX_SIZE)
@jit(dynamic="num_rows", fixed="num_vectors gate_pitch up_pitch")
def gated_activation_kernel(
    gates, ups,  # (num_rows, num_cols); JOINED: gates is x (num_rows, 2 num_cols), ups is unused
    bias,  # (2 num_cols,) or None
    y,  # (num_rows, num_cols), contiguous
    num_rows, num_vectors, gate_pitch, up_pitch,
    JOINED: tl.constexpr, HAS_BIAS: tl.constexpr, FORM: tl.constexpr, COMPUTE: tl.constexpr,
    VECTOR: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute one tile (BLOCK_M, BLOCK_N) of y = activation(gate) * up.

    num_vectors and pitches count vectors of VECTOR elements, which proves alignment to the compiler.
    """
    # 1. Locate the tile in gate and up.
    num_cols = num_vectors * VECTOR
    column_blocks = tl.cdiv(num_cols, BLOCK_N)
    pid = tl.program_id(0)
    rows = (pid // column_blocks).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = (pid % column_blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (rows < num_rows)[:, None] & (cols < num_cols)[None, :]
    # 2. Compute and store.
    out = y + rows[:, None] * num_vectors * VECTOR + cols[None, :]
    value = _activated_tile(
        gates, ups, bias, rows, cols, mask, num_cols, gate_pitch, up_pitch, JOINED, HAS_BIAS, FORM, COMPUTE,
        VECTOR,
    )  # fmt: skip
    tl.store(out, value, mask=mask)


@limits(num_vectors=MAX_SIZE)
@jit(dynamic="num_rows", fixed="num_vectors gate_pitch up_pitch")
def gated_quantized_kernel(
    gates, ups,  # (num_rows, num_cols); JOINED: gates is x (num_rows, 2 num_cols), ups is unused
    bias,  # (2 num_cols,) or None
    q,  # (num_rows, num_cols) bytes, contiguous
    s,  # (num_rows, num_cols / GROUP), M-major
    num_rows, num_vectors, gate_pitch, up_pitch,
    JOINED: tl.constexpr, HAS_BIAS: tl.constexpr, FORM: tl.constexpr, GROUP: tl.constexpr,
    E5M2: tl.constexpr, NATIVE: tl.constexpr, COMPUTE: tl.constexpr, VECTOR: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute one tile (BLOCK_M, BLOCK_N) of y = activation(gate) * up in FP8."""
    # 1. Locate the tile, which holds whole groups.
    num_cols, rows, first, cols, mask = group_tile(num_rows, num_vectors, VECTOR, GROUP, BLOCK_M, BLOCK_N)
    # 2. Compute y and round it as the unquantised op does.
    value = _activated_tile(
        gates, ups, bias, rows, cols, mask, num_cols, gate_pitch, up_pitch, JOINED, HAS_BIAS, FORM, COMPUTE,
        VECTOR,
    )  # fmt: skip
    value = tl.where(mask, value.to(gates.dtype.element_ty), 0.0).to(tl.float32)
    # 3. Quantise and store.
    values, scales = quantize_tile(value, GROUP, E5M2, NATIVE)
    tl.store(q + rows[:, None] * num_cols + cols[None, :], values, mask=mask)
    store_scales(s, scales, rows, first, num_rows, num_cols, GROUP)


@limits(num_vectors=MAX_SIZE, rows_per_strip=MAX_STRIP)
@jit(dynamic="num_rows rows_per_strip", fixed="num_vectors grad_pitch gate_pitch up_pitch")
def gated_activation_backward_kernel(
    grad, gates, ups,  # (num_rows, num_cols); JOINED: gates is x (num_rows, 2 num_cols), ups is unused
    bias,  # (2 num_cols,) or None
    dgates, dups,  # (num_rows, num_cols), contiguous; JOINED: dgates is dx, dups is unused
    partials,  # (num_strips, 2 num_cols) in COMPUTE, or None without a bias
    num_rows, rows_per_strip, num_vectors, grad_pitch, gate_pitch, up_pitch,
    JOINED: tl.constexpr, HAS_BIAS: tl.constexpr, FORM: tl.constexpr, COMPUTE: tl.constexpr,
    VECTOR: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute both gradients of one strip of rows and BLOCK_N columns, and the strip's row of `partials`."""
    # 1. Locate the strip and the columns; both biases stay in registers.
    num_cols = num_vectors * VECTOR
    column_blocks = tl.cdiv(num_cols, BLOCK_N)
    pid = tl.program_id(0)
    strip = (pid // column_blocks).to(tl.int64)
    cols = (pid % column_blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = cols < num_cols
    if JOINED:
        ups, dups = gates + num_cols, dgates + num_cols
    gate_bias = tl.zeros([BLOCK_N], COMPUTE)
    up_bias = tl.zeros([BLOCK_N], COMPUTE)
    if HAS_BIAS:
        gate_bias = tl.load(bias + cols, mask=inside, other=0.0).to(COMPUTE)
        up_bias = tl.load(bias + num_cols + cols, mask=inside, other=0.0).to(COMPUTE)
    gate_total = tl.zeros([BLOCK_M, BLOCK_N], COMPUTE)
    up_total = tl.zeros([BLOCK_M, BLOCK_N], COMPUTE)
    # 2. Walk down the strip: both gradients are stored, and summed for the bias gradient.
    for step in range(0, rows_per_strip, BLOCK_M):
        rows = strip * rows_per_strip + step + tl.arange(0, BLOCK_M)
        mask = (rows < num_rows)[:, None] & inside[None, :]
        g = tl.load(grad + rows[:, None] * grad_pitch * VECTOR + cols[None, :], mask=mask, other=0.0)
        gate_at = rows[:, None] * gate_pitch * VECTOR + cols[None, :]
        # one set of offsets for both halves: the exact GeLU has no registers to spare
        up_at = gate_at if JOINED else rows[:, None] * up_pitch * VECTOR + cols[None, :]
        gate = tl.load(gates + gate_at, mask=mask, other=0.0)
        up = tl.load(ups + up_at, mask=mask, other=0.0)
        g = g.to(COMPUTE)
        gate = gate.to(COMPUTE) + gate_bias[None, :]
        dgate, dup = gate_gradients(g, gate, up.to(COMPUTE) + up_bias[None, :], FORM)
        out = rows[:, None] * ((2 if JOINED else 1) * num_vectors) * VECTOR + cols[None, :]
        tl.store(dgates + out, dgate, mask=mask)
        tl.store(dups + out, dup, mask=mask)
        gate_total += dgate
        up_total += dup
    if HAS_BIAS:
        # 3. Store the strip's column sums; `sum_strips` adds the strips in order.
        sums = partials + strip * 2 * num_cols + cols
        tl.store(sums, tl.sum(gate_total, 0), mask=inside)
        tl.store(sums + num_cols, tl.sum(up_total, 0), mask=inside)


def backward_block_shape(num_cols: int, itemsize: int) -> tuple[int, int]:
    """Return (BLOCK_M, BLOCK_N) of the backward: half the rows, for it loads three tensors."""
    block_m, block_n = rows.block_shape(num_cols, itemsize)
    return block_m // 2, block_n


def _shape(x: Tensor, up: Tensor | None) -> tuple[int, ...]:
    """Return the shape of y."""
    return tuple(x.shape) if up is not None else (*x.shape[:-1], x.shape[-1] // 2)


def launch(x: Tensor, bias: Tensor | None, activation: str, up: Tensor | None = None) -> Tensor:
    shape = _shape(x, up)
    y = x.new_empty(*shape)
    if x.numel():
        bias = None if bias is None else bias.contiguous()
        tensors, absent, pitches = _halves(x, up)
        rows.launch(
            gated_activation_kernel, tensors, (*absent, bias, y), pitches, columns=shape[-1],
            JOINED=up is None, HAS_BIAS=bias is not None, FORM=activation,
        )  # fmt: skip
    return y


def reference_quantized(
    x: Tensor, bias: Tensor | None, activation: str, up: Tensor | None, block: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return `quantize_rows` of activation(gate) * up."""
    return quantizers.reference_rows(reference(x, bias, activation, up), block, dtype)


def launch_quantized(
    x: Tensor, bias: Tensor | None, activation: str, up: Tensor | None, block: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    shape = _shape(x, up)
    fp8.check_multiple("gated_activation_quantized", "F", shape[-1], block)
    q, s = fp8.empty_rows(x, shape, block, dtype)
    if x.numel():
        bias = None if bias is None else bias.contiguous()
        tensors, absent, pitches = _halves(x, up)
        rows.launch(
            gated_quantized_kernel, tensors,
            (*absent, bias, q.view(torch.uint8), fp8.scale_bytes(s)), pitches, blocks=quantizers.block_shape,
            columns=shape[-1], JOINED=up is None, HAS_BIAS=bias is not None, FORM=activation, GROUP=block,
            E5M2=dtype != fp8.E4M3, NATIVE=fp8.casts_natively(x),
        )  # fmt: skip
    return q, s


def _halves(x: Tensor, up: Tensor | None) -> tuple[tuple[Tensor, ...], tuple[None, ...], tuple[int, ...]]:
    """Return (row tensors, placeholder for `ups`, placeholder for its pitch) of a kernel call."""
    return ((x,), (None,), (0,)) if up is None else ((x, up), (), ())


def launch_backward(
    grad: Tensor, x: Tensor, bias: Tensor | None, activation: str, up: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    dx = rows.empty_like(x)
    dup = x.new_empty(0) if up is None else rows.empty_like(x)
    dbias = x.new_empty(0 if bias is None else bias.numel())
    if x.numel() == 0:
        return dx, dup, dbias.zero_()
    bias = None if bias is None else bias.contiguous()
    tensors, absent, pitches = _halves(x, up)
    rows.launch_with_sums(
        gated_activation_backward_kernel, (grad, *tensors),
        (*absent, bias, dx, None if up is None else dup), None if bias is None else dbias, pitches,
        blocks=backward_block_shape, JOINED=up is None, HAS_BIAS=bias is not None, FORM=activation,
    )  # fmt: skip
    return dx, dup, dbias


_FLOPS_PER_ELEMENT = {"silu": (8, 17), "gelu_tanh": (11, 22), "gelu": (18, 28)}  # forward, backward
register(
    "gated_activation_backward(Tensor grad, Tensor x, Tensor? bias, str activation, Tensor? up=None)"
    " -> (Tensor, Tensor, Tensor)",
    contract=(
        "up ? x (..., N) floating; no up ? x (..., 2N) floating; up (..., N) x; bias (2N) x; "
        "grad (..., N) x; activation in silu gelu_tanh gelu"
    ),
    shard="grad x up -> rows rows?up sum",
    reference=reference_backward,
    triton=launch_backward,
    flops=lambda grad, x, bias, form, up=None: math.prod(grad.shape) * _FLOPS_PER_ELEMENT[form][1],
)


_gated_activation = register(
    "gated_activation(Tensor x, Tensor? bias, str activation, Tensor? up=None) -> Tensor",
    contract=(
        "up ? x (..., N) floating; no up ? x (..., 2N) floating; up (..., N) x; bias (2N) x; "
        "activation in silu gelu_tanh gelu"
    ),
    shard="x up -> rows",
    reference=reference,
    triton=launch,
    flops=lambda x, bias, form, up=None: math.prod(_shape(x, up)) * _FLOPS_PER_ELEMENT[form][0],
    autograd_formula="gated_activation_backward(grad, x, bias, activation, up) -> x, up, bias",
)
_gated_activation_quantized = register(
    "gated_activation_quantized(Tensor x, Tensor? bias, str activation, Tensor? up, int block,"
    " ScalarType dtype) -> (Tensor, Tensor)",
    contract=(
        "up ? x (..., N) floating; no up ? x (..., 2N) floating; up (..., N) x; bias (2N) x; "
        "activation in silu gelu_tanh gelu; block in 128 32; dtype in fp8; N % block == 0"
    ),
    reference=reference_quantized,
    triton=launch_quantized,
    fake=lambda x, bias, form, up, block, dtype: fp8.empty_rows(x, _shape(x, up), block, dtype),
    flops=lambda x, bias, form, up, block, dtype: math.prod(_shape(x, up)) * _FLOPS_PER_ELEMENT[form][0],
)


@checks.memoized
def _check(op: str, x: Tensor, up: Tensor | None, bias: Tensor | None) -> None:
    name = "x" if up is None else "gate"
    checks.check_floating(op, name, x)
    even = up is not None or x.shape[-1] % 2 == 0
    checks.require(even, "{}: x must end in a dimension of even size, got shape {}", op, x.shape)
    checks.check_shape(op, x.shape, to=(name, x), up=up)
    columns = x.shape[-1] if up is None else 2 * x.shape[-1]
    checks.check_shape(op, (columns,), to=(name, x), bias=bias)
    checks.check_same(op, **{name: x}, up=up, bias=bias)


def _gated(x: Tensor, up: Tensor | None, bias: Tensor | None, activation: str) -> Tensor:
    x, up, bias = autocast(x, up, bias)
    _check(_FUNCTION[activation], x, up, bias)
    return _gated_activation(x, bias, activation, up)


@overload
def swiglu(
    x: Tensor, up: Tensor | None = None, *, bias: Tensor | None = None, quantize: Literal[False] = False
) -> Tensor: ...


@overload
def swiglu(
    x: Tensor, up: Tensor | None = None, *, bias: Tensor | None = None, quantize: Literal[True],
    block: int = 128, dtype: torch.dtype = fp8.E4M3,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


@traced("fastmp.swiglu")
def swiglu(
    x: Tensor, up: Tensor | None = None, *, bias: Tensor | None = None, quantize: bool = False,
    block: int = 128, dtype: torch.dtype = fp8.E4M3,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Return silu(gate) * up, fused. Differentiable once.

    Args:
        x: (..., 2F) = [gate | up], float64, float32, bfloat16 or float16, any strides (last stride 1 avoids
            a copy); with `up`, the gate alone (..., F).
        up: (..., F), of the gate's dtype and device, if gate and up come from two GEMMs.
        bias: (2F,), of the same dtype and device, added to [gate | up] first, or None.
        quantize: return the FP8 numbers and scales that `quantize_rows(swiglu(x), block=block, dtype=dtype)`
            returns, in one kernel; without a derivative.
        block, dtype: of the FP8 blocks, as for `quantize_rows`; F must be a multiple of `block`.

    Returns:
        A new contiguous tensor (..., F) of x's dtype; under autocast, of the autocast dtype. Arithmetic is in
        float32 (float64 for float64 inputs) and rounded once; so is the accumulated bias gradient.

    Raises:
        ValueError: shapes, dtypes or devices do not match.

    Example:

        x = torch.randn(8, 2 * 16, requires_grad=True)
        gate, up = x.chunk(2, -1)
        assert torch.equal(fastmp.ops.swiglu(x), fastmp.ops.swiglu(gate, up))

    Shazeer, "GLU Variants Improve Transformer", 2020.
    """
    if not quantize:
        return _gated(x, up, bias, "silu")
    x, up, bias = autocast(x, up, bias)
    _check("swiglu", x, up, bias)
    fp8.check_block("swiglu", block, dtype)
    fp8.check_multiple("swiglu", "F", _shape(x, up)[-1], block)
    return _gated_activation_quantized(x, bias, "silu", up, block, dtype)


@traced("fastmp.geglu")
def geglu(
    x: Tensor, up: Tensor | None = None, *, bias: Tensor | None = None, approximate: str = "tanh"
) -> Tensor:
    """Return gelu(gate) * up, fused. Differentiable once.

    Args:
        x, up, bias: as for `swiglu`.
        approximate: "tanh" or "none" (the exact form with erf).

    Returns:
        As for `swiglu`.

    Raises:
        ValueError: as for `swiglu`, or `approximate` is unknown.

    Example:

        x = torch.randn(8, 2 * 16, requires_grad=True)
        y = fastmp.ops.geglu(x, approximate="none")
        assert y.shape == (8, 16)

    Shazeer, "GLU Variants Improve Transformer", 2020.
    """
    checks.check_choice("geglu", "approximate", approximate, ("tanh", "none"))
    return _gated(x, up, bias, "gelu_tanh" if approximate == "tanh" else "gelu")
