"""PEFT's LoRA on experts (`target_parameters`) of accelerated models, by `fastmp.ops.grouped_lora`.

PEFT wraps a module of experts once for each parameter that it adapts, and merges W + scale B A of all experts
into a new tensor in every forward. `register` replaces one method of that wrapper: for accelerated experts it
passes the factors A and B to the module instead, whose GEMMs are `grouped_lora` then. Adapters, their names
and their checkpoints are PEFT's. What the op does not support keeps PEFT's merged weights, with a warning.
"""

from __future__ import annotations

import contextlib
import importlib.util
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils.parametrize import is_parametrized, type_before_parametrizations

from fastmp.hf.fp8_modules import experts_are_fp8
from fastmp.ops import grouped_lora, grouped_mm
from fastmp.ops.core.checks import FLOATING

_FACTORS = "_fastmp_lora"  # attribute of experts while their forward runs: {name of a parameter: its factors}
_TARGETS = ("gate_up_proj", "up_proj", "down_proj")


class Factors(NamedTuple):
    """LoRA of one parameter of the experts: scale * b[e] @ a[e] is added to the weight of expert e."""

    a: Tensor  # (E, R, K)
    b: Tensor  # (E, N, R)
    scale: float


def register(implementation: str) -> None:
    """Replace PEFT's merging of weights for experts with this `experts_implementation`, once in a process.

    Without PEFT, or with a release that has no LoRA on parameters, nothing happens.
    """
    if importlib.util.find_spec("peft") is None:
        return
    from peft.tuners.lora import layer

    wrapper = getattr(layer, "ParamWrapper", None)
    merge = getattr(wrapper, "_activate_lora", None)
    if merge is None or hasattr(merge, "merged"):
        return

    def activate(self: Any, active_adapters: list[str]) -> AbstractContextManager[None]:
        experts = self.get_base_layer()
        ours = getattr(getattr(experts, "config", None), "_experts_implementation", None) == implementation
        adapters = [name for name in active_adapters if name in self.lora_A] if ours else []
        if not adapters:
            return merge(self, active_adapters)
        if why := _why_not(self, experts):
            name = f"{type_before_parametrizations(experts).__name__}.{self.parameter_name}"
            warnings.warn(f"LoRA on {name} merges the weights in every forward: {why}", stacklevel=2)
            return merge(self, active_adapters)
        return _passed(experts, self.parameter_name, _factors(self, adapters, experts.is_transposed))

    activate.merged = merge  # type: ignore[attr-defined]
    wrapper._activate_lora = activate  # type: ignore[union-attr]


def _why_not(wrapper: Any, experts: Any) -> str | None:
    """Return the reason why `grouped_lora` does not compute a parameter of the experts, or None."""
    weight = getattr(experts, wrapper.parameter_name)
    if wrapper.parameter_name not in _TARGETS or weight.dim() != 3 or wrapper.num_experts == 1:
        return "expected gate_up_proj, up_proj or down_proj of several experts"
    if experts_are_fp8(experts):
        return "the experts multiply in FP8"
    plain = type(weight) in (Tensor, nn.Parameter) or _over_ep(weight)
    if not plain or weight.dtype not in FLOATING:
        return f"the weight is a {type(weight).__name__} of {weight.dtype}"
    if weight.requires_grad:
        return "the weight is trained too; call requires_grad_(False) on it"
    if is_parametrized(experts, wrapper.parameter_name):
        return "the weight is parametrized"
    return None


def _over_ep(weight: Tensor) -> bool:
    """Return True if the experts of a weight are sharded over expert-parallel ranks."""
    return isinstance(weight, DTensor) and "ep" in (weight.device_mesh.mesh_dim_names or ())


def _factors(wrapper: Any, adapters: Sequence[str], transposed: bool) -> Factors:
    """Return the factors of the active adapters, for the experts of this rank of ep.

    Those of several adapters are joined along the rank of LoRA.
    """
    weight, found = wrapper.get_param(), []
    for adapter in adapters:
        left, right, scale = wrapper.get_delta_factors(adapter)  # of the weight as it is stored
        a, b = (left.mT, right.mT) if transposed else (right, left)
        if _over_ep(weight):
            mesh = weight.device_mesh
            a, b = (t.chunk(mesh["ep"].size())[mesh.get_local_rank("ep")] for t in (a, b))
        found.append(Factors(a, b, scale))
    if len(found) == 1:
        (only,) = found
        return only._replace(b=only.b.contiguous())
    a = torch.cat([each.a for each in found], 1)
    return Factors(a, torch.cat([each.b * each.scale for each in found], 2), 1.0)


@contextlib.contextmanager
def _passed(experts: Any, name: str, factors: Factors) -> Iterator[None]:
    """Pass the factors of a parameter to the module of experts for one forward."""
    held = experts.__dict__.setdefault(_FACTORS, {})
    held[name] = factors
    try:
        yield
    finally:
        del held[name]


def has_factors(experts: Any, name: str) -> bool:
    """Return True if LoRA of this parameter is active in the forward that runs."""
    return name in experts.__dict__.get(_FACTORS, ())


def expert_linear(
    experts: Any, name: str, weight: Tensor, rows: Tensor, offsets: Tensor, bias: Tensor | None
) -> Tensor:
    """Multiply rows sorted by expert by the parameter `name` of the experts, with its LoRA if one is active.

    Args:
        experts: the module of experts.
        name: "gate_up_proj", "up_proj" or "down_proj".
        weight: (L, N, K), or (L, K, N) if the module is transposed: that parameter, of the experts here.
        rows: (M, K).
        offsets: (L,) int32, where the rows of each expert end.
        bias: (L, N), or None.

    Returns:
        (M, N).
    """
    transposed, factors = experts.is_transposed, experts.__dict__.get(_FACTORS, {}).get(name)
    if factors is None:
        return grouped_mm(rows, weight, offsets, transposed=transposed, bias=bias)
    a, b, scale = factors
    return grouped_lora(rows, weight, a, b, offsets, scale=scale, transposed=transposed, bias=bias)
