"""Checks of shapes, dtypes and devices for the public functions of fastmp.ops; each raises a ValueError.

A message is put together where the check fails, and only there: under torch.compile with dynamic shapes a
number that stands in an f-string would stop the compiler.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastmp.config.options import unknown_choice
from fastmp.ops.core.registry import compute_dtype

FLOATING = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_MAX_PASSED = 4096  # calls that a check remembers; more come from sizes that do not repeat


def memoized(check: Callable[..., None]) -> Callable[..., None]:
    """Make a check remember what it has passed, so that passing it again costs one look-up.

    It may look at shapes, dtypes and devices of tensors, and at nothing else of them. What a compiler or a
    subclass of Tensor brings is always checked.
    """
    passed: set[tuple] = set()

    @functools.wraps(check)
    def checked(*arguments: Any) -> None:
        if torch.compiler.is_compiling():
            check(*arguments)
            return
        key: list[Any] = []
        for argument in arguments:
            kind = type(argument)
            if kind is Tensor or kind is torch.nn.Parameter:
                key += (argument.shape, argument.dtype, argument.device)
            elif isinstance(argument, Tensor):
                check(*arguments)
                return
            else:
                key.append(argument)
        found = tuple(key)
        try:
            known = found in passed
        except TypeError:  # a number that is a list, say: the check has words for it
            check(*arguments)
            return
        if not known:
            check(*arguments)
            if len(passed) >= _MAX_PASSED:
                passed.clear()
            passed.add(found)

    return checked


def require(condition: bool, message: str, *values: Any) -> None:
    """Raise `message`, with `values` in place of its {}, unless the condition holds."""
    if not condition:
        raise ValueError(message.format(*(tuple(v) if isinstance(v, torch.Size) else v for v in values)))


def check_floating(op: str, name: str, x: Tensor) -> None:
    """Check that `x` has a dtype that kernels compute with, and a last dimension."""
    require(x.dtype in FLOATING, "{}: {} must have one of the dtypes {}, got {}", op, name, FLOATING, x.dtype)
    require(x.dim() > 0, "{}: {} must have at least one dimension, got shape ()", op, name)


def check_same_device(op: str, **tensors: Tensor | None) -> None:
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


def check_same(op: str, **tensors: Tensor | None) -> None:
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


def check_shape(
    op: str, wanted: tuple[int, ...], *, to: tuple[str, Tensor], **tensors: Tensor | None
) -> None:
    """Check that all tensors have shape `wanted`, which follows from the tensor `to`, a (name, tensor)."""
    name, given = to
    for other, tensor in tensors.items():
        if tensor is not None and tensor.shape != wanted:
            found, shape = tuple(tensor.shape), tuple(given.shape)
            raise ValueError(f"{op}: {other} of shape {found} does not fit {name} of shape {shape}")


def overlaps(out: Tensor, *others: Tensor | None) -> bool:
    """Whether one of `others` shares memory with `out`, which is contiguous, or has it between its rows."""
    begin = out.data_ptr()
    end = begin + out.nbytes
    return any(
        other is not None and 0 < other.data_ptr() < end and begin < other.data_ptr() + _span(other)
        for other in others
    )


def _span(tensor: Tensor) -> int:
    """The bytes from the first element to the last."""
    if tensor.is_contiguous():
        return tensor.nbytes
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return (last + 1) * tensor.element_size()


def check_no_overlap(op: str, out: Tensor, **others: Tensor | None) -> None:
    """Check that `out`, which will be written to, shares no memory with others.

    Of tensors with gaps, and of what compilers and transforms bring, the op itself sees to it.
    """
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return
    for name, other in others.items():
        if other is None or not {type(out), type(other)} <= {Tensor, torch.nn.Parameter}:
            continue
        if out.is_contiguous() and other.is_contiguous() and overlaps(out, other):
            shapes = tuple(out.shape), tuple(other.shape)
            raise ValueError(
                f"{op}: out {shapes[0]} shares memory with {name} {shapes[1]}; pass another place"
            )


def check_main_grad(op: str, total: Tensor | None, **weight: Tensor) -> None:
    """Check that `total`, a `main_grad` or None, has shape and device of its weight, and a dtype that fits.

    That is the dtype of the weight, or float32 for a 16-bit one: sums in another would lose bits, or have no
    kernel. The weight comes by its name, and as autocast wants it.
    """
    if total is None:
        return
    ((name, given),) = weight.items()
    check_shape(op, given.shape, to=(name, given), main_grad=total)
    check_same_device(op, **weight, main_grad=total)
    wide = compute_dtype(given.dtype)
    if total.dtype not in (given.dtype, wide):
        either = f"{wide} or {given.dtype}" if wide != given.dtype else f"{wide}"
        raise ValueError(f"{op}: main_grad is {total.dtype} but {name} is {given.dtype}: make it {either}")


def check_choice(op: str, name: str, value: Any, allowed: tuple) -> None:
    """Check an option against the values it may have."""
    if value not in allowed:
        raise ValueError(f"{op}: {unknown_choice(name, value, allowed)}")
