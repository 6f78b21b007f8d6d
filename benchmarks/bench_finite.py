"""The search for the first number that is not finite: on demand, and not; torch always searches."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.cases import EAGER, OURS, Case, Workload, normal, title
from fastmp.ops import OPS, first_not_finite


def arguments(op: str, shape: tuple[int], dtype: torch.dtype, device: str, seed: int) -> tuple:
    """Random arguments of `torch.ops.fastmp.first_not_finite`: all finite, and searched."""
    random = normal(dtype, device, seed)
    x = random(*shape)
    return x, torch.tensor(True, device=device)


def _plain(x: Tensor) -> Tensor:
    finite = torch.isfinite(x)
    return torch.where(finite.all(), x.numel(), finite.int().argmin())


def finite_case(num_elements: int, wanted: int, dtype: torch.dtype, device: str, seed: int = 0) -> Case:
    x, flag = arguments("first_not_finite", (num_elements,), dtype, device, seed)
    flag.fill_(wanted)
    name = title("first_not_finite", (num_elements, wanted), dtype)
    rivals = {OURS: lambda: first_not_finite(x, flag), EAGER: lambda: _plain(x)}
    return Case(name, (x,), x, rivals, OPS["first_not_finite"].traffic(x, flag) if wanted else 0, 0)


# elements, and whether they are searched: the gradients of a rank
WORKLOADS = (
    Workload(
        "first_not_finite",
        finite_case,
        cpu=((1 << 24, 0), (1 << 24, 1)),
        cuda=((1_000_000_000, 1),),
        rivals=(OURS, EAGER),
        directions=("forward",),
        tiny=(5000, 1),
    ),
)
SHAPES = {"first_not_finite": ((100_000_000,),)}
