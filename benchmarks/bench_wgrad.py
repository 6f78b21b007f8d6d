"""The gradient of a linear layer's weight, added to a sum in float32; torch eager: a product, an addition.

Beside it, the product of the few rows that a decoded token makes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.cases import EAGER, OURS, Case, Workload, normal, title
from fastmp.ops import OPS


def arguments(op: str, shape: tuple[int, int, int], dtype: torch.dtype, device: str, seed: int) -> tuple:
    """Random arguments of `torch.ops.fastmp.accumulate_weight_grad_`, or `few_rows_linear`, at a shape
    (tokens, inputs, outputs)."""
    tokens, inputs, outputs = shape
    random = normal(dtype, device, seed)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    left = (outputs, inputs) if op == "few_rows_linear" else (tokens, outputs)
    other, x = (random(*size) for size in (left, (tokens, inputs)))
    if op == "few_rows_linear":
        return x, other, None
    return torch.zeros(outputs, inputs, dtype=wide, device=device), other, x


def wgrad_case(
    tokens: int, inputs: int, outputs: int, dtype: torch.dtype, device: str, seed: int = 0
) -> Case:
    op = OPS["accumulate_weight_grad_"]
    total, grad, x = arguments(op.name, (tokens, inputs, outputs), dtype, device, seed)

    def rival(add: Callable[[Tensor], object]) -> Callable[[], Tensor]:
        own = total.clone()

        def call() -> Tensor:
            add(own)
            return own

        return call

    return Case(
        title("wgrad", (tokens, inputs, outputs), dtype),
        (total,),
        grad,
        {OURS: rival(lambda own: op(own, grad, x)), EAGER: rival(lambda own: own.add_(grad.t() @ x))},
        op.traffic(total, grad, x),
        0,
        flops=(op.flops(total, grad, x), 0),
    )


# tokens, inputs, outputs: of Llama-3 8B the second product of the MLP, and queries, keys and values.
WORKLOADS = (
    Workload(
        "wgrad",
        wgrad_case,
        cpu=((1024, 1024, 1024), (4096, 1024, 4096)),
        cuda=((8192, 14336, 4096), (8192, 4096, 6144)),
        rivals=(OURS, EAGER),
        directions=("forward",),
        tiny=(24, 16, 65),
    ),
)
SHAPES = {
    "accumulate_weight_grad_": ((8192, 14336, 4096), (4096, 4096, 128256), (8192, 8192, 16032)),
    "few_rows_linear": ((1, 4096, 14336), (8, 4096, 14336)),
}
