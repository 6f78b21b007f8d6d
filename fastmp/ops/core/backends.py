"""Choice of a backend for each op and device.

    device   backend by default
    CPU      "c++" if `_C_cpu` has a kernel, else "reference" (plain torch)
    CUDA     "cuda" (CUDA C++ from `_C_cuda`) for calls that the op's `prefers_cuda` selects,
             else "triton", else "reference"

FASTMP_OPS overrides the choice, for all ops (`FASTMP_OPS=cuda`) or per op
(`FASTMP_OPS=bias_gelu=cuda,cross_entropy_stats=reference`). Under TRITON_INTERPRET=1, `FASTMP_OPS=triton`
runs the Triton kernels on the CPU, interpreted.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from fastmp.config import Environment
from fastmp.ops.core import _triton
from fastmp.ops.core.built import PACKAGE, build_record, has_code_for, load_for_this_torch
from fastmp.ops.core.versions import untested

LIBRARY = torch.library.Library("fastmp", "DEF")
_REQUESTED = Environment.read().ops


def _load(library: str, part: str) -> str:
    """Load a compiled library. Return "" on success, else the reason why its kernels are absent."""
    path = PACKAGE / f"{library}.so"
    if not path.exists():
        return str(build_record().get(part, f"{path.name} was not built"))
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        return f"{library} does not load: {error}"
    return ""


for _package, _version in (("torch", torch.__version__), ("triton", _triton.VERSION)):
    if _warning := untested(_package, _version):
        warnings.warn(_warning, RuntimeWarning, stacklevel=2)
CPU_ABSENT = _load("_C_cpu", "cpp")
if CPU_ABSENT and CPU_ABSENT != "FASTMP_CPP=0":  # pip hides the build's output, so warn at import
    warnings.warn(
        f"fastmp has no C++ kernels here ({CPU_ABSENT}): on a CPU its ops are plain torch, several times "
        "slower. Install again where torch and a C++ compiler are, or with FASTMP_CPP=0 to leave them out.",
        RuntimeWarning,
        stacklevel=2,
    )
_autograd, AUTOGRAD_ABSENT = load_for_this_torch("_C_autograd", "autograd", "signature")
CUDA_ABSENT = _load("_C_cuda", "cuda") if torch.version.cuda else "this torch is built without CUDA"


def _signature(*arguments: Any) -> tuple | None:
    """Return a hashable key of plain tensors, for which only shape, dtype and device count, and other values.

    None for subclasses of Tensor.
    """
    plain = torch.Tensor, torch.nn.Parameter
    if any(isinstance(each, torch.Tensor) and type(each) not in plain for each in arguments):
        return None
    return tuple((a.shape, a.dtype, a.device) if isinstance(a, torch.Tensor) else a for a in arguments)


signature: Callable[..., tuple | None] = _signature if _autograd is None else _autograd.signature


def direct(overload: torch._ops.OpOverload) -> Callable:
    """Return a function that calls the op as the overload does, in as little host time as possible."""
    otherwise = overload._op  # the C++ callable behind OpOverload.__call__
    return otherwise if _autograd is None else _autograd.caller(overload._schema.name, otherwise)


def _requested(name: str) -> str | None:
    """Return the backend that FASTMP_OPS requests for this op, or None."""
    choice = None
    for item in filter(None, _REQUESTED.split(",")):
        op, _, backend = item.rpartition("=")
        if op in ("", name):
            choice = backend
    return choice


def serve_cpu(name: str, implementations: dict[str, Callable]) -> tuple[str, str]:
    """Register the CPU kernel of an op. Return (backend, reason)."""
    compiled = torch._C._dispatch_has_kernel_for_dispatch_key(f"fastmp::{name}", "CPU")
    choice = _requested(name)
    if choice == "reference" or (choice == "triton" and _triton.INTERPRETED and choice in implementations):
        LIBRARY.impl(name, implementations[choice], "CPU", allow_override=compiled)
        return choice, "named by FASTMP_OPS"
    if compiled:
        return "c++", "compiled kernel"
    LIBRARY.impl(name, implementations["reference"], "CPU")
    return "reference", CPU_ABSENT or "no compiled kernel for this op"


def serve_cuda(
    name: str, implementations: dict[str, Callable], prefers_cuda: Callable[..., bool] | None
) -> tuple[str, str]:
    """Register the CUDA kernel of an op. Return (backend, reason)."""
    exported = not CUDA_ABSENT and hasattr(torch.ops.fastmp_cuda, name)
    if exported:
        implementations["cuda"] = getattr(torch.ops.fastmp_cuda, name).default
    choice = _requested(name)
    if choice in implementations:
        backend, reason = str(choice), "named by FASTMP_OPS"
    elif "triton" in implementations:
        backend, reason = "triton", "default on CUDA"
    else:
        backend, reason = "reference", _triton.ABSENT or "no Triton kernel for this op"
    if choice not in (None, backend):
        absent = CUDA_ABSENT if choice == "cuda" else _triton.ABSENT if choice == "triton" else ""
        reason += f"; FASTMP_OPS names {choice}: {absent or 'not known here'}"
    serve = implementations[backend]
    if choice is None and backend == "triton" and exported and prefers_cuda is not None:
        serve = _cuda_or_triton(prefers_cuda, implementations["cuda"], implementations["triton"])
        reason += "; CUDA C++ for shapes at which it is faster, on GPUs it is compiled for"
    LIBRARY.impl(name, serve, "CUDA")
    return backend, reason


def _cuda_or_triton(prefers_cuda: Callable[..., bool], by_cuda: Callable, by_triton: Callable) -> Callable:
    """Return a kernel that dispatches each call to CUDA C++ or Triton."""

    def serve(*arguments: Any) -> Any:
        by_cuda_here = prefers_cuda(*arguments) and has_code_for(arguments[0].get_device())
        return (by_cuda if by_cuda_here else by_triton)(*arguments)

    return serve
