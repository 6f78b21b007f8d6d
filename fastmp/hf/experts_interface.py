"""Grouped-GEMM experts for transformers models, as an implementation of transformers' interface.

`register` adds "fastmp" to the implementations of `model.set_experts_implementation`. Gated and plain MLPs,
biases, transposed weights and custom gates are supported.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fastmp.hf.fp8_modules import experts_in_fp8
from fastmp.hf.hooks import activation_form
from fastmp.hf.lora import expert_linear, has_factors
from fastmp.ops import clamped_swiglu, grouped_mlp_in, permutation, permute, unpermute
from fastmp.ops.core.registry import compute_dtype

NAME = "fastmp"
# attributes that describe a module of experts
FLAGS = ("has_gate", "has_bias", "is_transposed", "is_concatenated")


def reads(module: Any) -> tuple[str, ...]:
    """Return the attributes that the implementation reads from a module of experts."""
    first = "gate_up_proj" if module.has_gate else "up_proj"
    names: tuple[str, ...] = ("num_experts", "_apply_gate", first, "down_proj")
    if module.has_bias:
        names += (f"{first}_bias", "down_proj_bias")
    plain = not module.has_gate or getattr(type(module), "_apply_gate", None) is _default_gate()
    return (*names, "act_fn") if plain else names


_USUAL: set[Any] = set()  # transformers' default `_apply_gate`
_CLAMPED: set[Any] = set()  # the `_apply_gate`s that compute clamped_swiglu


def by(module: Any) -> str:
    """Return the ops of a module of experts, for the table; record a gate that is `clamped_swiglu`."""
    gate = type(module)._apply_gate
    if gate is _default_gate() or not module.has_gate:
        return "fastmp.ops.grouped_mm, grouped_mlp_in, permute"
    if {"alpha", "limit"} <= vars(module).keys() and _is_clamped(module):
        _CLAMPED.add(gate)
        return "fastmp.ops.grouped_mm, clamped_swiglu, permute"
    return "fastmp.ops.grouped_mm, permute, between them transformers' gate"


def _is_clamped(module: Any) -> bool:
    """Return True if the module's gate equals `clamped_swiglu` on values inside and outside of its limits."""
    values = torch.linspace(-1.5, 1.5, 12, dtype=torch.float64, device="cpu") * module.limit
    pairs = torch.cartesian_prod(values, values).flatten()
    ours = clamped_swiglu(pairs, alpha=module.alpha, limit=module.limit)
    return torch.allclose(module._apply_gate(pairs), ours, rtol=1e-9, atol=1e-12)


def _default_gate() -> Any:
    from transformers.integrations import moe

    return getattr(moe, "_default_apply_gate", None)  # None: no gate is the default one


def register() -> None:
    """Register the implementation with transformers, once in a process."""
    from transformers.integrations import moe

    if NAME not in moe.ALL_EXPERTS_FUNCTIONS:
        _USUAL.add(_default_gate())  # found outside of what torch.compile traces
        moe.ALL_EXPERTS_FUNCTIONS.register(NAME, experts)


def experts(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Compute the experts' outputs, weighted and summed for each token.

    Args:
        self: the module of experts.
        hidden_states: (T, H).
        top_k_index: (T, k), the experts of each token; an index of `num_experts`, which expert parallelism
            gives to experts of other ranks, adds nothing.
        top_k_weights: (T, k).

    Returns:
        (T, H) of the dtype of `hidden_states`.
    """
    # 1. Permute (token, expert) assignments so that the rows of each expert are contiguous.
    row_of, offsets = permutation(top_k_index.to(torch.int32), self.num_experts)
    rows = permute(hidden_states, row_of, row_of.numel())
    # 2. Two grouped GEMMs with the activation between them.
    out = expert_mlps(self, rows, offsets)
    # 3. Weight each row and sum the rows of each token.
    out = unpermute(out, row_of, top_k_weights.to(compute_dtype(out.dtype)))
    return out.to(hidden_states.dtype)


def expert_mlps(self: Any, rows: Tensor, offsets: Tensor) -> Tensor:
    """Compute the MLPs of the experts that `self` holds.

    Args:
        self: the module of experts.
        rows: (M, H), sorted by expert.
        offsets: int32 (L,), where the rows of each of the L experts end.

    Returns:
        (M, H).
    """
    out = experts_in_fp8(self, rows, offsets)
    if out is None:
        bias = local(self.down_proj_bias) if self.has_bias else None
        out = _first_linear(self, rows, offsets)
        out = expert_linear(self, "down_proj", local(self.down_proj), out, offsets, bias)
    if getattr(self, "has_post_expert_norm", False):
        out = self.post_expert_norm(out)
    return out


def local(weight: Tensor) -> Tensor:
    """Return this rank's experts of a weight that is sharded over expert-parallel ranks."""
    return weight.to_local() if isinstance(weight, DTensor) else weight


def _first_linear(self: Any, rows: Tensor, offsets: Tensor) -> Tensor:
    """Compute the first linear layer of the experts' MLPs and the activation."""
    name = "gate_up_proj" if self.has_gate else "up_proj"
    weight = local(getattr(self, name))
    bias = local(getattr(self, f"{name}_bias")) if self.has_bias else None
    form = activation_form(getattr(self, "act_fn", None))
    gate = None if "_apply_gate" in self.__dict__ else type(self)._apply_gate
    plain = (self.is_concatenated and gate in _USUAL) or not self.has_gate
    if form is not None and plain and not self.is_transposed and not has_factors(self, name):
        return grouped_mlp_in(rows, weight, offsets, form=form, gated=self.has_gate, bias=bias)
    out = expert_linear(self, name, weight, rows, offsets, bias)
    if form is not None and plain and self.has_gate:
        return torch.ops.fastmp.gated_activation(out, None, form)
    if gate in _CLAMPED:
        return clamped_swiglu(out, alpha=self.alpha, limit=self.limit)
    return self._apply_gate(out) if self.has_gate else self.act_fn(out)
