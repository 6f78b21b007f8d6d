"""Parts: what takes the place of a module of transformers, and computes the same with ops of fastmp.

A part is a mixin. `class_with(cls, part)` is a subclass of the module's own class with the part before it,
and a module is replaced by giving it that class: parameters, buffers, hooks and names in the state_dict
stay, `isinstance` holds, and `copy.deepcopy`, `torch.compile` and `fully_shard` see a usual module. What a
part does not do, such as mixed dtypes that the op does not take, goes to the method of the module's own
class.

The ops are called below autocast (`torch.ops.fastmp`): an input that autocast leaves in float32 is not
rounded before a norm, as it is not in transformers.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from functools import reduce
from inspect import signature
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastmp.ops import rope_qk, topk_router
from fastmp.ops.core.checks import FLOATING
from fastmp.ops.core.registry import compute_dtype

FORMS = {  # activations by their classes in transformers and torch: the form that fastmp's ops call them
    "SiLUActivation": "silu",
    "SiLU": "silu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh",
}


class Part:
    """What a class has beside its module's own methods; subclasses define the methods."""

    by: str  # what computes, for the table of what was replaced
    needs: tuple[str, ...] = ()  # attributes of the module, and of those in it, that the methods read
    original: type[nn.Module]

    @classmethod
    def why_not(cls, module: nn.Module) -> str | None:
        """The reason why this module keeps its class, if there is one."""
        return None

    @classmethod
    def members(cls, original: type[nn.Module]) -> dict[str, Any]:
        """Methods that are made from those of the module's class."""
        return {}

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _new, (type(self).original, type(self).__mro__[1]), self.__getstate__()


def _new(original: type[nn.Module], part: type[Part]) -> Any:
    return object.__new__(class_with(original, part))


_MADE: dict[tuple[type[nn.Module], type[Part]], type[Any]] = {}


def class_with(original: type[nn.Module], part: type[Part]) -> type[Any]:
    """The subclass of `original` with the methods of `part`; it has the name of `original`.

    transformers goes by names: that of the model stands in its config.json, those of layers in lists of what
    to shard or to keep on one device.
    """
    if (original, part) not in _MADE:
        same = {name: getattr(original, name) for name in ("__module__", "__qualname__", "__doc__")}
        members = {**same, "original": original, **part.members(original)}
        bases: Any = (part, original)
        _MADE[original, part] = type(original.__name__, bases, members)
    return _MADE[original, part]


def of_numbers(module: Any, epsilon: float = 0.0) -> str | None:
    """Return why an op of fastmp does not take a module's weight and epsilon, or None."""
    if type(module.weight) not in (Tensor, nn.Parameter):
        return f"its weight is a {type(module.weight).__name__}, which may be quantized"
    if module.weight.dtype not in FLOATING:
        return f"its weight is {module.weight.dtype}, which fastmp's ops do not compute in"
    return None if epsilon >= 0 else f"its epsilon is {epsilon}"


class RMSNorm(Part):
    by = "fastmp.ops.rms_norm"
    needs = ("weight", "variance_epsilon")

    @classmethod
    def why_not(cls, module: Any) -> str | None:
        return of_numbers(module, module.variance_epsilon)

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        return self.normalised(hidden_states, self.weight)

    def normalised(self: Any, hidden_states: Tensor, weight: Tensor) -> Tensor:
        if hidden_states.dtype != weight.dtype:  # the product with the weight has the wider dtype
            dtype = torch.promote_types(hidden_states.dtype, weight.dtype)
            hidden_states, weight = hidden_states.to(dtype), weight.to(dtype)
        return torch.ops.fastmp.rms_norm(hidden_states, None, weight, self.variance_epsilon)[0]


class RMSNormOfItsDtype(RMSNorm):
    """The norm of GPT-OSS, whose result has the dtype of the input, whatever that of the weight."""

    def normalised(self: Any, hidden_states: Tensor, weight: Tensor) -> Tensor:
        return super().normalised(hidden_states, weight).to(hidden_states.dtype)


class LayerNorm(Part):
    by = "fastmp.ops.layer_norm"
    needs = ("weight", "bias", "eps", "normalized_shape")

    @classmethod
    def why_not(cls, module: Any) -> str | None:
        if module.weight is None or len(module.normalized_shape) != 1:
            return "has no weight, or normalises over several dimensions"
        return of_numbers(module, module.eps)

    def forward(self: Any, input: Tensor) -> Tensor:
        # autocast of a GPU makes layer norms in float32, and torch has its own rules for mixed dtypes
        promoted = input.is_cuda and torch.is_autocast_enabled("cuda") and input.dtype != torch.float32
        if promoted or input.dtype != self.weight.dtype:
            return super().forward(input)  # type: ignore[misc]
        return torch.ops.fastmp.layer_norm(input, None, self.weight, self.bias, self.eps)[0]


class GELU(Part):
    by = "fastmp.ops.bias_gelu"

    def forward(self: Any, input: Tensor) -> Tensor:
        form = FORMS[type(self).__name__]
        return torch.ops.fastmp.bias_gelu(input, None, "none" if form == "gelu" else "tanh")


class GatedMLP(Part):
    """down(activation(gate(x)) * up(x)): the activation and its product are one op over both tensors."""

    by = "fastmp.ops.swiglu, geglu"
    needs = ("gate_proj", "up_proj", "down_proj", "act_fn")

    @classmethod
    def why_not(cls, module: Any) -> str | None:
        name = type(module.act_fn).__name__
        return None if name in FORMS else f"its activation is {name}, which fastmp has no gated op of"

    def forward(self: Any, x: Tensor) -> Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        if gate.dtype != up.dtype:
            return self.down_proj(self.act_fn(gate) * up)
        form = FORMS[type(self.act_fn).__name__]
        return self.down_proj(torch.ops.fastmp.gated_activation(gate, None, form, up))


class GroupedRouter(Part):
    """The router of DeepSeek-V3: sigmoids, groups of experts, and a bias for the choice alone."""

    by = "fastmp.ops.topk_router"
    needs = (
        *("weight", "e_score_correction_bias", "top_k", "num_group", "topk_group"),
        *("norm_topk_prob", "routed_scaling_factor"),
    )

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
        chosen = topk_router(
            logits,
            self.top_k,
            score="sigmoid",
            num_groups=self.num_group,
            group_topk=self.topk_group,
            expert_bias=self.e_score_correction_bias,
            normalize=self.norm_topk_prob,
            scale=self.routed_scaling_factor,
            balance=False,
        )
        return logits, chosen.probs, chosen.indices.long()


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """The rotary embedding of queries (B, N, S, D) and keys (B, G, S, D), as `apply_rotary_pos_emb` has it.

    With `unsqueeze_dim` 2 they are (B, S, N, D) and (B, S, G, D). cos and sin: (B or 1, S, D or D / 2) of
    hidden states' dtype; what lies beyond D / 2 is a repetition.
    """
    return _rotate(q, k, cos, sin, unsqueeze_dim, interleaved=False)


def rotate_neighbours(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Any = None, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """`rotate` of pairs of neighbours, as `apply_rotary_pos_emb_interleave` has it but for one thing.

    That also moves the even elements before the odd ones. Here all stay in their places: products of queries
    and keys have the same terms, and a cache only ever meets this order.
    """
    return _rotate(q, k, cos, sin, unsqueeze_dim, interleaved=True)


def _rotate(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int, interleaved: bool
) -> tuple[Tensor, Tensor]:
    half = q.shape[-1] // 2
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


def _or_else(ours: Any, theirs: Any) -> Any:
    """Return a function that calls `ours` with tensors that `rope_qk` takes, and `theirs` with others."""

    def rotate_either(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
        usual = (
            q.dim() == k.dim() == 4
            and q.shape[-1] == k.shape[-1] in (cos.shape[-1], 2 * cos.shape[-1])
            and cos.dim() == 3
            and cos.shape == sin.shape
            and kwargs.get("unsqueeze_dim", 1) in (1, 2)
            and not (cos.requires_grad or sin.requires_grad)  # positions that are learnt
        )
        return (ours if usual else theirs)(q, k, cos, sin, *args, **kwargs)

    return rotate_either


class Attention(Part):
    """Attention whose queries and keys fastmp rotates: its own `forward`, in which a function is another.

    The function is a global of transformers' file. `forward` gets globals of its own, so that no other model
    in this process changes.
    """

    by = "fastmp.ops.rope_qk"
    functions: Mapping[str, Any] = MappingProxyType({"apply_rotary_pos_emb": rotate})

    @classmethod
    def members(cls, original: Any) -> dict[str, Any]:
        forward = original.forward
        for name, ours in cls.functions.items():
            if name not in getattr(getattr(forward, "__code__", None), "co_names", ()):
                raise AttributeError(f"forward that calls {name}")
            given, wanted = (list(signature(f).parameters) for f in (forward.__globals__[name], ours))
            if given != wanted:
                raise AttributeError(f"{name} of {', '.join(wanted)}")
        # without __name__ a compiler looks globals up in this dict, not in the file of that name
        scope = {name: value for name, value in forward.__globals__.items() if name != "__name__"}
        scope |= {name: _or_else(ours, scope[name]) for name, ours in cls.functions.items()}
        made = types.FunctionType(
            forward.__code__, scope, forward.__name__, forward.__defaults__, forward.__closure__
        )
        made.__kwdefaults__, made.__annotations__ = forward.__kwdefaults__, forward.__annotations__
        made.__module__, made.__qualname__ = forward.__module__, forward.__qualname__
        return {"forward": made}


class LatentAttention(Attention):
    """The attention of DeepSeek-V3, which rotates a part of each head, as its configuration says how."""

    functions = MappingProxyType(
        {**Attention.functions, "apply_rotary_pos_emb_interleave": rotate_neighbours}
    )
