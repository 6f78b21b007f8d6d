"""first_not_finite: where a buffer has its first number that is not finite, searched only on demand.

The search follows a norm that was not finite. Until then a step costs the launch of a kernel that reads one
flag and ends: nothing waits for the host to decide whether to search. In the search programs walk over the
buffer side by side, each from block to block until its own first find, and agree by an atomic minimum, so the
result does not depend on their order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastmp.ops.core import checks, launcher
from fastmp.ops.core._triton import cdiv, jit, tl
from fastmp.ops.core.registry import register
from fastmp.ops.core.rowwise import arithmetic
from fastmp.profiling import traced

NUM_WARPS, BLOCK = 4, 4096
NUM_PROGRAMS = 1056  # eight for each of 132 multiprocessors


def reference(x: Tensor, wanted: Tensor) -> Tensor:
    """Return what `first_not_finite` says, in plain torch."""
    size = x.numel()
    result = torch.full((), size, dtype=torch.int64, device=x.device)
    if size and bool(wanted):
        finite = torch.isfinite(x)
        result = torch.where(finite.all(), result, finite.int().argmin())
    return result


@jit
def first_not_finite_kernel(x, wanted, first, size, COMPUTE: tl.constexpr, BLOCK: tl.constexpr):
    """The blocks number program_id, program_id + num_programs, ... up to the first find."""
    end = tl.where(tl.load(wanted) != 0, size, 0).to(tl.int64)
    found = tl.cast(size, tl.int64)
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    start = tl.program_id(0).to(tl.int64) * BLOCK
    while start < end:
        at = start + tl.arange(0, BLOCK)
        value = tl.load(x + at, mask=at < end, other=0.0).to(COMPUTE)
        bad = (value - value) != 0.0  # infinity less itself is not a number, which differs from all
        here = tl.min(tl.where(bad, at, size), 0)
        found = tl.minimum(found, here)
        start = tl.where(here < size, end, start + step)
    if found < size:
        tl.atomic_min(first, found, sem="relaxed")


def launch(x: Tensor, wanted: Tensor) -> Tensor:
    first = torch.full((), x.numel(), dtype=torch.int64, device=x.device)
    programs = max(1, min(NUM_PROGRAMS, cdiv(x.numel(), BLOCK)))
    launcher.launch(
        first_not_finite_kernel, programs, (x, wanted, first, x.numel()),
        {"COMPUTE": arithmetic(x.dtype), "BLOCK": BLOCK, "num_warps": NUM_WARPS},
    )  # fmt: skip
    return first


_first_not_finite = register(
    "first_not_finite(Tensor x, Tensor wanted) -> Tensor",
    reference=reference,
    triton=launch,
    fake=lambda x, wanted: x.new_empty((), dtype=torch.int64),
)


@torch.no_grad()
@traced("fastmp.first_not_finite")
def first_not_finite(x: Tensor, wanted: Tensor) -> Tensor:
    """Find the first number of a flat buffer that is infinite or not a number.

    Args:
        x: (n,), contiguous: float64, float32, bfloat16 or float16.
        wanted: bool, one element, on x's device; where it is False nothing of x is read.

    Returns:
        a 0-dim int64 tensor: the index; n where all are finite, or where `wanted` is False.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, or x is not contiguous.
    """
    require = checks.require
    fits = x.dim() == 1 and x.is_contiguous() and x.is_floating_point()
    require(fits, "first_not_finite: x must be a contiguous vector of floats, got {} {}", x.shape, x.dtype)
    is_flag = wanted.dtype == torch.bool and wanted.numel() == 1
    require(is_flag, "first_not_finite: wanted must be one bool, got {} {}", wanted.shape, wanted.dtype)
    checks.check_same_device("first_not_finite", x=x, wanted=wanted)
    return _first_not_finite(x, wanted)
