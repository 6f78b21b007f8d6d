"""No offset wraps at 2^31 or 2^32: every op on tensors of more elements, most of which are never touched."""

from __future__ import annotations

import itertools
import math
import os
from unittest import mock

import pytest
import torch
from every_op_tools import (
    BEYOND,
    INDEXED,
    NothingWalksThrough,
    Stretched,
    apart,
    implementation,
    only_ends_run,
    op_backends,
    results_of,
    row_dim,
    stretched,
)
from kernel_tools import set_programs
from marks import full
from torch import Tensor

from fastmp.ops import (
    OPS,
    dropout,
    finite,
    norm_triton,
    rope_triton,
    router_triton,
)
from fastmp.ops.core import rowwise as rows
from fastmp.testing.ops import run, samples

# ops that take nothing else, or a copy
CONTIGUOUS = (
    "adamw_", "block_rows", "cross_entropy_merge", "exchange_barrier", "exchange_counts", "exchange_take",
    "first_not_finite", "stash_pull", "stash_release", "stash_reserve",
)  # fmt: skip
RINGS = ("h", "ring", "y")  # of the stash's ops, which take contiguous ones only
IN_TURN = ("rope", "rope_")  # the programs of keys follow those of queries
SUMS_OVER_ROWS = ("grouped_mm_wgrad", "grouped_mm_wgrad_")
SLOW = ("grouped_mlp_in_fp8", "grouped_mm_fp8", "linear_fp8")  # interpreted; products of other dtypes are not
ON_CPU = pytest.mark.parametrize(("op", "backend"), op_backends(("c++", "reference")))
TRITON = pytest.mark.parametrize(("op", "backend"), op_backends(("triton",)))
pytestmark = pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")


def assert_close(value: Tensor, want: Tensor, **tolerance: float) -> None:
    """Equal up to rounding, FP8 byte by byte; NaN equals NaN."""
    if value.is_floating_point() and value.itemsize == 1:
        assert torch.equal(value.view(torch.uint8), want.view(torch.uint8))
    else:
        torch.testing.assert_close(value, want, equal_nan=True, **tolerance)


def equals_when_apart(op: str, call, dtype: torch.dtype, **tolerance: float) -> None:
    """The same result whether the rows of the arguments lie next to each other or 2^35 elements apart."""
    moved = 0
    for arguments in samples(op, device="cpu", dtype=dtype):
        names = [argument.name for argument in OPS[op].overload._schema.arguments]
        far = tuple(
            apart(a) if isinstance(a, Tensor) and not (op.startswith("stash_") and name in RINGS) else a
            for name, a in zip(names, arguments, strict=True)
        )
        if all(a is b for a, b in zip(arguments, far, strict=True)):
            continue
        moved += 1
        near = run(op, call, arguments)
        for value, want in zip(results_of(op, call, far), near, strict=True):
            assert_close(value, want, **tolerance)
    assert moved or op in CONTIGUOUS, "no sample has 17 rows"


@ON_CPU
@pytest.mark.parametrize(
    "dtype", (torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.full)), ids=str
)
def test_rows_far_apart(op, backend, dtype):
    """Our kernels promise equal bits; plain torch rounds differently in another memory layout."""
    rounding = 0.0 if backend == "c++" else 8 * torch.finfo(dtype).eps
    equals_when_apart(op, implementation(op, backend), dtype, rtol=rounding, atol=rounding)


@pytest.mark.full
@pytest.mark.interpret
@TRITON
def test_rows_far_apart_interpreted(op, backend):
    """Up to rounding: where a block starts, and with it the order of sums, can follow from the address."""
    equals_when_apart(op, implementation(op, backend), torch.float32, rtol=1e-5, atol=1e-5)


def two_rows_of_many(op: str, case: Stretched, monkeypatch) -> tuple[Tensor, ...]:
    """Return the reference of the first and the last row; the dropout mask counts the rows between."""

    def mask(shape, p, seed):
        columns = math.prod(shape) // 2
        row = torch.arange(columns, device=seed.device)
        index = torch.cat((row, row + (case.num_rows - 1) * columns))
        words = dropout.philox(seed.reshape(()), index // 4).gather(-1, (index % 4)[:, None])
        return (words >= dropout._threshold(p)).reshape(shape)

    with monkeypatch.context() as patched:
        patched.setattr(dropout, "keep_mask", mask)
        return run(op, OPS[op].implementations["reference"], case.two_rows)


def check_ends(op: str, results: list[Tensor], case: Stretched, tolerance: float, monkeypatch) -> None:
    """The first and the last row of every result that has rows are right."""
    wanted = two_rows_of_many(op, case, monkeypatch)
    dims = [row_dim(result, case.num_rows) for result in results]
    if op in SUMS_OVER_ROWS:  # the rows between are zero
        torch.testing.assert_close(results, list(wanted), rtol=tolerance, atol=tolerance)
        return
    if op == "first_not_finite":  # an index, of two rows and of all
        assert results[0] == (0, case.num_rows - 1, case.num_rows)[wanted[0]]
        return
    pairs = [trio for trio in zip(results, wanted, dims, strict=True) if trio[2] is not None]
    assert pairs, "no result has rows"
    ends = ((pairs[0], 0), (pairs[-1], -1)) if op in IN_TURN else itertools.product(pairs, (0, -1))
    for (result, want, dim), row in ends:
        value, expected = result.select(dim, row), want.select(dim, row)
        while value.dim() > 1:  # of several rows in one the outermost: the next may be another program's
            value, expected = value[row], expected[row]
        assert_close(value, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.interpret
@pytest.mark.parametrize(  # but not where each program reads all rows
    ("op", "backend"), op_backends(("triton",), (*INDEXED, *SUMS_OVER_ROWS), in_full=SLOW)
)
@pytest.mark.parametrize("more_than", (1 << 31, *full([1 << 32, BEYOND])), ids=("2^31", "2^32", "2^35"))
def test_first_and_last_row_of_very_many(op, backend, more_than, monkeypatch):
    """Contiguous arguments and results of so many elements; the programs in between are left out.

    Sizes that reach a kernel as int32, and their products that do not fit, are others in each case.
    """
    call = implementation(op, backend)
    case = stretched(op, torch.float16, more_than)
    # kernels that walk through rows and sum columns: one step a program, and the sums are left out
    monkeypatch.setattr(rows, "_NUM_PROGRAMS", 1 << 40)
    left_out = mock.MagicMock(arg_names=())
    monkeypatch.setattr(rows, "sum_strips_kernel", left_out)
    monkeypatch.setattr(router_triton, "router_sums_kernel", left_out)
    monkeypatch.setattr(
        norm_triton, "num_programs", lambda num_rows, block_m, num_warps: -(-num_rows // block_m)
    )
    monkeypatch.setattr(finite, "NUM_PROGRAMS", 1 << 40)
    # one tile a program; the last two have none: each of three experts could have had a tile more
    set_programs(monkeypatch, 1 << 40)
    ends = 3 if op.startswith("grouped_") else 2
    between = []
    if op.startswith("latent_norm_rope"):  # the last tile of keys, and the first of latents
        last = -(-2 * case.num_rows // rope_triton.block_shape(32, 2)[0]) - 1
        between = [last, last + 1]
    with NothingWalksThrough(), only_ends_run(ends, between):
        results = results_of(op, call, case.arguments)
    check_ends(op, results, case, 2e-3, monkeypatch)


@pytest.mark.parametrize(("op", "backend"), op_backends(("c++", "reference"), without=INDEXED))
def test_first_and_last_row_of_many(op, backend, monkeypatch):
    """The same comparison where all rows fit into memory."""
    case = stretched(op, torch.float32, 1 << 18)
    check_ends(op, results_of(op, implementation(op, backend), case.arguments), case, 1e-5, monkeypatch)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("op", "backend"), op_backends(("c++",), without=INDEXED))
def test_results_of_more_than_two_to_the_31_elements(op, backend, monkeypatch):
    """Compiled kernels; what is read takes no memory, what is written does."""
    call = implementation(op, backend)
    case = stretched(op, torch.bfloat16, (1 << 31) + (1 << 20))
    written = bytes_written(op, case.arguments)
    if (free := os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")) < 1.5 * written:
        pytest.skip(f"writes {written >> 30} GiB, and {free >> 30} GiB of memory are free")
    check_ends(op, results_of(op, call, case.arguments), case, 2e-2, monkeypatch)


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize(("op", "backend"), op_backends(("triton", "cuda"), without=INDEXED))
def test_more_than_two_to_the_31_elements_on_gpu(op, backend, monkeypatch):
    call = implementation(op, backend)
    torch.cuda.empty_cache()
    few = stretched(op, torch.bfloat16, 1 << 20, "cuda")
    per_element = sum(a.numel() * a.element_size() for a in few.arguments if isinstance(a, Tensor)) >> 20
    needed = (per_element << 31) + bytes_written(op, few.arguments) * (1 << 11)
    if torch.cuda.mem_get_info()[0] < 1.2 * needed:
        pytest.skip(f"needs {needed >> 30} GiB of free GPU memory")
    case = stretched(op, torch.bfloat16, (1 << 31) + (1 << 20), "cuda")
    check_ends(op, results_of(op, call, case.arguments), case, 2e-2, monkeypatch)


def bytes_written(op: str, arguments: tuple) -> int:
    """Size of what an op returns and overwrites, found without running it."""
    meta = tuple(a.to("meta") if isinstance(a, Tensor) else a for a in arguments)
    return sum(t.numel() * t.element_size() for t in results_of(op, OPS[op].overload, meta))
