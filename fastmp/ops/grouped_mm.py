"""Grouped GEMM: one GEMM for each expert, over rows in the order of the experts; and its gradients.

Only the device knows where an expert's rows end: kernels read `offsets` there, so nothing is padded and
there is no host-device synchronisation. Rows after the last offset belong to no expert and are zeros in every
result.

`grouped_mlp_in` fuses the activation into the epilogue of the first GEMM, and keeps the pre-activation for
the backward pass. The wgrad is summed in fp32 (fp64 for fp64), and added to `w.main_grad` where there is one,
rounded once to its dtype. Each tile of it has one producer, so results are deterministic.

M rows, E experts, N x K the weight of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastmp.ops import gated as gated_activation
from fastmp.ops import grouped_mm_launch
from fastmp.ops.activation import bias_gelu
from fastmp.ops.activation import reference as bias_gelu_reference
from fastmp.ops.core import checks
from fastmp.ops.core.built import has_code_for
from fastmp.ops.core.registry import (
    Differentiable,
    autocast,
    can_read_values,
    compute_dtype,
    raise_if_create_graph,
    register,
    without_autocast,
)
from fastmp.ops.grouped_mm_tiles import grouped_mm_choice, prefers_cutlass
from fastmp.ops.wgrad import MainGrad, add_by, deferral, leaf_of, main_grad_of
from fastmp.profiling import traced

_APPROXIMATE = {"gelu_tanh": "tanh", "gelu": "none"}  # torch's names of the forms of GELU


def spans(offsets: Tensor, num_rows: int) -> list[tuple[int, int]]:
    """Return (start, end) of each expert's rows; ends are clamped to be monotonic and within the rows."""
    found, start = [], 0
    for end in offsets.tolist():
        end = max(start, min(end, num_rows))
        found.append((start, end))
        start = end
    return found


def _mm_in(dtype: torch.dtype, a: Tensor, b: Tensor) -> Tensor:
    """Multiply a by b in `dtype`."""
    return torch.mm(a.to(dtype), b.to(dtype))


def reference(x: Tensor, w: Tensor, offsets: Tensor, transposed: bool) -> Tensor:
    """Multiply each expert's rows by its weight; rounded once."""
    return reference_bias(x, w, None, offsets, transposed)


def reference_bias(x: Tensor, w: Tensor, bias: Tensor | None, offsets: Tensor, transposed: bool) -> Tensor:
    """Multiply each expert's rows by its weight, and add its bias; rounded once."""
    y = x.new_empty(len(x), w.shape[2 if transposed else 1])
    dtype, end = compute_dtype(x.dtype), 0
    with without_autocast(x.device.type):
        for expert, (start, end) in enumerate(spans(offsets, len(x))):
            if start < end:
                h = _mm_in(dtype, x[start:end], w[expert] if transposed else w[expert].t())
                y[start:end] = h if bias is None else h + bias[expert]
    y[end:] = 0
    return y


def reference_wgrad(grad: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
    """Sum grad^T x over each expert's rows; rounded once."""
    dw = x.new_zeros(len(offsets), grad.shape[1], x.shape[1])
    dtype = compute_dtype(x.dtype)
    with without_autocast(x.device.type):
        for total, (start, end) in zip(dw, spans(offsets, len(x)), strict=True):
            if start < end:
                total.copy_(_mm_in(dtype, grad[start:end].t(), x[start:end]))
    return dw


def reference_wgrad_(out: Tensor, grad: Tensor, x: Tensor, offsets: Tensor, add: bool = True) -> None:
    """Add grad^T x over each expert's rows to `out`, or overwrite it; rounded once."""
    dtype = compute_dtype(x.dtype)
    if not add:
        out.zero_()
    with without_autocast(x.device.type):
        for total, (start, end) in zip(out, spans(offsets, len(x)), strict=True):
            if start == end:
                continue
            rows, columns = grad[start:end].to(dtype), x[start:end].to(dtype)
            if total.dtype == dtype:
                total.addmm_(rows.t(), columns)
            else:
                total.copy_(torch.addmm(total.to(dtype), rows.t(), columns))


def _activated(h: Tensor, form: str, gated: bool) -> Tensor:
    if gated:
        return gated_activation.reference(h, None, form)
    return F.silu(h) if form == "silu" else bias_gelu_reference(h, None, _APPROXIMATE[form])


def activation_backward(grad: Tensor, h: Tensor, form: str, gated: bool) -> Tensor:
    """Return the gradient of h, given that of activation(h)."""
    if gated:
        return torch.ops.fastmp.gated_activation_backward(grad, h, None, form)[0]
    if form == "silu":
        return torch.ops.aten.silu_backward(grad.contiguous(), h)
    return torch.ops.fastmp.bias_gelu_backward(grad, h, None, _APPROXIMATE[form])[0]


def reference_mlp_in(
    x: Tensor, w: Tensor, bias: Tensor | None, offsets: Tensor, form: str, gated: bool, keep: bool
) -> tuple[Tensor, Tensor]:
    """Return activation(h) and h = grouped_mm(x, w) + bias; each rounded once. Without `keep` h is empty."""
    y = x.new_empty(len(x), w.shape[1] // (1 + gated))
    h = x.new_empty((len(x), w.shape[1]) if keep else (0,))
    dtype, end = compute_dtype(x.dtype), 0
    with without_autocast(x.device.type):
        for expert, (start, end) in enumerate(spans(offsets, len(x))):
            if start == end:
                continue
            part = _mm_in(dtype, x[start:end], w[expert].t())
            if bias is not None:
                part += bias[expert]
            y[start:end] = _activated(part, form, gated)
            if keep:
                h[start:end] = part
    y[end:] = 0
    if keep:
        h[end:] = 0
    return y, h


def _fake_mlp_in(
    x: Tensor, w: Tensor, bias: Tensor | None, offsets: Tensor, form: str, gated: bool, keep: bool
) -> tuple[Tensor, Tensor]:
    kept = (x.shape[0], w.shape[1]) if keep else (0,)
    return x.new_empty(x.shape[0], w.shape[1] // (1 + gated)), x.new_empty(kept)


# Costs assume that every row belongs to an expert; only the device knows the real number.


def grouped_flops(x: Any, w: Any, *_: Any) -> int:
    return 2 * x.shape[0] * w.shape[1] * w.shape[2]


def _flops_wgrad(grad: Any, x: Any, offsets: Any) -> int:
    return 2 * x.shape[0] * grad.shape[1] * x.shape[1]


def _mlp_in_prefers_cuda(
    x: Tensor, w: Tensor, bias: Any, offsets: Any, form: str, gated: bool, keep: bool
) -> bool:
    width = w.shape[1] // 2 if gated else w.shape[1]
    arch = grouped_mm_launch.architecture(x)
    return prefers_cutlass(len(x), len(w), width, x.shape[1], x.dtype, arch) and has_code_for(
        x.get_device(), 9.0
    )


def _wgrad_prefers_cuda(total: Tensor, grad: Tensor, x: Tensor, offsets: Tensor, add: bool = True) -> bool:
    if not add or total.dtype != torch.float32 or total.data_ptr() % 16:
        return False
    arch = grouped_mm_launch.architecture(x)
    sizes = len(x), len(offsets), grad.shape[1], x.shape[1]
    return prefers_cutlass(*sizes, x.dtype, arch) and has_code_for(x.get_device(), 9.0)


register(
    "grouped_mm(Tensor x, Tensor w, Tensor offsets, bool transposed) -> Tensor",
    contract=(
        "x (M, K) floating; transposed ? w (E, K, N) x; no transposed ? w (E, N, K) x; offsets (#E) int32"
    ),
    reference=reference,
    fake=lambda x, w, offsets, transposed: x.new_empty(x.shape[0], w.shape[2 if transposed else 1]),
    triton=grouped_mm_launch.launch,
    flops=grouped_flops,
)
register(
    "grouped_mm_bias(Tensor x, Tensor w, Tensor bias, Tensor offsets, bool transposed) -> Tensor",
    contract=(
        "x (M, K) floating; transposed ? w (E, K, N) x; no transposed ? w (E, N, K) x; bias (E, N) x; "
        "offsets (#E) int32"
    ),
    reference=reference_bias,
    fake=lambda x, w, bias, offsets, transposed: x.new_empty(x.shape[0], bias.shape[1]),
    triton=grouped_mm_launch.launch_bias,
    flops=grouped_flops,
)
register(
    "grouped_mm_wgrad(Tensor grad, Tensor x, Tensor offsets) -> Tensor",
    contract="grad (M, N) floating; x (M, K) grad; offsets (E) int32",
    reference=reference_wgrad,
    fake=lambda grad, x, offsets: x.new_empty(offsets.shape[0], grad.shape[1], x.shape[1]),
    triton=grouped_mm_launch.launch_wgrad,
    flops=_flops_wgrad,
)
register(
    "grouped_mm_wgrad_(Tensor(a!) total, Tensor grad, Tensor x, Tensor offsets, bool add=True) -> ()",
    contract="grad (M, N) floating; x (M, K) grad; offsets (E) int32; total (E, N, K) grad|wide(grad)",
    overwrites="total without add",
    reference=reference_wgrad_,
    fake=lambda total, grad, x, offsets, *_: None,
    triton=grouped_mm_launch.launch_wgrad_,
    flops=lambda total, grad, x, offsets, *_: _flops_wgrad(grad, x, offsets),
    prefers_cuda=_wgrad_prefers_cuda,
)
register(
    "grouped_mlp_in(Tensor x, Tensor w, Tensor? bias, Tensor offsets, str form, bool gated, bool keep)"
    " -> (Tensor, Tensor)",
    contract=(
        "x (M, K) floating; gated ? w (E, 2N, K) x; gated ? bias (E, 2N) x; no gated ? w (E, N, K) x; "
        "no gated ? bias (E, N) x; offsets (#E) int32; form in silu gelu_tanh gelu"
    ),
    reference=reference_mlp_in,
    fake=_fake_mlp_in,
    triton=grouped_mm_launch.launch_mlp_in,
    flops=grouped_flops,
    prefers_cuda=_mlp_in_prefers_cuda,
)


def _starts(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Return (start, end) of each expert's rows."""
    return pairwise(accumulate(sizes, initial=0))


def _mm(x: Tensor, w: Tensor, offsets: Tensor, transposed: bool, sizes: Sequence[int] | None) -> Tensor:
    """Multiply by the op, or with `sizes` in a loop."""
    if sizes is None:
        return torch.ops.fastmp.grouped_mm(x, w, offsets, transposed)
    y = x.new_empty(len(x), w.shape[2 if transposed else 1])
    with without_autocast(x.device.type), torch.no_grad():
        for weight, (start, end) in zip(w, _starts(sizes), strict=True):
            if start < end:
                torch.mm(x[start:end], weight if transposed else weight.t(), out=y[start:end])
    y[sum(sizes) :] = 0
    return y


def weight_gradient(
    grad: Tensor, x: Tensor, offsets: Tensor, kept: MainGrad, sizes: Sequence[int] | None = None
) -> Tensor | None:
    """Return the gradient of the weights, or None after adding it to `main_grad`."""
    main_grad = kept.total()
    if sizes is None:
        if main_grad is None:
            return torch.ops.fastmp.grouped_mm_wgrad(grad, x, offsets)
        op = torch.ops.fastmp.grouped_mm_wgrad_
        add_by(main_grad, lambda add: op(main_grad, grad, x, offsets, add))
        return None
    out = x.new_zeros(len(sizes), grad.shape[1], x.shape[1]) if main_grad is None else main_grad

    def loop(add: bool) -> None:
        for total, (start, end) in zip(out, _starts(sizes), strict=True):
            if start == end and add:
                continue
            if main_grad is None:
                torch.mm(grad[start:end].t(), x[start:end], out=total)
            else:
                torch.ops.fastmp.accumulate_weight_grad_(total, grad[start:end], x[start:end], add)

    with without_autocast(x.device.type), torch.no_grad():
        add_by(out, loop)
    return out if main_grad is None else None


def _wgrad_or_defer(defer: Callable[..., None] | None, *arguments: Any) -> Tensor | None:
    if defer is None:
        return weight_gradient(*arguments)
    defer(lambda: weight_gradient(*arguments))
    return None


def column_sums(grad: Tensor, offsets: Tensor) -> Tensor:
    """Sum each expert's rows: a wgrad with a column of ones."""
    return torch.ops.fastmp.grouped_mm_wgrad(grad, grad.new_ones(grad.shape[0], 1), offsets).squeeze(2)


def _forward(x, w, bias, offsets, main_grad, defer, transposed, sizes):
    if bias is not None:
        return torch.ops.fastmp.grouped_mm_bias(x, w, bias, offsets, transposed)
    return _mm(x, w, offsets, transposed, sizes)


def _setup(ctx, inputs, output):
    x, w, _, offsets, ctx.main_grad, ctx.defer, ctx.transposed, ctx.sizes = inputs
    ctx.save_for_backward(x, w, offsets)


@traced("fastmp.grouped_mm_backward")
def _backward(ctx, grad):
    raise_if_create_graph("grouped_mm")
    x, w, offsets = ctx.saved_tensors
    dx = dw = dbias = None
    if ctx.needs_input_grad[0]:
        dx = _mm(grad, w, offsets, not ctx.transposed, ctx.sizes)
    if ctx.needs_input_grad[1]:
        left, right = (x, grad) if ctx.transposed else (grad, x)
        dw = _wgrad_or_defer(ctx.defer, left, right, offsets, ctx.main_grad, ctx.sizes)
    if ctx.needs_input_grad[2]:
        dbias = column_sums(grad, offsets)
    return dx, dw, dbias, None, None, None, None, None


def _forward_mlp_in(x, w, bias, offsets, main_grad, defer, form, gated):
    return torch.ops.fastmp.grouped_mlp_in(x, w, bias, offsets, form, gated, True)


def _setup_mlp_in(ctx, inputs, output):
    x, w, _, offsets, ctx.main_grad, ctx.defer, ctx.form, ctx.gated = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, w, offsets, output[1])


@traced("fastmp.grouped_mlp_in_backward")
def _backward_mlp_in(ctx, grad, _):
    if grad is None:
        return (None,) * 8
    raise_if_create_graph("grouped_mlp_in")
    x, w, offsets, h = ctx.saved_tensors
    dh = activation_backward(grad, h, ctx.form, ctx.gated)
    dx = dw = dbias = None
    if ctx.needs_input_grad[0]:
        dx = torch.ops.fastmp.grouped_mm(dh, w, offsets, True)
    if ctx.needs_input_grad[1]:
        dw = _wgrad_or_defer(ctx.defer, dh, x, offsets, ctx.main_grad)
    if ctx.needs_input_grad[2]:
        dbias = column_sums(dh, offsets)
    return dx, dw, dbias, None, None, None, None, None


_grouped_mm = Differentiable("grouped_mm", _forward, _setup, _backward)
_grouped_mlp_in = Differentiable("grouped_mlp_in", _forward_mlp_in, _setup_mlp_in, _backward_mlp_in)


def check_offsets(name: str, offsets: Tensor, w: Tensor) -> None:
    """Check dtype and shape of the ends of the rows of each expert of w (E, N, K)."""
    int32 = offsets.dtype == torch.int32
    checks.require(int32, "{}: offsets must be int32, got {}; pass offsets.int()", name, offsets.dtype)
    ends = "{}: offsets of shape {} do not fit the {} experts of w: expected the end of the rows of each"
    checks.require(offsets.shape == w.shape[:1], ends, name, offsets.shape, w.shape[0])


def check_ends(name: str, offsets: Tensor, operand: str, num_rows: int) -> None:
    """Check the values of offsets, where the host may read them, against the rows of the operand."""
    if not can_read_values(offsets):
        return
    ends = [0, *offsets.tolist(), num_rows]
    if ends != sorted(ends):
        raise ValueError(
            f"{name}: offsets {ends[1:-1]} must not be negative, fall, or pass the {num_rows} rows of "
            f"{operand}"
        )


@checks.memoized
def _check(name: str, x: Tensor, w: Tensor, offsets: Tensor, columns: int, main_grad: Tensor | None) -> None:
    def require(condition: bool, message: str, *values: Any) -> None:
        checks.require(condition, f"{name}: " + message, *values)

    checks.check_floating(name, "x", x)
    shape, weight = x.shape, w.shape
    require(len(shape) == 2, "x must be (M, K), got shape {}", shape)
    require(len(weight) == 3, "w must be (E, N, K), got shape {}", weight)
    misfit = "x {} does not fit w {}: expected {} in dimension {} of w"
    require(shape[1] == weight[columns], misfit, shape, weight, shape[1], columns)
    checks.check_same(name, x=x, w=w)
    checks.check_main_grad(name, main_grad, w=w)
    check_offsets(name, offsets, w)
    checks.check_same_device(name, x=x, offsets=offsets)


@checks.memoized
def _check_mlp_in(
    x: Tensor, w: Tensor, offsets: Tensor, main_grad: Tensor | None, bias: Tensor | None, form: str,
    gated: bool,
) -> None:  # fmt: skip
    _check("grouped_mlp_in", x, w, offsets, 2, main_grad)
    checks.check_choice("grouped_mlp_in", "form", form, (*_APPROXIMATE, "silu"))
    odd = "grouped_mlp_in: w {} has an odd number of rows: no [gate | up]"
    checks.require(not (gated and w.shape[1] % 2), odd, w.shape)
    checks.check_shape("grouped_mlp_in", w.shape[:2], to=("w", w), bias=bias)
    checks.check_same("grouped_mlp_in", x=x, bias=bias)


def _check_rows(name: str, x: Tensor, w: Tensor, offsets: Tensor, sizes: Sequence[int] | None) -> None:
    """Check `sizes`, and offsets where their values may be read."""
    check_ends(name, offsets, "x", x.shape[0])
    if sizes is None:
        return

    def require(condition: bool, message: str, *values: Any) -> None:
        checks.require(condition, f"{name}: " + message, *values)

    num_rows, num_experts = x.shape[0], w.shape[0]
    require(len(sizes) == num_experts, "{} sizes do not fit the {} experts of w", len(sizes), num_experts)
    within = all(size >= 0 for size in sizes) and sum(sizes) <= num_rows
    wrong = "sizes {} must not be negative, nor sum to more than the {} rows of x"
    require(within, wrong, list(sizes), num_rows)
    if can_read_values(offsets):
        ends = offsets.tolist()
        require(list(accumulate(sizes)) == ends, "sizes {} do not add up to offsets {}", list(sizes), ends)


def _sizes_of_a_loop(sizes: Sequence[int] | None, x: Tensor, w: Tensor) -> tuple[int, ...] | None:
    """Return `sizes` where a loop is the better grouped_mm, else None."""
    if sizes is None:
        return None
    arch = grouped_mm_launch.architecture(x) if x.is_cuda else 0
    choice = grouped_mm_choice(sizes, w.shape[1], w.shape[2], x.dtype, arch)
    return tuple(sizes) if choice == "loop" else None


@traced("fastmp.grouped_mm")
def grouped_mm(
    x: Tensor,
    w: Tensor,
    offsets: Tensor,
    *,
    transposed: bool = False,
    bias: Tensor | None = None,
    sizes: Sequence[int] | None = None,
) -> Tensor:
    """Grouped GEMM: y[r] = w[e] @ x[r] + bias[e] for each row r of expert e; differentiable once.

    Under autocast it runs in the autocast dtype. The gradient of w is summed in fp32 (fp64 for fp64). If the
    parameter has a `main_grad` (its shape; fp32 or the dtype of x), the gradient is added to that and rounded
    once, and autograd gets none. Every backward pass through this op does so, even one that asks for the
    gradient of x alone.

    Args:
        x: (M, K) float64, float32, bfloat16 or float16, rows in the order of the experts.
        w: (E, N, K) of the same dtype and device; contiguous avoids a copy.
        offsets: (E,) int32 on the same device: the end of each expert's rows, not decreasing, at most M. Rows
            after the last one are zeros in the result and in the gradient of x.
        transposed: x is (M, N), and the result y[r] = x[r] @ w[e] + bias[e] is (M, K).
        bias: (E, N), or (E, K) if transposed, of the same dtype and device, or None.
        sizes: rows of each expert, if the host knows them: lets `grouped_mm_choice` use one GEMM per expert
            where that is faster and there is no bias.

    Returns:
        (M, N), or (M, K) if transposed, contiguous, of x's dtype; sums are in float32 (float64 for float64
        inputs) and rounded once.

    Raises:
        ValueError: shapes, dtypes, devices (also of `main_grad`) or sizes that do not fit; on the CPU also
            offsets that decrease or exceed M (elsewhere they are clamped).

    Example:
        x = torch.randn(6, 16, requires_grad=True)  # 4 rows of expert 0, 2 of expert 1
        w = torch.randn(2, 32, 16, requires_grad=True)
        y = grouped_mm(x, w, torch.tensor([4, 6], dtype=torch.int32))  # (6, 32)
        y.sum().backward()

    Gale et al., "MegaBlocks", 2022 (arXiv 2211.15841).
    """
    # Of the parameter, not of what autocast makes of it.
    param, main_grad = w, main_grad_of(w) if torch.is_grad_enabled() else None
    x, w, bias = autocast(x, w, bias)
    _check("grouped_mm", x, w, offsets, 1 if transposed else 2, main_grad)
    if bias is not None:
        checks.check_shape(
            "grouped_mm", (w.shape[0], w.shape[2 if transposed else 1]), to=("w", w), bias=bias
        )
        checks.check_same("grouped_mm", x=x, bias=bias)
    _check_rows("grouped_mm", x, w, offsets, sizes)
    defer = deferral(w)
    w = w if defer is None else leaf_of(w)
    loop = None if bias is not None else _sizes_of_a_loop(sizes, x, w)
    return _grouped_mm(x, w, bias, offsets, MainGrad(main_grad, param), defer, transposed, loop)


def _apply_activation(h: Tensor, form: str, gated: bool) -> Tensor:
    """Apply the activation as a separate op."""
    if form == "silu":
        return gated_activation.swiglu(h) if gated else F.silu(h)
    return (gated_activation.geglu if gated else bias_gelu)(h, approximate=_APPROXIMATE[form])


@traced("fastmp.grouped_mlp_in")
def grouped_mlp_in(
    x: Tensor,
    w: Tensor,
    offsets: Tensor,
    *,
    form: str,
    gated: bool,
    bias: Tensor | None = None,
    sizes: Sequence[int] | None = None,
) -> Tensor:
    """First GEMM of the experts' MLPs with fused activation: activation(grouped_mm(x, w) + bias).

    Under autocast it runs in the autocast dtype; differentiable once in x, w and bias. The kernel also stores
    the pre-activation for the backward pass; `main_grad` of w works as in `grouped_mm`.

    Args:
        x, w, offsets: as for `grouped_mm`, not transposed.
        form: the activation: "silu", "gelu" (exact, by the error function) or "gelu_tanh".
        gated: the rows of w[e] are [gate | up], and the result is form(gate) * up; else it is form(h).
        bias: (E, N) of the same dtype and device, or None.
        sizes: as for `grouped_mm`; in a loop the activation is a separate op.

    Returns:
        (M, N / 2) if gated, else (M, N), contiguous, of x's dtype; rounded once. Rows from the last
        offset on are zeros.

    Raises:
        ValueError: as `grouped_mm`; another form, an odd number of rows of w[e] if gated, a bias that does
            not fit.

    Example:
        offsets = torch.tensor([4, 6], dtype=torch.int32)
        w = torch.randn(2, 64, 16)  # 2 experts, rows [gate | up]
        hidden = grouped_mlp_in(torch.randn(6, 16), w, offsets, form="silu", gated=True)  # (6, 32)

    Shazeer, "GLU Variants Improve Transformer", 2020; Gale et al., "MegaBlocks", 2022.
    """
    given, main_grad = (x, w), main_grad_of(w) if torch.is_grad_enabled() else None
    x, w, bias = autocast(x, w, bias)
    _check_mlp_in(x, w, offsets, main_grad, bias, form, gated)
    _check_rows("grouped_mlp_in", x, w, offsets, sizes)
    if bias is None and _sizes_of_a_loop(sizes, x, w) is not None:
        return _apply_activation(grouped_mm(*given, offsets, sizes=sizes), form, gated)
    if not (torch.is_grad_enabled() and any(t.requires_grad for t in (x, w, bias) if t is not None)):
        return torch.ops.fastmp.grouped_mlp_in(x, w, bias, offsets, form, gated, False)[0]
    defer = deferral(w)
    w = w if defer is None else leaf_of(w)
    return _grouped_mlp_in(x, w, bias, offsets, MainGrad(main_grad, given[1]), defer, form, gated)[0]
