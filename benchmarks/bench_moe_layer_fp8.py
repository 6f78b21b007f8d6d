"""A mixture of experts in FP8, beside ours in its dtype and Transformer Engine's grouped layers in FP8.

All have the same weights. Rows, gradients and, in ours, nothing else is quantised in every call: weights are
quantised once, as in all microbatches of a step but the first. Results differ by the rounding to FP8.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from benchmarks.bench_linear_fp8 import te_blockwise
from benchmarks.bench_moe_layer import moe_layer_case, moe_layer_of
from benchmarks.cases import OURS, TE, Case, CpuGoal, Workload, title
from fastmp.config.precision import Fp8Recipe
from fastmp.tensor_parallel.fp8_linear import native_block

IN_DTYPE = "fastmp in dtype"


def moe_layer_fp8_case(
    tokens: int, hidden: int, experts: int, k: int, ffn: int, dtype: torch.dtype, device: str, seed: int = 0
) -> Case:
    shape = (tokens, hidden, experts, k, ffn)
    case = moe_layer_case(*shape, dtype, device, seed)
    x, router, fc1, fc2 = case.leaves
    layer = moe_layer_of(*shape[1:], dtype, device, fp8=Fp8Recipe(native_block(device)))
    layer.router.weight, layer.experts.fc1, layer.experts.fc2 = router, fc1, fc2
    rivals: dict[str, Callable[[], Any]] = {
        OURS: lambda: layer(x.unsqueeze(1))[0].squeeze(1),
        IN_DTYPE: case.rivals[OURS],
    }
    engine = case.rivals.get(TE)
    if engine is not None and (blockwise := te_blockwise(engine, device)) is not None:
        rivals[TE] = blockwise
    return replace(case, name=title("moe_layer_fp8", shape, dtype), rivals=rivals, random=True)


WORKLOADS = (
    Workload(
        "moe_layer_fp8",
        moe_layer_fp8_case,
        cpu=((512, 512, 16, 4, 256),),
        cuda=((32768, 2048, 128, 8, 768), (8192, 4096, 8, 2, 14336), (4096, 7168, 32, 8, 2048)),
        rivals=(OURS, IN_DTYPE, TE),
        tiny=(24, 128, 8, 2, 128),
    ),
)
GOALS = (CpuGoal("moe_layer_fp8", "float32", "both", OURS, 0.7, 0.7, over=IN_DTYPE),)
