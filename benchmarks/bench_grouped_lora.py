"""grouped_lora of fastmp, the three grouped GEMMs of torch, and weights merged in every call, as PEFT does.

`python -m benchmarks.bench_grouped_lora` prints time and peak memory of forward and backward on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.bench_grouped_mm import FINE, LARGE, sizes_of
from benchmarks.cases import OURS, TORCH, Case, Workload, normal, title
from benchmarks.compare import print_cpu_table
from benchmarks.conftest import DEVICE
from fastmp.ops import OPS, grouped_lora, grouped_mm

MERGED = "merged weights"
SCALE = 2.0


def _operands(
    shape: tuple[int, ...], routing: str, dtype: torch.dtype, device: str, seed: int
) -> tuple[Tensor, ...]:
    """x, w, a, b, offsets, a gradient of the result; for (experts, rows, N, K, rank)."""
    experts, rows, n, k, r = shape
    random = normal(dtype, device, seed)
    ends = list(accumulate(sizes_of(experts, rows, routing)))
    offsets = torch.tensor(ends, dtype=torch.int32, device=device)
    a, b = random(experts, r, k).mul_(k**-0.5), random(experts, n, r).mul_(r**-0.5)
    return random(rows, k), random(experts, n, k).mul_(k**-0.5), a, b, offsets, random(rows, n)


def _by_torch(x: Tensor, w: Tensor, a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    low = F.grouped_mm(F.grouped_mm(x, a.mT, offs=offsets), b.mT, offs=offsets)
    return F.grouped_mm(x, w.mT, offs=offsets) + SCALE * low


def _merged(x: Tensor, w: Tensor, a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    return grouped_mm(x, torch.baddbmm(w, b, a, alpha=SCALE), offsets)


def grouped_lora_case(
    experts: int,
    rows: int,
    n: int,
    k: int,
    r: int,
    routing: str,
    dtype: torch.dtype,
    device: str,
    seed: int = 0,
) -> Case:
    shape = experts, rows, n, k, r
    x, w, a, b, offsets, grad = _operands(shape, routing, dtype, device, seed)
    x.requires_grad_(), a.requires_grad_(), b.requires_grad_()
    rivals: dict[str, Callable[[], Tensor]] = {
        OURS: lambda: grouped_lora(x, w, a, b, offsets, scale=SCALE),
        MERGED: lambda: _merged(x, w, a, b, offsets),
    }
    if hasattr(F, "grouped_mm") and not (x.is_cuda and dtype != torch.bfloat16):
        rivals[TORCH] = lambda: _by_torch(x, w, a, b, offsets)
    low = x.new_empty(rows, r)
    op, wgrad = OPS["grouped_mm_lora"], OPS["grouped_mm_wgrad"]
    base, terms = 2 * rows * n * k, 2 * rows * r * (n + k)
    return Case(
        title("grouped_lora", (*shape, routing), dtype),
        (x, a, b),
        grad,
        rivals,
        op.traffic(x, w, None, low, b, offsets, False, False),
        op.traffic(grad, w, None, low, a, offsets, True, True)
        + wgrad.traffic(low, x, offsets)
        + wgrad.traffic(grad, low, offsets),
        flops=(base + terms, base + 2 * terms),
    )


# Experts, rows, N, K and the rank: Qwen3-30B and one of 8 ranks of Mixtral.
_CUDA = tuple((*shape, 16, "balanced") for shape in (LARGE[0], LARGE[4], *FINE[:2]))
WORKLOADS = (
    Workload(
        "grouped_lora",
        grouped_lora_case,
        cpu=((32, 4096, 768, 1024, 16, "balanced"), (32, 4096, 768, 1024, 16, "skewed")),
        cuda=(*_CUDA, (*FINE[0], 64, "balanced")),
        rivals=(OURS, TORCH, MERGED),
        dtypes=(torch.bfloat16, torch.float32) if DEVICE == "cpu" else (torch.bfloat16,),
        tiny=(4, 36, 16, 8, 4, "balanced"),
    ),
)
SHAPES = {"grouped_mm_lora": tuple((*shape, 16) for shape in (*LARGE, *FINE))}


def arguments(op: str, shape: tuple[int, ...], dtype: torch.dtype, device: str, seed: int) -> tuple:
    """Random arguments of `torch.ops.fastmp.<op>`, rows spread evenly."""
    x, w, _, b, offsets, _ = _operands(shape, "balanced", dtype, device, seed)
    return x, w, None, normal(dtype, device, seed + 1)(len(x), shape[-1]), b, offsets, False, False


if __name__ == "__main__":
    (work,) = WORKLOADS
    both = torch.float32, torch.bfloat16
    print_cpu_table((work.case(shape, dtype, "cpu") for shape in work.cpu for dtype in both), work.rivals)
