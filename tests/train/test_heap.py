"""Large tensors do not lie on the heap of a process that trains on a CPU."""

from __future__ import annotations

import ctypes

import pytest
import torch

from fastmp.testing.ranks import run_ranks
from fastmp.train.heap import LARGE_BLOCK, map_large_blocks


class MallInfo(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def num_mapped():
    libc = ctypes.CDLL("libc.so.6")
    libc.mallinfo2.restype = MallInfo
    return libc.mallinfo2().hblks


@pytest.mark.parametrize("call", [True, False])
def test_large_blocks_are_mapped_also_after_larger_ones_were_freed(call):
    def rank_main(rank, world_size):
        large = torch.empty(16 * LARGE_BLOCK, dtype=torch.uint8)
        del large  # glibc takes it that blocks of this size come and go
        if call:
            map_large_blocks()
        before = num_mapped()
        blocks = [torch.empty(LARGE_BLOCK, dtype=torch.uint8) for _ in range(4)]
        return num_mapped() - before, len(blocks)

    assert run_ranks(rank_main, 1) == [(4 if call else 0, 4)]
