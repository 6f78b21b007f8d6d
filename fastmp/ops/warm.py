"""Compile kernels before they are needed, for any GPU, without one, and load them where there is one.

Launchers run on tensors of the device "meta", which have shapes and no memory. What they would launch is
written down as `Code`: all that Triton compiles for, and nothing else. Counts, which differ from batch to
batch, are no part of it, and a few tile classes stand for all of them. So a list made from one batch has the
kernels of all batches. Processes compile it into Triton's cache on disk, where training finds them.
"""

from __future__ import annotations

import importlib
import math
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fastmp.ops import grouped_mm_tiles, router_triton
from fastmp.ops.core import _triton, launcher
from fastmp.ops.core.registry import OPS

_WIDE = 1 << 32  # stands for all numbers that need 64 bits


@dataclass(frozen=True)
class Code:
    """A kernel and all that Triton compiles it for, except the GPU; can be hashed, and sent to a process.

    arguments: as `_class_of` makes them; constants: (name, value) in the order of the call.
    """

    module: str
    kernel: str
    arguments: tuple
    constants: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, kernel: Any, arguments: tuple, constants: dict[str, Any]) -> Code:
        classes = tuple(map(_class_of, arguments, kernel.counts))
        return cls(kernel.fn.__module__, kernel.fn.__name__, classes, tuple(constants.items()))

    def call(self) -> tuple[Any, list[Any]]:
        """Return the kernel, and arguments of the class for its `warmup`."""
        return getattr(importlib.import_module(self.module), self.kernel), list(map(_example, self.arguments))


def _class_of(argument: Any, counts: bool) -> Any:
    """One value for all those that Triton compiles alike; what has memory, as a tuple."""
    if isinstance(argument, _triton.TensorDescriptor):
        return "descriptor", argument.base.dtype, tuple(argument.block_shape)
    if isinstance(argument, Tensor):
        return "pointer", argument.dtype, argument.data_ptr() % 16 == 0
    if type(argument) is not int:
        return 0.0 if isinstance(argument, float) else argument
    wide = 0 if -(1 << 31) <= argument < 1 << 31 else _WIDE
    if counts:
        return wide + 2
    if argument == 1:
        return 1
    return wide + (16 if argument % 16 == 0 else 2)


class _Pointer:
    """What Triton looks at of a tensor."""

    def __init__(self, dtype: torch.dtype, aligned: bool) -> None:
        self.dtype, self._address = dtype, 0 if aligned else 1

    def data_ptr(self) -> int:
        return self._address


def _example(kind: Any) -> Any:
    """An argument of the class that `_class_of` has named."""
    if not isinstance(kind, tuple):
        return kind
    name, dtype, more = kind
    if name == "pointer":
        return _Pointer(dtype, more)
    return _triton.TensorDescriptor.from_tensor(torch.empty(more, dtype=dtype, device="meta"), list(more))


class AbsentGPU:
    """Triton's view of a GPU of compute capability `arch` that is not there."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_device(self) -> int:
        return self.arch  # what Triton compiles is kept apart by this number

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return _triton.GPUTarget("cuda", self.arch, 32)


def _each_class(x: Tensor, classes: tuple[float, ...], num_experts: int) -> Iterator[Tensor]:
    """Yield x with other numbers of rows: one for each class of rows an expert."""
    for each in classes:
        rows = num_experts * int(each if each < math.inf else 1 << 12)
        yield x.new_empty_strided((rows, x.shape[1]), x.stride())


def _rows_of_experts(x: Tensor, w: Tensor, *others: Any) -> Iterator[tuple]:
    """Yield arguments with numbers of rows that a grouped GEMM has all its tiles for."""
    for rows in _each_class(x, grouped_mm_tiles.ROW_CLASSES, w.shape[0]):
        yield rows, w, *others


def _terms_of_experts(*arguments: Any) -> Iterator[tuple]:
    """Yield arguments with numbers of rows that a grouped wgrad has all its tiles for."""
    *total, grad, x, offsets = arguments
    classes = grouped_mm_tiles.WGRAD_ROW_CLASSES, offsets.shape[0]
    for grads, terms in zip(_each_class(grad, *classes), _each_class(x, *classes), strict=True):
        yield *total, grads, terms, offsets


def _tokens_of_router(logits: Tensor, *others: Any) -> Iterator[tuple]:
    """Numbers of tokens that a router has all its blocks for."""
    sequences = math.prod(logits.shape[1:-1])
    for tokens in router_triton.TOKENS:
        yield logits.new_empty(-(-tokens // sequences), *logits.shape[1:]), *others


def _tokens_of_router_backward(
    grad_probs: Tensor | None, grad_sums: Tensor | None, grad_z: Tensor | None, logits: Tensor,
    indices: Tensor, *others: Any,
) -> Iterator[tuple]:  # fmt: skip
    for (more,) in _tokens_of_router(logits):
        steps = more.shape[0]
        probs = None if grad_probs is None else grad_probs.new_empty(steps, *grad_probs.shape[1:])
        yield probs, grad_sums, grad_z, more, indices.new_empty(steps, *indices.shape[1:]), *others


# Ops whose tiles depend on counts: from the arguments of one call, those of calls that have all their tiles.
_TILE_CLASSES: dict[str, Callable[..., Iterator[tuple]]] = {
    "grouped_mm": _rows_of_experts,
    "grouped_mm_bias": _rows_of_experts,
    "grouped_mlp_in": _rows_of_experts,
    "grouped_mm_wgrad": _terms_of_experts,
    "grouped_mm_wgrad_": _terms_of_experts,
    "topk_router": _tokens_of_router,
    "topk_router_backward": _tokens_of_router_backward,
}


class _ByTriton(TorchDispatchMode):
    """Ops on meta tensors run their Triton launchers, once more for each of their tile classes."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("fastmp::")
        launch = OPS[name].implementations.get("triton") if name in OPS else None
        if launch is None or not _on_meta(args):
            return func(*args, **(kwargs or {}))
        for arguments in _TILE_CLASSES.get(name, lambda *arguments: ())(*args):
            launch(*arguments)
        return launch(*args, **(kwargs or {}))


def _on_meta(arguments: Iterable[Any]) -> bool:
    return any(isinstance(a, Tensor) and a.is_meta for a in arguments)


@contextmanager
def recording(arch: int) -> Iterator[dict[Code, None]]:
    """Inside, the kernels of ops on meta tensors are listed, in order, each once.

    arch: the compute capability, as one number, that tiles are chosen for.
    """
    found: dict[Code, None] = {}
    with launcher.intercept_launches(lambda *launch: found.setdefault(Code.of(*launch)), arch), _ByTriton():
        yield found


def _become(arch: int) -> None:
    _triton.driver.set_active(AbsentGPU(arch))


def _compile(code: Code) -> None:
    kernel, arguments = code.call()
    kernel.warmup(*arguments, grid=(1,), **dict(code.constants))


def compile_all(
    codes: Iterable[Code], arch: int, *, processes: int | None = None,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> None:  # fmt: skip
    """Compile `codes` into Triton's cache; what is there already costs little.

    Args:
        arch: compute capability as one number (90 is 9.0).
        processes: how many compile at a time; default: one for each core.
        progress: called with how many are done, of how many.
    """
    codes = list(codes)
    workers = min(processes or len(os.sched_getaffinity(0)), len(codes))
    progress(0, len(codes))
    if not codes:
        return
    context = multiprocessing.get_context("spawn")  # a fork would inherit threads' locks, and a GPU's context
    with ProcessPoolExecutor(workers, context, initializer=_become, initargs=(arch,)) as pool:
        compiled = [pool.submit(_compile, code) for code in codes]
        for done, each in enumerate(as_completed(compiled), start=1):
            each.result()
            progress(done, len(codes))


def load_all(codes: Iterable[Code]) -> None:
    """Load kernels that `compile_all` has compiled on the current GPU, without launching them."""
    for code in codes:
        kernel, arguments = code.call()
        launcher.load(kernel, arguments, dict(code.constants))


def nothing_is_compiled() -> str:
    """The reason why this process compiles no kernels, "" if it does."""
    return _triton.ABSENT or ("TRITON_INTERPRET=1 interprets them" if _triton.INTERPRETED else "")


def require_compilation() -> None:
    """ValueError where this process compiles no kernels."""
    if reason := nothing_is_compiled():
        raise ValueError(f"warm_up: nothing is compiled: {reason}")


def current_architecture() -> int:
    """Compute capability of the current GPU as one number (90 is 9.0); ValueError where there is none."""
    if not torch.cuda.is_available():
        raise ValueError("warm_up: there is no GPU here: say which to compile for, as arch=90 or --arch 90")
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


def warm_up(
    *calls: Callable[[], object], arch: int | None = None, processes: int | None = None,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> int:  # fmt: skip
    """Compile all kernels that `calls` launch, so that none is compiled in mid-training or during a capture.

    The calls use tensors and modules on the device "meta", which take no memory; they run backward as well:

        layer = MLP(config, Placement(device="meta", dtype=torch.bfloat16))
        x = torch.empty(4096, 1, 1024, dtype=torch.bfloat16, device="meta", requires_grad=True)
        fastmp.ops.warm_up(lambda: layer(x).sum().backward())

    Numbers of rows and tokens do not matter: their kernels are the same, or all of them are compiled. They
    are loaded, without a launch, where the current GPU has the architecture; otherwise no GPU is used.

    Args:
        arch: compute capability as one number (90 is 9.0); default: that of the current GPU.
        processes, progress: see `compile_all`.

    Returns:
        The number of kernels.

    Raises:
        ValueError: Triton is not installed or interprets, or there is neither a GPU nor `arch`.
    """
    require_compilation()
    if arch is None:
        arch = current_architecture()
    with recording(arch) as codes:
        for call in calls:
            call()
    compile_all(codes, arch, processes=processes, progress=progress)
    if torch.cuda.is_available() and current_architecture() == arch:
        load_all(codes)
    return len(codes)
