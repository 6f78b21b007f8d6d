"""Specs of the tensors that a pipeline stage outputs, encoded as integers to be sent ahead of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

__all__ = ["HEADER", "Spec", "decode", "encode", "in_words"]

HEADER = 64  # integers in a header
_DTYPES = (
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)


class Spec(NamedTuple):
    """Shape and dtype of a tensor, and True if its gradient is sent back."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


def encode(specs: Sequence[Spec]) -> list[int]:
    """Return `specs` as `HEADER` integers. Raises ValueError for other dtypes, and for too many tensors."""
    numbers = [len(specs)]
    for shape, dtype, requires_grad in specs:
        if dtype not in _DTYPES:
            raise ValueError(f"tensors of {dtype} cannot be sent")
        numbers += [_DTYPES.index(dtype), int(requires_grad), len(shape), *shape]
    if len(numbers) > HEADER:
        raise ValueError(f"{len(specs)} tensors of so many dimensions do not fit a header: {in_words(specs)}")
    return numbers + [0] * (HEADER - len(numbers))


def decode(numbers: Sequence[int]) -> tuple[Spec, ...]:
    """Return the specs from the integers of `encode`."""
    rest, specs = iter(numbers), []
    for _ in range(next(rest)):
        dtype, requires_grad, dims = next(rest), next(rest), next(rest)
        specs.append(Spec(tuple(next(rest) for _ in range(dims)), _DTYPES[dtype], bool(requires_grad)))
    return tuple(specs)


def in_words(specs: Sequence[Spec]) -> str:
    """Format specs for an error message."""
    return " and ".join(
        f"{list(shape)} {str(dtype).removeprefix('torch.')}{'' if grad else ' without gradient'}"
        for shape, dtype, grad in specs
    ) or "no tensor"  # fmt: skip
