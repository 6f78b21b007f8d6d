"""Threads of one program that read and write the same memory are ordered, in every kernel that does so.

The facts of compiled kernels ask the same of all others.
"""

from __future__ import annotations

from unittest import mock

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import torch
from triton.runtime import driver

from fastmp.ops import OPS
from fastmp.ops.core._triton import jit, tl
from fastmp.ops.precompile import AbsentGPU
from fastmp.testing.ops import samples
from tools.cubins.accesses import unordered
from tools.cubins.compiled import launches

IN_PLACE = [op for op, entry in OPS.items() if any(a.alias_info for a in entry.overload._schema.arguments)]


@jit
def _turned(x, SIZE: tl.constexpr, BARRIER: tl.constexpr):
    """Transpose a matrix in place."""
    i = tl.arange(0, SIZE)
    value = tl.load(x + i[:, None] * SIZE + i[None, :])
    if BARRIER:
        tl.debug_barrier()
    tl.store(x + i[None, :] * SIZE + i[:, None], value)


@pytest.mark.parametrize("barrier", [True, False])
def test_threads_that_overwrite_what_others_read_are_found(barrier):
    with mock.patch.object(driver, "_active", AbsentGPU(90)):
        x = torch.empty(64, 64, device="meta")
        compiled = _turned.warmup(x, SIZE=64, BARRIER=barrier, num_warps=4, grid=(1,))
    assert bool(list(unordered(compiled.asm["ttgir"], {"x": 0}))) != barrier


@pytest.mark.parametrize("op", sorted(op for op in IN_PLACE if "triton" in OPS[op].implementations))
def test_in_place_threads_do_not_overwrite_what_others_read(op):
    for arguments in samples(op, device="meta", dtype=torch.bfloat16):
        for launch in launches(op, arguments, 90):
            assert not list(unordered(launch.ttgir, launch.storages)), launch.constants
