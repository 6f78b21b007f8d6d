"""swiglu and geglu: y = activation(gate) * up with x + bias = [gate | up], and its backward.

Only x and bias are saved; the backward recomputes the activation from them. SiLU and the tanh form of GeLU
are h * sigmoid(w(h)), one exp2 and one reciprocal, from which the activation and its slope follow. The bias
gradient comes out of the same pass (see rows.py).
Gated linear units: Dauphin et al. 2017 (arXiv 1612.08083); these two: Shazeer 2020 (arXiv 2002.05202).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fastmp.ops import activation as gelu_family
from fastmp.ops._triton import cdiv, jit, tl
from fastmp.ops.activation import gelu, gelu_parts
from fastmp.ops.registry import autocast, compute_dtype, register
from fastmp.ops.rows import NUM_WARPS, as_rows, block_shape, strip_shape, sum_rows, sum_strips, vector_width
from fastmp.profiling import region, traced

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_GELU_FORM = {"gelu_tanh": "tanh", "gelu": "none"}
_FUNCTION = {"silu": "swiglu", "gelu_tanh": "geglu", "gelu": "geglu"}


def _halves(x: Tensor, bias: Tensor | None) -> tuple[Tensor, ...]:
    h = x.to(compute_dtype(x.dtype))
    return (h if bias is None else h + bias.to(h.dtype)).chunk(2, -1)


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


def reference(x: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """activation(gate) * up, rounded once."""
    gate, up = _halves(x, bias)
    return _activated(gate, activation).mul_(up).to(x.dtype).contiguous()


def reference_backward(
    grad: Tensor, x: Tensor, bias: Tensor | None, activation: str
) -> tuple[Tensor, Tensor]:
    """Gradients of x and bias; the second is empty without a bias."""
    gate, up = _halves(x, bias)
    dgate = _slope(gate, activation).mul_(up).mul_(grad)
    dh = torch.cat((dgate, _activated(gate, activation).mul_(grad)), -1)
    dbias = x.new_empty(0) if bias is None else sum_rows(dh.unsqueeze(0).flatten(0, -2)).to(x.dtype)
    return dh.to(x.dtype), dbias


@jit
def activate(h, FORM: tl.constexpr):
    if FORM == "silu":
        return h * (1.0 / (1.0 + tl.exp2(-1.4426950408889634 * h)))
    else:
        return gelu(h, FORM == "gelu_tanh")


@jit
def _parts(h, FORM: tl.constexpr):
    """(p, q) of the activation h p, whose slope is p + h q."""
    if FORM == "silu":
        e = tl.exp2(-1.4426950408889634 * tl.abs(h))
        r = 1.0 / (1.0 + e)  # sigmoid(|h|)
        return tl.where(h > 0, r, e * r), e * r * r
    else:
        return gelu_parts(h, FORM == "gelu_tanh")


@jit
def gated_activation_kernel(
    x,
    bias,
    y,
    num_rows,
    num_vectors,
    x_pitch,
    HAS_BIAS: tl.constexpr,
    FORM: tl.constexpr,
    COMPUTE: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One tile of y. Its row length and the pitch of x count vectors of VECTOR elements: both are aligned."""
    num_cols = num_vectors * VECTOR
    column_blocks = tl.cdiv(num_cols, BLOCK_N)
    pid = tl.program_id(0)
    rows = (pid // column_blocks).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = (pid % column_blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (rows < num_rows)[:, None] & (cols < num_cols)[None, :]
    gates = x + rows[:, None] * x_pitch * VECTOR + cols[None, :]
    gate = tl.load(gates, mask=mask, other=0.0).to(COMPUTE)
    up = tl.load(gates + num_cols, mask=mask, other=0.0).to(COMPUTE)
    if HAS_BIAS:
        gate += tl.load(bias + cols, mask=cols < num_cols, other=0.0).to(COMPUTE)[None, :]
        up += tl.load(bias + num_cols + cols, mask=cols < num_cols, other=0.0).to(COMPUTE)[None, :]
    out = y + rows[:, None] * num_vectors * VECTOR + cols[None, :]
    tl.store(out, activate(gate, FORM) * up, mask=mask)


@jit
def gated_activation_backward_kernel(
    grad,
    x,
    bias,
    dx,
    partials,
    num_rows,
    rows_per_strip,
    num_vectors,
    grad_pitch,
    x_pitch,
    HAS_BIAS: tl.constexpr,
    FORM: tl.constexpr,
    COMPUTE: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """dx of one strip of rows and one block of columns of both halves, and their sums in `partials`."""
    num_cols = num_vectors * VECTOR
    column_blocks = tl.cdiv(num_cols, BLOCK_N)
    pid = tl.program_id(0)
    strip = (pid // column_blocks).to(tl.int64)
    cols = (pid % column_blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = cols < num_cols
    gate_bias = tl.zeros([BLOCK_N], COMPUTE)
    up_bias = tl.zeros([BLOCK_N], COMPUTE)
    if HAS_BIAS:
        gate_bias = tl.load(bias + cols, mask=inside, other=0.0).to(COMPUTE)
        up_bias = tl.load(bias + num_cols + cols, mask=inside, other=0.0).to(COMPUTE)
    gate_total = tl.zeros([BLOCK_M, BLOCK_N], COMPUTE)
    up_total = tl.zeros([BLOCK_M, BLOCK_N], COMPUTE)
    for step in range(0, rows_per_strip, BLOCK_M):
        rows = strip * rows_per_strip + step + tl.arange(0, BLOCK_M)
        mask = (rows < num_rows)[:, None] & inside[None, :]
        gates = x + rows[:, None] * x_pitch * VECTOR + cols[None, :]
        g = tl.load(grad + rows[:, None] * grad_pitch * VECTOR + cols[None, :], mask=mask, other=0.0)
        gate = tl.load(gates, mask=mask, other=0.0)
        up = tl.load(gates + num_cols, mask=mask, other=0.0)
        g = g.to(COMPUTE)
        gate = gate.to(COMPUTE) + gate_bias[None, :]
        p, q = _parts(gate, FORM)
        dgate = g * ((up.to(COMPUTE) + up_bias[None, :]) * (p + gate * q))
        dup = g * (gate * p)
        out = dx + rows[:, None] * (2 * num_vectors) * VECTOR + cols[None, :]
        tl.store(out, dgate, mask=mask)
        tl.store(out + num_cols, dup, mask=mask)
        gate_total += dgate
        up_total += dup
    if HAS_BIAS:
        sums = partials + strip * 2 * num_cols + cols
        tl.store(sums, tl.sum(gate_total, 0), mask=inside)
        tl.store(sums + num_cols, tl.sum(up_total, 0), mask=inside)


def backward_block_shape(num_cols: int, itemsize: int) -> tuple[int, int]:
    """(BLOCK_M, BLOCK_N) of the backward: three tensors come in, so half the rows keep as much in flight."""
    block_m, block_n = block_shape(num_cols, itemsize)
    return block_m // 2, block_n


def _constants(x: Tensor, bias: Tensor | None, activation: str, blocks: tuple[int, int]) -> dict:
    return {
        "HAS_BIAS": bias is not None,
        "FORM": activation,
        "COMPUTE": tl.float64 if x.dtype == torch.float64 else tl.float32,
        "BLOCK_M": blocks[0],
        "BLOCK_N": blocks[1],
        "num_warps": NUM_WARPS,
    }


def launch(x: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    y = torch.empty(_half_shape(x), dtype=x.dtype, device=x.device)
    if x.numel() == 0:
        return y
    rows = as_rows(x)
    bias = None if bias is None else bias.contiguous()
    num_rows, num_cols = rows.shape[0], y.shape[-1]
    block_m, block_n = block_shape(num_cols, x.element_size())
    vector = vector_width(rows[:, :num_cols])
    with torch.cuda.device_of(x):
        gated_activation_kernel[(cdiv(num_rows, block_m) * cdiv(num_cols, block_n),)](
            rows,
            bias,
            y,
            num_rows,
            num_cols // vector,
            rows.stride(0) // vector,
            VECTOR=vector,
            **_constants(x, bias, activation, (block_m, block_n)),
        )
    return y


def launch_backward(grad: Tensor, x: Tensor, bias: Tensor | None, activation: str) -> tuple[Tensor, Tensor]:
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dbias = x.new_empty(0 if bias is None else x.shape[-1])
    if x.numel() == 0:
        return dx, dbias.zero_()
    x_rows, grad_rows = as_rows(x), as_rows(grad)
    bias = None if bias is None else bias.contiguous()
    num_rows, num_cols = grad_rows.shape
    block_m, block_n = backward_block_shape(num_cols, x.element_size())
    vector = vector_width(grad_rows, x_rows)
    num_strips, rows_per_strip = strip_shape(num_rows, num_cols, block_m, block_n)
    partials = None
    if bias is not None:
        partials = torch.empty((num_strips, 2 * num_cols), dtype=compute_dtype(x.dtype), device=x.device)
    with torch.cuda.device_of(x):
        gated_activation_backward_kernel[(num_strips * cdiv(num_cols, block_n),)](
            grad_rows,
            x_rows,
            bias,
            dx,
            partials,
            num_rows,
            rows_per_strip,
            num_cols // vector,
            grad_rows.stride(0) // vector,
            x_rows.stride(0) // vector,
            VECTOR=vector,
            **_constants(x, bias, activation, (block_m, block_n)),
        )
        if partials is not None:
            sum_strips(partials, dbias)
    return dx, dbias


def _half_shape(x: Tensor) -> tuple[int, ...]:
    return (*x.shape[:-1], x.shape[-1] // 2)


_FLOPS_PER_ELEMENT = {"silu": (8, 17), "gelu_tanh": (11, 22), "gelu": (18, 28)}


def _flops(x: Tensor, bias: Tensor | None, activation: str) -> int:
    return math.prod(_half_shape(x)) * _FLOPS_PER_ELEMENT[activation][0]


def _flops_backward(grad: Tensor, x: Tensor, bias: Tensor | None, activation: str) -> int:
    return math.prod(_half_shape(x)) * _FLOPS_PER_ELEMENT[activation][1]


_gated_activation_backward = register(
    "gated_activation_backward(Tensor grad, Tensor x, Tensor? bias, str activation) -> (Tensor, Tensor)",
    reference=reference_backward,
    triton=launch_backward,
    flops=_flops_backward,
)


def _setup(ctx, inputs, output) -> None:
    x, bias, ctx.activation = inputs
    ctx.save_for_backward(x, bias)


def _backward(ctx, grad: Tensor):
    x, bias = ctx.saved_tensors
    with region(f"fastmp.{_FUNCTION[ctx.activation]}_backward"):
        dx, dbias = _gated_activation_backward(grad, x, bias, ctx.activation)
    return dx, (None if bias is None else dbias), None


_gated_activation = register(
    "gated_activation(Tensor x, Tensor? bias, str activation) -> Tensor",
    reference=reference,
    triton=launch,
    flops=_flops,
    backward=(_setup, _backward),
)


def _gated(x: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    name = _FUNCTION[activation]
    x, bias = autocast(x, bias)
    if x.dtype not in _DTYPES:
        raise ValueError(f"{name}: x must have one of the dtypes {_DTYPES}, got {x.dtype}")
    if x.dim() == 0 or x.shape[-1] % 2:
        raise ValueError(f"{name}: x must end in a dimension of even size, got shape {tuple(x.shape)}")
    if bias is not None:
        if bias.shape != x.shape[-1:]:
            shapes = f"bias of shape {tuple(bias.shape)} does not fit x of shape {tuple(x.shape)}"
            raise ValueError(f"{name}: {shapes}")
        if bias.dtype != x.dtype:
            raise ValueError(f"{name}: x is {x.dtype} but bias is {bias.dtype}")
        if bias.device != x.device:
            raise ValueError(f"{name}: x is on {x.device} but bias is on {bias.device}")
    return _gated_activation(x, bias, activation)


@traced("fastmp.swiglu")
def swiglu(x: Tensor, bias: Tensor | None = None) -> Tensor:
    """silu(gate) * up on the halves of x + bias, fused; differentiable once. Under autocast, in its dtype.

    Args:
        x: (..., 2F) = [gate | up], float64, float32, bfloat16 or float16, any strides (last stride 1 avoids
            a copy).
        bias: (2F,) of the same dtype and device, or None.

    Returns:
        A new contiguous tensor (..., F) of x's dtype. Arithmetic is in float32 (float64 for float64 inputs)
        and rounded once; the bias gradient is accumulated in the same precision.

    Raises:
        ValueError: shapes, dtypes or devices do not fit.

    Shazeer, "GLU Variants Improve Transformer", 2020.
    """
    return _gated(x, bias, "silu")


@traced("fastmp.geglu")
def geglu(x: Tensor, bias: Tensor | None = None, *, approximate: str = "tanh") -> Tensor:
    """gelu(gate) * up on the halves of x + bias, fused; differentiable once. Under autocast, in its dtype.

    Args:
        x, bias: as for `swiglu`.
        approximate: "tanh" or "none" (the exact form with erf).

    Returns, raises: as `swiglu`; ValueError also where `approximate` is neither of the two.

    Shazeer, "GLU Variants Improve Transformer", 2020.
    """
    if approximate not in ("tanh", "none"):
        raise ValueError(f"geglu: approximate must be 'tanh' or 'none', got {approximate!r}")
    return _gated(x, bias, "gelu_tanh" if approximate == "tanh" else "gelu")
