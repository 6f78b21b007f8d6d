"""The fused op that computes an activation of `config.ACTIVATIONS`."""

from __future__ import annotations

from functools import partial
from typing import Protocol

from torch import Tensor

from fastmp.config import Activation
from fastmp.ops import bias_gelu, geglu, swiglu

__all__ = ["ActivationFunction", "activation_function"]


class ActivationFunction(Protocol):
    """Maps (..., blocks * F) and a bias (blocks * F,) or None to the activation (..., F) of their sum."""

    def __call__(self, x: Tensor, *, bias: Tensor | None = None) -> Tensor: ...


_FUNCTIONS: dict[Activation, ActivationFunction] = {
    Activation("gelu"): partial(bias_gelu, approximate="none"),
    Activation("gelu_tanh"): partial(bias_gelu, approximate="tanh"),
    Activation("silu", blocks=2): swiglu,
    Activation("gelu", blocks=2): partial(geglu, approximate="none"),
    Activation("gelu_tanh", blocks=2): partial(geglu, approximate="tanh"),
}


def activation_function(owner: str, activation: Activation) -> ActivationFunction:
    """The op of `activation`; ValueError, in the name of `owner`, where there is none."""
    if activation not in _FUNCTIONS:
        known = ", ".join(str(each) for each in _FUNCTIONS)
        raise ValueError(f"{owner}: no op computes {activation}; there are {known}")
    return _FUNCTIONS[activation]
