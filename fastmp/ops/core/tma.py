"""Tensor maps of the TMA unit (Hopper and later): requirements, and maps of ragged matrices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fastmp.ops.core import launcher
from fastmp.ops.core._triton import TensorDescriptor, jit, tl

MAX_ROWS = 1 << 30  # rows of a matrix for `ragged`


def use_tma(arch: int, itemsize: int, aligned: bool, *strides: int) -> bool:
    """Return True if the TMA unit can read tensors with these row strides.

    On Blackwell only with fastmp's own tensor maps: Triton's let the unit read 128 KiB beyond the address,
    however small the allocation.

    Args:
        arch: compute capability as one number (90 is 9.0).
        itemsize: bytes of an element; 1 and 2 are supported.
        aligned: the addresses are multiples of 16 bytes.
        strides: row strides in elements; multiples of 16 bytes are supported.
    """
    served = arch >= 90 and (arch < 100 or launcher.SETS_TENSOR_MAPS)
    sixteen = all(n > 0 and n * itemsize % 16 == 0 for n in strides)
    return aligned and served and itemsize <= 2 and sixteen


def descriptor(tensor: Tensor, shape: Sequence[int], strides: Sequence[int], *block: int) -> Any:
    """Return a TensorDescriptor without running its checks, which `use_tma` replaces."""
    described = object.__new__(TensorDescriptor)
    described.base, described.shape, described.strides, described.block_shape = tensor, shape, strides, block
    return described


def ragged(tensor: Tensor, pitch: int, columns: int, *block: int) -> Any:
    """Return a descriptor of a matrix for `load_ragged`, which zero-fills beyond any chosen row.

    The bound of a TMA dimension is fixed, so two extra dimensions shift the rows against the bound of the
    third: one forward, one backward (64-bit addresses wrap around). As in triton.tools.ragged_tma.

    Args:
        tensor: at most `MAX_ROWS` rows, `pitch` elements apart.
        columns: number of columns.
        block: rows and columns of a load.
    """
    shape = (0x7FFF0000, 0x7FFF0000, MAX_ROWS, columns)
    return descriptor(tensor, shape, ((1 << 34) - pitch, pitch, pitch, 1), 1, 1, *block)


@jit
def load_ragged(data, row, first, length, end, BLOCK_R: tl.constexpr, BLOCK: tl.constexpr):
    """Load BLOCK_R rows, from row `row` of the `length` rows that end at row `end`; zeros beyond `end`."""
    limit: tl.constexpr = 1 << 30
    remaining = length - row
    return data.load([limit, end, limit - remaining, first]).reshape(BLOCK_R, BLOCK)
