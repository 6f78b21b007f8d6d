"""Every op computes what its definition in plain torch computes in float64, within rounding.

The truth is the op's reference on the same inputs in float64. Each op is run by what serves it on this CPU,
in four dtypes, and by its Triton kernel, which is interpreted: the kernel's own source, program by program.
The interpreter rounds bfloat16 otherwise than a GPU does, so kernels are interpreted in float32. Fresh memory
is filled with NaN beforehand, so that an element that is forgotten shows. Samples have odd sizes, strides and
special values; the bound is half a unit in the last place for 16 bits, 16 units for wider types.
"""

from __future__ import annotations

import multiprocessing
import os
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor

import torch

from fastmp.ops.core import _triton
from fastmp.ops.core.registry import OPS
from fastmp.testing.ops import DTYPES, OpAccuracy, check_op
from tools.prove.claims import Claim, Table


def claims() -> Iterator[Claim | Table]:
    """Return the claims on all ops on the CPU, then on all kernels."""
    kernels = [name for name, op in OPS.items() if "triton" in op.implementations]
    shown = not _triton.ABSENT and _triton.INTERPRETED
    work = [(name, None) for name in OPS] + [(name, "triton") for name in kernels if shown]
    context = multiprocessing.get_context("spawn")
    workers = len(os.sched_getaffinity(0))
    with ProcessPoolExecutor(workers, context, initializer=_begin) as pool:
        found = [*pool.map(_check, work)]
    here = [result for (_, backend), results in zip(work, found) if backend is None for result in results]
    interpreted = [result for (_, backend), results in zip(work, found) if backend for result in results]
    served = sorted({op.serving["cpu"] for op in OPS.values()})
    yield from _judged(f"ops on this CPU ({', '.join(served)}) in four dtypes", here)
    says = "Triton kernels, interpreted in float32"
    if shown:
        yield from _judged(says, interpreted)
    else:
        yield Claim.not_shown(says, _triton.ABSENT or "TRITON_INTERPRET is not set")
    rows = [
        [name, *(_error(here, name, dtype) for dtype in DTYPES), _error(interpreted, name, torch.float32)]
        for name in OPS
    ]
    columns = ("op", *(str(dtype).removeprefix("torch.") for dtype in DTYPES), "interpreted, float32")
    yield Table("Relative errors against float64", columns, rows)


def _begin() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", RuntimeWarning)  # of numpy, where samples have infinities on purpose


def _check(work: tuple[str, str | None]) -> list[OpAccuracy]:
    name, backend = work
    return check_op(name, "cpu", backend=backend, dtypes=DTYPES if backend is None else (torch.float32,))


def _judged(says: str, results: Sequence[OpAccuracy]) -> Iterator[Claim]:
    wrong = [f"{each.op} {each.dtype}: {each.error:.1e}" for each in results if not each.ok]
    yield Claim.all_of(
        f"{says}, within their bound of float64", len(results) - len(wrong), len(results), wrong
    )
    shares = torch.tensor([each.error / each.bound for each in results] or [torch.nan])
    worst = shares.max().item()  # NaN if any is
    yield Claim.at_most(f"{says}, the largest error over its bound", worst, 1)


def _error(results: Sequence[OpAccuracy], name: str, dtype: torch.dtype) -> float | str:
    """Return the error of an op in a dtype, or None if it was not run."""
    kind = str(dtype).removeprefix("torch.")
    return next((each.error for each in results if (each.op, each.dtype) == (name, kind)), "")
