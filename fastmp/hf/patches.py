"""Mixins that override methods of transformers modules with fastmp ops.

`patched_class(cls, patch)` returns a subclass of the module's class with the mixin first, and a module is
replaced by assigning that class to `__class__`. Parameters, buffers, hooks and names in the state_dict are
unchanged, `isinstance` holds, and `copy.deepcopy`, `torch.compile` and `fully_shard` see a regular module.
Inputs that an op does not support, such as mixed dtypes, go to `super()`, transformers' method.

Ops are called below autocast (`torch.ops.fastmp`), as transformers' norms compute an input that autocast
left in float32 without rounding it first.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from functools import reduce
from inspect import signature, unwrap
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastmp.hf.hooks import activation_form, form_of
from fastmp.ops import rope_qk, topk_router
from fastmp.ops.core.checks import FLOATING
from fastmp.ops.core.registry import compute_dtype


class ModulePatch:
    """Mixin that overrides methods of a transformers module.

    Attributes:
        by: the ops, for the table that `accelerate` returns.
        needs: attributes of the module that the methods read; a dot goes on in that attribute.
        original: the module's own class (set by `patched_class`).
    """

    by: str
    needs: tuple[str, ...] = ()
    original: type[nn.Module]

    @classmethod
    def why_not(cls, module: nn.Module) -> str | None:
        """Return the reason why this module is not supported, or None."""
        return None

    @classmethod
    def members(cls, original: type[nn.Module]) -> dict[str, Any]:
        """Return methods derived from those of the module's class. Raises AttributeError if it lacks them."""
        return {}

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _new, (type(self).original, type(self).__mro__[1]), self.__getstate__()


def _new(original: type[nn.Module], patch: type[ModulePatch]) -> Any:
    return object.__new__(patched_class(original, patch))


_PATCHED: dict[tuple[type[nn.Module], type[ModulePatch]], type[Any]] = {}


def patched_class(original: type[nn.Module], patch: type[ModulePatch]) -> type[Any]:
    """Return the subclass of `original` with the methods of `patch`, under the name of `original`.

    transformers looks classes up by name: the model's in config.json, layers' in lists of what to shard or to
    keep on one device.
    """
    if (original, patch) not in _PATCHED:
        same = {name: getattr(original, name) for name in ("__module__", "__qualname__", "__doc__")}
        members = {**same, "original": original, **patch.members(original)}
        bases: Any = (patch, original)
        _PATCHED[original, patch] = type(original.__name__, bases, members)
    return _PATCHED[original, patch]


def why_not_weight(module: Any, epsilon: float = 0.0) -> str | None:
    """Return the reason why ops of fastmp do not support a module's weight or epsilon, or None."""
    if type(module.weight) not in (Tensor, nn.Parameter):
        return f"its weight is a {type(module.weight).__name__}, which may be quantized"
    if module.weight.dtype not in FLOATING:
        return f"its weight is {module.weight.dtype}, which fastmp's ops do not compute in"
    return None if epsilon >= 0 else f"its epsilon is {epsilon}"


class RMSNormPatch(ModulePatch):
    """RMSNorm whose output has the wider dtype of input and weight."""

    by = "fastmp.ops.rms_norm"
    needs = ("weight", "variance_epsilon")

    @classmethod
    def why_not(cls, module: Any) -> str | None:
        return why_not_weight(module, module.variance_epsilon)

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        return self.normalised(hidden_states, self.weight)

    def normalised(self: Any, hidden_states: Tensor, weight: Tensor) -> Tensor:
        if hidden_states.dtype != weight.dtype:  # the product with the weight has the wider dtype
            dtype = torch.promote_types(hidden_states.dtype, weight.dtype)
            hidden_states, weight = hidden_states.to(dtype), weight.to(dtype)
        return torch.ops.fastmp.rms_norm(hidden_states, None, weight, self.variance_epsilon)[0]


class RMSNormInInputDtype(RMSNormPatch):
    """RMSNorm whose output has the dtype of the input, regardless of the weight's: GPT-OSS."""

    def normalised(self: Any, hidden_states: Tensor, weight: Tensor) -> Tensor:
        return super().normalised(hidden_states, weight).to(hidden_states.dtype)


class LayerNormPatch(ModulePatch):
    """Layer norm over the last dimension."""

    by = "fastmp.ops.layer_norm"
    needs = ("weight", "bias", "eps", "normalized_shape")

    @classmethod
    def why_not(cls, module: Any) -> str | None:
        if module.weight is None or len(module.normalized_shape) != 1:
            return "has no weight, or normalises over several dimensions"
        return why_not_weight(module, module.eps)

    def forward(self: Any, input: Tensor) -> Tensor:
        # CUDA autocast runs layer norms in float32, and torch has its own promotion of mixed dtypes
        promoted = input.is_cuda and torch.is_autocast_enabled("cuda") and input.dtype != torch.float32
        if promoted or input.dtype != self.weight.dtype:
            return super().forward(input)  # type: ignore[misc]
        return torch.ops.fastmp.layer_norm(input, None, self.weight, self.bias, self.eps)[0]


class GELU(ModulePatch):
    """GELU, exact or by its tanh approximation."""

    by = "fastmp.ops.bias_gelu"
    approximate: str

    @classmethod
    def members(cls, original: type[nn.Module]) -> dict[str, Any]:
        return {"approximate": "none" if form_of(original) == "gelu" else "tanh"}

    def forward(self: Any, input: Tensor) -> Tensor:
        return torch.ops.fastmp.bias_gelu(input, None, self.approximate)


GELUS = {"NewGELUActivation": GELU, "GELUActivation": GELU, "GELUTanh": GELU}


class GatedMLP(ModulePatch):
    """Gated MLP, down(activation(gate(x)) * up(x)), with the activation and the product in one op.

    An activation with hooks, or one that was replaced since `accelerate`, is called as transformers calls it.
    """

    by = "fastmp.ops.swiglu or geglu"
    needs = ("gate_proj", "up_proj", "down_proj", "act_fn")

    @classmethod
    def why_not(cls, module: Any) -> str | None:
        if form_of(type(module.act_fn)) is not None:
            return None
        return f"its activation is {type(module.act_fn).__name__}, which fastmp has no gated op of"

    def forward(self: Any, x: Tensor) -> Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        form = activation_form(self.act_fn)
        if form is None or gate.dtype != up.dtype:
            return self.down_proj(self.act_fn(gate) * up)
        return self.down_proj(torch.ops.fastmp.gated_activation(gate, None, form, up))


class GroupedRouter(ModulePatch):
    """Router of DeepSeek-V3: sigmoid scores, group-limited top-k, a bias that only affects the choice."""

    by = "fastmp.ops.topk_router"
    needs: tuple[str, ...] = (
        *("weight", "e_score_correction_bias", "top_k", "num_group", "topk_group"),
        *("norm_topk_prob", "routed_scaling_factor"),
    )
    given_experts: Tensor | None = None  # (T, k), set by `fastmp.replay_routing`

    @classmethod
    def why_not(cls, module: Any) -> str | None:
        experts, groups, opened, k = len(module.weight), module.num_group, module.topk_group, module.top_k
        if groups < 1 or experts % groups or not 1 <= opened <= groups:
            return (
                f"a token's {opened} of {groups} groups of {experts} experts, which topk_router does not have"
            )
        if not 1 <= k <= experts // groups * opened:
            return f"a token's {k} experts are more than there are in {opened} groups of {experts // groups}"
        return None

    def forward(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        logits = F.linear(tokens.float(), self.weight.float())
        scale = self.routed_scaling_factor
        options = {"scale": scale, "balance": False, "chosen": self.given_experts, **self.routing()}
        found = topk_router(logits, self.top_k, **options)
        return logits, found.probs, found.indices.long()

    def routing(self: Any) -> dict[str, Any]:
        """Return the options of `topk_router` that families differ in."""
        return {
            "score": "sigmoid",
            "num_groups": self.num_group,
            "group_topk": self.topk_group,
            "expert_bias": self.e_score_correction_bias,
            "normalize": self.norm_topk_prob,
        }


class SoftmaxRouter(GroupedRouter):
    """Router of DeepSeek-V2: softmax scores, top-k of all experts or of those in the best groups."""

    needs = ("weight", "top_k", "topk_method", "num_group", "topk_group", "routed_scaling_factor")

    @classmethod
    def why_not(cls, module: Any) -> str | None:
        if module.topk_method == "greedy":
            return None
        if module.topk_method != "group_limited_greedy":
            return f"its topk_method is {module.topk_method}, which topk_router does not have"
        return super().why_not(module)

    def routing(self: Any) -> dict[str, Any]:
        if self.topk_method == "greedy":
            return {"score": "softmax"}
        return {"score": "softmax", "num_groups": self.num_group, "group_topk": self.topk_group}


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """Apply rotary embeddings to queries and keys: transformers' `apply_rotary_pos_emb`.

    Args:
        q: (B, N, S, D), or (B, S, N, D) with `unsqueeze_dim` 2.
        k: (B, G, S, D), or (B, S, G, D) with `unsqueeze_dim` 2.
        cos: (B or 1, S, D or D / 2) of the hidden states' dtype; columns from D / 2 on repeat the first half.
        sin: as `cos`.
        unsqueeze_dim: the dimension of heads.
    """
    return _rotate(q, k, cos, sin, unsqueeze_dim, interleaved=False)


def rotate_part(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """Apply rotary embeddings to the first R elements of each head, where cos and sin are (B or 1, S, R)."""
    return _rotate(q, k, cos, sin, unsqueeze_dim, interleaved=False, part=cos.shape[-1])


def rotate_neighbours(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Any = None, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """Apply rotary embeddings to interleaved pairs: transformers' `apply_rotary_pos_emb_interleave`.

    That function also moves the even elements before the odd ones. Here they stay in place: the dot products
    of queries and keys have the same terms, and a KV cache only ever sees this order.
    """
    return _rotate(q, k, cos, sin, unsqueeze_dim, interleaved=True)


def rotate_complex(xq: Tensor, xk: Tensor, freqs_cis: Tensor) -> tuple[Tensor, Tensor]:
    """Apply rotary embeddings to interleaved pairs by complex factors: `apply_rotary_emb` of DeepSeek-V2.

    Args:
        xq: (B, N, S, D).
        xk: (B, 1, S, D).
        freqs_cis: (B or 1, S, D / 2), complex.
    """
    cos, sin = (part.contiguous() for part in (freqs_cis.real, freqs_cis.imag))
    q, k = _rotate(xq, xk, cos, sin, 1, interleaved=True)
    return q.type_as(xq), k.type_as(xk)


def _rotate(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    unsqueeze_dim: int,
    interleaved: bool,
    part: int | None = None,
) -> tuple[Tensor, Tensor]:
    half = (q.shape[-1] if part is None else part) // 2
    cos, sin = cos[..., :half], sin[..., :half]
    dtypes = {x.dtype for x in (q, k, cos, sin)}
    if q.dtype != k.dtype or not dtypes <= {q.dtype, compute_dtype(q.dtype)}:
        # e.g. BF16 queries and FP16 tables, of an FP16 model under BF16 autocast: the product is FP32
        dtype = reduce(torch.promote_types, dtypes)
        q, k, cos, sin = (x.to(dtype) for x in (q, k, cos, sin))
    if unsqueeze_dim == 2:
        return rope_qk(q, k, cos, sin, interleaved=interleaved)
    q, k = rope_qk(q.transpose(1, 2), k.transpose(1, 2), cos, sin, interleaved=interleaved)
    return q.transpose(1, 2), k.transpose(1, 2)


def _complex_or_else(ours: Any, theirs: Any) -> Any:
    """Return a function that calls `ours` if `rope_qk` supports the tensors, else `theirs`."""

    def rotate_either(xq: Tensor, xk: Tensor, freqs_cis: Tensor) -> Any:
        usual = xq.dim() == xk.dim() == 4 and freqs_cis.dim() == 3 and freqs_cis.is_complex()
        usual = usual and xq.shape[-1] == xk.shape[-1] == 2 * freqs_cis.shape[-1]
        return (ours if usual and not freqs_cis.requires_grad else theirs)(xq, xk, freqs_cis)

    return rotate_either


def _or_else(ours: Any, theirs: Any) -> Any:
    """Return a function that calls `ours` if `rope_qk` supports the tensors, else `theirs`."""

    def fits(head: int, angles: int) -> bool:
        return angles <= head if ours is rotate_part else head in (angles, 2 * angles)

    def rotate_either(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
        usual = (
            q.dim() == k.dim() == 4
            and q.shape[-1] == k.shape[-1]
            and fits(q.shape[-1], cos.shape[-1])
            and cos.dim() == 3
            and cos.shape == sin.shape
            and kwargs.get("unsqueeze_dim", 1) in (1, 2)
            and not (cos.requires_grad or sin.requires_grad)  # learnt positions
        )
        return (ours if usual else theirs)(q, k, cos, sin, *args, **kwargs)

    return rotate_either


class Attention(ModulePatch):
    """Attention with fastmp's rotary embedding.

    transformers' `forward` calls a global function of its file for that. The patched `forward` is the same
    code with a copy of the globals, so that other models in the process are unaffected.
    """

    by = "fastmp.ops.rope_qk"
    functions: Mapping[str, Any] = MappingProxyType({"apply_rotary_pos_emb": rotate})
    or_else: Any = staticmethod(_or_else)

    @classmethod
    def members(cls, original: Any) -> dict[str, Any]:
        forward = unwrap(original.forward)  # without decorators, such as those for renamed arguments
        for name, ours in cls.functions.items():
            if name not in getattr(getattr(forward, "__code__", None), "co_names", ()):
                raise AttributeError(f"forward that calls {name}")
            given, wanted = (list(signature(f).parameters) for f in (forward.__globals__[name], ours))
            if given != wanted:
                raise AttributeError(f"{name} of {', '.join(wanted)}")
        # without __name__, torch.compile looks globals up in this dict and not in the module of that name
        scope = {name: value for name, value in forward.__globals__.items() if name != "__name__"}
        scope |= {name: cls.or_else(ours, scope[name]) for name, ours in cls.functions.items()}
        made = types.FunctionType(
            forward.__code__, scope, forward.__name__, forward.__defaults__, forward.__closure__
        )
        made.__kwdefaults__, made.__annotations__ = forward.__kwdefaults__, forward.__annotations__
        made.__module__, made.__qualname__ = forward.__module__, forward.__qualname__
        return {"forward": made}


class PartlyRotatedAttention(Attention):
    """Attention of GLM-4.5, which rotates the first part of each head."""

    functions = MappingProxyType({"apply_rotary_pos_emb": rotate_part})


class InterleavedLatentAttention(Attention):
    """Multi-head latent attention of DeepSeek-V3, which rotates pairs of neighbours of a part of heads."""

    functions = MappingProxyType(
        {**Attention.functions, "apply_rotary_pos_emb_interleave": rotate_neighbours}
    )


class ComplexLatentAttention(Attention):
    """Multi-head latent attention of DeepSeek-V2, whose angles are complex numbers."""

    functions = MappingProxyType({"apply_rotary_emb": rotate_complex})
    or_else = staticmethod(_complex_or_else)
