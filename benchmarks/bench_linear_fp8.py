"""linear_fp8 of fastmp, torch's BF16 and blockwise FP8 GEMMs, DeepGEMM and torchao, on the same operands.

Times are of the GEMM alone; "quantised rows" adds the quantisation of the rows, as Transformer Engine's layer
does. Torch multiplies the dequantised operands in BF16: the values are equal, the roofline is that of BF16.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.cases import EAGER, OURS, TORCH, Case, CpuGoal, Workload, normal, title
from benchmarks.peers import ABSENT, DEEPGEMM, TE, TORCHAO, peer
from fastmp.ops import OPS, dequantize_rows, linear_fp8, quantize_rows, quantize_weight
from fastmp.ops.linear_fp8 import dequantized_weight
from fastmp.testing.ops import relative_error

QUANTISED = "fastmp with quantised rows"
BLOCK = 128


def agreeing(rivals: dict[str, Callable[[], Tensor]], name: str, call: Callable[[], Tensor]) -> None:
    """Add a rival if it runs here and its result is ours: layouts of scales differ between releases."""
    try:
        error = relative_error(call(), rivals[OURS]())
    except Exception as reason:  # an FP8 GEMM for other GPUs, or of another release, raises whatever it likes
        ABSENT[name] = f"{name} does not run here: {type(reason).__name__}: {reason}".splitlines()[0]
        return
    if error < 2e-2:
        rivals[name] = call
    else:
        ABSENT[name] = f"{name} takes scales of another layout here: relative error {error:.2g}"


def _by_torch(q: Tensor, s: Tensor, w: Tensor, w_scale: Tensor) -> Callable[[], Tensor]:
    recipes = F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128
    return lambda: F.scaled_mm(q, w.t(), s, recipes[0], w_scale.t(), recipes[1])


def te_blockwise(call: Callable[[], Tensor], device: str) -> Callable[[], Tensor] | None:
    """Return a call of Transformer Engine's layers in its blockwise recipe; None if it does not run here."""
    autocast = peer(TE, "transformer_engine.pytorch:fp8_autocast", device)
    recipe = peer(TE, "transformer_engine.common.recipe:Float8BlockScaling", device)
    if autocast is None or recipe is None:
        return None

    def blockwise() -> Tensor:
        with autocast(enabled=True, fp8_recipe=recipe()):
            return call()

    return blockwise


def _by_te(x: Tensor, w: Tensor, device: str) -> Callable[[], Tensor] | None:
    """Return Transformer Engine's layer in its blockwise recipe, whose rows are quantised in every call."""
    linear = peer(TE, "transformer_engine.pytorch:Linear", device)
    if linear is None:
        return None
    layer = linear(w.shape[1], w.shape[0], bias=False, params_dtype=x.dtype, device=device)
    with torch.no_grad():
        layer.weight.copy_(w)
    return te_blockwise(lambda: layer(x, is_first_microbatch=False), device)


def linear_fp8_case(rows: int, n: int, k: int, dtype: torch.dtype, device: str, seed: int = 0) -> Case:
    q, s, w, w_scale, _ = arguments("linear_fp8", (rows, n, k), dtype, device, seed)
    x, weight = dequantize_rows(q, s, dtype), dequantized_weight(w, w_scale, torch.float32).to(dtype)
    rivals: dict[str, Callable[[], Tensor]] = {
        OURS: lambda: linear_fp8(q, s, w, w_scale, out_dtype=dtype),
        QUANTISED: lambda: linear_fp8(*quantize_rows(x), w, w_scale, out_dtype=dtype),
        EAGER: lambda: F.linear(x, weight),
    }
    if torch.device(device).type == "cuda":
        agreeing(rivals, TORCH, _by_torch(q, s, w, w_scale))
        if (deep := peer(DEEPGEMM, "deep_gemm:fp8_gemm_nt", device)) is not None:
            out = torch.empty(rows, n, dtype=dtype, device=device)
            agreeing(rivals, DEEPGEMM, lambda: (deep((q, s), (w, w_scale), out), out)[1])
        blockwise = "torchao.prototype.blockwise_fp8_inference.blockwise_quantization:blockwise_fp8_gemm"
        if (ao := peer(TORCHAO, blockwise, device)) is not None:
            agreeing(rivals, TORCHAO, lambda: ao(q, s, w, w_scale))
        if (te := _by_te(x, weight, device)) is not None:
            agreeing(rivals, TE, te)
    op = OPS["linear_fp8"]
    given = q, s, w, w_scale, dtype
    name = title("linear_fp8", (rows, n, k), dtype)
    return Case(name, (x,), x, rivals, op.traffic(*given), 0, flops=(op.flops(*given), 0))


# Rows, N, K: attention and MLP of a dense 8B model, the projections of DeepSeek-V3, and decoding.
LARGE = ((16384, 6144, 4096), (16384, 28672, 4096), (16384, 4096, 14336), (32768, 7168, 2048))
DECODE = (64, 4096, 7168)
WORKLOADS = (
    Workload(
        "linear_fp8",
        linear_fp8_case,
        cpu=((2048, 1024, 1024),),
        cuda=(*LARGE, DECODE),
        rivals=(OURS, QUANTISED, EAGER, TORCH, DEEPGEMM, TORCHAO, TE),
        directions=("forward",),
        dtypes=(torch.bfloat16,),
        tiny=(6, 128, 256),
    ),
)
# With a matrix unit torch multiplies BF16 as fast; elsewhere it widens it.
_FACTOR = 0.75 if torch.cpu._is_amx_tile_supported() else 1.0
GOALS = (CpuGoal("linear_fp8", "bfloat16", "forward", OURS, _FACTOR, _FACTOR),)
SHAPES = {"linear_fp8": (*LARGE, DECODE)}


def arguments(op: str, shape: tuple[int, ...], dtype: torch.dtype, device: str, seed: int) -> tuple:
    """Random arguments of `torch.ops.fastmp.linear_fp8`."""
    rows, n, k = shape
    random = normal(dtype, device, seed)
    q, s = quantize_rows(random(rows, k), block=BLOCK)
    w, _, w_scale = quantize_weight(random(n, k).mul_(k**-0.5), block=BLOCK)
    return q, s, w, w_scale, dtype
