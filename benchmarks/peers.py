"""Who is compared with whom: fastmp, plain torch, torch.compile, and Liger where it is installed.

A `Case` is one workload with its inputs; each rival is a function that returns outputs from which
`torch.autograd.grad` reaches `case.leaves`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastmp.ops import OPS, bias_gelu, cross_entropy

EAGER = "torch eager"
COMPILE = "torch.compile"


@dataclass
class Case:
    """`forward_bytes` and `backward_bytes` are the least that must cross memory in each direction."""

    name: str
    leaves: tuple[Tensor, ...]
    grad: Tensor
    rivals: dict[str, Callable[[], Tensor]]
    forward_bytes: int
    backward_bytes: int

    def forward(self, rival: str) -> Callable[[], Any]:
        function = self.rivals[rival]

        def call() -> Tensor:
            with torch.no_grad():
                return function()

        return call

    def both(self, rival: str) -> Callable[[], Any]:
        """Forward and backward; gradients are returned, not accumulated."""
        function = self.rivals[rival]
        return lambda: torch.autograd.grad(function(), self.leaves, self.grad)


def _compiled(function: Callable) -> Callable:
    torch.compiler.reset()  # else shapes after the eighth count as too many recompilations of one function
    return torch.compile(function, fullgraph=True, dynamic=False)


def cross_entropy_case(tokens: int, vocab: int, dtype: torch.dtype, device: str, seed: int = 0) -> Case:
    generator = torch.Generator(device).manual_seed(seed)
    logits = torch.randn(tokens, vocab, device=device, generator=generator).to(dtype).requires_grad_()
    target = torch.randint(vocab, (tokens,), device=device, generator=generator)
    grad = torch.full((tokens,), 1 / tokens, device=device)

    def eager(logits: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(logits, target, reduction="none")

    compiled = _compiled(eager)
    # The gradient lands in the logits, so a second run works on those numbers: the time is the same.
    rivals = {
        "fastmp": lambda: cross_entropy(logits, target),
        "fastmp in place": lambda: cross_entropy(logits, target, grad_in_place=True),
        EAGER: lambda: eager(logits, target),
        COMPILE: lambda: compiled(logits, target),
    }
    if device != "cpu":
        try:
            from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction
        except ImportError:
            pass
        else:
            rivals["Liger"] = lambda: LigerCrossEntropyFunction.apply(
                logits, target, None, -100, 0.0, 0.0, "none"
            )[0]
    stats = (logits, target, 0, vocab, False)
    lse = torch.empty(tokens)
    gradient = (logits, target, lse, lse, None, 0, vocab, -100, 0.0, 0.0)
    return Case(
        f"cross_entropy [{tokens}, {vocab}] {str(dtype).removeprefix('torch.')}",
        (logits,),
        grad if dtype != torch.float64 else grad.double(),
        {name: _cast(call, grad.dtype) for name, call in rivals.items()},
        OPS["cross_entropy_stats"].traffic(*stats),
        OPS["cross_entropy_grad"].traffic(*gradient),
    )


def _cast(call: Callable[[], Tensor], dtype: torch.dtype) -> Callable[[], Tensor]:
    """Plain torch returns the loss of 16-bit logits in 16 bits; all rivals return float32."""
    return lambda: call().to(dtype)


def bias_gelu_case(
    rows: int, columns: int, dtype: torch.dtype, device: str, approximate: str = "tanh", seed: int = 0
) -> Case:
    generator = torch.Generator(device).manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, generator=generator).to(dtype)

    x, bias, grad = (
        random(rows, columns).requires_grad_(),
        random(columns).requires_grad_(),
        random(rows, columns),
    )

    def eager(x: Tensor, bias: Tensor) -> Tensor:
        return F.gelu(x + bias, approximate=approximate)

    compiled = _compiled(eager)
    rivals = {
        "fastmp": lambda: bias_gelu(x, bias, approximate=approximate),
        EAGER: lambda: eager(x, bias),
        COMPILE: lambda: compiled(x, bias),
    }
    return Case(
        f"bias_gelu {approximate} [{rows}, {columns}] {str(dtype).removeprefix('torch.')}",
        (x, bias),
        grad,
        rivals,
        OPS["bias_gelu"].traffic(x, bias, approximate),
        OPS["bias_gelu_backward"].traffic(grad, x, bias, approximate),
    )
