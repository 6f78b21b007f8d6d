"""first_not_finite: index of the first non-finite number of a buffer, searched only if a flag is set.

The search follows a gradient norm that is not finite. In all other steps the op launches a kernel that reads
one flag and exits, so the host never waits to decide. In a search each program walks over every
num_programs-th block until its first find, and an atomic minimum combines them, so the result does not depend
on their order.
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
NUM_PROGRAMS = 1056  # 8 x 132 multiprocessors


def reference(x: Tensor, wanted: Tensor) -> Tensor:
    """Return the index of the first non-finite number, in plain torch."""
    size = x.numel()
    result = torch.full((), size, dtype=torch.int64, device=x.device)
    if size and bool(wanted):
        finite = torch.isfinite(x)
        result = torch.where(finite.all(), result, finite.int().argmin())
    return result


@jit(fixed="size")
def first_not_finite_kernel(x, wanted, first, size, COMPUTE: tl.constexpr, BLOCK: tl.constexpr):
    """Search blocks program_id, program_id + num_programs, ... of x until the first find."""
    # 1. Without the flag the range is empty.
    end = tl.where(tl.load(wanted) != 0, size, 0).to(tl.int64)
    found = tl.cast(size, tl.int64)
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    start = tl.program_id(0).to(tl.int64) * BLOCK
    # 2. Walk over this program's blocks.
    while start < end:
        at = start + tl.arange(0, BLOCK)
        value = tl.load(x + at, mask=at < end, other=0.0).to(COMPUTE)
        bad = (value - value) != 0.0  # inf - inf and NaN - NaN are NaN, which differs from 0
        here = tl.min(tl.where(bad, at, size), 0)
        found = tl.minimum(found, here)
        start = tl.where(here < size, end, start + step)
    # 3. Combine the finds of all programs.
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
    contract="x (N) floating; wanted (#1) bool",
    reference=reference,
    triton=launch,
    fake=lambda x, wanted: x.new_empty((), dtype=torch.int64),
)


@torch.no_grad()
@traced("fastmp.first_not_finite")
def first_not_finite(x: Tensor, wanted: Tensor) -> Tensor:
    """Return the index of the first infinity or NaN of a flat buffer, without host-device synchronisation.

    Args:
        x: (n,), contiguous, float64, float32, bfloat16 or float16.
        wanted: bool, one element, on x's device; if False, x is not read.

    Returns:
        0-dim int64 tensor: the index; n if all numbers are finite, or if `wanted` is False.

    Raises:
        ValueError: shapes, dtypes or devices do not match, or x is not contiguous.

    Example:

        x = torch.tensor([1.0, float("inf"), float("nan")])
        assert fastmp.ops.first_not_finite(x, torch.tensor(True)).item() == 1
    """
    require = checks.require
    fits = x.dim() == 1 and x.is_contiguous() and x.is_floating_point()
    require(fits, "first_not_finite: x must be a contiguous vector of floats, got {} {}", x.shape, x.dtype)
    is_flag = wanted.dtype == torch.bool and wanted.numel() == 1
    require(is_flag, "first_not_finite: wanted must be one bool, got {} {}", wanted.shape, wanted.dtype)
    checks.check_same_device("first_not_finite", x=x, wanted=wanted)
    return _first_not_finite(x, wanted)
