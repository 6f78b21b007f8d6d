"""Checks of shapes, dtypes and devices for the public functions of fastmp.ops; each raises a ValueError.

A message is put together where the check fails, and only there: under torch.compile with dynamic shapes a
number that stands in an f-string would stop the compiler.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastmp.config import unknown_choice

FLOATING = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def require(condition: bool, message: str, *values: Any) -> None:
    """Raise `message`, with `values` in place of its {}, unless the condition holds."""
    if not condition:
        raise ValueError(message.format(*(tuple(v) if isinstance(v, torch.Size) else v for v in values)))


def floating(op: str, name: str, x: Tensor) -> None:
    """Check that `x` has a dtype that kernels compute with, and a last dimension."""
    require(x.dtype in FLOATING, "{}: {} must have one of the dtypes {}, got {}", op, name, FLOATING, x.dtype)
    require(x.dim() > 0, "{}: {} must have at least one dimension, got shape ()", op, name)


def same_device(op: str, **tensors: Tensor | None) -> None:
    """Check that all tensors are on the device of the first one, which is not None."""
    device = None
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if device is None:
            first, device = name, tensor.device
        elif tensor.device != device:
            raise ValueError(f"{op}: {first} is on {device} but {name} is on {tensor.device}")


def is_dtensor(x: Tensor) -> bool:
    """Whether `x` is a DTensor; asked so, torch.distributed.tensor need not be imported."""
    return type(x) is not Tensor and hasattr(x, "device_mesh")


def like(op: str, **tensors: Tensor | None) -> None:
    """Check that all tensors have dtype and device of the first one, which is not None."""
    dtype = device = None
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if dtype is None:
            first, dtype, device = name, tensor.dtype, tensor.device
        elif tensor.dtype != dtype:
            raise ValueError(f"{op}: {first} is {dtype} but {name} is {tensor.dtype}")
        elif tensor.device != device:
            raise ValueError(f"{op}: {first} is on {device} but {name} is on {tensor.device}")


def fits(op: str, wanted: tuple[int, ...], *, to: tuple[str, Tensor], **tensors: Tensor | None) -> None:
    """Check that all tensors have shape `wanted`, which follows from the tensor `to`, a (name, tensor)."""
    name, given = to
    for other, tensor in tensors.items():
        if tensor is not None and tensor.shape != wanted:
            found, shape = tuple(tensor.shape), tuple(given.shape)
            raise ValueError(f"{op}: {other} of shape {found} does not fit {name} of shape {shape}")


def one_of(op: str, name: str, value: Any, allowed: tuple) -> None:
    """Check an option against the values it may have."""
    if value not in allowed:
        raise ValueError(f"{op}: {unknown_choice(name, value, allowed)}")
