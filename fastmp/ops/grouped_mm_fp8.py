"""Grouped GEMM of FP8 operands: `linear_fp8` for each expert, over rows in the order of the experts.

As in `grouped_mm`, only the device knows where an expert's rows end: nothing is padded, and there is no
host-device synchronisation. Rows after the last offset are zeros. Numbers, scales and their layouts are those
of `linear_fp8`. M rows, L experts, N x K the weight of one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastmp.ops import gated, grouped_mm_fp8_triton
from fastmp.ops.core import checks, fp8
from fastmp.ops.core._triton import INTERPRETED
from fastmp.ops.core.registry import compute_dtype, register, without_autocast
from fastmp.ops.grouped_mm import check_ends, check_offsets, grouped_flops, spans
from fastmp.ops.linear_fp8 import check_operands, dequantized_weight
from fastmp.ops.quantize import reference_dequantize
from fastmp.profiling import traced


def reference(
    q: Tensor, s: Tensor, w: Tensor, w_scale: Tensor, offsets: Tensor, out_dtype: torch.dtype
) -> Tensor:
    """Multiply each expert's dequantised rows by its dequantised weight; rounded once."""
    wide, end = compute_dtype(out_dtype), 0
    y = q.new_empty(len(q), w.shape[1], dtype=out_dtype)
    with without_autocast(q.device.type):
        for expert, (start, end) in enumerate(spans(offsets, len(q))):
            if start < end:
                rows = reference_dequantize(q[start:end], s[start:end], wide)
                y[start:end] = rows @ dequantized_weight(w[expert], w_scale[expert], wide).t()
    y[end:] = 0
    return y


def _fake(
    q: Tensor, s: Tensor, w: Tensor, w_scale: Tensor, offsets: Tensor, out_dtype: torch.dtype
) -> Tensor:
    return q.new_empty(q.shape[0], w.shape[1], dtype=out_dtype)


def launch(
    q: Tensor, s: Tensor, w: Tensor, w_scale: Tensor, offsets: Tensor, out_dtype: torch.dtype
) -> Tensor:
    if out_dtype == torch.float64:  # tensor cores accumulate FP8 in float32
        return (_fake if q.is_meta else reference)(q, s, w, w_scale, offsets, out_dtype)
    return grouped_mm_fp8_triton.launch("grouped_mm_fp8", q, s, w, w_scale, offsets, out_dtype)


_grouped_mm_fp8 = register(
    "grouped_mm_fp8(Tensor q, Tensor s, Tensor w, Tensor w_scale, Tensor offsets, ScalarType out_dtype)"
    " -> Tensor",
    contract=(
        "q (M, K) fp8; B of s; s (M, K/B) any; w (E, N, K) float8_e4m3fn; w_scale (E, N/B, K/B) s; "
        "offsets (#E) int32; out_dtype in floating"
    ),
    reference=reference,
    fake=_fake,
    triton=launch,
    flops=lambda q, s, w, *rest: grouped_flops(q, w),
)


def reference_mlp_in(
    q: Tensor, s: Tensor, w: Tensor, w_scale: Tensor, offsets: Tensor, form: str, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return form(gate) * up, quantised, its scales, and h = [gate | up]."""
    h = reference(q, s, w, w_scale, offsets, out_dtype)
    return *gated.reference_quantized(h, None, form, None, q.shape[1] // max(s.shape[1], 1), fp8.E4M3), h


def _fake_mlp_in(
    q: Tensor, s: Tensor, w: Tensor, w_scale: Tensor, offsets: Tensor, form: str, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    num_rows, num_n = q.shape[0], w.shape[1]
    block = q.shape[1] // max(s.shape[1], 1)
    h = q.new_empty(num_rows, num_n, dtype=out_dtype)
    return *fp8.empty_rows(h, (num_rows, num_n // 2), block, fp8.E4M3), h


def launch_mlp_in(
    q: Tensor, s: Tensor, w: Tensor, w_scale: Tensor, offsets: Tensor, form: str, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    if out_dtype == torch.float64:
        return (_fake_mlp_in if q.is_meta else reference_mlp_in)(q, s, w, w_scale, offsets, form, out_dtype)
    if s.dtype != torch.float32 and not INTERPRETED:
        # Triton 3.6 fails to compile a loop with two accumulators of dot_scaled: two kernels.
        h = launch(q, s, w, w_scale, offsets, out_dtype)
        op = torch.ops.fastmp.gated_activation_quantized
        return *op(h, None, form, None, fp8.BLOCKS[s.dtype], fp8.E4M3), h
    return grouped_mm_fp8_triton.launch_mlp_in(q, s, w, w_scale, offsets, form, out_dtype)


_grouped_mlp_in_fp8 = register(
    "grouped_mlp_in_fp8(Tensor q, Tensor s, Tensor w, Tensor w_scale, Tensor offsets, str form,"
    " ScalarType out_dtype) -> (Tensor, Tensor, Tensor)",
    contract=(
        "q (M, K) fp8; B of s; s (M, K/B) any; w (E, 2N, K) float8_e4m3fn; w_scale (E, 2N/B, K/B) s; "
        "N % B == 0; offsets (#E) int32; form in silu gelu_tanh gelu; out_dtype in floating"
    ),
    reference=reference_mlp_in,
    fake=_fake_mlp_in,
    triton=launch_mlp_in,
    flops=lambda q, s, w, *rest: grouped_flops(q, w),
)


@checks.memoized
def _check(
    name: str, q: Tensor, s: Tensor, w: Tensor, w_scale: Tensor, offsets: Tensor, out_dtype: torch.dtype
) -> None:
    check_operands(name, q, s, w, w_scale, out_dtype, True)
    check_offsets(name, offsets, w)
    checks.check_same_device(name, q=q, offsets=offsets)


@traced("fastmp.grouped_mm_fp8")
def grouped_mm_fp8(
    q: Tensor,
    s: Tensor,
    w: Tensor,
    w_scale: Tensor,
    offsets: Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Multiply each quantised row by the quantised weight of its expert; no derivative, see `linear_fp8`.

    Args:
        q: (M, K) float8_e4m3fn or float8_e5m2, rows in the order of the experts.
        s: (M, K / block), as for `linear_fp8`.
        w: (L, N, K) float8_e4m3fn; last stride 1 avoids a copy.
        w_scale: (L, N / block, K / block) of the dtype of s; any strides.
        offsets: (L,) int32 on the same device: the end of each expert's rows, not decreasing, at most M.
        out_dtype: bfloat16, float16, float32 or float64 (on a CPU).

    Returns:
        (M, N), contiguous, of `out_dtype`, summed in float32 (float64 for float64) and rounded once. Rows
        after the last offset are zeros.

    Raises:
        ValueError: as `linear_fp8`; on the CPU also offsets that decrease or exceed M (elsewhere they are
            clamped).

    Example:
        q, s = fastmp.ops.quantize_rows(torch.randn(6, 256))  # 4 rows of expert 0, 2 of expert 1
        w, _, w_scale = fastmp.ops.quantize_weight(torch.randn(2, 128, 256))
        y = fastmp.ops.grouped_mm_fp8(q, s, w, w_scale, torch.tensor([4, 6], dtype=torch.int32))  # (6, 128)

    Zhao et al., "DeepGEMM: clean and efficient FP8 GEMM kernels", 2025.
    """
    _check("grouped_mm_fp8", q, s, w, w_scale, offsets, out_dtype)
    check_ends("grouped_mm_fp8", offsets, "q", q.shape[0])
    return _grouped_mm_fp8(q, s, w, w_scale, offsets, out_dtype)


@checks.memoized
def _check_mlp_in(w: Tensor, s: Tensor, form: str) -> None:
    checks.check_choice("grouped_mlp_in_fp8", "form", form, ("silu", "gelu", "gelu_tanh"))
    block = fp8.BLOCKS[s.dtype]
    odd = "grouped_mlp_in_fp8: gate and up must each have a multiple of block ({}) rows, got w {}"
    checks.require(w.shape[1] % (2 * block) == 0, odd, block, w.shape)


@traced("fastmp.grouped_mlp_in_fp8")
def grouped_mlp_in_fp8(
    q: Tensor,
    s: Tensor,
    w: Tensor,
    w_scale: Tensor,
    offsets: Tensor,
    *,
    form: str,
    out_dtype: torch.dtype = torch.bfloat16,
) -> tuple[Tensor, Tensor, Tensor]:
    """First FP8 GEMM of the experts' gated MLPs; the epilogue activates and quantises for the second one.

    Args:
        q, s, offsets: as for `grouped_mm_fp8`.
        w, w_scale: (L, 2F, K) and its scales; the rows of w[e] are [gate | up], F a multiple of the block.
        form: the activation of the gate: "silu", "gelu" (exact) or "gelu_tanh".
        out_dtype: dtype of h.

    Returns:
        (y, y_scale, h): y (M, F) float8_e4m3fn and its scales; and the pre-activation h (M, 2F) for the
        backward pass, of which `swiglu(h, quantize=True)` would make the same y. Rows after the last offset
        are zeros.

    Raises:
        ValueError: as `grouped_mm_fp8`; another form, F not a multiple of the block.

    Example:
        q, s = fastmp.ops.quantize_rows(torch.randn(6, 256))
        w, _, w_scale = fastmp.ops.quantize_weight(torch.randn(2, 256, 256))  # 2 experts, F = 128
        offsets = torch.tensor([4, 6], dtype=torch.int32)
        y, y_scale, h = fastmp.ops.grouped_mlp_in_fp8(q, s, w, w_scale, offsets, form="silu")  # y (6, 128)

    Shazeer, "GLU Variants Improve Transformer", 2020; DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024.
    """
    _check("grouped_mlp_in_fp8", q, s, w, w_scale, offsets, out_dtype)
    _check_mlp_in(w, s, form)
    check_ends("grouped_mlp_in_fp8", offsets, "q", q.shape[0])
    return _grouped_mlp_in_fp8(q, s, w, w_scale, offsets, form, out_dtype)
