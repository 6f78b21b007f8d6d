"""Kernels of an op against its reference: random tensors, tolerances, and numbers of threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from every_op_tools import implementation
from torch import Tensor

from fastmp.ops import OPS, grouped_mm_launch
from fastmp.ops.grouped_mm_tiles import TileConfig
from fastmp.testing.functions import as_tuple
from fastmp.testing.ops import poisoned_memory

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 1e-3}
TRITON = pytest.param("triton", marks=pytest.mark.interpret)
ON_CPU = pytest.mark.parametrize("backend", ["c++", "reference"])
# in Triton's interpreter other dtypes differ in their rounding only
KERNELS = pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        *(("c++", dtype) for dtype in DTYPES),
        pytest.param("triton", torch.float32, marks=pytest.mark.interpret),
        *(
            pytest.param("triton", dtype, marks=(pytest.mark.interpret, pytest.mark.full))
            for dtype in DTYPES
            if dtype != torch.float32
        ),
    ],
    ids=str,
)


def random(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0, scale: float = 1.0) -> Tensor:
    """Normal numbers that depend on the seed only, times `scale`, rounded to the dtype."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype)


def set_programs(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Let at most so many programs walk over the tiles of a grouped GEMM that is interpreted."""
    monkeypatch.setattr(TileConfig, "programs_per_sm", lambda *_: 1)
    monkeypatch.setattr(grouped_mm_launch, "_MULTIPROCESSORS_ELSEWHERE", number)  # in the key of a plan


def bits(tensor: Tensor) -> Tensor:
    """Equal where the numbers are, NaN included."""
    return tensor.reshape(-1).contiguous().view(torch.uint8) if tensor.is_floating_point() else tensor


def scale_of(values: Tensor) -> float:
    """The magnitude that an absolute error is held against: sums of many terms cancel."""
    finite = values[values.isfinite()]
    return max(1.0, finite.abs().max().item()) if len(finite) else 1.0


def check_kernel(
    backend: str, op: str, *arguments: object, rtol: float | None = None, atol: float | None = None
) -> tuple[Tensor, ...]:
    """Compare a kernel on poisoned memory with the reference, whose results are returned.

    rtol: by default that of each result's dtype. atol: times `scale_of` the result.
    """
    with poisoned_memory():
        results = as_tuple(implementation(op, backend)(*arguments))
    wanted = as_tuple(OPS[op].implementations["reference"](*arguments))
    for value, want in zip(results, wanted, strict=True):
        assert value.is_contiguous()
        relative = TOLERANCE.get(want.dtype, 0.0) if rtol is None else rtol
        absolute = (min(relative, 1e-5) if atol is None else atol) * scale_of(want)
        torch.testing.assert_close(value, want, rtol=relative, atol=absolute, equal_nan=True)
    return wanted


def threads_agree(call: Callable[[], Sequence[Tensor]]) -> bool:
    """Return True if `call` gives the same bits on one thread and on two."""
    before, results = torch.get_num_threads(), []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            results.append(call())
    finally:
        torch.set_num_threads(before)
    return all(torch.equal(bits(one), bits(two)) for one, two in zip(*results, strict=True))
