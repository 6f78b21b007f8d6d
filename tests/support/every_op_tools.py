"""Tensors of billions of elements of which only a few pages exist, and launches of which only the ends run.

The memory is reserved, not committed: what was never written reads as zero. An offset that is computed in 32
bits wraps, and finds zeros, other rows, or nothing at all.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fastmp.ops import OPS
from fastmp.testing.ops import samples

# Kernels count elements, or vectors of up to eight of them: both counts pass 2^32.
BEYOND = 1 << 35
_MAP_NORESERVE = 0x4000  # of Linux; in the mmap module from Python 3.13 on
_WALKED = 1 << 28  # elements: what is as large as that must not be walked through


def sparse(num_elements: int, dtype: torch.dtype) -> Tensor:
    """Zeros that take memory only where they are written. More lie before them, where negative offsets go."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    before = (BEYOND // 2) * dtype.itemsize
    memory = mmap.mmap(-1, before + num_elements * dtype.itemsize, flags=flags)
    return torch.frombuffer(memory, dtype=dtype, offset=before)


def apart(tensor: Tensor) -> Tensor:
    """The same numbers with more than 2^35 elements between the first and the last index of dimension 0.

    From 17 indices on the stride fits into 32 bits, and only its product with an index does not; tensors with
    fewer are returned as they are.
    """
    if tensor.dim() < 2 or tensor.shape[0] < 17 or not tensor.numel():
        return tensor
    extent = (
        sum((n - 1) * stride for n, stride in zip(tensor.shape[1:], tensor.stride()[1:], strict=True)) + 1
    )
    stride = -(-BEYOND // (tensor.shape[0] - 1) // 64) * 64 + 64
    assert stride > extent
    flat = sparse((tensor.shape[0] - 1) * stride + extent, tensor.dtype)
    return flat.as_strided(tensor.shape, (stride, *tensor.stride()[1:])).copy_(tensor)


# Ops whose rows lie where an index says (zeros in place of the index would send all rows to one), or come in
# blocks. Their own tests stretch them.
INDEXED = (
    "block_rows", "permutation", "permute", "permute_quantized", "unpermute", "unpermute_into",
    "unpermute_add", "unpermute_add_into", "unpermute_backward", "unpermute_backward_into",
    "exchange_barrier", "exchange_counts", "exchange_give", "exchange_places", "exchange_pull",
    "exchange_push", "exchange_take", "quantize_weight", "stash_gate_backward_", "stash_mlp_in", "stash_mm",
    "stash_pull", "stash_push", "stash_release", "stash_reserve", "stash_wgrad", "stash_wgrad_",
)  # fmt: skip


def op_backends(names: Iterable[str], without: Iterable[str] = (), in_full: Iterable[str] = ()) -> list[Any]:
    """Parameters (op, backend): whoever of those names implements each op here; "c++" is the CPU's kernel.

    in_full: ops of the full set only.
    """
    return [
        pytest.param(op, name, id=f"{op}-{name}", marks=[pytest.mark.full] * (op in in_full))
        for op, entry in sorted(OPS.items())
        if op not in without
        for name in names
        if name in entry.implementations or (name == "c++" and entry.serving["cpu"] == name)
    ]


def implementation(op: str, backend: str) -> Callable:
    return OPS[op].overload if backend == "c++" else OPS[op].implementations[backend]


# The dimension that counts rows, where it is not the first of the largest argument.
_ROWS = {"cross_entropy_merge": 1}


def row_dim(tensor: Tensor, num_rows: int) -> int | None:
    """The first dimension of that size, if any."""
    return tensor.shape.index(num_rows) if num_rows in tensor.shape else None


def _with_rows(arguments: tuple, given: int, num_rows: int, make: Callable[..., Tensor]) -> tuple:
    """The arguments with `num_rows` rows: the first and the last of those given, the others zero."""

    def change(argument: Any) -> Any:
        if not isinstance(argument, Tensor):
            return num_rows if argument == given and not isinstance(argument, float) else argument
        if (dim := row_dim(argument, given)) is None:
            ends = argument.dtype == torch.int32  # numbers of rows: where the last expert's end
            return argument.masked_fill(argument == given, num_rows) if ends else argument.clone()
        shape = (*argument.shape[:dim], num_rows, *argument.shape[dim + 1 :])
        large = make(shape, argument.dtype)
        large.select(dim, 0).copy_(argument.select(dim, 0))
        large.select(dim, num_rows - 1).copy_(argument.select(dim, given - 1))
        return large

    return tuple(map(change, arguments))


@dataclass(frozen=True)
class Stretched:
    """An op's first sample with so many rows that its largest tensor has `num_elements`, and with two rows.

    Both hold the first and the last row of the sample; what lies between them is zero.
    """

    arguments: tuple
    num_rows: int
    two_rows: tuple


def stretched(op: str, dtype: torch.dtype, num_elements: int, device: str = "cpu") -> Stretched:
    sample = samples(op, device=device, dtype=dtype)[0]
    largest = max((a for a in sample if isinstance(a, Tensor)), key=Tensor.numel)
    given = largest.shape[_ROWS.get(op, 0)]
    beyond = 5 if largest.dim() > 1 else 64  # a flat buffer keeps the widest vectors, as one in use does
    num_rows = -(-num_elements * given // largest.numel()) + beyond
    if largest.dim() > 1:
        num_rows = min(num_rows, 1 << 29)  # more tokens than anyone has; a grid has fewer than 2^31 programs
    make = zeros_on(device)
    few = lambda shape, dtype: torch.zeros(shape, dtype=dtype, device=device)  # noqa: E731
    return Stretched(_with_rows(sample, given, num_rows, make), num_rows, _with_rows(sample, given, 2, few))


def zeros_on(device: str) -> Callable[..., Tensor]:
    if device == "cpu":
        return lambda shape, dtype: sparse(math.prod(shape), dtype).view(shape)
    return lambda shape, dtype: torch.zeros(shape, dtype=dtype, device=device)


def results_of(op: str, implementation: Callable, arguments: tuple) -> list[Tensor]:
    """Return an op's results, then the arguments it wrote."""
    returned = implementation(*arguments)
    schema = OPS[op].overload._schema.arguments
    written = [a for a, s in zip(arguments, schema, strict=True) if s.alias_info and s.alias_info.is_write]
    outputs = returned if isinstance(returned, tuple) else (returned,)
    return [t for t in (*outputs, *written) if t is not None]


class NothingWalksThrough(TorchDispatchMode):
    """Large fresh tensors are sparse; what reads or writes all of a large tensor raises."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func._schema.name
        if name in ("aten::empty", "aten::new_empty", "aten::zeros", "aten::new_zeros", "aten::empty_like"):
            like = args[0] if isinstance(args[0], Tensor) else None
            shape = like.shape if name == "aten::empty_like" else args[-1]
            dtype = kwargs.get("dtype") or (torch.get_default_dtype() if like is None else like.dtype)
            large = math.prod(shape) >= _WALKED
            return sparse(math.prod(shape), dtype).view(shape) if large else func(*args, **kwargs)
        if name == "aten::new_empty_strided":
            like, shape, strides = args
            extent = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
            if extent < _WALKED:
                return func(*args, **kwargs)
            return sparse(extent, kwargs.get("dtype") or like.dtype).as_strided(shape, strides)
        large = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor) and a.numel() >= _WALKED]
        out = func(*args, **kwargs)
        for tensor in large:
            views = (
                isinstance(out, Tensor) and out.untyped_storage()._cdata == tensor.untyped_storage()._cdata
            )
            if func._schema.is_mutable or not views:
                raise AssertionError(f"{name} walks through {tuple(tensor.shape)}")
        return out


@contextmanager
def only_ends_run(programs: int = 2, also: Sequence[int] = ()) -> Iterator[None]:
    """Triton's interpreter runs the first and last programs of a large grid, and copies no arguments back.

    also: programs in between that run, too.
    """
    from triton.runtime import interpreter

    def short(*limits: int) -> Any:
        """`range` of that module; only over a grid does it go this far."""
        if len(limits) > 1 or limits[0] <= 1000:
            return range(*limits)
        return [*range(programs), *also, *range(limits[0] - programs, limits[0])]

    restore = interpreter.GridExecutor._restore_args_dev
    interpreter.GridExecutor._restore_args_dev = lambda *arguments: None
    interpreter.range = short
    try:
        yield
    finally:
        del interpreter.range
        interpreter.GridExecutor._restore_args_dev = restore
