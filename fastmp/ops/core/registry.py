"""Registration of local ops under `torch.ops.fastmp`, and the choice of what serves each of them.

One default per (op, device). CPU: the compiled kernel where `_C_cpu` brings one, else the reference in
plain torch. CUDA: the Triton kernel, else the reference. The CUDA C++ kernels that `_C_cuda` exports under
`torch.ops.fastmp_cuda` serve calls for which their op prefers them, and all where FASTMP_OPS names them:
`FASTMP_OPS=cuda`, or per op
`FASTMP_OPS=bias_gelu=cuda,cross_entropy_stats=reference`. Under TRITON_INTERPRET=1, `FASTMP_OPS=triton` lets
the Triton kernels serve the CPU, interpreted.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVarTuple

import torch
from torch import Tensor
from torch._functorch.autograd_function import enable_single_level_autograd_function
from torch.autograd import Function
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import register_flop_formula

from fastmp.config import Environment
from fastmp.ops.core import _triton
from fastmp.ops.core.built import build_record, has_code_for
from fastmp.ops.core.formulas import AutogradFormula, encode
from fastmp.ops.core.versions import untested
from fastmp.profiling import traced

LIBRARY = torch.library.Library("fastmp", "DEF")
_PACKAGE = Path(__file__).resolve().parents[2]
# asked once: torch.compile before torch 2.12 does not know the question
_AUTOCAST_DEVICES = {d for d in ("cpu", "cuda", "xpu", "hpu", "mps") if torch.amp.is_autocast_available(d)}
_REQUESTED = Environment.read().ops
Tensors = TypeVarTuple("Tensors")  # each a Tensor or None


class Differentiable:
    """A function with a backward, for autograd, torch.func.grad and torch.compile.

    An `autograd.Function` around an op costs a third of the host time of a backward registered within it.

    Args:
        name: what the node is called in autograd's graph.
        forward: takes positional arguments and returns a tensor or a tuple of tensors.
        setup: takes (ctx, inputs, output) and keeps what the backward needs. `ctx.save_for_backward` takes
            inputs and outputs only: with anything else a second derivative would silently be missing.
        backward: takes (ctx, *gradients) and returns one gradient, or None, for each argument.
    """

    def __init__(self, name: str, forward: Callable, setup: Callable, backward: Callable) -> None:
        def recorded(ctx: Any, *arguments: Any) -> Any:
            output = forward(*arguments)
            setup(ctx, arguments, output)
            return output

        def function(**methods: Callable) -> type[Function]:
            return type(name, (Function,), {key: staticmethod(method) for key, method in methods.items()})

        self.forward = forward
        self.function = function(forward=recorded, backward=backward)
        # torch.func needs the set-up apart; `apply` then binds arguments by inspection, which takes longer
        self.function_of_func = function(forward=forward, setup_context=setup, backward=backward)
        self.record = super(Function, self.function).apply  # type: ignore[misc]

    def __call__(self, *arguments: Any) -> Any:
        if not (
            torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in arguments)
        ):
            return self.forward(*arguments)
        if torch.compiler.is_compiling():
            return self.function.apply(*arguments)
        if torch._C._are_functorch_transforms_active():
            return self.function_of_func.apply(*arguments)
        return self.record(*arguments)


@dataclass(frozen=True)
class Op:
    """One registered op: its overload, implementations by backend name and cost formulas.

    Calling it runs the op and records its backward where an argument requires grad. `flops` and `traffic`
    take the op's own arguments and return floating-point operations and the fewest bytes that must cross
    device memory.
    """

    name: str
    overload: torch._ops.OpOverload
    implementations: dict[str, Callable]
    serving: dict[str, str]
    reasons: dict[str, str]
    flops: Callable[..., int] | None
    traffic: Callable[..., int]
    autograd_formula: AutogradFormula | None
    call: Callable[..., Any]

    def __call__(self, *arguments: Any) -> Any:
        return self.call(*arguments)

    def validates_args(self, *tensors: Tensor) -> bool:
        """Whether the kernel for these tensors looks at its arguments by itself, as those in C++ do.

        Then a public function may call it first, and look at them only where it fails, for words to say it.
        """
        for tensor in tensors:
            if type(tensor) not in _PLAIN or not tensor.is_cpu:
                return False
        return self.serving["cpu"] == "c++" and not _is_recorded()

    @property
    def family(self) -> str:
        """Name of the file in fastmp/ops that defines the op, and of its tests, samples and benchmark."""
        module = self.implementations["reference"].__module__.rpartition(".")[2]
        return module.removesuffix("_reference")  # a family may keep its references in a file of their own


OPS: dict[str, Op] = {}
_PLAIN = (Tensor, torch.nn.Parameter)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """What kernels compute and accumulate in: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def autocast(*tensors: *Tensors) -> tuple[*Tensors]:
    """The tensors as torch.autocast wants them: where it is on for their device, in its dtype.

    None and float64 stay as they are, as in torch's own rules. Public functions call it first: their kernels
    compute in float32 whatever the storage, so the narrow dtype costs one rounding.
    """
    if not (torch._C._is_any_autocast_enabled() or torch.compiler.is_compiling()):
        return tensors
    given: tuple[Any, ...] = tensors
    device = next((t.device.type for t in given if t is not None), "cpu")
    if device not in _AUTOCAST_DEVICES or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    narrowed: Any = tuple(
        t if t is None or t.dtype == torch.float64 or not t.is_floating_point() else t.to(dtype)
        for t in given
    )
    return narrowed


def without_autocast(device: str) -> AbstractContextManager:
    """A context in which products and sums keep the dtype of their operands."""
    return torch.autocast(device, enabled=False) if device in _AUTOCAST_DEVICES else nullcontext()


@cache
def shared_memory(device: int) -> int:
    """Return the bytes of shared memory of a multiprocessor of the GPU of this index."""
    return torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor


def can_read_values(x: torch.Tensor) -> bool:
    """Whether values of `x` may be read to check them: no device is waited for, and nobody records ops, as a
    compiler or the capture of a graph does, which would keep what was read."""
    return type(x) is Tensor and x.is_cpu and not _is_recorded()


def _is_recorded() -> bool:
    """Whether a compiler, a recorder or a transformation of torch.func is at work, not eager torch alone."""
    if torch.compiler.is_compiling():
        return True
    return torch._C._len_torch_dispatch_stack() > 0 or torch._C._are_functorch_transforms_active()


def _load(library: str, wanted: bool, otherwise: str) -> str:
    """Load a compiled library; "" on success, else the reason why its kernels are absent."""
    path = _PACKAGE / f"{library}.so"
    if not wanted:
        return otherwise
    if not path.exists():
        part = {"_C_cpu": "cpp", "_C_autograd": "autograd", "_C_cuda": "cuda"}[library]
        return str(build_record().get(part, f"{path.name} was not built"))
    if library == "_C_autograd" and (built_for := build_record().get("torch")) != torch.__version__:
        return f"{path.name} is compiled for torch {built_for}, this is {torch.__version__}"
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        return f"{path.name} does not load: {error}"
    return ""


for _package, _version in (("torch", torch.__version__), ("triton", _triton.VERSION)):
    if _warning := untested(_package, _version):
        warnings.warn(_warning, RuntimeWarning, stacklevel=2)
_CPU_ABSENT = _load("_C_cpu", True, "")
if _CPU_ABSENT and _CPU_ABSENT != "FASTMP_CPP=0":  # that is how to ask for it; pip shows no other sign
    warnings.warn(
        f"fastmp has no C++ kernels here ({_CPU_ABSENT}): on a CPU its ops are plain torch, several times "
        "slower. Install again where torch and a C++ compiler are, or with FASTMP_CPP=0 to leave them out.",
        RuntimeWarning,
        stacklevel=2,
    )
_AUTOGRAD_ABSENT = _load("_C_autograd", True, "")
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


def _serve_cuda(
    name: str, implementations: dict[str, Callable], prefers_cuda: Callable[..., bool] | None
) -> tuple[str, str]:
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
    serve = implementations[backend]
    if choice is None and backend == "triton" and exported and prefers_cuda is not None:
        serve = _by_bytes(prefers_cuda, implementations["cuda"], implementations["triton"])
        reason += "; CUDA C++ for shapes of which it moves fewer bytes, on GPUs it is compiled for"
    LIBRARY.impl(name, serve, "CUDA")
    return backend, reason


def _by_bytes(prefers_cuda: Callable[..., bool], by_cuda: Callable, by_triton: Callable) -> Callable:
    """Return a kernel that calls one of two, by the arguments and the GPU of the first, a tensor."""

    def serve(*arguments: Any) -> Any:
        by_cuda_here = prefers_cuda(*arguments) and has_code_for(arguments[0].get_device())
        return (by_cuda if by_cuda_here else by_triton)(*arguments)

    return serve


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


def _no_derivative(name: str, has_backward: bool = False) -> str:
    """Return the message for a derivative that does not exist, of an op or of its backward."""
    first = name.removesuffix("_backward")
    once = has_backward or first != name
    what = "its backward is not differentiable" if once else "this op has no derivative"
    return f"{first}: {what} (second derivatives, as create_graph=True asks for, are not there)"


def raise_if_create_graph(op: str) -> None:
    """Raise inside a backward that autograd would differentiate (create_graph=True).

    Called by backwards that write in place, which autograd cannot differentiate. torch.func.grad records
    every backward, and differentiates it again only where it is nested.
    """
    once = torch._C._functorch.maybe_current_level() == 1
    if torch.is_grad_enabled() and not (once or torch.compiler.is_compiling()):
        raise RuntimeError(f"{op}: its backward is not differentiable (create_graph=True is not supported)")


def _caller(overload: torch._ops.OpOverload) -> Callable:
    """What public functions call: the overload, which learns how DTensors are sharded when it gets one."""
    run = overload._op  # what calling the overload does

    def call(*arguments: Any) -> Any:
        if torch.compiler.is_compiling():
            _learn_dtensors()
            return overload(*arguments)
        try:  # costs nothing while nothing is raised
            return run(*arguments)
        except NotImplementedError:
            if not _learn_dtensors():
                raise
        return run(*arguments)

    return call


def _learn_dtensors() -> bool:
    """Register how ops are sharded, if DTensors may be about and it is not known yet; whether that was so."""
    rules = "fastmp.ops.core.dtensor"
    if rules in sys.modules or "torch.distributed.tensor" not in sys.modules:
        return False
    importlib.import_module(rules)
    return True


_learn_dtensors._dynamo_marked_constant = True  # type: ignore[attr-defined]  # called while compilers trace


def _differentiable(overload: torch._ops.OpOverload, formula: AutogradFormula | None) -> Callable:
    """Register the op's autograd kernel, and return the callable that public functions use.

    The kernel is C++ where `_C_autograd` is loaded, else Python, which takes longer. An op without a formula
    gets a backward that raises: with no autograd kernel at all it would warn and give no gradient, or
    differentiate the steps of its reference.
    """
    name = overload._opname
    error = _no_derivative(name, formula is not None)
    # 1. C++: hand over the formula, and call the overload.
    if not _AUTOGRAD_ABSENT:
        node = "".join(part.capitalize() for part in name.split("_")) + "Backward"
        ops, differentiable, code = encode(formula) if formula else ([], [], [])
        torch.ops.fastmp_autograd.declare(name, node, error, ops, differentiable, code)
        return _caller(overload)
    # 2. Python: an autograd.Function that runs the op below autograd.
    writes = overload._schema.is_mutable
    defaults = [argument.default_value for argument in overload._schema.arguments]
    forward: Callable = overload
    setup, backward = lambda ctx, inputs, output: None, _raise_in_backward(error)
    if formula is not None:
        forward, setup = formula.forward(overload), formula.setup
        backward = traced(f"fastmp.{name}_backward")(formula.backward(OPS, error))
    function = Differentiable(name, forward, setup, backward)

    def record(apply: Callable, arguments: tuple) -> Any:
        # the dispatcher drops arguments equal to their defaults
        outputs = apply(*arguments, *defaults[len(arguments) :])
        if formula is not None and formula.in_place:
            return None
        return outputs[0] if writes else outputs

    def kernel(keyset: Any, *arguments: Any) -> Any:
        if not (torch.is_grad_enabled() and torch._C._any_requires_grad(*arguments)):
            return overload.redispatch(keyset & torch._C._after_autograd_keyset, *arguments)
        if writes and formula is None:
            raise RuntimeError(f"{name} writes into its arguments and has no derivative: use torch.no_grad()")
        with enable_single_level_autograd_function():  # torch.func comes here once for each of its levels
            return record(function.record, arguments)

    LIBRARY.impl(name, kernel, "Autograd", with_keyset=True)
    eager = _caller(overload)

    def call(*arguments: Any) -> Any:
        transformed = torch._C._are_functorch_transforms_active() and not torch.compiler.is_compiling()
        return record(function, arguments) if transformed else eager(*arguments)

    return call


def _raise_in_backward(error: str) -> Callable:
    """Return the backward of an op without a formula, which raises `error`."""

    def backward(ctx: Any, *gradients: Tensor) -> None:
        raise RuntimeError(error)

    return backward


def _moved_once(overload: torch._ops.OpOverload) -> Callable[..., int]:
    """The bytes of every tensor of the schema, twice if it is changed, as one called "...out" is not."""
    changed = [
        bool(a.alias_info and a.alias_info.is_write and not a.name.endswith("out"))
        for a in overload._schema.arguments
    ]

    def traffic(*arguments: Any) -> int:
        outputs = overload(*tree_map_only(Tensor, lambda t: t.detach().to("meta"), arguments))
        moved = [
            *arguments,
            *tree_leaves(outputs),
            *(a for a, again in zip(arguments, changed, strict=False) if again),
        ]
        return sum(t.numel() * t.element_size() for t in moved if isinstance(t, Tensor))

    return traffic


def _on_one_device(overload: torch._ops.OpOverload, fake: Callable) -> Callable:
    """`fake` for tensors of one device only.

    One meta tensor among others brings a raw call here: it would return memory that nobody has written.
    """
    names = [argument.name for argument in overload._schema.arguments]

    def checked(*arguments: Any) -> Any:
        given = [(n, a.device) for n, a in zip(names, arguments) if isinstance(a, Tensor)]
        for name, device in given:
            if device != given[0][1]:
                raise ValueError(
                    f"{overload._opname}: {given[0][0]} is on {given[0][1]}, but {name} is on {device}"
                )
        return fake(*arguments)

    return checked


def register(
    schema: str,
    *,
    reference: Callable,
    triton: Callable | None = None,
    flops: Callable[..., int] | None = None,
    autograd_formula: str | Mapping[str, str] = "",
    fake: Callable | None = None,
    traffic: Callable[..., int] | None = None,
    prefers_cuda: Callable[..., bool] | None = None,
) -> Op:
    """Declare an op: define `schema` in the `fastmp` namespace and give every device one implementation.

    Args:
        schema: e.g. "bias_gelu(Tensor x, Tensor? bias, str approximate) -> Tensor".
        reference: plain torch on any device; defines the result.
        triton: launches the Triton kernel on CUDA tensors.
        flops: floating-point operations, from the op's arguments.
        autograd_formula: the op's backward, in the grammar of `formulas.py`. Default: no derivative; asking
            for one raises RuntimeError.
        fake: shapes and dtypes only, for torch.compile and meta tensors. Default: the reference, run on
            tensors without data; needed where that reads values or loops over a size.
        traffic: bytes, from the op's arguments. Default: every tensor is read or written once, and one that
            the op changes is both, unless its name ends in "out": then nothing is read from it.
        prefers_cuda: from the op's arguments, True if the CUDA C++ kernel serves this call where FASTMP_OPS
            names no backend and `_C_cuda` exports the op and is compiled for the GPU. Default: the Triton
            kernel serves all calls.

    Returns:
        The op; public functions call it rather than `torch.ops.fastmp.<name>`, which takes longer.
    """
    name = schema.partition("(")[0]
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    overload = getattr(torch.ops.fastmp, name).default
    implementations = {"reference": reference}
    if triton is not None and not _triton.ABSENT:
        implementations["triton"] = triton
    serving, reasons = {}, {}
    serving["cpu"], reasons["cpu"] = _serve_cpu(name, implementations)
    serving["cuda"], reasons["cuda"] = _serve_cuda(name, implementations, prefers_cuda)
    torch.library.register_fake(f"fastmp::{name}", _on_one_device(overload, fake or reference), lib=LIBRARY)
    if overload._schema.is_mutable and _AUTOGRAD_ABSENT:
        LIBRARY.impl(name, _bump_versions(overload), "ADInplaceOrView", with_keyset=True)
    elif overload._schema.is_mutable:
        torch.ops.fastmp_autograd.declare_writes(name)
    formula = AutogradFormula(overload._schema, autograd_formula) if autograd_formula else None
    call = _differentiable(overload, formula)
    if flops is not None:
        register_flop_formula(overload.overloadpacket, get_raw=True)(
            lambda *a, out_val=None, **k: flops(*a, **k)
        )
    OPS[name] = Op(
        name,
        overload,
        implementations,
        serving,
        reasons,
        flops,
        traffic or _moved_once(overload),
        formula,
        call,
    )
    return OPS[name]
