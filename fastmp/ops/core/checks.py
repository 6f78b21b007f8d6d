"""Argument checks for the public functions of fastmp.ops: shapes, dtypes and devices. All raise ValueError.

Messages are formatted only after a check has failed: under torch.compile with dynamic shapes, formatting a
size would break the graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastmp.config.options import unknown_choice
from fastmp.ops.core.contracts import check_finite as check_finite
from fastmp.ops.core.contracts import check_memory as check_memory
from fastmp.ops.core.contracts import check_number as check_number
from fastmp.ops.core.contracts import memoized as memoized
from fastmp.ops.core.registry import compute_dtype

FLOATING = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def require(condition: bool, message: str, *values: Any) -> None:
    """Raise ValueError(message.format(*values)) unless the condition holds."""
    if not condition:
        raise ValueError(message.format(*(tuple(v) if isinstance(v, torch.Size) else v for v in values)))


def check_floating(op: str, name: str, x: Tensor) -> None:
    """Check that `x` has one of the `FLOATING` dtypes and at least one dimension."""
    if x.dtype not in FLOATING:
        raise ValueError(f"{op}: {name} must have one of the dtypes {FLOATING}, got {x.dtype}")
    if x.dim() == 0:
        raise ValueError(f"{op}: {name} must have at least one dimension, got shape ()")


def check_same_device(op: str, **tensors: Tensor | None) -> None:
    """Check that all tensors are on one device; None is skipped."""
    device = None
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if device is None:
            first, device = name, tensor.device
        elif tensor.device != device:
            raise ValueError(f"{op}: {first} is on {device} but {name} is on {tensor.device}")


def is_dtensor(x: Tensor) -> bool:
    """Return True if `x` is a DTensor, without importing torch.distributed.tensor."""
    return type(x) is not Tensor and hasattr(x, "device_mesh")


def check_same(op: str, **tensors: Tensor | None) -> None:
    """Check that all tensors have the same dtype and device; None is skipped."""
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


def check_shape(
    op: str, expected: tuple[int, ...], *, to: tuple[str, Tensor], **tensors: Tensor | None
) -> None:
    """Check that all tensors have shape `expected`, derived from the tensor `to`; None is skipped.

    Args:
        op: name of the op, for the message.
        expected: the shape.
        to: (name, tensor) that determines it.
        tensors: by their names.
    """
    source, source_tensor = to
    for name, tensor in tensors.items():
        if tensor is not None and tensor.shape != expected:
            raise ValueError(
                f"{op}: expected {name} of shape {tuple(expected)} for {source} of shape "
                f"{tuple(source_tensor.shape)}, got {tuple(tensor.shape)}"
            )


def overlaps(out: Tensor, *others: Tensor | None) -> bool:
    """Return True if the byte range of one of `others` intersects that of `out`, which is contiguous."""
    begin = out.data_ptr()
    end = begin + out.nbytes
    return any(
        other is not None and 0 < other.data_ptr() < end and begin < other.data_ptr() + _span(other)
        for other in others
    )


def _span(tensor: Tensor) -> int:
    """Return the number of bytes from the first element to the end of the last."""
    if tensor.is_contiguous():
        return tensor.nbytes
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return (last + 1) * tensor.element_size()


def check_no_overlap(op: str, out: Tensor, **others: Tensor | None) -> None:
    """Check that `out`, which the op writes, shares no memory with other arguments.

    Skips tensors with gaps, subclasses, and calls under a compiler or a functorch transform; the op itself
    handles those.
    """
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return
    for name, other in others.items():
        if other is None or not {type(out), type(other)} <= {Tensor, torch.nn.Parameter}:
            continue
        if out.is_contiguous() and other.is_contiguous() and overlaps(out, other):
            shapes = tuple(out.shape), tuple(other.shape)
            raise ValueError(
                f"{op}: out {shapes[0]} shares memory with {name} {shapes[1]}; pass another tensor"
            )


def check_main_grad(op: str, total: Tensor | None, **weight: Tensor) -> None:
    """Check that `total`, a `main_grad` or None, matches its weight in shape and device.

    Its dtype must be the weight's, or float32 for a 16-bit weight. Pass the weight by keyword, after
    autocast.
    """
    if total is None:
        return
    ((name, tensor),) = weight.items()
    check_shape(op, tensor.shape, to=(name, tensor), main_grad=total)
    check_same_device(op, **weight, main_grad=total)
    wide = compute_dtype(tensor.dtype)
    if total.dtype not in (tensor.dtype, wide):
        either = f"{wide} or {tensor.dtype}" if wide != tensor.dtype else f"{wide}"
        raise ValueError(f"{op}: main_grad is {total.dtype} but {name} is {tensor.dtype}: make it {either}")


def check_choice(op: str, name: str, value: Any, allowed: tuple) -> None:
    """Check that an option has one of its `allowed` values."""
    if value not in allowed:
        raise ValueError(f"{op}: {unknown_choice(name, value, allowed)}")
