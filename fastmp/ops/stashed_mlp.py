"""Gated experts' MLPs whose activations are written to a stash and read from there, without copies.

The ops are those of `grouped_mm` and `gated`, with operands in the ring (R, w) of an activation stash: row i
of an operand is row start + i of the ring, and start is read on the device. What experts do not own is
another entry's, so nothing after the last offset is written there.

    stash_mlp_in            rows -> pre-activation and activation in the ring
    stash_mm                a GEMM of rows in the ring
    stash_gate_backward_    gradient of the pre-activation, in its place in the ring
    stash_wgrad, ..._wgrad_ gradient of the weights, of rows in the ring

C rows of capacity, L experts of the rank, H hidden, F hidden units of an expert.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastmp.ops.core import checks, launcher
from fastmp.ops.core._triton import MAX_COUNT, MAX_EXPERTS, MAX_SIZE, cdiv, jit, limits, tl
from fastmp.ops.core.registry import register
from fastmp.ops.core.rowwise import NUM_WARPS, arithmetic, as_rows, vector_width
from fastmp.ops.gated import backward_block_shape, gate_gradients
from fastmp.ops.grouped_mm_launch import (
    launch_from_ring,
    launch_mlp_in_ring,
    launch_wgrad,
    launch_wgrad_from_ring_,
)
from fastmp.ops.stash import kept_rows


def _entry(op: str, ring: Tensor, start: Tensor, offsets: Tensor, capacity: int) -> Tensor:
    """Return the rows of an entry, whose place the host reads: on a CPU."""
    last = int(offsets[-1])
    checks.require(last <= capacity, "{}: expected offsets of at most {} rows, got {}", op, capacity, last)
    return ring[kept_rows(op, ring, start, offsets, capacity)]


def reference_mlp_in(
    x: Tensor, w: Tensor, offsets: Tensor, start: Tensor, h: Tensor, y: Tensor, form: str
) -> None:
    """Write form(gate) * up and [gate | up] = x w^T to the entry, by the op on a CPU."""
    into_h, into_y = (_entry("stash_mlp_in", ring, start, offsets, len(x)) for ring in (h, y))
    made = torch.ops.fastmp.grouped_mlp_in(x[: len(into_y)], w, None, offsets, form, True, True)
    into_y.copy_(made[0])
    into_h.copy_(made[1])


def reference_mm(
    x: Tensor, w: Tensor, offsets: Tensor, start: Tensor, transposed: bool, capacity: int
) -> Tensor:
    """Multiply the rows of the entry; zeros after them."""
    rows = _entry("stash_mm", x, start, offsets, capacity)
    out = x.new_zeros(capacity, w.shape[2 if transposed else 1])
    out[: len(rows)] = torch.ops.fastmp.grouped_mm(rows, w, offsets, transposed)
    return out


def reference_gate_backward_(grad: Tensor, h: Tensor, start: Tensor, offsets: Tensor, form: str) -> None:
    """Replace the rows of the entry by their gradient."""
    rows = _entry("stash_gate_backward_", h, start, offsets, len(grad))
    rows.copy_(torch.ops.fastmp.gated_activation_backward(grad[: len(rows)], rows, None, form)[0])


def _operands(
    op: str, grad: Tensor, x: Tensor, offsets: Tensor, grad_start: Tensor | None, start: Tensor, capacity: int
) -> tuple[Tensor, Tensor, Tensor]:
    rows = _entry(op, x, start, offsets, capacity if grad_start is not None else min(capacity, len(grad)))
    own = grad[: len(rows)] if grad_start is None else _entry(op, grad, grad_start, offsets, capacity)
    return own, rows, offsets


def reference_wgrad(
    grad: Tensor, x: Tensor, offsets: Tensor, grad_start: Tensor | None, start: Tensor, capacity: int
) -> Tensor:
    result: Tensor = torch.ops.fastmp.grouped_mm_wgrad(
        *_operands("stash_wgrad", grad, x, offsets, grad_start, start, capacity)
    )
    return result


def reference_wgrad_(
    total: Tensor, grad: Tensor, x: Tensor, offsets: Tensor, grad_start: Tensor | None, start: Tensor,
    capacity: int,
) -> None:  # fmt: skip
    torch.ops.fastmp.grouped_mm_wgrad_(
        total, *_operands("stash_wgrad_", grad, x, offsets, grad_start, start, capacity)
    )


@limits(capacity=MAX_COUNT, num_local=MAX_EXPERTS, num_vectors=MAX_SIZE)
@jit(fixed="capacity num_local num_vectors pitch")
def gate_backward_kernel(
    grad,  # (C, F), rows pitch vectors apart
    h,  # (R, 2F) = [gate | up]
    start,  # () int64, the first row of the entry
    offsets,  # (L,) int32, the last of which is the number of rows
    capacity, num_local, num_vectors, pitch,
    FORM: tl.constexpr, COMPUTE: tl.constexpr, VECTOR: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute one tile of both gradients, in the place of gate and up."""
    # 1. Locate the tile; rows after those of the experts are another entry's.
    num_cols = num_vectors * VECTOR
    column_blocks = tl.cdiv(num_cols, BLOCK_N)
    pid = tl.program_id(0)
    rows = (pid // column_blocks).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = (pid % column_blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
    count = tl.minimum(tl.load(offsets + num_local - 1), capacity)
    mask = (rows < count)[:, None] & (cols < num_cols)[None, :]
    gates = h + (tl.load(start) + rows)[:, None] * 2 * num_cols + cols[None, :]
    # 2. Load gate and up; compute their gradients.
    g = tl.load(grad + rows[:, None] * pitch * VECTOR + cols[None, :], mask=mask, other=0.0).to(COMPUTE)
    gate = tl.load(gates, mask=mask, other=0.0).to(COMPUTE)
    up = tl.load(gates + num_cols, mask=mask, other=0.0).to(COMPUTE)
    dgate, dup = gate_gradients(g, gate, up, FORM)
    # 3. Store the gradients where all threads have loaded.
    tl.debug_barrier()
    tl.store(gates, dgate, mask=mask)
    tl.store(gates + num_cols, dup, mask=mask)


def launch_gate_backward_(grad: Tensor, h: Tensor, start: Tensor, offsets: Tensor, form: str) -> None:
    grad, pitch = as_rows(grad)
    capacity, num_cols = grad.shape
    if capacity * num_cols == 0:
        return
    vector = vector_width(h.element_size(), num_cols, pitch)
    block_m, block_n = backward_block_shape(num_cols, h.element_size())
    launcher.launch(
        gate_backward_kernel, cdiv(capacity, block_m) * cdiv(num_cols, block_n),
        (
            grad, h, start, offsets.contiguous(), capacity, offsets.numel(), num_cols // vector,
            pitch // vector,
        ),
        {
            "FORM": form, "COMPUTE": arithmetic(h.dtype), "VECTOR": vector, "BLOCK_M": block_m,
            "BLOCK_N": block_n, "num_warps": NUM_WARPS,
        },
    )  # fmt: skip


def _moved(*shapes: tuple[int, int], like: Tensor) -> int:
    return sum(rows * columns for rows, columns in shapes) * like.element_size()


# Costs assume C rows, as those of grouped_mm; only the device knows the real number.
register(
    "stash_mlp_in(Tensor x, Tensor w, Tensor offsets, Tensor start, Tensor(a!) h, Tensor(b!) y, str form)"
    " -> ()",
    contract=(
        "x (C, K) floating; w (L, 2N, K) x; offsets (L) int32; 0 < L; start () int64; y (R, N) x; "
        "h (R, 2N) x; 0 < R; form in silu gelu_tanh gelu"
    ),
    reference=reference_mlp_in,
    triton=launch_mlp_in_ring,
    guards_launch=True,
    fake=lambda *arguments: None,
    flops=lambda x, w, *rest: 2 * x.shape[0] * w.shape[1] * w.shape[2],
    traffic=lambda x, w, offsets, start, h, y, form: (
        w.numel() * w.element_size()
        + _moved((len(x), x.shape[1]), (len(x), h.shape[1]), (len(x), y.shape[1]), like=x)
    ),
)
register(
    "stash_mm(Tensor x, Tensor w, Tensor offsets, Tensor start, bool transposed, int capacity) -> Tensor",
    contract=(
        "x (R, K) floating; 0 < R; transposed ? w (L, K, N) x; no transposed ? w (L, N, K) x; "
        "offsets (L) int32; 0 < L; start () int64; 0 <= capacity <= 2147483647"
    ),
    reference=reference_mm,
    triton=launch_from_ring,
    guards_launch=True,
    fake=lambda x, w, offsets, start, transposed, capacity: x.new_empty(
        capacity, w.shape[2 if transposed else 1]
    ),
    flops=lambda x, w, offsets, start, transposed, capacity: 2 * capacity * w.shape[1] * w.shape[2],
    traffic=lambda x, w, offsets, start, transposed, capacity: (
        w.numel() * w.element_size() + _moved((capacity, w.shape[1]), (capacity, w.shape[2]), like=x)
    ),
)
register(
    "stash_gate_backward_(Tensor grad, Tensor(a!) h, Tensor start, Tensor offsets, str form) -> ()",
    contract=(
        "grad (C, N) floating; h (R, 2N) grad; h contiguous; start () int64; offsets (L) int32; 0 < L; "
        "form in silu gelu_tanh gelu"
    ),
    reference=reference_gate_backward_,
    triton=launch_gate_backward_,
    guards_launch=True,
    fake=lambda *arguments: None,
    traffic=lambda grad, h, *rest: _moved((len(grad), grad.shape[1] + 2 * h.shape[1]), like=grad),
)


def _wgrad_traffic(grad: Tensor, x: Tensor, offsets: Tensor, grad_start: Tensor | None, *rest: int) -> int:
    sums = len(offsets) * grad.shape[1] * x.shape[1] * x.element_size()
    return sums + _moved((rest[-1], grad.shape[1]), (rest[-1], x.shape[1]), like=x)


register(
    "stash_wgrad(Tensor grad, Tensor x, Tensor offsets, Tensor? grad_start, Tensor start, int capacity)"
    " -> Tensor",
    contract=(
        "grad (G, N) floating; x (R, K) grad; offsets (L) int32; 0 < L; grad_start () int64; start () int64; "
        "0 <= capacity <= 2147483647"
    ),
    reference=reference_wgrad,
    triton=launch_wgrad,
    guards_launch=True,
    fake=lambda grad, x, offsets, *rest: x.new_empty(offsets.shape[0], grad.shape[1], x.shape[1]),
    flops=lambda grad, x, *rest: 2 * rest[-1] * grad.shape[1] * x.shape[1],
    traffic=_wgrad_traffic,
)
register(
    "stash_wgrad_(Tensor(a!) total, Tensor grad, Tensor x, Tensor offsets, Tensor? grad_start, Tensor start,"
    " int capacity) -> ()",
    contract=(
        "grad (G, N) floating; x (R, K) grad; offsets (L) int32; 0 < L; total (L, N, K) grad|wide(grad); "
        "grad_start () int64; start () int64; 0 <= capacity <= 2147483647"
    ),
    reference=reference_wgrad_,
    triton=launch_wgrad_from_ring_,
    guards_launch=True,
    fake=lambda *arguments: None,
    flops=lambda total, grad, x, *rest: 2 * rest[-1] * grad.shape[1] * x.shape[1],
    traffic=lambda total, *rest: 2 * total.numel() * total.element_size() + _wgrad_traffic(*rest),
)
