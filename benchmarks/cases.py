"""What a bench_<family>.py is made of: workloads, the rivals that run them, and goals.

A `Case` is one workload with its inputs; each rival is a function that returns outputs from which
`torch.autograd.grad` reaches `case.leaves`. Who is not installed is not among the rivals. A family declares
`WORKLOADS` (public functions as they are used), `GOALS` (on a CPU), and for the kernels alone `SHAPES`
{op: shapes} and `arguments(op, shape, dtype, device, seed)`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor

OURS = "fastmp"
EAGER = "torch eager"
COMPILE = "torch.compile"
LIGER = "Liger"


@dataclass
class Case:
    """`forward_bytes` and `backward_bytes` are the least that must cross memory in each direction.

    `grad` is the gradient of what a rival returns, a tuple where that is one. `flops` (forward, backward)
    counts matrix products only: where there are any, they can be the floor.
    """

    name: str
    leaves: tuple[Tensor, ...]
    grad: Tensor | tuple[Tensor, ...]
    rivals: dict[str, Callable[[], Any]]
    forward_bytes: int
    backward_bytes: int
    flops: tuple[int, int] = (0, 0)

    def forward(self, rival: str) -> Callable[[], Any]:
        function = self.rivals[rival]

        def call() -> Any:
            with torch.no_grad():
                return function()

        return call

    def both(self, rival: str) -> Callable[[], Any]:
        """Forward and backward; gradients are returned, not accumulated."""
        function = self.rivals[rival]
        return lambda: torch.autograd.grad(function(), self.leaves, self.grad)


@dataclass(frozen=True)
class Workload:
    """`make(*shape, dtype, device)` on the shapes of each device; `rivals` in the order of the table."""

    name: str
    make: Callable[..., Case]
    cpu: tuple[tuple, ...]
    cuda: tuple[tuple, ...]
    rivals: tuple[str, ...] = (OURS, EAGER, COMPILE, LIGER)
    directions: tuple[str, ...] = ("forward", "both")
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)

    def shapes(self, device: str) -> tuple[tuple, ...]:
        return self.cpu if torch.device(device).type == "cpu" else self.cuda


@dataclass(frozen=True)
class Goal:
    """Speed-up on a CPU of `rival` over plain torch at the workload's first shape.

    `without_huge_pages` is the goal where the system refuses them; `over_compile` that over torch.compile.
    """

    workload: str
    dtype: str
    direction: str
    rival: str
    factor: float
    without_huge_pages: float
    over_compile: float = 1.0


def compiled(function: Callable) -> Callable:
    """`function` under torch.compile with default options, specialised on its shapes."""
    torch.compiler.reset()  # else shapes after the eighth count as too many recompilations of one function
    return torch.compile(function, fullgraph=True, dynamic=False)


def title(name: str, shape: tuple, dtype: torch.dtype) -> str:
    return f"{name} {list(shape)} {str(dtype).removeprefix('torch.')}"


@lru_cache(maxsize=1)
def _made(make: Callable[..., Case], shape: tuple, dtype: torch.dtype, device: str) -> Case:
    return make(*shape, dtype, device)


def sweep(workloads: tuple[Workload, ...], device: str) -> list[Any]:
    """Parameters (case, rival, direction) of a benchmark, `case()` being made once for all its rivals."""
    return [
        pytest.param(
            partial(_made, work.make, shape, dtype, device),
            rival,
            direction,
            id=f"{title(work.name, shape, dtype)} {direction} {rival}".replace(" ", "-"),
        )
        for work in workloads
        for shape in work.shapes(device)
        for dtype in work.dtypes
        for direction in work.directions
        for rival in work.rivals
    ]
