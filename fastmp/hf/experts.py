"""The experts of a model of transformers by fastmp's grouped products, behind transformers' own interface.

`register` adds the implementation "fastmp" to those that `model.set_experts_implementation` chooses from. It
takes what the interface describes: gated or not, with biases, weights either way round, gates of any kind.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastmp.hf.patches import FORMS
from fastmp.ops import clamped_swiglu, grouped_mlp_in, grouped_mm, permutation, permute, unpermute
from fastmp.ops.core.registry import compute_dtype

NAME = "fastmp"
# what a module of experts says of itself
FLAGS = ("has_gate", "has_bias", "is_transposed", "is_concatenated")


def reads(module: Any) -> tuple[str, ...]:
    """The attributes that the implementation reads of a module of experts with these flags."""
    first = "gate_up_proj" if module.has_gate else "up_proj"
    names: tuple[str, ...] = ("num_experts", "_apply_gate", first, "down_proj")
    if module.has_bias:
        names += (f"{first}_bias", "down_proj_bias")
    plain = not module.has_gate or getattr(type(module), "_apply_gate", None) is _default_gate()
    return (*names, "act_fn") if plain else names


_CLAMPED: set[Any] = set()  # the `_apply_gate`s that were found to be clamped_swiglu


def by(module: Any) -> str:
    """What computes a module of experts, for the table; remembers whether its gate is `clamped_swiglu`."""
    gate = type(module)._apply_gate
    if gate is _default_gate() or not module.has_gate:
        return "fastmp.ops.grouped_mm, grouped_mlp_in, permute"
    if {"alpha", "limit"} <= vars(module).keys() and _is_clamped(module):
        _CLAMPED.add(gate)
        return "fastmp.ops.grouped_mm, clamped_swiglu, permute"
    return "fastmp.ops.grouped_mm, permute, between them transformers' gate"


def _is_clamped(module: Any) -> bool:
    """Whether the module's gate computes `clamped_swiglu` on numbers inside and outside of its limits."""
    values = torch.linspace(-1.5, 1.5, 12, dtype=torch.float64, device="cpu") * module.limit
    pairs = torch.cartesian_prod(values, values).flatten()
    ours = clamped_swiglu(pairs, alpha=module.alpha, limit=module.limit)
    return torch.allclose(module._apply_gate(pairs), ours, rtol=1e-9, atol=1e-12)


def _default_gate() -> Any:
    from transformers.integrations import moe

    return getattr(moe, "_default_apply_gate", None)  # without it every gate is an op of its own


def register() -> None:
    """Register the implementation with transformers, once in a process."""
    from transformers.integrations import moe

    if NAME in moe.ALL_EXPERTS_FUNCTIONS:
        return
    default_gate = _default_gate()

    def forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        usual_gate = type(self)._apply_gate is default_gate
        clamped = type(self)._apply_gate in _CLAMPED
        return experts(self, hidden_states, top_k_index, top_k_weights, usual_gate, clamped)

    moe.ALL_EXPERTS_FUNCTIONS.register(NAME, forward)


def experts(
    self: Any,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    usual_gate: bool,
    clamped: bool,
) -> Tensor:
    """The experts' outputs of tokens (T, H), weighted and added up: (T, H) of their dtype.

    top_k_index, top_k_weights: (T, k), the experts of a token and their weights. An index beyond the last
    expert, as expert parallelism gives tokens of other ranks, adds nothing.
    """
    row_of, offsets = permutation(top_k_index.to(torch.int32), self.num_experts)
    rows = permute(hidden_states, row_of, row_of.numel())
    out = _first_product(self, rows, offsets, usual_gate, clamped)
    bias = self.down_proj_bias if self.has_bias else None
    out = grouped_mm(out, self.down_proj, offsets, transposed=self.is_transposed, bias=bias)
    if getattr(self, "has_post_expert_norm", False):
        out = self.post_expert_norm(out)
    out = unpermute(out, row_of, top_k_weights.to(compute_dtype(out.dtype)))
    return out.to(hidden_states.dtype)


def _first_product(self: Any, rows: Tensor, offsets: Tensor, usual_gate: bool, clamped: bool) -> Tensor:
    """The first product of the experts' MLPs, with its activation."""
    weight = self.gate_up_proj if self.has_gate else self.up_proj
    bias = None
    if self.has_bias:
        bias = self.gate_up_proj_bias if self.has_gate else self.up_proj_bias
    form = FORMS.get(type(getattr(self, "act_fn", None)).__name__)
    plain = (self.is_concatenated and usual_gate) or not self.has_gate
    if form is not None and plain and not self.is_transposed:
        return grouped_mlp_in(rows, weight, offsets, form=form, gated=self.has_gate, bias=bias)
    out = grouped_mm(rows, weight, offsets, transposed=self.is_transposed, bias=bias)
    if clamped:
        return clamped_swiglu(out, alpha=self.alpha, limit=self.limit)
    return self._apply_gate(out) if self.has_gate else self.act_fn(out)
