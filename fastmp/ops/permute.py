"""permutation, permute and unpermute: tokens in the order of their experts, and back.

`permutation` sorts the (token, expert) assignments by expert, stably: a counting sort that gives each
assignment its row. `permute` writes each token to its k rows, reading it once; `unpermute` gathers the k rows
of each token, weighted, and adds them in fp32 in the order of the slots. Each is the gradient of the other,
so there are no atomics. Rows without an assignment are zeros in results and gradients.
"""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor

from fastmp.ops import quantize as quantizers
from fastmp.ops.core import checks, fp8
from fastmp.ops.core.registry import compute_dtype, register
from fastmp.ops.core.rowwise import sum_rows
from fastmp.ops.permute_quantized_triton import launch_quantized
from fastmp.ops.permute_triton import (
    launch,
    launch_permutation,
    launch_unpermute,
    launch_unpermute_add,
    launch_unpermute_add_into,
    launch_unpermute_backward,
    launch_unpermute_backward_into,
    launch_unpermute_into,
)
from fastmp.profiling import traced


def reference_permutation(indices: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Return the row of each assignment (-1 for experts out of range) and the end of each expert's rows."""
    experts = indices.reshape(-1)
    valid = (experts >= 0) & (experts < num_experts)
    experts, order = experts.where(valid, num_experts).sort(stable=True)
    rows = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    bounds = torch.arange(num_experts, device=order.device, dtype=experts.dtype)
    offsets = torch.searchsorted(experts, bounds, right=True, out_int32=True)
    return rows.where(valid, -1).to(torch.int32).view(indices.shape), offsets


def _inside(row_of: Tensor, num_rows: int) -> Tensor:
    return (row_of >= 0) & (row_of < num_rows)


def reference(x: Tensor, row_of: Tensor, num_rows: int) -> Tensor:
    """Write token t to the rows row_of[t]; others are zeros. A spare last row takes dropped assignments."""
    rows = row_of.where(_inside(row_of, num_rows), num_rows).long()
    out = x.new_zeros(num_rows + 1, x.shape[1])
    for slot in rows.unbind(1):
        out.index_copy_(0, slot, x)
    return out[:num_rows]


def reference_quantized(
    x: Tensor, scales: Tensor | None, row_of: Tensor, num_rows: int, block: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return `quantize_rows` of the rows, or rows of FP8 numbers and their scales: one for empty rows."""
    if scales is None:
        return quantizers.reference_rows(reference(x, row_of, num_rows), block, dtype)
    q, s = (
        reference(t.view(torch.uint8) if t.itemsize == 1 else t, row_of, num_rows).view(t.dtype)
        for t in (x, scales)
    )
    used = reference(x.new_ones(len(x), 1, dtype=torch.bool), row_of, num_rows)
    s = torch.where(used, fp8.scale_bytes(s), 127 if s.dtype == fp8.SCALE[32] else 1).view(s.dtype)
    return q, s.new_empty_strided(s.shape, fp8.scale_strides(num_rows, block)).copy_(s)


def _gathered(y: Tensor, rows: Tensor) -> Tensor:
    """Read rows of y in the compute dtype; rows that y does not have are zeros."""
    wide = compute_dtype(y.dtype)
    if len(y) == 0:
        return y.new_zeros(len(rows), y.shape[1], dtype=wide)
    inside = _inside(rows, len(y))
    return y.index_select(0, rows.where(inside, 0)).to(wide).masked_fill_(~inside[:, None], 0)


def reference_unpermute(y: Tensor, row_of: Tensor, probs: Tensor | None) -> Tensor:
    """Add probs times the rows of y over the slots, in their order."""
    total = y.new_zeros(len(row_of), y.shape[1], dtype=compute_dtype(y.dtype))
    inside = _inside(row_of, len(y))
    for slot, rows in enumerate(row_of.unbind(1)):
        part = _gathered(y, rows)
        if probs is not None:
            part.mul_(probs[:, slot, None].where(inside[:, slot, None], 0))
        total.add_(part)
    return total.to(y.dtype)


def reference_unpermute_into(y: Tensor, row_of: Tensor, probs: Tensor | None, out: Tensor) -> None:
    out.copy_(reference_unpermute(y, row_of, probs))


def reference_unpermute_add(y: Tensor, row_of: Tensor, probs: Tensor | None, residual: Tensor) -> Tensor:
    """Add the residual to the sums, which are rounded before."""
    return (reference_unpermute(y, row_of, probs) + residual).contiguous()


def reference_unpermute_add_into(
    y: Tensor, row_of: Tensor, probs: Tensor | None, residual: Tensor, out: Tensor
) -> None:
    out.copy_(reference_unpermute_add(y, row_of, probs, residual))


def reference_unpermute_backward(
    grad: Tensor, y: Tensor, row_of: Tensor, probs: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of y, every row of it, and of probs."""
    num_rows = len(y)
    rows = row_of.where(_inside(row_of, num_rows), num_rows).long()
    wide = grad.to(probs.dtype)
    dy = y.new_zeros(num_rows + 1, y.shape[1])
    dprobs = torch.zeros(probs.shape, dtype=probs.dtype, device=probs.device)
    for slot, target in enumerate(rows.unbind(1)):
        dy.index_copy_(0, target, (wide * probs[:, slot, None]).to(y.dtype))
        if y.shape[1]:
            dots = sum_rows(_gathered(y, target).mul_(wide).t())
            dprobs[:, slot] = dots.where(target < num_rows, 0)
    return dy[:num_rows], dprobs


def reference_unpermute_backward_into(
    grad: Tensor, y: Tensor, row_of: Tensor, probs: Tensor, out: Tensor
) -> Tensor:
    """Compute the gradient of y; that of probs goes to `out`."""
    dy, dprobs = reference_unpermute_backward(grad, y, row_of, probs)
    out.copy_(dprobs)
    return dy


register(
    "permutation(Tensor indices, int num_experts) -> (Tensor, Tensor)",
    contract="indices (?) int32; 0 < num_experts <= 2147483647",
    reference=reference_permutation,
    fake=lambda indices, num_experts: (indices.new_empty(indices.shape), indices.new_empty(num_experts)),
    triton=launch_permutation,
)
register(
    "unpermute_backward(Tensor grad, Tensor y, Tensor row_of, Tensor probs) -> (Tensor, Tensor)",
    contract="y (R, H) floating; grad (T, H) y; row_of (T, S) int32; probs (T, S) wide(y)",
    reference=reference_unpermute_backward,
    fake=lambda grad, y, row_of, probs: (y.new_empty(y.shape), probs.new_empty(probs.shape)),
    triton=launch_unpermute_backward,
    flops=lambda grad, y, row_of, probs: row_of.numel() * y.shape[1] * 3,
)
register(
    "unpermute_backward_into(Tensor grad, Tensor y, Tensor row_of, Tensor probs, Tensor(a!) out) -> Tensor",
    contract="y (R, H) floating; grad (T, H) y; row_of (T, S) int32; probs (T, S) wide(y); out (T, S) probs",
    overwrites="out",
    reference=reference_unpermute_backward_into,
    fake=lambda grad, y, row_of, probs, out: y.new_empty(y.shape),
    triton=launch_unpermute_backward_into,
    flops=lambda grad, y, row_of, probs, out: row_of.numel() * y.shape[1] * 3,
)


_permute = register(
    "permute(Tensor x, Tensor row_of, SymInt num_rows) -> Tensor",
    contract="x (T, H) floating; row_of (T, S) int32; 0 <= num_rows <= 2147483647",
    reference=reference,
    fake=lambda x, row_of, num_rows: x.new_empty(num_rows, x.shape[1]),
    triton=launch,
    autograd_formula="unpermute(grad, row_of, None) -> x!",
)
_permute_quantized = register(
    "permute_quantized(Tensor x, Tensor? scales, Tensor row_of, SymInt num_rows, int block, ScalarType dtype)"
    " -> (Tensor, Tensor)",
    contract=(
        "row_of (T, S) int32; x (T, K) any; no scales ? x (T, K) floating; scales ? x (T, K) fp8; "
        "0 <= num_rows <= 2147483647; block in 128 32; dtype in fp8; scales (T, K/block) any; B of scales; "
        "B == block; K % block == 0"
    ),
    reference=reference_quantized,
    fake=lambda x, scales, row_of, num_rows, block, dtype: fp8.empty_rows(
        x, (num_rows, x.shape[1]), block, dtype
    ),
    triton=launch_quantized,
)
_unpermute = register(
    "unpermute(Tensor y, Tensor row_of, Tensor? probs) -> Tensor",
    contract="y (R, H) floating; row_of (T, S) int32; probs (T, S) wide(y)",
    reference=reference_unpermute,
    fake=lambda y, row_of, probs: y.new_empty(row_of.shape[0], y.shape[1]),
    triton=launch_unpermute,
    flops=lambda y, row_of, probs: row_of.numel() * y.shape[1] * (1 if probs is None else 2),
    autograd_formula={
        "probs": "unpermute_backward(grad, y, row_of, probs) -> y, probs!",
        "": "permute(grad, row_of, size(y, 0)) -> y",
    },
)
register(
    "unpermute_into(Tensor y, Tensor row_of, Tensor? probs, Tensor(a!) out) -> ()",
    contract="y (R, H) floating; row_of (T, S) int32; probs (T, S) wide(y); out (T, H) y",
    overwrites="out",
    reference=reference_unpermute_into,
    fake=lambda *arguments: None,
    triton=launch_unpermute_into,
    flops=lambda y, row_of, probs, out: row_of.numel() * y.shape[1] * (1 if probs is None else 2),
)


def _flops_unpermute_add(y: Tensor, row_of: Tensor, probs: Tensor | None, *_: Tensor) -> int:
    return (row_of.numel() * (1 if probs is None else 2) + row_of.shape[0]) * y.shape[1]


_unpermute_add = register(
    "unpermute_add(Tensor y, Tensor row_of, Tensor? probs, Tensor residual) -> Tensor",
    contract="y (R, H) floating; row_of (T, S) int32; probs (T, S) wide(y); residual (T, H) y",
    reference=reference_unpermute_add,
    fake=lambda y, row_of, probs, residual: y.new_empty(residual.shape),
    triton=launch_unpermute_add,
    flops=_flops_unpermute_add,
    autograd_formula={
        "probs": "unpermute_backward(grad, y, row_of, probs) -> y, probs!; grad -> residual",
        "": "permute(grad, row_of, size(y, 0)) -> y; grad -> residual",
    },
)
_unpermute_add_into = register(
    "unpermute_add_into(Tensor y, Tensor row_of, Tensor? probs, Tensor residual, Tensor(a!) out) -> ()",
    contract="y (R, H) floating; row_of (T, S) int32; probs (T, S) wide(y); residual (T, H) y; out (T, H) y",
    overwrites="out",
    reference=reference_unpermute_add_into,
    fake=lambda *arguments: None,
    triton=launch_unpermute_add_into,
    flops=_flops_unpermute_add,
    autograd_formula={
        "probs": "unpermute_backward(grad_out, y, row_of, probs) -> y, probs!; grad_out -> residual",
        "": "permute(grad_out, row_of, size(y, 0)) -> y; grad_out -> residual",
    },
)


def _check_assignments(op: str, name: str, tensor: Tensor) -> None:
    if tensor.dtype != torch.int32 or tensor.dim() != 2:
        raise ValueError(f"{op}: {name} must be int32 (T, k), got {tensor.dtype} {tuple(tensor.shape)}")


def _check(op: str, name: str, x: Tensor, row_of: Tensor, scales: Tensor | None = None) -> None:
    if scales is None:
        checks.check_floating(op, name, x)
    else:
        checks.check_choice(op, f"{name}.dtype", x.dtype, tuple(fp8.LARGEST))
    if x.dim() != 2:
        raise ValueError(f"{op}: {name} must be a matrix, got shape {tuple(x.shape)}")
    _check_assignments(op, "row_of", row_of)
    if x.device != row_of.device:
        raise ValueError(f"{op}: {name} is on {x.device} but row_of is on {row_of.device}")


@traced("fastmp.permutation")
def permutation(indices: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Sort the (token, expert) assignments by expert: the rows for `permute` and `unpermute`.

    Args:
        indices: (T, k) int32, the expert of each assignment. An index outside [0, num_experts), such as -1,
            drops the assignment.
        num_experts: E.

    Returns:
        row_of (T, k) int32, the row of each assignment, or -1 if it is dropped.
        offsets (E,) int32, the end of each expert's rows, as `grouped_mm` takes them. Assignments of one
        expert keep the order of their tokens, then of their slots. Shapes do not depend on the indices, and
        there is no host-device synchronisation.

    Raises:
        ValueError: indices is not an int32 tensor of two dimensions with fewer than 2^31 elements, or
            num_experts is not positive, or does not fit int32.

    Example:
        indices = torch.tensor([[0, 1], [1, 2]], dtype=torch.int32)  # two tokens, two experts each
        row_of, offsets = permutation(indices, num_experts=3)
        rows = permute(torch.randn(2, 8), row_of, num_rows=4)  # (4, 8), in the order of the experts
        tokens = unpermute(rows, row_of, torch.full((2, 2), 0.5))
    """
    _check_assignments("permutation", "indices", indices)
    few = indices.numel() < 1 << 31
    checks.require(few, "permutation: int32 cannot number the assignments of indices {}", indices.shape)
    countable = num_experts > 0 and num_experts < 1 << 31
    checks.require(countable, "permutation: num_experts must be from 1 to 2147483647, got {}", num_experts)
    return torch.ops.fastmp.permutation(indices, num_experts)


@overload
def permute(x: Tensor, row_of: Tensor, num_rows: int, *, quantize: Literal[False] = False) -> Tensor: ...


@overload
def permute(
    x: Tensor, row_of: Tensor, num_rows: int, *, quantize: Literal[True], block: int = 128,
    dtype: torch.dtype = fp8.E4M3,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


@overload
def permute(x: Tensor, row_of: Tensor, num_rows: int, *, scales: Tensor) -> tuple[Tensor, Tensor]: ...


@traced("fastmp.permute")
def permute(
    x: Tensor, row_of: Tensor, num_rows: int, *, scales: Tensor | None = None, quantize: bool = False,
    block: int = 128, dtype: torch.dtype = fp8.E4M3,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Copy each token to its rows, the experts' input. Differentiable in x, any number of times.

    Args:
        x: (T, H), float64, float32, bfloat16 or float16, any strides (last stride 1 avoids a copy).
        row_of: (T, k) int32, the rows of each token, see `permutation`. A row outside [0, num_rows) drops the
            assignment. Two assignments with one row, which `permutation` never makes, leave it undefined.
        num_rows: M of the result.
        scales: (T, H / block), if x is FP8 already (see `quantize_rows`); returned permuted as x is, without
            a derivative.
        quantize: return the FP8 numbers and scales that `quantize_rows(permute(x, row_of, num_rows),
            block=block, dtype=dtype)` returns: each token is quantised once, while it is copied; without a
            derivative.
        block, dtype: of the FP8 blocks, as for `quantize_rows`; H must be a multiple of `block`.

    Returns:
        (M, H) of x's dtype; rows without an assignment are zeros. The gradient of a token is the sum over its
        rows, in float32 (float64 for float64 x) in the order of the slots. With `scales` or `quantize`: (q,
        s), q (M, H) in FP8 and s (M, H / block) M-major, one for rows without an assignment.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, or `block` does not divide H.

    Example: see `permutation`.
    """
    _check("permute", "x", x, row_of, scales)
    fits = row_of.shape[0] == x.shape[0]
    checks.require(fits, "permute: row_of {} does not fit x {} by tokens", row_of.shape, x.shape)
    countable = num_rows >= 0 and num_rows < 1 << 31
    checks.require(countable, "permute: num_rows must be from 0 to 2147483647, got {}", num_rows)
    if scales is not None:
        block, dtype = fp8.block_of("permute", x.shape[1], scales), x.dtype
        checks.check_shape("permute", (len(x), x.shape[1] // block), to=("x", x), scales=scales)
        checks.check_same_device("permute", x=x, scales=scales)
    elif not quantize:
        return _permute(x, row_of, num_rows)
    fp8.check_block("permute", block, dtype)
    fp8.check_multiple("permute", "H", x.shape[1], block)
    return _permute_quantized(x, scales, row_of, num_rows, block, dtype)


@traced("fastmp.unpermute")
def unpermute(
    y: Tensor,
    row_of: Tensor,
    probs: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Sum each token's rows, weighted: the experts' outputs per token, with an optional residual.

    Differentiable in y, probs and residual.

    Args:
        y: (M, H), float64, float32, bfloat16 or float16, any strides (last stride 1 avoids a copy).
        row_of: (T, k) int32, the rows of each token, see `permutation`. A row outside [0, M) adds nothing.
            Two assignments with one row leave its gradient undefined, as in `permute`.
        probs: (T, k), float32 (float64 for float64 y), or None for a plain sum, whose gradient can be
            differentiated again.
        residual: (T, H) of y's dtype, which is added to the rounded sum, or None.
        out: where to write the result, a tensor (T, H) of y's dtype without a gradient; needs a residual. It
            may be the residual, and shares no memory with others. No view where autograd records: pass
            out.detach().

    Returns:
        `out`, or a new tensor (T, H) of y's dtype: the sum over the slots of probs * y[row_of], in float32
        (float64 for float64 y), in order, rounded once. In the gradient of y, rows without an assignment are
        zeros.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, or out is in the memory of another argument.
    """
    _check("unpermute", "y", y, row_of)
    if probs is not None:
        checks.check_shape("unpermute", row_of.shape, to=("row_of", row_of), probs=probs)
        wanted, message = compute_dtype(y.dtype), "unpermute: probs must be {} for y of {}, got {}"
        checks.require(probs.dtype == wanted, message, wanted, y.dtype, probs.dtype)
        checks.check_same_device("unpermute", y=y, probs=probs)
    if residual is None:
        checks.require(out is None, "unpermute: out {} needs a residual", None if out is None else out.shape)
        return _unpermute(y, row_of, probs)
    shape = (row_of.shape[0], y.shape[1])
    checks.check_shape("unpermute", shape, to=("y by row_of", y), residual=residual, out=out)
    checks.check_same("unpermute", y=y, residual=residual, out=out)
    if out is None:
        return _unpermute_add(y, row_of, probs, residual)
    checks.require(not out.requires_grad, "unpermute: out {} requires a gradient", out.shape)
    checks.check_no_overlap("unpermute", out, y=y, row_of=row_of, probs=probs)
    _unpermute_add_into(y, row_of, probs, residual, out)
    return out
