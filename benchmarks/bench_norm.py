"""rms_norm and layer_norm of fastmp, torch eager (F.rms_norm, F.layer_norm), torch.compile, Liger, quack."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.bench_quantize import BLOCK, plain_rows
from benchmarks.cases import (
    COMPILE,
    EAGER,
    LIGER,
    OURS,
    QUACK,
    Case,
    CpuGoal,
    Workload,
    against_torch,
    normal,
    title,
)
from benchmarks.peers import peer
from fastmp.ops import OPS, layer_norm, quantize_rows, rms_norm
from fastmp.ops.core.fp8 import E4M3

EPS = 1e-5
IN_TURN = "fastmp in two ops"


def _liger_rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, device: str) -> Callable | None:
    """Clone the gradient, which all baselines share."""
    if residual is None:
        found = peer(LIGER, "liger_kernel.ops.rms_norm:LigerRMSNormFunction", device)
        return found and (lambda: found.apply(x, weight, EPS, 0.0, "llama", False))
    found = peer(LIGER, "liger_kernel.ops.fused_add_rms_norm:LigerFusedAddRMSNormFunction", device)
    return found and (lambda: found.apply(x, residual, weight, EPS, 0.0, "llama", False))


def _quack_rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, device: str) -> Callable | None:
    found = peer(QUACK, "quack.rmsnorm:rmsnorm", device)
    return found and (lambda: found(x, weight, residual=residual, eps=EPS, prenorm=residual is not None))


def _liger_layer_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor, device: str
) -> Callable | None:
    """Liger does not add the residual: torch does."""
    found = peer(LIGER, "liger_kernel.ops.layer_norm:LigerLayerNormFunction", device)
    if residual is None:
        return found and (lambda: found.apply(x, weight, bias, EPS))

    def add_and_norm() -> tuple[Tensor, Tensor]:
        total = x + residual
        return found.apply(total, weight, bias, EPS), total

    return found and add_and_norm


def _case(
    name: str, rows: int, columns: int, with_residual: bool, dtype: torch.dtype, device: str, seed: int = 0
) -> Case:
    random = normal(dtype, device, seed)
    x, residual = (random(rows, columns).requires_grad_() for _ in range(2))
    parameters = [random(columns).requires_grad_() for _ in range(1 if name == "rms_norm" else 2)]
    theirs = F.rms_norm if name == "rms_norm" else F.layer_norm
    ours: Callable[..., Any] = rms_norm if name == "rms_norm" else layer_norm

    def eager(x: Tensor, residual: Tensor | None, *parameters: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        total = x if residual is None else x + residual
        y = theirs(total, parameters[0].shape, *parameters, EPS)
        return y if residual is None else (y, total)

    added = residual if with_residual else None
    rivals = against_torch(
        lambda: ours(x, *parameters, eps=EPS, residual=added), eager, x, added, *parameters
    )
    if name == "rms_norm":
        others = {
            LIGER: _liger_rms_norm(x, added, parameters[0], device),
            QUACK: _quack_rms_norm(x, added, parameters[0], device),
        }
    else:
        others = {LIGER: _liger_layer_norm(x, added, *parameters, device)}
    forward = x, added, *parameters, EPS
    stats = x.new_empty((len(parameters), rows), dtype=torch.promote_types(dtype, torch.float32))
    grad = random(rows, columns)
    grad_total = random(rows, columns) if with_residual else None
    backward = grad, grad_total, x, parameters[0], stats, *([True] if len(parameters) == 2 else [])
    return Case(
        title(f"{name}{' add' if with_residual else ''}", (rows, columns), dtype),
        (x, *([residual] if with_residual else []), *parameters),
        grad if grad_total is None else (grad, grad_total),
        rivals | {name: call for name, call in others.items() if call is not None},
        OPS[name].traffic(*forward),
        OPS[f"{name}_backward"].traffic(*backward),
    )


def quantized_case(
    rows: int, columns: int, with_residual: bool, dtype: torch.dtype, device: str, seed: int = 0
) -> Case:
    random = normal(dtype, device, seed)
    x, weight, residual = random(rows, columns), random(columns), random(rows, columns)
    added = residual if with_residual else None

    def in_turn() -> tuple[Tensor, ...]:
        if added is None:
            return quantize_rows(rms_norm(x, weight, eps=EPS))
        y, total = rms_norm(x, weight, eps=EPS, residual=added)
        return *quantize_rows(y), total

    def eager(x: Tensor, residual: Tensor | None, weight: Tensor) -> tuple[Tensor, ...]:
        total = x if residual is None else x + residual
        rows = plain_rows(F.rms_norm(total, weight.shape, weight, EPS))
        return rows if residual is None else (*rows, total)

    fused = lambda: rms_norm(x, weight, eps=EPS, residual=added, quantize=True)  # noqa: E731
    rivals = against_torch(fused, eager, x, added, weight) | {IN_TURN: in_turn}
    name = title(f"rms_norm quantized{' add' if with_residual else ''}", (rows, columns), dtype)
    moved = OPS["rms_norm_quantized"].traffic(x, added, weight, EPS, BLOCK, E4M3)
    return Case(name, (x,), x, rivals, moved, 0)


# Rows are tokens; hidden sizes are those of Llama-3-8B and Mixtral, Llama-3-70B, DeepSeek-V3, Qwen3-30B-A3B
# and GPT-3; (8192 x 32, 128) are the query heads of Qwen3, each normalised by itself.
_LLAMA_AND_DEEPSEEK = tuple(
    (*shape, add) for shape in ((8192, 4096), (8192, 8192), (4096, 7168)) for add in (False, True)
)
WORKLOADS = (
    Workload(
        "rms_norm",
        partial(_case, "rms_norm"),
        cpu=((4096, 8192, False), (4096, 8192, True)),
        cuda=(*_LLAMA_AND_DEEPSEEK, (8192, 2048, True), (8192 * 32, 128, False)),
        rivals=(OURS, EAGER, COMPILE, LIGER, QUACK),
        tiny=(33, 129, True),
    ),
    Workload(
        "rms_norm quantized",
        quantized_case,
        cpu=((4096, 8192, True),),
        cuda=_LLAMA_AND_DEEPSEEK,
        rivals=(OURS, IN_TURN, EAGER, COMPILE),
        directions=("forward",),
        dtypes=(torch.bfloat16,),
        tiny=(33, 256, True),
    ),
    Workload(
        "layer_norm",
        partial(_case, "layer_norm"),
        cpu=((4096, 8192, False), (4096, 8192, True)),
        cuda=((8192, 4096, False), (8192, 8192, False), (8192, 8192, True), (2048, 12288, False)),
        rivals=(OURS, EAGER, COMPILE, LIGER),
        tiny=(33, 129, True),
    ),
)
GOALS = (
    CpuGoal("rms_norm", "float32", "both", OURS, 4.0, 4.0),
    CpuGoal("layer_norm", "float32", "both", OURS, 1.5, 1.0),
)
_SHAPES = ((8192, 4096), (8192, 8192), (4096, 7168), (2048, 12288))
SHAPES = {f"{name}{way}": _SHAPES for name in ("rms_norm", "layer_norm") for way in ("", "_backward")}
SHAPES |= {"rms_norm_quantized": _SHAPES}


def arguments(op: str, shape: tuple[int, int], dtype: torch.dtype, device: str, seed: int) -> tuple:
    """Random arguments of `torch.ops.fastmp.<op>`, without a residual."""
    random = normal(dtype, device, seed)
    x, grad = (random(*shape) for _ in range(2))
    weight = x[0].clone()
    optional = () if op.startswith("rms") else (weight,)
    forward = x, None, weight, *optional, EPS
    if op == "rms_norm_quantized":
        return *forward, BLOCK, E4M3
    if not op.endswith("_backward"):
        return forward
    stats = getattr(torch.ops.fastmp, op.removesuffix("_backward"))(*forward)[2]
    return grad, None, x, weight, stats, *(() if op.startswith("rms") else (True,))
