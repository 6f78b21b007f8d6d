"""Large blocks do not lie on the heap of a process that trains on a CPU."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import ctypes, sys
from fastmp.training.heap import LARGE_BLOCK, map_large_blocks

libc = ctypes.CDLL("libc.so.6")
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
libc.malloc.argtypes = [ctypes.c_size_t]

class MallInfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena ordblks smblks hblks hblkhd".split()] + [
        ("others", ctypes.c_size_t * 5)
    ]

libc.mallinfo2.restype = MallInfo
libc.free(libc.malloc(16 * LARGE_BLOCK))  # glibc takes it that blocks of this size come and go
if sys.argv[1] == "True":
    map_large_blocks()
before = libc.mallinfo2().hblks
for _ in range(4):
    libc.malloc(LARGE_BLOCK)
print(libc.mallinfo2().hblks - before)
"""


@pytest.mark.parametrize(("call", "mapped"), [(True, 4), (False, 0)])
def test_large_blocks_are_mapped_also_after_larger_ones_were_freed(call, mapped):
    command = [sys.executable, "-c", PROGRAM, str(call)]
    assert int(subprocess.run(command, check=True, capture_output=True, text=True).stdout) == mapped
