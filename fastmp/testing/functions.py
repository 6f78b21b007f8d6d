"""Public functions of `fastmp.ops` with their plain-torch meaning and a way to draw arguments.

The modules of `fastmp/testing/samples` list them by op family in `FAMILIES`. One set of tests runs over all
of them, and so does `benchmarks/gpu_check`. Arguments come from a `random.Random`: seeded, or driven by
hypothesis, which then shrinks them.
"""

from __future__ import annotations

import functools
import importlib
import math
import pkgutil
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import fastmp.testing.samples

_SIZES = (0, 1, 2, 3, 5, 7, 8, 13, 16, 17, 31, 32, 61, 64, 97, 128, 257, 512, 1031)
_SPECIAL = (math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-40, 3e38, -6e4)


class Draw:
    """Source of arguments of one dtype and device.

    Args:
        special: tensors may hold NaN, infinities, subnormal and very large numbers.
        large: draw a regular case of at least 100,000 elements, to estimate errors.
        rows: draw that regular case with so many rows (tokens, queries), whatever its size.
        small: draw a case for Triton's interpreter, which takes milliseconds a program.
    """

    def __init__(
        self,
        source: random.Random,
        dtype: torch.dtype = torch.float64,
        *,
        device: str = "cpu",
        special: bool = False,
        large: bool = False,
        small: bool = False,
        rows: int | None = None,
    ) -> None:
        self.source, self.dtype, self.device = source, dtype, torch.device(device)
        self.special, self.large, self.small = special, large or rows is not None, small
        self.rows = rows
        self.generator = torch.Generator().manual_seed(source.getrandbits(32))

    def choice(self, options: Sequence[Any]) -> Any:
        return options[self.source.randrange(len(options))]

    def flag(self) -> bool:
        return self.source.random() < 0.5

    def size(self, most: int = 64, least: int = 0) -> int:
        """Draw an edge-case size: zero, one, primes, powers of two and their neighbours."""
        return self.choice([size for size in _SIZES if least <= size <= most])

    def tensor(self, *shape: int, scale: float = 1.0, grad: bool = True) -> Tensor:
        """Draw normal numbers with unusual strides, as a leaf that requires grad by default."""
        values = torch.randn(shape, generator=self.generator, dtype=torch.float64) * scale
        if self.special and values.numel() and self.flag():
            for _ in range(3):
                values.view(-1)[self.source.randrange(values.numel())] = self.choice(_SPECIAL)
        tensor = self._laid_out(values.to(self.dtype))
        return tensor.requires_grad_() if grad else tensor

    def ids(self, *shape: int, below: int) -> Tensor:
        """Draw int64 numbers in [0, below)."""
        return torch.randint(below, shape, generator=self.generator).to(self.device)

    def _laid_out(self, values: Tensor) -> Tensor:
        values = values.to(self.device)
        layout = "contiguous" if self.large else self.choice(["contiguous", "apart", "transposed", "offset"])
        if values.dim() == 0 or layout == "contiguous":
            return values
        if layout == "apart":
            return torch.cat([values, values], -1)[..., : values.shape[-1]].detach()
        if layout == "transposed":
            return values.transpose(0, -1).contiguous().transpose(0, -1)
        flat = torch.cat([values.new_zeros(3), values.flatten()])
        return flat[3:].view(values.shape)


@dataclass(frozen=True)
class Function:
    """Public function with its equivalent in plain torch, and a way to draw its arguments.

    Attributes:
        eager: takes the arguments of `call` in every dtype: the truth in float64, the yardstick for errors in
            bfloat16.
        draw: returns positional and keyword arguments.
        interpret: its Triton kernels run in the interpreter.
    """

    name: str
    call: Callable[..., Any]
    eager: Callable[..., Any]
    draw: Callable[[Draw], tuple[tuple, dict[str, Any]]]
    interpret: bool = True


@dataclass(frozen=True)
class OpFamily:
    """Samples of the ops that a module of `fastmp/ops` defines, and its public functions.

    Attributes:
        samples: yields argument tuples of an op for a dtype; None if the family has functions only.
        functions: its public functions; empty if it has ops only.
    """

    samples: Callable[[str, torch.dtype, torch.Generator], Iterator[tuple]] | None = None
    functions: tuple[Function, ...] = ()


@functools.cache
def families() -> dict[str, OpFamily]:
    """Return all op families by name, sorted: the `FAMILIES` of every module in `fastmp/testing/samples`."""
    found: dict[str, OpFamily] = {}
    for module in pkgutil.iter_modules(fastmp.testing.samples.__path__):
        found |= importlib.import_module(f"fastmp.testing.samples.{module.name}").FAMILIES
    return dict(sorted(found.items()))


def functions() -> dict[str, Function]:
    """Return all public functions by name."""
    return {function.name: function for family in families().values() for function in family.functions}


def as_tuple(result: Any) -> tuple[Tensor, ...]:
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


def converted(arguments: Any, dtype: torch.dtype, device: str | None = None) -> Any:
    """Return the arguments with floating tensors as new leaves of `dtype`, with the same strides.

    device: of all tensors; None: where they are.
    """
    if isinstance(arguments, Tensor):
        if not arguments.is_floating_point():
            return arguments.to(device)
        place = arguments.device if device is None else device
        copy = torch.empty_strided(arguments.shape, arguments.stride(), dtype=dtype, device=place)
        return copy.copy_(arguments.detach()).requires_grad_(arguments.requires_grad)
    if isinstance(arguments, dict):
        return {name: converted(value, dtype, device) for name, value in arguments.items()}
    if isinstance(arguments, (tuple, list)):
        return type(arguments)(converted(value, dtype, device) for value in arguments)
    return arguments


def leaves(arguments: Any) -> list[Tensor]:
    """Return the tensors among the arguments that require grad, in order."""
    if isinstance(arguments, Tensor):
        return [arguments] if arguments.requires_grad else []
    if isinstance(arguments, dict):
        return leaves(list(arguments.values()))
    return (
        [leaf for value in arguments for leaf in leaves(value)]
        if isinstance(arguments, (tuple, list))
        else []
    )


def gradients_for(outputs: Sequence[Tensor]) -> list[Tensor]:
    """Return upstream gradients for the differentiable outputs, the same numbers for every dtype."""
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(out.shape, generator=generator, dtype=torch.float64) for out in outputs]
    return [g.to(out.device, out.dtype) for g, out in zip(drawn, outputs, strict=True)]


def evaluate(call: Callable, positional: tuple, keywords: dict) -> list[Tensor]:
    """Return the outputs, then the gradients of all leaves among the arguments (zeros if there is none)."""
    outputs = as_tuple(call(*positional, **keywords))
    inputs = leaves((positional, keywords))
    differentiable = [out for out in outputs if out.requires_grad]
    grads: Sequence[Tensor] = ()
    if differentiable and inputs:
        grads = torch.autograd.grad(
            differentiable, inputs, gradients_for(differentiable), allow_unused=True, materialize_grads=True
        )
    return [*(out.detach() for out in outputs), *grads]
