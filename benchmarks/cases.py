"""The parts of a bench_<family>.py: workloads, the rivals that run them, and goals.

A `Case` is one workload with its inputs. Each rival is a function that returns outputs from which
`torch.autograd.grad` reaches `case.leaves`; a library that is not installed is not among them (see
`peers.py`). A family declares `WORKLOADS` (public functions as they are used), `GOALS` (on a CPU), and for
kernels alone `SHAPES` {op: shapes} and `arguments(op, shape, dtype, device, seed)`.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.peers import CCE, LIGER, QUACK, TE

__all__ = [
    "CCE", "COMPILE", "EAGER", "LIGER", "OURS", "QUACK", "TE", "TORCH",
    "Case", "CpuGoal", "Workload", "against_torch", "compiled", "families", "is_first",
    "is_ours", "normal", "sweep", "title",
]  # fmt: skip

OURS = "fastmp"
EAGER = "torch eager"
TORCH = "torch fused"  # torch's own fused op, where there is one: F.rms_norm, F.linear_cross_entropy ...
COMPILE = "torch.compile"


def is_ours(rival: str) -> bool:
    """Return whether a rival is a form of ours: "fastmp", "fastmp in place"."""
    return rival.startswith(OURS)


@dataclass
class Case:
    """One workload with its inputs, and the rivals that run it.

    `forward_bytes` and `backward_bytes` are the fewest bytes that must cross memory in each direction.
    `flops` (forward, backward) counts matrix products only; where there are any, they can be the floor.
    `grad` is the gradient of what a rival returns, a tuple where that is one. `again(seed)` makes the same
    case with other numbers, for calls that must not find their inputs in the cache. `own_leaves` has the
    leaves of rivals that do not share `leaves`. A case that is not `capturable` does work on the host that no
    CUDA graph can hold. Rivals of a `random` case draw numbers or round in their own way: results differ.
    `counterparts` has the steps of a form of ours in plain torch, where rivals take others; for host times.
    """

    name: str
    leaves: tuple[Tensor, ...]
    grad: Tensor | tuple[Tensor, ...]
    rivals: dict[str, Callable[[], Any]]
    forward_bytes: int
    backward_bytes: int
    flops: tuple[int, int] = (0, 0)
    again: Callable[[int], Case] | None = None
    own_leaves: dict[str, tuple[Tensor, ...]] = field(default_factory=dict)
    capturable: bool = True
    random: bool = False
    counterparts: dict[str, Callable[[], Any]] = field(default_factory=dict)

    def forward(self, rival: str) -> Callable[[], Any]:
        function = self.rivals[rival]

        def call() -> Any:
            with torch.no_grad():
                return function()

        return call

    def both(self, rival: str) -> Callable[[], Any]:
        """Forward and backward; gradients are returned, not accumulated."""
        function, leaves = self.rivals[rival], self.own_leaves.get(rival, self.leaves)
        return lambda: torch.autograd.grad(function(), leaves, self.grad)

    def step(self, rival: str) -> Callable[[], Any]:
        """A step that differentiates and updates by itself."""
        return self.rivals[rival]

    def results(self, rival: str, direction: str) -> Callable[[], Any]:
        """Return the call of that direction; it returns outputs and gradients."""
        if direction != "both":
            return getattr(self, direction)(rival)

        def call() -> Any:
            out = self.rivals[rival]()
            return out, torch.autograd.grad(out, self.own_leaves.get(rival, self.leaves), self.grad)

        return call

    def costs(self, direction: str) -> tuple[int, int]:
        """Return the least (bytes moved, FLOPs of matrix products) of a direction."""
        if direction == "forward":
            return self.forward_bytes, self.flops[0]
        return self.forward_bytes + self.backward_bytes, sum(self.flops)


@dataclass(frozen=True)
class Workload:
    """A function under test, with the shapes that it is timed on.

    `make(*shape, dtype, device)` makes a case; if it also takes `seed`, it can make several copies. `cpu` and
    `cuda` are the shapes on each device, and `tiny` is a shape for tests, on which all rivals must agree.
    `rivals` are in the order of the table. `directions` are names of methods of the case.
    """

    name: str
    make: Callable[..., Case]
    cpu: tuple[tuple, ...]
    cuda: tuple[tuple, ...]
    rivals: tuple[str, ...] = (OURS, EAGER, COMPILE)
    directions: tuple[str, ...] = ("forward", "both")
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)
    tiny: tuple | None = None

    def shapes(self, device: str) -> tuple[tuple, ...]:
        return self.cpu if torch.device(device).type == "cpu" else self.cuda

    def case(self, shape: tuple, dtype: torch.dtype, device: str) -> Case:
        case = self.make(*shape, dtype, device)
        if "seed" in inspect.signature(self.make).parameters:
            case.again = lambda seed: self.make(*shape, dtype, device, seed=seed)
        return case


@dataclass(frozen=True)
class CpuGoal:
    """A speed-up that is wanted on a CPU: of `rival` over `over`, at shape number `shape` of the workload.

    `factor` is wanted where the system grants huge pages, `without_huge_pages` where it does not.
    `over_compile` is wanted over torch.compile, where that is among the rivals. `extra_bytes` is the most
    extra memory, as a share of the extra memory of `over`.
    """

    workload: str
    dtype: str
    direction: str
    rival: str
    factor: float
    without_huge_pages: float
    over_compile: float = 1.0
    extra_bytes: float | None = None
    over: str = EAGER
    shape: int = 0


def families() -> dict[str, ModuleType]:
    """Return the modules bench_<family>.py by family."""
    names = sorted(path.stem for path in Path(__file__).parent.glob("bench_*.py"))
    return {name.removeprefix("bench_"): importlib.import_module(f"benchmarks.{name}") for name in names}


def compiled(function: Callable) -> Callable:
    """Return `function` under torch.compile with default options, specialised on its shapes."""
    torch.compiler.reset()  # else shapes after the eighth count as too many recompilations of one function
    return torch.compile(function, fullgraph=True, dynamic=False)


def against_torch(ours: Callable[[], Any], eager: Callable, *inputs: Any) -> dict[str, Callable[[], Any]]:
    """Return ours, and `eager` of the inputs as it is and under torch.compile."""
    with_compile = compiled(eager)
    return {OURS: ours, EAGER: lambda: eager(*inputs), COMPILE: lambda: with_compile(*inputs)}


def normal(dtype: torch.dtype, device: str, seed: int) -> Callable[..., Tensor]:
    """Return a function that draws a tensor of a shape, other numbers in every call."""
    generator = torch.Generator(device).manual_seed(seed)
    return lambda *shape: torch.randn(shape, device=device, generator=generator).to(dtype)


def title(name: str, shape: tuple, dtype: torch.dtype) -> str:
    return f"{name} {list(shape)} {str(dtype).removeprefix('torch.')}"


@lru_cache(maxsize=1)
def _made(work: Workload, shape: tuple, dtype: torch.dtype, device: str) -> Case:
    return work.case(shape, dtype, device)


def sweep(workloads: tuple[Workload, ...], device: str) -> list[Any]:
    """Return parameters (case, rival, direction) of a benchmark; a case is made once for all its rivals."""
    return [
        pytest.param(
            partial(_made, work, shape, dtype, device),
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


def is_first(case: partial) -> bool:
    """Return whether a case that `sweep` made has the first shape and dtype of its workload.

    On a GPU bfloat16 comes first.
    """
    work, shape, dtype, device = case.args
    on_gpu = torch.device(device).type == "cuda"
    first = torch.bfloat16 if on_gpu and torch.bfloat16 in work.dtypes else work.dtypes[0]
    return shape == work.shapes(device)[0] and dtype == first
