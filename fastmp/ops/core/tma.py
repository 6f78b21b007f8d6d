"""Tensor maps of the TMA unit (Hopper and later): who may have one, and maps of rows of any number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fastmp.ops.core import launcher
from fastmp.ops.core._triton import TensorDescriptor, jit, tl

MAX_ROWS = 1 << 30  # of a matrix that `ragged` describes


def use_tma(arch: int, itemsize: int, aligned: bool, *strides: int) -> bool:
    """Say whether tensors can be described to the GPU's TMA unit.

    aligned: whether their addresses are multiples of 16 bytes, as the strides of all rows must be, too.
    Triton's own maps let Blackwell's unit read 128 KiB from the address, however little memory is there.
    """
    served = arch >= 90 and (arch < 100 or launcher.SETS_TENSOR_MAPS)
    return aligned and served and itemsize == 2 and all(n > 0 and n % 8 == 0 for n in strides)


def descriptor(tensor: Tensor, shape: Sequence[int], strides: Sequence[int], *block: int) -> Any:
    """Make a TensorDescriptor without its checks: `use_tma` has made those that can fail."""
    described = object.__new__(TensorDescriptor)
    described.base, described.shape, described.strides, described.block_shape = tensor, shape, strides, block
    return described


def ragged(tensor: Tensor, pitch: int, columns: int, *block: int) -> Any:
    """Describe a matrix, for `load_ragged`, so that the TMA unit puts zeros behind any of its rows.

    Its rows begin `pitch` elements apart. Two more dimensions move them by any number, forward or (for
    addresses are 64 bits that wrap around) backward, against the limit of the third. As in
    triton.tools.ragged_tma.
    """
    shape = (0x7FFF0000, 0x7FFF0000, MAX_ROWS, columns)
    return descriptor(tensor, shape, ((1 << 34) - pitch, pitch, pitch, 1), 1, 1, *block)


@jit
def load_ragged(data, row, first, length, end, BLOCK_R: tl.constexpr, BLOCK: tl.constexpr):
    """Load BLOCK_R rows from the `row`-th of the `length` before `end` on; zeros behind. See `ragged`."""
    limit: tl.constexpr = 1 << 30
    remaining = length - row
    return data.load([limit, end, limit - remaining, first]).reshape(BLOCK_R, BLOCK)
