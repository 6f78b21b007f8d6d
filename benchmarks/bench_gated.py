"""swiglu and geglu of fastmp, torch eager, torch.compile, Megatron's way of fusing them, and Liger."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.cases import (
    COMPILE,
    EAGER,
    LIGER,
    OURS,
    Case,
    CpuGoal,
    Workload,
    against_torch,
    normal,
    title,
)
from benchmarks.peers import peer
from fastmp.ops import OPS, geglu, swiglu

MEGATRON = "Megatron"
_LIGER = {
    "swiglu": "liger_kernel.ops.swiglu:LigerSiLUMulFunction",
    "geglu": "liger_kernel.ops.geglu:LigerGELUMulFunction",
}
ACTIVATION = {"swiglu": "silu", "geglu": "gelu_tanh"}


def _eager(name: str, x: Tensor, bias: Tensor | None) -> Tensor:
    gate, up = (x if bias is None else x + bias).chunk(2, -1)
    return (F.silu(gate) if name == "swiglu" else F.gelu(gate, approximate="tanh")) * up


def _megatron_swiglu() -> Callable[[Tensor, Tensor | None], Tensor]:
    """Megatron-LM's: both directions by hand under torch.compile; dx is read again for the bias."""

    def forward(x: Tensor, bias: Tensor | None) -> Tensor:
        gate, up = torch.chunk(x if bias is None else x + bias, 2, -1)
        return F.silu(gate) * up

    def backward(grad: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
        gate, up = torch.chunk(x if bias is None else x + bias, 2, -1)
        s = torch.sigmoid(gate)
        return torch.cat((grad * s * (1 + gate * (1 - s)) * up, grad * F.silu(gate)), -1)

    compiled_forward, compiled_backward = (
        torch.compile(function, fullgraph=True, dynamic=False) for function in (forward, backward)
    )

    class Fused(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, bias):
            ctx.save_for_backward(x, bias)
            return compiled_forward(x, bias)

        @staticmethod
        def backward(ctx, grad):
            x, bias = ctx.saved_tensors
            dx = compiled_backward(grad, x, bias)
            return dx, None if bias is None else dx.sum_to_size(bias.shape)

    return Fused.apply


def _case(
    name: str, rows: int, width: int, with_bias: bool, dtype: torch.dtype, device: str, seed: int = 0
) -> Case:
    """x (rows, 2 width)."""
    random = normal(dtype, device, seed)
    x, grad = random(rows, 2 * width).requires_grad_(), random(rows, width)
    bias = random(2 * width).requires_grad_() if with_bias else None
    ours = swiglu if name == "swiglu" else geglu
    rivals = against_torch(lambda: ours(x, bias=bias), partial(_eager, name), x, bias)
    if name == "swiglu":
        megatron = _megatron_swiglu()
        rivals[MEGATRON] = lambda: megatron(x, bias)
    if not with_bias and (liger := peer(LIGER, _LIGER[name], device)) is not None:
        rivals[LIGER] = lambda: liger.apply(*x.chunk(2, -1))  # copies both halves: it wants them apart
    arguments = x, bias, ACTIVATION[name]
    return Case(
        title(name + (" bias" if with_bias else ""), (rows, 2 * width), dtype),
        (x,) if bias is None else (x, bias),
        grad,
        rivals,
        OPS["gated_activation"].traffic(*arguments),
        OPS["gated_activation_backward"].traffic(grad, *arguments),
    )


# Rows are tokens; widths are those of Llama-3-8B, Qwen3-30B-A3B's and DeepSeek-V3's experts.
WORKLOADS = (
    Workload(
        "swiglu",
        partial(_case, "swiglu"),
        cpu=((4096, 4096, False), (4096, 4096, True)),
        cuda=((8192, 14336, False), (8192, 14336, True), (32768, 768, False), (32768, 2048, False)),
        rivals=(OURS, EAGER, COMPILE, MEGATRON, LIGER),
        tiny=(6, 8, True),
    ),
    Workload(
        "geglu",
        partial(_case, "geglu"),
        cpu=((4096, 4096, False),),
        cuda=((8192, 14336, False), (8192, 14336, True)),
        rivals=(OURS, EAGER, COMPILE, LIGER),
        tiny=(6, 8, False),
    ),
)
GOALS = (
    CpuGoal("swiglu", "float32", "forward", OURS, 3.5, 1.6),
    CpuGoal("swiglu", "float32", "both", OURS, 3.0, 2.0),
    CpuGoal("swiglu", "bfloat16", "both", OURS, 2.5, 2.0),
    CpuGoal("geglu", "float32", "forward", OURS, 3.5, 2.0),
    CpuGoal("geglu", "float32", "both", OURS, 3.5, 2.0),
)
SHAPES = dict.fromkeys(
    ("gated_activation", "gated_activation_backward", "gated_activation_quantized"),
    ((8192, 14336), (32768, 768), (32768, 2048)),
)


def arguments(op: str, shape: tuple[int, int], dtype: torch.dtype, device: str, seed: int) -> tuple:
    """Random arguments of `torch.ops.fastmp.<op>`; shape is that of y."""
    random = normal(dtype, device, seed)
    rows, width = shape
    x = random(rows, 2 * width)
    if op == "gated_activation_quantized":
        return x, x[0].clone(), "silu", None, 128, torch.float8_e4m3fn
    grad = random(*shape)
    return (x, x[0].clone(), "silu") if op == "gated_activation" else (grad, x, x[0].clone(), "silu")
