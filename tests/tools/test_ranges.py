"""The int32 range analysis of kernels' TTIR, on kernels that overflow and kernels that do not.

tests/tools/test_cubins.py applies it to every kernel.
"""

from __future__ import annotations

from unittest import mock

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import torch

from fastmp.ops.core import _triton, launcher
from fastmp.ops.core._triton import MAX_SIZE, check_count, jit, limits, tl
from fastmp.ops.precompile import AbsentGPU
from tools.cubins.ranges import overflows

INT = torch.int32


@jit(dynamic="index_vectors")
def product_kernel(out, index_vectors, VECTOR: tl.constexpr):
    tl.store(out, index_vectors * VECTOR)


@jit(dynamic="index_vectors")
def wide_product_kernel(out, index_vectors, VECTOR: tl.constexpr):
    tl.store(out, index_vectors.to(tl.int64) * VECTOR)


@limits(index_vectors=MAX_SIZE)
@jit(dynamic="index_vectors")
def limited_product_kernel(out, index_vectors, VECTOR: tl.constexpr):
    tl.store(out, index_vectors * VECTOR)


@limits(num_rows=(1 << 31) - 1)
@jit(dynamic="num_rows")
def sum_kernel(out, num_rows, VECTOR: tl.constexpr):
    tl.store(out, num_rows + VECTOR)


@limits(num_rows=1 << 29)
@jit(dynamic="num_rows")
def shift_kernel(out, num_rows, VECTOR: tl.constexpr):
    tl.store(out, num_rows << VECTOR)


@limits(num_rows=(1 << 31) - 1)
@jit(dynamic="num_rows")
def loop_kernel(out, num_rows, VECTOR: tl.constexpr):
    for row in range(0, num_rows, VECTOR):
        tl.store(out + row, row)


@limits(num_rows=1 << 28)
@jit(dynamic="num_rows")
def program_kernel(out, num_rows, VECTOR: tl.constexpr):
    rows = tl.program_id(0) * VECTOR + tl.arange(0, 16)
    tl.store(out + rows, rows, mask=rows < num_rows)


@limits(num_rows=1 << 28, programs=1 << 20)
@jit(dynamic="num_rows")
def within_kernel(out, num_rows, VECTOR: tl.constexpr):
    rows = tl.program_id(0) * VECTOR + tl.arange(0, 16)
    for row in range(0, tl.cdiv(num_rows, VECTOR), VECTOR):
        number = tl.where(row == 0, num_rows // 2, tl.maximum(num_rows - row, 0))
        tl.store(out + rows, number + rows % VECTOR, mask=rows < num_rows)


def found(kernel):
    with mock.patch.object(_triton.driver, "_active", AbsentGPU(90)):
        compiled = kernel.warmup(torch.empty(1, dtype=INT, device="meta"), 1 << 20, 4, grid=(1,))
    return overflows(compiled.asm["ttir"], kernel.limits)


@pytest.mark.parametrize(
    ("kernel", "op"),
    [
        (product_kernel, "arith.muli"),
        (sum_kernel, "arith.addi"),
        (shift_kernel, "arith.shli"),
        (loop_kernel, "scf.for"),
        (program_kernel, "arith.muli"),
    ],
)
def test_overflow_is_found(kernel, op):
    (message,) = found(kernel)
    assert message.startswith(op) and message.endswith("beyond int32")


@pytest.mark.parametrize("kernel", [wide_product_kernel, limited_product_kernel, within_kernel])
def test_nothing_is_found_within_the_limits(kernel):
    assert found(kernel) == []


def test_launcher_refuses_sizes_beyond_the_limits():
    out = torch.empty(1, dtype=INT, device="meta")
    given = []
    with launcher.intercept_launches(lambda *launch: given.append(launch), 90):
        for vectors in (MAX_SIZE, 1 << 31):  # the latter is an int64
            launcher.launch(limited_product_kernel, 1, (out, vectors), {"VECTOR": 4})
        with pytest.raises(ValueError, match="expected index_vectors of at most 67108864, got 67108865"):
            launcher.launch(limited_product_kernel, 1, (out, MAX_SIZE + 1), {"VECTOR": 4})
    assert len(given) == 2


def test_counts_that_leave_no_room_for_a_block_are_refused():
    for count in (0, (1 << 31) - (1 << 16), 1 << 31):
        check_count("op", "rows", count)
    with pytest.raises(ValueError, match="op: expected at most 2147418112 rows"):
        check_count("op", "rows", (1 << 31) - 1)
