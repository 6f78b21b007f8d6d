"""bias_dropout_add of fastmp, torch eager and torch.compile: other masks, the same work; at p = 0 equal."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.cases import OURS, Case, CpuGoal, Workload, against_torch, normal, title
from fastmp.ops import OPS, bias_dropout_add


def bias_dropout_add_case(
    rows: int, columns: int, p: float, dtype: torch.dtype, device: str, seed: int = 0
) -> Case:
    random = normal(dtype, device, seed)
    x, bias, residual = (
        random(*shape).requires_grad_() for shape in ((rows, columns), (columns,), (rows, columns))
    )
    grad = random(rows, columns)

    def eager(x: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
        return residual + F.dropout(x + bias, p)

    inputs = x, bias, residual
    key = torch.zeros((), dtype=torch.int64, device=device)
    backward = OPS["bias_dropout_add_backward"].traffic(grad, p, key, dtype, True)
    if p == 0:  # the gradient of x is that of y: what is left is to sum it for the bias
        backward = (grad.numel() + columns) * grad.element_size()
    return Case(
        title(f"bias_dropout_add {p}", (rows, columns), dtype),
        inputs,
        grad,
        against_torch(lambda: bias_dropout_add(*inputs, p=p), eager, *inputs),
        OPS["bias_dropout_add"].traffic(x, bias, residual, p, key),
        backward,
        random=p > 0,
    )


WORKLOADS = (
    Workload(
        "bias_dropout_add",
        bias_dropout_add_case,
        cpu=((4096, 4096, 0.1), (2048, 7168, 0.0)),
        cuda=((8192, 8192, 0.1), (2048, 12288, 0.1), (4096, 7168, 0.1), (8192, 8192, 0.0)),
        tiny=(16, 256, 0.0),
    ),
)
GOALS = (
    CpuGoal("bias_dropout_add", "float32", "forward", OURS, 7.0, 3.5),
    CpuGoal("bias_dropout_add", "float32", "both", OURS, 4.5, 2.5),
    CpuGoal("bias_dropout_add", "bfloat16", "forward", OURS, 6.0, 4.0),
    CpuGoal("bias_dropout_add", "bfloat16", "both", OURS, 4.5, 2.8),
)
SHAPES = dict.fromkeys(
    ("bias_dropout_add", "bias_dropout_add_into", "bias_dropout_add_backward"),
    ((8192, 8192), (2048, 12288), (4096, 7168)),
)


def arguments(op: str, shape: tuple[int, int], dtype: torch.dtype, device: str, seed: int) -> tuple:
    """Random arguments of `torch.ops.fastmp.<op>`."""
    random = normal(dtype, device, seed)
    x, residual = (random(*shape) for _ in range(2))
    key = torch.full((), seed, dtype=torch.int64, device=device)
    if op == "bias_dropout_add":
        return (x, x[0].clone(), residual, 0.1, key)
    if op == "bias_dropout_add_into":
        return (x, x[0].clone(), residual, 0.1, key, torch.empty_like(residual))
    return (x, 0.1, key, dtype, True)
