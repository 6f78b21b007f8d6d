"""grouped_mm_fp8 of fastmp, its BF16 GEMM, a loop of torch's, and DeepGEMM, on the same operands."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from benchmarks.bench_grouped_mm import FINE, LARGE, sizes_of
from benchmarks.bench_linear_fp8 import BLOCK, QUANTISED, agreeing
from benchmarks.cases import EAGER, OURS, Case, CpuGoal, Workload, normal, title
from benchmarks.peers import DEEPGEMM, peer
from fastmp.ops import OPS, dequantize_rows, grouped_mm, grouped_mm_fp8, quantize_rows, quantize_weight
from fastmp.ops.linear_fp8 import dequantized_weight

IN_BF16 = "fastmp in BF16"


def grouped_mm_fp8_case(
    experts: int, rows: int, n: int, k: int, routing: str, dtype: torch.dtype, device: str, seed: int = 0
) -> Case:
    shape = experts, rows, n, k
    q, s, w, w_scale, offsets, _ = arguments("grouped_mm_fp8", (*shape, routing), dtype, device, seed)
    x = dequantize_rows(q, s, dtype)
    pairs = zip(w, w_scale, strict=True)
    weight = torch.stack([dequantized_weight(*pair, torch.float32).to(dtype) for pair in pairs])
    spans = [*pairwise(accumulate(sizes_of(experts, rows, routing), initial=0))]
    rivals: dict[str, Callable[[], Tensor]] = {
        OURS: lambda: grouped_mm_fp8(q, s, w, w_scale, offsets, out_dtype=dtype),
        QUANTISED: lambda: grouped_mm_fp8(*quantize_rows(x), w, w_scale, offsets, out_dtype=dtype),
        IN_BF16: lambda: grouped_mm(x, weight, offsets),
        EAGER: lambda: torch.cat([x[i:j] @ each.t() for (i, j), each in zip(spans, weight, strict=True)]),
    }
    deep = peer(DEEPGEMM, "deep_gemm:m_grouped_fp8_gemm_nt_contiguous", device)
    if deep is not None and all((end - start) % BLOCK == 0 for start, end in spans):
        out, experts_of = torch.empty(rows, n, dtype=dtype, device=device), torch.arange(experts)
        sizes = torch.tensor([end - start for start, end in spans])
        expert = experts_of.repeat_interleave(sizes).to(device, torch.int32)
        agreeing(rivals, DEEPGEMM, lambda: (deep((q, s), (w, w_scale), out, expert), out)[1])
    op = OPS["grouped_mm_fp8"]
    given = q, s, w, w_scale, offsets, dtype
    name = title("grouped_mm_fp8", (*shape, routing), dtype)
    return Case(name, (x,), x, rivals, op.traffic(*given), 0, flops=(op.flops(*given), 0))


CPU = (8, 4096, 2048, 1024)
_ALL = tuple((*shape, "balanced") for shape in (*LARGE, *FINE)) + ((*FINE[0], "skewed"),)
WORKLOADS = (
    Workload(
        "grouped_mm_fp8",
        grouped_mm_fp8_case,
        cpu=((*CPU, "balanced"),),
        cuda=_ALL,
        rivals=(OURS, QUANTISED, IN_BF16, EAGER, DEEPGEMM),
        directions=("forward",),
        dtypes=(torch.bfloat16,),
        tiny=(3, 36, 128, 256, "skewed"),
    ),
)
GOALS = (CpuGoal("grouped_mm_fp8", "bfloat16", "forward", OURS, 0.75, 0.75, over=IN_BF16),)
SHAPES = {"grouped_mm_fp8": (*LARGE, *FINE), "grouped_mlp_in_fp8": (LARGE[3], *FINE)}


def arguments(op: str, shape: tuple, dtype: torch.dtype, device: str, seed: int) -> tuple:
    """Random arguments of `torch.ops.fastmp.<op>`, rows spread evenly unless the shape names a routing."""
    experts, rows, n, k, routing = (*shape, "balanced")[:5]
    random = normal(dtype, device, seed)
    q, s = quantize_rows(random(rows, k), block=BLOCK)
    w, _, w_scale = quantize_weight(random(experts, n, k).mul_(k**-0.5), block=BLOCK)
    ends = list(accumulate(sizes_of(experts, rows, routing)))
    operands = q, s, w, w_scale, torch.tensor(ends, dtype=torch.int32, device=device)
    return (*operands, "silu", dtype) if op == "grouped_mlp_in_fp8" else (*operands, dtype)
