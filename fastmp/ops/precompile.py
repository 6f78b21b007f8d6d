"""Precompile Triton kernels for any GPU, without needing one, and load them if there is one.

1. `recording` runs launchers on meta tensors and lists what they would launch, as `Code`.
2. `compile_all` compiles the list in parallel processes into Triton's cache on disk.
3. `load_all` loads the kernels on the current GPU.

A `Code` contains everything Triton specialises on and nothing else. Counts that differ from batch to batch
are not part of it, and ops whose tiles depend on counts have a few tile classes, all of which are listed. So
a list made from one batch covers all batches.
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

_WIDE = 1 << 32  # represents all integers that need 64 bits


@dataclass(frozen=True)
class Code:
    """A kernel with everything Triton specialises it on, except the GPU; hashable and picklable.

    arguments: classes from `_class_of`; constants: (name, value) in the order of the call.
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
        """Return the kernel, and example arguments for its `warmup`."""
        return getattr(importlib.import_module(self.module), self.kernel), list(map(_example, self.arguments))


def _class_of(argument: Any, counts: bool) -> Any:
    """Return a representative of all arguments with the same specialisation; pointers become tuples."""
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
    """The part of a tensor's interface that Triton reads."""

    def __init__(self, dtype: torch.dtype, aligned: bool) -> None:
        self.dtype, self._address = dtype, 0 if aligned else 1

    def data_ptr(self) -> int:
        return self._address


def _example(kind: Any) -> Any:
    """Return an argument of a class from `_class_of`."""
    if not isinstance(kind, tuple):
        return kind
    name, dtype, more = kind
    if name == "pointer":
        return _Pointer(dtype, more)
    return _triton.TensorDescriptor.from_tensor(torch.empty(more, dtype=dtype, device="meta"), list(more))


class AbsentGPU:
    """Triton driver for an absent GPU of compute capability `arch`."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_device(self) -> int:
        return self.arch  # Triton's in-memory cache is per device number

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return _triton.GPUTarget("cuda", self.arch, 32)


def _each_class(x: Tensor, classes: tuple[float, ...], num_experts: int) -> Iterator[Tensor]:
    """Yield x with other numbers of rows, one for each class of rows per expert."""
    for each in classes:
        rows = num_experts * int(each if each < math.inf else 1 << 12)
        yield x.new_empty_strided((rows, x.shape[1]), x.stride())


def _rows_of_experts(x: Tensor, w: Tensor, *others: Any) -> Iterator[tuple]:
    """Yield arguments of a grouped GEMM for each class of rows per expert."""
    for rows in _each_class(x, grouped_mm_tiles.ROW_CLASSES, w.shape[0]):
        yield rows, w, *others


def _rows_of_lora(x: Tensor, w: Tensor, bias: Any, low: Tensor, *others: Any) -> Iterator[tuple]:
    """Yield arguments of a grouped GEMM with LoRA for each class of rows per expert."""
    classes = grouped_mm_tiles.ROW_CLASSES, w.shape[0]
    for rows, terms in zip(_each_class(x, *classes), _each_class(low, *classes), strict=True):
        yield rows, w, bias, terms, *others


def _fp8_rows_of_experts(q: Tensor, s: Tensor, w: Tensor, *others: Any) -> Iterator[tuple]:
    """Yield arguments of an FP8 GEMM for each class of rows per expert."""
    for rows in _each_class(q, grouped_mm_tiles.ROW_CLASSES, w.shape[0] if w.dim() == 3 else 1):
        yield rows, s.new_empty_strided((rows.shape[0], s.shape[1]), (1, rows.shape[0])), w, *others


def _tokens_of_router(logits: Tensor, *others: Any) -> Iterator[tuple]:
    """Yield arguments of a router for each class of token counts."""
    sequences = math.prod(logits.shape[1:-1])
    for tokens in router_triton.TOKENS:
        yield logits.new_empty(-(-tokens // sequences), *logits.shape[1:]), *others


# Ops whose tile config depends on counts: functions from the arguments of one call to those of all classes.
_TILE_CLASSES: dict[str, Callable[..., Iterator[tuple]]] = {
    "grouped_mm": _rows_of_experts,
    "grouped_mm_bias": _rows_of_experts,
    "grouped_mlp_in": _rows_of_experts,
    "grouped_mlp_in_fp8": _fp8_rows_of_experts,
    "grouped_mm_lora": _rows_of_lora,
    "grouped_mm_fp8": _fp8_rows_of_experts,
    "linear_fp8": _fp8_rows_of_experts,
    "topk_router": _tokens_of_router,
}


class _TritonOnMeta(TorchDispatchMode):
    """Run the Triton launchers of ops on meta tensors, once for each tile class."""

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
    """Context that lists the kernels launched by ops on meta tensors, in order, each once.

    arch: compute capability as one number (90 is 9.0), for which tile configs are chosen.

    Example:

        with recording(arch=90) as codes:
            fastmp.ops.bias_gelu(torch.empty(8, 64, device="meta"))
        assert [code.kernel for code in codes] == ["bias_gelu_kernel"]
    """
    found: dict[Code, None] = {}
    intercepted = launcher.intercept_launches(lambda *launch: found.setdefault(Code.of(*launch)), arch)
    with intercepted, _TritonOnMeta():
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
    """Compile `codes` into Triton's cache on disk; cached kernels cost little.

    Args:
        codes: from `recording`.
        arch: compute capability as one number (90 is 9.0).
        processes: number of compiling processes. Default: one per core.
        progress: called with (kernels done, kernels in total).
    """
    codes = list(codes)
    workers = min(processes or len(os.sched_getaffinity(0)), len(codes))
    progress(0, len(codes))
    if not codes:
        return
    context = multiprocessing.get_context("spawn")  # a fork would inherit locks and the CUDA context
    with ProcessPoolExecutor(workers, context, initializer=_become, initargs=(arch,)) as pool:
        compiled = [pool.submit(_compile, code) for code in codes]
        for done, each in enumerate(as_completed(compiled), start=1):
            each.result()
            progress(done, len(codes))


def load_all(codes: Iterable[Code]) -> None:
    """Load compiled kernels on the current GPU, without launching them."""
    for code in codes:
        kernel, arguments = code.call()
        launcher.load(kernel, arguments, dict(code.constants))


def nothing_is_compiled() -> str:
    """Return the reason why this process cannot compile kernels, "" if it can."""
    return _triton.ABSENT or ("TRITON_INTERPRET=1 interprets them" if _triton.INTERPRETED else "")


def require_compilation() -> None:
    """Raise ValueError if this process cannot compile kernels."""
    if reason := nothing_is_compiled():
        raise ValueError(f"warm_up: nothing is compiled: {reason}")


def current_architecture() -> int:
    """Return the compute capability of the current GPU as one number (90 is 9.0)."""
    if not torch.cuda.is_available():
        raise ValueError("no GPU found: choose the target, as arch=90 (--arch 90, an H100)")
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


def warm_up(
    *calls: Callable[[], object], arch: int | None = None, processes: int | None = None,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> int:  # fmt: skip
    """Compile all kernels that `calls` launch, so that none is compiled during training or graph capture.

    Write calls with tensors and modules on the device "meta", which take no memory, and include the backward.
    The number of tokens does not matter. If the current GPU has the architecture, the kernels are also
    loaded, without a launch; otherwise no GPU is used.

    Args:
        calls: functions that run the ops.
        arch: compute capability as one number (90 is 9.0). Default: that of the current GPU.
        processes, progress: see `compile_all`.

    Returns:
        The number of kernels.

    Raises:
        ValueError: Triton is not installed or interprets kernels, or there is neither a GPU nor `arch`.

    Example (compiles for seconds):

        layer = MLP(config, Placement(device="meta", dtype=torch.bfloat16))
        x = torch.empty(4096, 1, 1024, dtype=torch.bfloat16, device="meta", requires_grad=True)
        fastmp.ops.warm_up(lambda: layer(x).sum().backward(), arch=90)
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
