"""An activation from outside of fastmp: a linear unit gated by ReLU."""

from __future__ import annotations

import torch
from torch import Tensor

from fastmp.config import ACTIVATIONS, ActivationSpec


def reglu(x: Tensor, *, bias: Tensor | None = None) -> Tensor:
    gate, up = (x if bias is None else x + bias).chunk(2, -1)
    return torch.relu(gate) * up


def register() -> None:
    ACTIVATIONS.register(ActivationSpec("reglu", reglu, num_gates=1, help="gated ReLU"))
