"""Activations by name: the fused ops that the specs of `fastmp.config.specs` name."""

from __future__ import annotations

from functools import partial
from typing import Protocol

from torch import Tensor

from fastmp.config import ACTIVATIONS
from fastmp.config.specs import load
from fastmp.ops import bias_gelu, swiglu
from fastmp.ops import clamped_swiglu as clamped_swiglu_op
from fastmp.ops import geglu as geglu_op

__all__ = [
    "ActivationFunction",
    "activation_function",
    "clamped_swiglu",
    "geglu",
    "geglu_erf",
    "gelu",
    "gelu_tanh",
    "swiglu",
]


class ActivationFunction(Protocol):
    """Maps (..., num_projections * F) and a bias (num_projections * F,) or None to (..., F)."""

    def __call__(self, x: Tensor, *, bias: Tensor | None = None) -> Tensor: ...


gelu = partial(bias_gelu, approximate="none")
gelu_tanh = partial(bias_gelu, approximate="tanh")
geglu = partial(geglu_op, approximate="tanh")
geglu_erf = partial(geglu_op, approximate="none")


def clamped_swiglu(x: Tensor, *, bias: Tensor | None = None) -> Tensor:
    """Return the clamped SwiGLU of x + bias, with GPT-OSS's slope and limit; gate and up are interleaved."""
    return clamped_swiglu_op(x if bias is None else x + bias)


def activation_function(name: str) -> ActivationFunction:
    """Return the op of the activation `name`. Raises ValueError for an unknown one."""
    found: ActivationFunction = load(ACTIVATIONS[name].op)
    return found
