"""The FP8 quantisers of fastmp, torch eager and torch.compile: rows, back, weights with their transpose."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.cases import Case, Workload, against_torch, normal, title
from fastmp.ops import OPS, dequantize_rows, quantize_rows, quantize_weight
from fastmp.ops.core.fp8 import E4M3, LARGEST

BLOCK = 128


def _scales(amax: Tensor) -> Tensor:
    """The powers of two by torch's logarithm, which may be off by one."""
    return torch.exp2(torch.ceil(torch.log2(amax / LARGEST[E4M3]))).where(amax > 0, 1.0)


def plain_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise rows in steps of torch."""
    blocks = x.float().view(len(x), -1, BLOCK)
    s = _scales(blocks.abs().amax(-1))
    return (blocks / s.unsqueeze(-1)).to(E4M3).view(x.shape), s


def _weight(w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows, columns = w.shape
    blocks = w.float().view(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
    s = _scales(blocks.abs().amax((1, 3)))
    q = (blocks / s[:, None, :, None]).to(E4M3).view(w.shape)
    return q, q.t().contiguous(), s


def _back(q: Tensor, s: Tensor) -> Tensor:
    blocks = q.float().view(len(q), -1, BLOCK) * s.unsqueeze(-1)
    return blocks.to(torch.bfloat16).view(q.shape)


def _case(op: str, ours: Callable, plain: Callable) -> Callable[..., Case]:
    """Return `make` of a workload."""

    def make(rows: int, columns: int, dtype: torch.dtype, device: str, seed: int = 0) -> Case:
        given = arguments(op, (rows, columns), dtype, device, seed)
        tensors = tuple(each for each in given if isinstance(each, Tensor))
        rivals, moved = against_torch(lambda: ours(*tensors), plain, *tensors), OPS[op].traffic(*given)
        return Case(title(op, (rows, columns), dtype), tensors, tensors[0], rivals, moved, 0)

    return make


def arguments(op: str, shape: tuple[int, int], dtype: torch.dtype, device: str, seed: int) -> tuple:
    """Random arguments of `torch.ops.fastmp.<op>`; shape is that of the wide numbers."""
    x = normal(dtype, device, seed)(*shape)
    if op == "quantize_weight":
        return x, BLOCK
    if op == "quantize_rows":
        return x, BLOCK, E4M3
    return *quantize_rows(x), torch.bfloat16


# Activations of 8,192 and 32,768 tokens, and the weight of an MLP.
_SHAPES = {
    "quantize_rows": ((8192, 4096), (32768, 4096)),
    "dequantize_rows": ((8192, 4096), (32768, 4096)),
    "quantize_weight": ((4096, 14336),),
}
_FUNCTIONS = {
    "quantize_rows": (quantize_rows, plain_rows),
    "dequantize_rows": (dequantize_rows, _back),
    "quantize_weight": (quantize_weight, _weight),
}
WORKLOADS = tuple(
    Workload(
        op,
        _case(op, *_FUNCTIONS[op]),
        cpu=((2048, 2048),),
        cuda=shapes,
        directions=("forward",),
        dtypes=(torch.bfloat16,),
        tiny=(128, 256),
    )
    for op, shapes in _SHAPES.items()
)
SHAPES = _SHAPES
