"""Registration of ops under `torch.ops.fastmp`: schema, kernels, autograd formula and costs in one call.

`register` declares an op, `OPS` lists them, and `Op.__call__` runs one and records its backward. Public
functions start with `autocast` and the checks in `checks.py`.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVarTuple

import torch
from torch import Tensor
from torch._C._functorch import TransformType
from torch._functorch.autograd_function import enable_single_level_autograd_function
from torch.autograd import Function
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import register_flop_formula

from fastmp.ops.core import _triton, backends
from fastmp.ops.core.backends import LIBRARY
from fastmp.ops.core.contracts import ArgumentCheck, Contract
from fastmp.ops.core.formulas import AutogradFormula, encode
from fastmp.profiling import traced

# evaluated once: torch.compile before torch 2.12 cannot trace the query
_AUTOCAST_DEVICES = {d for d in ("cpu", "cuda", "xpu", "hpu", "mps") if torch.amp.is_autocast_available(d)}
Tensors = TypeVarTuple("Tensors")  # each a Tensor or None


class Differentiable:
    """A function with a backward, for autograd, torch.func.grad and torch.compile.

    An `autograd.Function` around an op has a third of the CPU overhead of a backward registered with
    `torch.library.register_autograd`.

    Args:
        name: name of the node in the autograd graph.
        forward: takes positional arguments and returns a tensor or a tuple of tensors.
        setup: takes (ctx, inputs, output) and saves what the backward needs. Pass only inputs and outputs to
            `ctx.save_for_backward`: with anything else a second derivative would silently be wrong.
        backward: takes (ctx, *gradients) and returns one gradient, or None, for each argument.

    Example:

        square = Differentiable(
            "square",
            forward=lambda x: x * x,
            setup=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
            backward=lambda ctx, grad: 2 * grad * ctx.saved_tensors[0],
        )
        x = torch.ones(3, requires_grad=True)
        square(x).sum().backward()
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
        # torch.func requires a separate setup_context; `apply` then binds arguments by inspection, which is
        # slow
        self.function_of_func = function(
            forward=forward, setup_context=setup, backward=backward, vmap=self._each_sample
        )
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

    def _each_sample(self, info: Any, in_dims: tuple, *arguments: Any) -> tuple[Any, Any]:
        """Call the function once for each sample, as torch.func.vmap does for ops without a batching rule."""
        outputs = [
            self(*(x if type(dim) is not int else x.select(dim, i) for x, dim in zip(arguments, in_dims)))
            for i in range(info.batch_size)
        ]
        if isinstance(outputs[0], Tensor):
            return torch.stack(outputs), 0
        return tuple(map(torch.stack, zip(*outputs))), (0,) * len(outputs[0])


@dataclass(frozen=True)
class Op:
    """A registered op; calling it runs the op and records its backward if an argument requires grad.

    implementations: by backend name: "reference", "triton", "cuda".
    serving, reasons: the backend of each device, and why.
    flops: floating-point operations, from the op's arguments.
    traffic: the fewest bytes that must cross device memory, from the op's arguments.
    run: the overload without further checks, for callers that have asked `validates_args`.
    check: raises ValueError if the schema rules the arguments out: None, no memory, or not finite.
    shard: how DTensors may be sharded, in the grammar of `dtensor.py`; "": not at all.
    """

    name: str
    overload: torch._ops.OpOverload
    implementations: dict[str, Callable]
    serving: dict[str, str]
    reasons: dict[str, str]
    flops: Callable[..., int] | None
    traffic: Callable[..., int]
    autograd_formula: AutogradFormula | None
    run: Callable[..., Any]
    check: ArgumentCheck
    shard: str = ""

    def __call__(self, *arguments: Any) -> Any:
        """Run the op; register DTensor sharding rules on the first DTensor argument.

        Where a kernel refuses what the op's schema already rules out, raise ValueError.
        """
        if torch.compiler.is_compiling():
            _register_dtensor_rules()
            return self.overload(*arguments)
        try:  # costs nothing unless it raises
            return self.run(*arguments)
        except NotImplementedError:
            if not _register_dtensor_rules():
                raise
        except RuntimeError:
            if all(type(a) in _PLAIN for a in arguments if isinstance(a, Tensor)) and not is_recorded():
                self.check(arguments)
            raise
        return self.run(*arguments)

    def validates_args(self, *tensors: Tensor) -> bool:
        """Return True if the selected kernel validates its own arguments, as C++ kernels do.

        A public function may then call it without checks, and run them for their message only if it raises.
        """
        for tensor in tensors:
            if type(tensor) not in _PLAIN or not tensor.is_cpu:
                return False
        return self.serving["cpu"] == "c++" and not is_recorded()

    @property
    def family(self) -> str:
        """Name of the module in fastmp/ops that defines the op, and of its tests, samples and benchmark."""
        module = self.implementations["reference"].__module__.rpartition(".")[2]
        return module.removesuffix("_reference")  # a family may keep its references in a file of their own


OPS: dict[str, Op] = {}
_PLAIN = (Tensor, torch.nn.Parameter)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which kernels compute and accumulate: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def autocast(*tensors: *Tensors) -> tuple[*Tensors]:
    """Cast floating-point tensors to the autocast dtype if autocast is enabled for their device.

    None, float64 and integer tensors are returned unchanged, as in torch's own rules. Public functions call
    it first; kernels compute in float32 anyway, so the narrow dtype costs one rounding.

    Example:

        with torch.autocast("cpu", dtype=torch.bfloat16):
            x, bias = autocast(torch.ones(3), None)
        assert x.dtype == torch.bfloat16 and bias is None
    """
    if not (torch._C._is_any_autocast_enabled() or torch.compiler.is_compiling()):
        return tensors
    inputs: tuple[Any, ...] = tensors
    device = next((t.device.type for t in inputs if t is not None), "cpu")
    if device not in _AUTOCAST_DEVICES or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    cast: Any = tuple(
        t if t is None or t.dtype == torch.float64 or not t.is_floating_point() else t.to(dtype)
        for t in inputs
    )
    return cast


def without_autocast(device: str) -> AbstractContextManager:
    """Return a context with autocast disabled: GEMMs keep the dtype of their operands."""
    return torch.autocast(device, enabled=False) if device in _AUTOCAST_DEVICES else nullcontext()


@cache
def shared_memory(device: int) -> int:
    """Return the bytes of shared memory per multiprocessor of the GPU with index `device`."""
    return torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor


def can_read_values(x: torch.Tensor) -> bool:
    """Return True if the host may read values of `x`, to check them.

    It must not cause a host-device synchronisation, nor happen under a tracer, which would bake the value in.
    """
    return type(x) is Tensor and x.is_cpu and not is_recorded()


def is_recorded() -> bool:
    """Return True under a compiler, a dispatch mode or a functorch transform."""
    if torch.compiler.is_compiling():
        return True
    return torch._C._len_torch_dispatch_stack() > 0 or torch._C._are_functorch_transforms_active()


def _bump_versions(overload: torch._ops.OpOverload) -> Callable:
    """Return the ADInplaceOrView kernel of a mutating op: run it, then bump the versions of what it wrote.

    Kernels on torch's stable ABI do not bump versions; autograd could not detect that a saved tensor was
    overwritten.
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
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return
    levels = torch._C._functorch.get_interpreter_stack() or ()
    if sum(level.key() != TransformType.Vmap for level in levels) != 1:
        raise RuntimeError(f"{op}: its backward is not differentiable (create_graph=True is not supported)")


def _register_dtensor_rules() -> bool:
    """Import the sharding rules if the program uses DTensors and has not yet. Return True if it did."""
    rules = "fastmp.ops.core.dtensor"
    if rules in sys.modules or "torch.distributed.tensor" not in sys.modules:
        return False
    importlib.import_module(rules)
    return True


# Dynamo calls it while tracing instead of tracing it.
_register_dtensor_rules._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _differentiable(overload: torch._ops.OpOverload, formula: AutogradFormula | None) -> Callable:
    """Register the op's autograd kernel, and return the function that calls the op.

    The kernel is C++ where `_C_autograd` is loaded, else Python, which takes longer. An op without a formula
    gets a backward that raises: with no autograd kernel at all it would warn and give no gradient, or
    differentiate the steps of its reference.
    """
    name, run = overload._opname, backends.direct(overload)
    error = _no_derivative(name, formula is not None)
    # 1. C++: hand over the formula, and call the overload.
    if not backends.AUTOGRAD_ABSENT:
        node = "".join(part.capitalize() for part in name.split("_")) + "Backward"
        ops, differentiable, code = encode(formula) if formula else ([], [], [])
        torch.ops.fastmp_autograd.declare(name, node, error, ops, differentiable, code)
        return run
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

    def call(*arguments: Any) -> Any:
        transformed = torch._C._are_functorch_transforms_active()
        return record(function, arguments) if transformed else run(*arguments)

    return call


def _raise_under_vmap(name: str) -> Callable:
    """Return the kernel of an op that writes into its arguments for the samples of torch.func.vmap."""

    def kernel(*arguments: Any) -> None:
        raise RuntimeError(
            f"{name}: torch.func.vmap does not support this op, which writes in place; loop over the samples"
        )

    return kernel


def _raise_in_backward(error: str) -> Callable:
    """Return the backward of an op without a formula, which raises `error`."""

    def backward(ctx: Any, *gradients: Tensor) -> None:
        raise RuntimeError(error)

    return backward


def _moved_once(overload: torch._ops.OpOverload, overwrites: str) -> Callable[..., int]:
    """Return the default traffic: each tensor once, or twice if it is mutated and not overwritten."""
    names = [a.name for a in overload._schema.arguments]
    mutated = {a.name for a in overload._schema.arguments if a.alias_info and a.alias_info.is_write}
    name, _, flag = overwrites.partition(" without ")
    if (name and name not in mutated) or (flag and flag not in names):
        raise ValueError(f"{overload._opname}: overwrites={overwrites!r} does not fit {overload._schema}")

    def traffic(*arguments: Any) -> int:
        given = dict(zip(names, arguments, strict=False))
        outputs = overload(*tree_map_only(Tensor, lambda t: t.detach().to("meta"), arguments))
        overwritten = {name} if not (flag and given.get(flag, True)) else set()
        twice = [given.get(each) for each in mutated - overwritten]
        moved = [each for each in (*arguments, *tree_leaves(outputs), *twice) if isinstance(each, Tensor)]
        return sum(t.numel() * t.element_size() for t in moved)

    return traffic


def _checked_kernel(check: ArgumentCheck, contract: Contract | None, kernel: Callable) -> Callable:
    """Wrap a kernel in plain torch with the checks of its arguments."""

    @functools.wraps(kernel)
    def checked(*arguments: Any) -> Any:
        arguments = check.completed(arguments)
        check(arguments)
        if contract is not None:
            contract(arguments)
        return kernel(*arguments)

    return checked


def _checked_launch(check: ArgumentCheck, contract: Contract | None, launch: Callable) -> Callable:
    """Wrap a launch with the checks of its arguments.

    Of tensors without memory, the launcher itself finds those whose storage was freed, not those of which it
    was shrunk.
    """

    @functools.wraps(launch)
    def checked(*arguments: Any) -> Any:
        if len(arguments) < len(check.names):
            arguments = check.completed(arguments)
        if check.numbers:
            check.finite(arguments)
        try:
            if contract is not None:
                contract(arguments)
            return launch(*arguments)
        except Exception:
            check.types(arguments)  # None where a tensor is due is the cause
            raise

    return checked


def _checked_fake(check: ArgumentCheck, contract: Contract | None, fake: Callable) -> Callable:
    """Wrap a fake kernel with the checks of its arguments, and of their devices.

    A raw call with one meta tensor among real ones is dispatched to the fake kernel, which would return
    uninitialised memory.
    """

    def checked(*arguments: Any) -> Any:
        arguments = check.completed(arguments)
        check.types(arguments)
        check.finite(arguments)
        devices = [(n, a.device) for n, a in zip(check.names, arguments) if isinstance(a, Tensor)]
        for name, device in devices:
            if device != devices[0][1]:
                raise ValueError(
                    f"{check.op}: {devices[0][0]} is on {devices[0][1]}, but {name} is on {device}"
                )
        if contract is not None:
            contract(arguments)
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
    overwrites: str = "",
    shard: str = "",
    prefers_cuda: Callable[..., bool] | None = None,
    contract: str = "",
    guards_launch: bool = False,
) -> Op:
    """Register an op: define `schema` in the `fastmp` namespace, with one kernel per device.

    Args:
        schema: e.g. "bias_gelu(Tensor x, Tensor? bias, str approximate) -> Tensor".
        reference: plain torch on any device; defines the result.
        triton: launches the Triton kernel on CUDA tensors.
        flops: floating-point operations, from the op's arguments.
        autograd_formula: the op's backward, in the grammar of `formulas.py`. Default: no derivative; asking
            for one raises RuntimeError.
        fake: shapes and dtypes only, for torch.compile and meta tensors. Default: the reference on fake
            tensors; pass one for a reference that reads values or loops over a size.
        traffic: bytes of device memory, from the op's arguments. Default: every tensor is read or written
            once; a mutated tensor both, unless it is overwritten.
        overwrites: the mutated argument that is only written: always ("out"), or where a flag is False
            ("total without add").
        shard: how DTensors may be sharded, in the grammar of `dtensor.py`. Default: the op takes none.
        prefers_cuda: True, from the op's arguments, if CUDA C++ should serve the call. It does if `_C_cuda`
            exports the op, is compiled for the GPU, and FASTMP_OPS names no backend. Default: Triton serves
            all calls.
        contract: sizes, dtypes and ranges of the arguments, in the grammar of `contracts.py`; the op's fake
            and its reference check them.
        guards_launch: check the contract before each Triton launch, too. It takes a microsecond: for ops
            that layers call without a public function, which would check.

    Returns:
        The op. Public functions call it rather than `torch.ops.fastmp.<name>`, which is slower.

    Example:

        register("halve_backward(Tensor grad) -> Tensor", reference=lambda grad: grad / 2)
        halve = register(
            "halve(Tensor x) -> Tensor",
            reference=lambda x: x / 2,
            autograd_formula="halve_backward(grad) -> x",
        )
        halve(torch.ones(3, requires_grad=True)).sum().backward()
    """
    name = schema.partition("(")[0]
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    overload = getattr(torch.ops.fastmp, name).default
    check = ArgumentCheck(overload._schema)
    required = Contract(overload._schema, contract) if contract else None
    if not backends.CPU_ABSENT:
        torch.ops.fastmp_names.declare(name, " ".join(check.names))
    implementations = {"reference": _checked_kernel(check, required, reference)}
    if triton is not None and not _triton.ABSENT:
        implementations["triton"] = _checked_launch(check, required if guards_launch else None, triton)
    serving, reasons = {}, {}
    serving["cpu"], reasons["cpu"] = backends.serve_cpu(name, implementations)
    serving["cuda"], reasons["cuda"] = backends.serve_cuda(name, implementations, prefers_cuda)
    implementations["reference"] = reference  # callers also compare with copies in float64
    checked_fake = _checked_fake(check, required, fake or reference)
    torch.library.register_fake(f"fastmp::{name}", checked_fake, lib=LIBRARY)
    if overload._schema.is_mutable and backends.AUTOGRAD_ABSENT:
        LIBRARY.impl(name, _bump_versions(overload), "ADInplaceOrView", with_keyset=True)
    elif overload._schema.is_mutable:
        torch.ops.fastmp_autograd.declare_writes(name)
    if overload._schema.is_mutable:
        LIBRARY.impl(name, _raise_under_vmap(name), "FuncTorchBatched")
    formula = AutogradFormula(overload._schema, autograd_formula) if autograd_formula else None
    run = _differentiable(overload, formula)
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
        traffic or _moved_once(overload, overwrites),
        formula,
        run,
        check,
        shard,
    )
    return OPS[name]
