"""Sample inputs of every op, and the check of an op on a device against float64.

The truth is the op's reference on the same inputs in float64. Uninitialised memory is made NaN while an op
runs, so that an element it forgets to write shows. Used by the tests, `fastmp doctor --check` and
`benchmarks/gpu_check.py`; takes seconds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastmp.ops.core.registry import OPS
from fastmp.testing.functions import families

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class OpAccuracy:
    """Error of an op in a dtype against float64, and its bound.

    `error` is infinite where NaN or infinity stand in the wrong places.
    """

    op: str
    dtype: str
    error: float
    bound: float

    @property
    def ok(self) -> bool:
        return self.error <= self.bound


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fill new memory of torch.empty with NaN (integers: the largest value), also in C++ kernels."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic
    fill = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    memory.fill_uninitialized_memory = True
    compiled = "c++" in {op.serving["cpu"] for op in OPS.values()}
    if compiled:
        torch.ops.fastmp_memory.outputs_by_dispatcher(True)
    try:
        yield
    finally:
        if compiled:
            torch.ops.fastmp_memory.outputs_by_dispatcher(False)
        memory.fill_uninitialized_memory = fill
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)


def samples(op: str, *, device: str | torch.device, dtype: torch.dtype, seed: int = 0) -> list[tuple]:
    """Return argument tuples for `torch.ops.fastmp.<op>`, with the same values and strides on every device.

    Args:
        op: a name in `fastmp.ops.core.registry.OPS`.
        dtype: of the activations; what an op keeps in higher precision is float32 then (float64 for float64).
    """
    if op not in OPS:
        raise ValueError(f"samples: no op {op!r}; there are {sorted(OPS)}")
    family = families().get(OPS[op].family)
    if family is None or family.samples is None:
        raise ValueError(
            f"samples: no samples of op {op!r}; add its family {OPS[op].family!r} to FAMILIES in a module of "
            "fastmp/testing/samples"
        )
    made = list(family.samples(op, dtype, torch.Generator().manual_seed(seed)))
    return [tuple(_like(a, device) if isinstance(a, Tensor) else a for a in arguments) for arguments in made]


def _like(tensor: Tensor, device: str | torch.device) -> Tensor:
    """Return a copy on `device` with the same strides."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device).copy_(tensor)


def _in_float64(argument: Any) -> Any:
    if isinstance(argument, Tensor) and argument.is_floating_point():
        return argument.detach().cpu().double()
    if isinstance(argument, torch.dtype) and argument.is_floating_point and argument.itemsize > 1:
        return torch.float64
    return argument.cpu() if isinstance(argument, Tensor) else argument


def run(op: str, implementation: Any, arguments: tuple) -> tuple[Tensor, ...]:
    """Return the outputs of an implementation, then the tensors that a mutating op wrote; arguments are not
    modified.
    """
    written = [
        i for i, a in enumerate(OPS[op].overload._schema.arguments) if a.alias_info and a.alias_info.is_write
    ]
    written = [i for i in written if arguments[i] is not None]
    arguments = tuple(_like(a, a.device) if i in written else a for i, a in enumerate(arguments))
    result = implementation(*arguments)
    outputs = result if isinstance(result, tuple) else () if result is None else (result,)
    return (*outputs, *(arguments[i] for i in written))


def relative_error(value: Tensor, truth: Tensor) -> float:
    """Return the 2-norm of the difference over that of the truth; infinite if NaN or infinities are
    misplaced.
    """
    value, truth = value.detach().cpu().double(), truth.detach().cpu().double()
    special = ~truth.isfinite()
    if value.shape != truth.shape or not torch.equal(special, ~value.isfinite()):
        return torch.inf
    if not torch.equal(value[special].nan_to_num(nan=0.5), truth[special].nan_to_num(nan=0.5)):
        return torch.inf
    difference = (value - truth)[~special].norm().item()
    return (
        difference / max(truth[~special].norm().item(), torch.finfo(torch.float32).tiny)
        if difference
        else 0.0
    )


def _bound(dtype: torch.dtype) -> float:
    """Return the error bound: rounding once to 16 bits costs about eps / 5; wider types also compute in their
    dtype.

    Integers are exact; what is returned for them is not zero, so that it can divide.
    """
    if not dtype.is_floating_point:
        return torch.finfo(torch.float64).eps
    eps = torch.finfo(dtype).eps
    return eps / 2 if dtype.itemsize == 2 else 16 * eps


def _dequantized(q: Tensor, s: Tensor) -> Tensor:
    """Return q * s: where rounding moves the maximum of a block, its scale may be another power of two."""
    blocks = q.double().reshape(*s.shape, -1) if q.numel() else q.double()
    return blocks * s.double().unsqueeze(-1) if q.numel() else blocks


def check_op(
    op: str,
    device: str | torch.device,
    *,
    backend: str | None = None,
    seed: int = 0,
    dtypes: Sequence[torch.dtype] = DTYPES,
) -> list[OpAccuracy]:
    """Run all samples of an op on `device` in each of `dtypes`; one result a dtype.

    Args:
        backend: a key of `OPS[op].implementations`; by default what serves the op on the device.
    """
    entry = OPS[op]
    implementation = entry.overload if backend is None else entry.implementations[backend]
    results = []
    for dtype in dtypes:
        pairs = []
        for arguments in samples(op, device=device, dtype=dtype, seed=seed):
            with poisoned_memory():
                outputs = run(op, implementation, arguments)
            truths = run(op, entry.implementations["reference"], tuple(map(_in_float64, arguments)))
            if op.endswith("_quantized"):
                bound = torch.finfo(outputs[0].dtype).eps / 2
                pairs.append((relative_error(_dequantized(*outputs[:2]), _dequantized(*truths[:2])), bound))
                outputs, truths = outputs[2:], truths[2:]
            pairs += [
                (relative_error(a, b), _bound(a.dtype))
                for a, b in zip(outputs, truths, strict=True)
                if a.dtype != torch.int16  # the lower halves of numbers, of which float64 knows nothing
            ]
        error, bound = max(pairs, key=lambda pair: pair[0] / pair[1])
        results.append(OpAccuracy(op, str(dtype).removeprefix("torch."), error, bound))
    return results
