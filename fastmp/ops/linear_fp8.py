"""GEMM of FP8 operands: y = x w^T, summed in FP32 block by block.

An operand is a tensor of FP8 numbers and one scale for each block of them: 1 x block along K for rows,
block x block for weights. Scales are powers of two, so scaling is exact; the sum over a block of K is
multiplied by both scales and added in FP32, however few bits the tensor cores accumulate in.

- Block 128: float32 scales; GPUs from compute capability 8.9 on.
- Block 32 (MXFP8): float8_e8m0fnu scales; compute capability 10.0 on, whose tensor cores apply the scales.

One function serves both directions: forward with `w`, dgrad with the transposed copy `w_t` and the view
`w_scale.transpose(-1, -2)`. The wgrad is a GEMM of dequantised operands. M rows, N x K the weight.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastmp.ops import grouped_mm_fp8_triton
from fastmp.ops.core import checks, fp8
from fastmp.ops.core.registry import compute_dtype, register, without_autocast
from fastmp.ops.quantize import reference_dequantize
from fastmp.profiling import traced

ROW_DTYPES = (fp8.E4M3, fp8.E5M2)


def dequantized_weight(w: Tensor, s: Tensor, dtype: torch.dtype) -> Tensor:
    """Return w (N, K) times its scales (N / block, K / block), in `dtype`."""
    (n, k), (down, across) = w.shape, s.shape
    tiles = w.to(dtype).reshape(down, n // max(down, 1), across, k // max(across, 1))
    return (tiles * s.to(dtype)[:, None, :, None]).reshape(n, k)


def reference(q: Tensor, s: Tensor, w: Tensor, w_scale: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Multiply the dequantised operands in the compute dtype; rounded once."""
    wide = compute_dtype(out_dtype)
    with without_autocast(q.device.type):
        y = reference_dequantize(q, s, wide) @ dequantized_weight(w, w_scale, wide).t()
    return y.to(out_dtype)


def _fake(q: Tensor, s: Tensor, w: Tensor, w_scale: Tensor, out_dtype: torch.dtype) -> Tensor:
    return q.new_empty(q.shape[0], w.shape[0], dtype=out_dtype)


def launch(q: Tensor, s: Tensor, w: Tensor, w_scale: Tensor, out_dtype: torch.dtype) -> Tensor:
    if out_dtype == torch.float64:  # tensor cores accumulate FP8 in float32
        return reference(q, s, w, w_scale, out_dtype)
    return grouped_mm_fp8_triton.launch("linear_fp8", q, s, w[None], w_scale[None], None, out_dtype)


_linear_fp8 = register(
    "linear_fp8(Tensor q, Tensor s, Tensor w, Tensor w_scale, ScalarType out_dtype) -> Tensor",
    contract=(
        "q (M, K) fp8; B of s; s (M, K/B) any; w (N, K) float8_e4m3fn; w_scale (N/B, K/B) s; "
        "out_dtype in floating"
    ),
    reference=reference,
    fake=_fake,
    triton=launch,
    flops=lambda q, s, w, w_scale, out_dtype: 2 * q.shape[0] * w.shape[0] * w.shape[1],
)


def check_operands(
    name: str, q: Tensor, s: Tensor, w: Tensor, w_scale: Tensor, out_dtype: torch.dtype, experts: bool
) -> int:
    """Check the operands of an FP8 GEMM, of which `w` is (L, N, K) for `experts`, and return their block."""

    def require(condition: bool, message: str, *values: Any) -> None:
        checks.require(condition, f"{name}: " + message, *values)

    require(q.dtype in ROW_DTYPES, "q must have one of the dtypes {}, got {}", ROW_DTYPES, q.dtype)
    require(w.dtype == ROW_DTYPES[0], "w must be {}, got {}", ROW_DTYPES[0], w.dtype)
    require(
        s.dtype in fp8.BLOCKS, "s must be float32 (block 128) or float8_e8m0fnu (block 32), got {}", s.dtype
    )
    require(w_scale.dtype == s.dtype, "s is {} but w_scale is {}", s.dtype, w_scale.dtype)
    require(out_dtype in checks.FLOATING, "out_dtype must be one of {}, got {}", checks.FLOATING, out_dtype)
    layout = "(L, N, K)" if experts else "(N, K)"
    require(q.dim() == 2, "q must be (M, K), got shape {}", q.shape)
    require(w.dim() == 2 + experts, f"w must be {layout}, got shape {{}}", w.shape)
    block = fp8.BLOCKS[s.dtype]
    (num_rows, k), (*lead, n, w_k) = q.shape, w.shape
    require(w_k == k, "q {} does not fit w {}: expected {} in the last dimension of w", q.shape, w.shape, k)
    for dimension, size in (("K", k), ("N", n)):
        fp8.check_multiple(name, dimension, size, block)
    checks.check_shape(name, (num_rows, k // block), to=("q", q), s=s)
    checks.check_shape(name, (*lead, n // block, k // block), to=("w", w), w_scale=w_scale)
    checks.check_same_device(name, q=q, s=s, w=w, w_scale=w_scale)
    return block


@checks.memoized
def _check(q: Tensor, s: Tensor, w: Tensor, w_scale: Tensor, out_dtype: torch.dtype) -> None:
    check_operands("linear_fp8", q, s, w, w_scale, out_dtype, False)


@traced("fastmp.linear_fp8")
def linear_fp8(
    q: Tensor, s: Tensor, w: Tensor, w_scale: Tensor, *, out_dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """Multiply quantised rows by a quantised weight: y = dequantise(q, s) @ dequantise(w, w_scale)^T.

    No derivative: a layer composes its backward pass from this function (dgrad) and a GEMM in BF16 (wgrad).

    Args:
        q: (M, K) float8_e4m3fn, or float8_e5m2 for upstream gradients; last stride 1 avoids a copy.
        s: (M, K / block), a scale for each 1 x block of q: float32 for block 128, float8_e8m0fnu for block
            32. Strides (1, pitch), those of `quantize_rows`, load fastest.
        w: (N, K) float8_e4m3fn; last stride 1 avoids a copy.
        w_scale: (N / block, K / block), a scale for each block x block of w, of the dtype of s; any strides.
        out_dtype: bfloat16, float16, float32 or float64 (on a CPU).

    Returns:
        (M, N), contiguous, of `out_dtype`, summed in float32 (float64 for float64) and rounded once.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit, K or N not a multiple of the block, or a GPU
            without FP8 tensor cores (below 8.9; below 10.0 for block 32).

    Example:
        q, s = fastmp.ops.quantize_rows(torch.randn(8, 256))
        w, w_t, w_scale = fastmp.ops.quantize_weight(torch.randn(128, 256))
        y = fastmp.ops.linear_fp8(q, s, w, w_scale)  # (8, 128)
        grad, grad_s = fastmp.ops.quantize_rows(torch.ones_like(y))
        dx = fastmp.ops.linear_fp8(grad, grad_s, w_t, w_scale.transpose(-1, -2))  # (8, 256)

    DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024 (arXiv 2412.19437), section 3.3.
    """
    _check(q, s, w, w_scale, out_dtype)
    return _linear_fp8(q, s, w, w_scale, out_dtype)
