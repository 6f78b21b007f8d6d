"""Registration of local ops under `torch.ops.fastmp`, and the choice of what serves each of them.

One default per (op, device). CPU: the compiled kernel where `_C_cpu` brings one, else the reference in
plain torch. CUDA: the Triton kernel, else the reference; the CUDA C++ kernels that `_C_cuda` exports under
`torch.ops.fastmp_cuda` serve only where FASTMP_OPS names them: `FASTMP_OPS=cuda`, or per op
`FASTMP_OPS=bias_gelu=cuda,cross_entropy_stats=reference`. Under TRITON_INTERPRET=1, `FASTMP_OPS=triton` lets
the Triton kernels serve the CPU, interpreted.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.utils.flop_counter import register_flop_formula

from fastmp.config import Environment
from fastmp.ops import _triton

LIBRARY = torch.library.Library("fastmp", "DEF")
_PACKAGE = Path(__file__).resolve().parent.parent
_REQUESTED = Environment.read().ops


@dataclass(frozen=True)
class Op:
    """One registered op: its callable overload, implementations by backend name, and cost formulas.

    `flops` and `traffic` take the op's own arguments and return floating-point operations and the fewest
    bytes that must cross device memory.
    """

    name: str
    overload: torch._ops.OpOverload
    implementations: dict[str, Callable]
    serving: dict[str, str]
    reasons: dict[str, str]
    flops: Callable[..., int] | None
    traffic: Callable[..., int] | None

    @property
    def family(self) -> str:
        """Name of the file in fastmp/ops that defines the op, and of its tests, samples and benchmark."""
        return self.implementations["reference"].__module__.rpartition(".")[2]


OPS: dict[str, Op] = {}


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """What kernels compute and accumulate in: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def autocast(*tensors: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """The tensors as torch.autocast wants them: where it is on for their device, in its dtype.

    None and float64 stay as they are, as in torch's own rules. Public functions call it first: their kernels
    compute in float32 whatever the storage, so the narrow dtype costs one rounding.
    """
    device = next((t.device.type for t in tensors if t is not None), "cpu")
    if not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(
        t if t is None or t.dtype == torch.float64 or not t.is_floating_point() else t.to(dtype)
        for t in tensors
    )


def may_look(x: torch.Tensor) -> bool:
    """Whether values of `x` may be read to check them: no device is waited for, and nobody records ops, as a
    compiler or the capture of a graph does, which would keep what was read."""
    recorded = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack()
    return x.device.type == "cpu" and type(x) is torch.Tensor and not recorded


def _load(library: str, wanted: bool, otherwise: str) -> str:
    """Load a compiled library; "" on success, else the reason why its kernels are absent."""
    path = _PACKAGE / f"{library}.so"
    if not wanted:
        return otherwise
    if not path.exists():
        record = _PACKAGE / "_build.json"
        built = json.loads(record.read_text()) if record.exists() else {}
        return str(built.get({"_C_cpu": "cpp", "_C_cuda": "cuda"}[library], f"{path.name} was not built"))
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        return f"{path.name} does not load: {error}"
    return ""


_CPU_ABSENT = _load("_C_cpu", True, "")
_CUDA_ABSENT = _load("_C_cuda", torch.version.cuda is not None, "this torch is built without CUDA")


def _requested(name: str) -> str | None:
    """The backend that FASTMP_OPS asks for this op, if any."""
    choice = None
    for item in filter(None, _REQUESTED.split(",")):
        op, _, backend = item.rpartition("=")
        if op in ("", name):
            choice = backend
    return choice


def _serve_cpu(name: str, implementations: dict[str, Callable]) -> tuple[str, str]:
    compiled = torch._C._dispatch_has_kernel_for_dispatch_key(f"fastmp::{name}", "CPU")
    choice = _requested(name)
    if choice == "reference" or (choice == "triton" and _triton.INTERPRETED and choice in implementations):
        LIBRARY.impl(name, implementations[choice], "CPU", allow_override=compiled)
        return choice, "named by FASTMP_OPS"
    if compiled:
        return "c++", "compiled kernel"
    LIBRARY.impl(name, implementations["reference"], "CPU")
    return "reference", _CPU_ABSENT or "no compiled kernel for this op"


def _serve_cuda(name: str, implementations: dict[str, Callable]) -> tuple[str, str]:
    exported = not _CUDA_ABSENT and hasattr(torch.ops.fastmp_cuda, name)
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
        absent = _CUDA_ABSENT if choice == "cuda" else _triton.ABSENT if choice == "triton" else ""
        reason += f"; FASTMP_OPS names {choice}: {absent or 'not known here'}"
    LIBRARY.impl(name, implementations[backend], "CUDA")
    return backend, reason


def _bump_versions(overload: torch._ops.OpOverload) -> Callable:
    """Kernel for ADInplaceOrView: run below autograd, then bump the version of what was written.

    A kernel over the stable ABI does not bump it by itself; without this a tensor saved by autograd and
    overwritten here would go unnoticed.
    """
    written = [i for i, a in enumerate(overload._schema.arguments) if a.alias_info and a.alias_info.is_write]

    def kernel(keyset, *args):
        below = keyset & torch._C._after_ADInplaceOrView_keyset
        result = overload.redispatch(below, *args)
        torch.autograd.graph.increment_version([args[i] for i in written if args[i] is not None])
        return result

    return kernel


def register(
    schema: str,
    *,
    reference: Callable,
    fake: Callable,
    triton: Callable | None = None,
    flops: Callable[..., int] | None = None,
    traffic: Callable[..., int] | None = None,
) -> Op:
    """Define `schema` in the `fastmp` namespace and give every device one implementation.

    Args:
        schema: e.g. "bias_gelu(Tensor x, Tensor? bias, str approximate) -> Tensor".
        reference: plain torch on any device; defines the result.
        fake: shapes and dtypes only, for torch.compile and meta tensors.
        triton: launches the Triton kernel on CUDA tensors.
        flops, traffic: cost formulas with the op's arguments (see `Op`).
    """
    name = schema.partition("(")[0]
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    overload = getattr(torch.ops.fastmp, name).default
    implementations = {"reference": reference}
    if triton is not None and not _triton.ABSENT:
        implementations["triton"] = triton
    serving, reasons = {}, {}
    serving["cpu"], reasons["cpu"] = _serve_cpu(name, implementations)
    serving["cuda"], reasons["cuda"] = _serve_cuda(name, implementations)
    torch.library.register_fake(f"fastmp::{name}", fake, lib=LIBRARY)
    if overload._schema.is_mutable:
        LIBRARY.impl(name, _bump_versions(overload), "ADInplaceOrView", with_keyset=True)
    if flops is not None:
        register_flop_formula(overload.overloadpacket, get_raw=True)(
            lambda *a, out_val=None, **k: flops(*a, **k)
        )
    OPS[name] = Op(name, overload, implementations, serving, reasons, flops, traffic)
    return OPS[name]
