"""bias_gelu of fastmp, torch eager and torch.compile."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.cases import OURS, Case, CpuGoal, Workload, against_torch, normal, title
from fastmp.ops import OPS, bias_gelu


def bias_gelu_case(
    rows: int, columns: int, approximate: str, dtype: torch.dtype, device: str, seed: int = 0
) -> Case:
    random = normal(dtype, device, seed)
    x, bias = (random(*shape).requires_grad_() for shape in ((rows, columns), (columns,)))
    grad = random(rows, columns)

    def eager(x: Tensor, bias: Tensor) -> Tensor:
        return F.gelu(x + bias, approximate=approximate)

    return Case(
        title(f"bias_gelu {approximate}", (rows, columns), dtype),
        (x, bias),
        grad,
        against_torch(lambda: bias_gelu(x, bias, approximate=approximate), eager, x, bias),
        OPS["bias_gelu"].traffic(x, bias, approximate),
        OPS["bias_gelu_backward"].traffic(grad, x, bias, approximate),
    )


WORKLOADS = (
    Workload(
        "bias_gelu",
        bias_gelu_case,
        cpu=((4096, 8192, "tanh"), (4096, 8192, "none")),
        cuda=((8192, 16384, "tanh"), (2048, 6144, "tanh"), (4096, 49152, "tanh"), (8192, 16384, "none")),
        tiny=(7, 24, "tanh"),
    ),
)
GOALS = (
    CpuGoal("bias_gelu", "float32", "forward", OURS, 4.0, 2.0),
    CpuGoal("bias_gelu", "float32", "both", OURS, 3.0, 2.0),
)
SHAPES = dict.fromkeys(("bias_gelu", "bias_gelu_backward"), ((8192, 16384), (2048, 6144), (4096, 49152)))


def arguments(op: str, shape: tuple[int, int], dtype: torch.dtype, device: str, seed: int) -> tuple:
    """Random arguments of `torch.ops.fastmp.<op>`."""
    random = normal(dtype, device, seed)
    x, grad = (random(*shape) for _ in range(2))
    return (x, x[0].clone(), "tanh") if op == "bias_gelu" else (grad, x, x[0].clone(), "tanh")
