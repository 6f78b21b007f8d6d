"""DeepSeek-V2 and V3 and Kimi K2: multi-head latent attention, and shared experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastmp.config import GPTConfig
from fastmp.hf.families import llama_like
from fastmp.hf.families.family import Acceleration, Conversion, Family, Field, TPTable, optional_int
from fastmp.hf.heads import CausalLMWithRouters
from fastmp.hf.patches import (
    ComplexLatentAttention,
    GroupedRouter,
    InterleavedLatentAttention,
    ModulePatch,
    SoftmaxRouter,
)
from fastmp.hf.tp_modules import ColumnParallel, ColumnParallelWithCopy, LatentHeads, RowParallel

_LATENT_WEIGHTS = {
    "attention.q.weight": "self_attn.q_proj.weight",
    "attention.q_down.weight": "self_attn.q_a_proj.weight",
    "attention.q_norm.weight": "self_attn.q_a_layernorm.weight",
    "attention.q_up.weight": "self_attn.q_b_proj.weight",
    "attention.kv_down.weight": "self_attn.kv_a_proj_with_mqa.weight",
    "attention.kv_norm.weight": "self_attn.kv_a_layernorm.weight",
    "attention.kv_up.weight": "self_attn.kv_b_proj.weight",
}
_LATENT_FIELDS = {
    "kv_lora_rank": Field("latent.kv_rank", 512),
    "q_lora_rank": Field("latent.q_rank", 1536),
    "qk_nope_head_dim": Field("latent.nope_size", 128),
    "qk_rope_head_dim": Field("latent.rope_size", 64),
    "v_head_dim": Field("latent.value_size", 128),
}
_FIELDS = {
    name: field for name, field in llama_like.FIELDS.items() if name != "num_key_value_heads"
} | _LATENT_FIELDS
# sizes that others imply; losses of training
_IMPLIED = (
    *("num_key_value_heads", "head_dim", "qk_head_dim"),
    *("num_mtp_layers", "ep_size", "seq_aux", "aux_loss_alpha"),
)


_ATTENTION_PLAN: TPTable = {
    "": LatentHeads,
    "q_proj": ColumnParallelWithCopy,
    "q_b_proj": ColumnParallelWithCopy,
    "kv_b_proj": ColumnParallel,
    "o_proj": RowParallel,
    **dict.fromkeys(("q_a_proj", "q_a_layernorm", "kv_a_proj_with_mqa", "kv_a_layernorm")),
}


def acceleration(prefix: str, attention: type[ModulePatch], router: type[ModulePatch]) -> Acceleration:
    """Return the replacements of a decoder with latent attention, experts and dense layers."""
    like = llama_like.dense(prefix, CausalLMWithRouters, Attention=attention, TopkRouter=router)
    plan = {
        f"{prefix}Attention": _ATTENTION_PLAN,
        f"{prefix}MLP": llama_like.MLP_PLAN,
        f"{prefix}Experts": llama_like.EXPERTS_PLAN,
    }
    return Acceleration(like.patches, f"{prefix}Experts", plan)


def conversion(
    architecture: str, *, fields: Mapping[str, Field] = {}, read_keys: tuple[str, ...] = (), **options: Any
) -> Conversion:
    """Return the `Conversion` of a family with latent attention and groups of experts."""
    return Conversion(
        architecture,
        llama_like.LAYERS,
        llama_like.MODEL_WEIGHTS,
        llama_like.LAYER_WEIGHTS
        | _LATENT_WEIGHTS
        | llama_like.EXPERT_WEIGHTS
        | llama_like.SHARED_EXPERT_WEIGHTS
        | {"moe.router.expert_bias": "mlp.gate.e_score_correction_bias"},
        {**_FIELDS, **llama_like.GROUPED_EXPERT_FIELDS, **fields},
        {**llama_like.MODEL},
        latent=True,
        aux_loss=None,
        read_keys=(*_IMPLIED, *read_keys),
        **options,
    )


def read(content: Mapping[str, Any], model: dict[str, Any]) -> None:
    """Read the shared experts; check that all heads have keys of their own."""
    heads, keys = content["num_attention_heads"], optional_int(content, "num_key_value_heads", None)
    if keys not in (None, heads):
        raise ValueError(f"num_key_value_heads is {keys}, fastmp computes {heads}, as many as heads")
    llama_like.read_shared_experts(content, model)


def write(config: GPTConfig) -> dict[str, Any]:
    """Return the keys of shared experts, and those that other keys imply."""
    found = llama_like.write_shared_experts(config)
    return found | {"num_key_value_heads": config.num_heads}


_METHODS = ("greedy", "group_limited_greedy")


def _read_v2(content: Mapping[str, Any], model: dict[str, Any]) -> None:
    read(content, model)
    model["rope_interleaved"] = True
    method = content.get("topk_method", "greedy")
    if method not in _METHODS:
        raise ValueError(f"topk_method is {method!r}, fastmp computes {' and '.join(_METHODS)}")
    if method == "greedy":  # whatever groups there are
        model["moe"] |= {"num_groups": 1, "group_topk": 1}


def _write_v2(config: GPTConfig) -> dict[str, Any]:
    assert config.moe is not None
    method = _METHODS[config.moe.num_groups > 1]
    return write(config) | {"topk_method": method}


# DeepSeek-V2: multi-head latent attention, experts chosen by softmax.
DEEPSEEK_V2 = Family(
    "deepseek_v2",
    conversion(
        "DeepseekV2ForCausalLM",
        read_keys=("topk_method",),
        moe={"score": "softmax"},
        supported={
            "attention_bias": (False,),
            "mlp_bias": (False,),
            "scoring_func": ("softmax",),
            "norm_topk_prob": (False,),
            "moe_layer_freq": (1,),
        },
        read=_read_v2,
        write=_write_v2,
    ),
    acceleration("DeepseekV2", ComplexLatentAttention, SoftmaxRouter),
)
# DeepSeek-V3: multi-head latent attention, groups of experts chosen by sigmoid scores and a bias.
_V3 = conversion(
    "DeepseekV3ForCausalLM",
    mtp_weights=llama_like.MTP_WEIGHTS,
    fields=llama_like.MTP_FIELDS
    | {
        "rope_interleave": Field("rope_interleaved", True),
        "norm_topk_prob": Field("moe.normalize_topk", True),
        "routed_scaling_factor": Field("moe.routed_scale", 2.5),
        "n_group": Field("moe.num_groups", 8),
        "topk_group": Field("moe.group_topk", 4),
    },
    moe={"score": "sigmoid", "expert_bias": True},
    supported={
        "attention_bias": (False,),
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
        "moe_layer_freq": (1,),
    },
    read=read,
    write=write,
)
DEEPSEEK_V3 = Family(
    "deepseek_v3",
    _V3,
    acceleration("DeepseekV3", InterleavedLatentAttention, GroupedRouter),
)
# Kimi K2: DeepSeek-V3 by another name, of which transformers has no class. Exports are DeepSeek-V3.
KIMI_K2 = Family("kimi_k2", _V3)
FAMILIES = (DEEPSEEK_V2, DEEPSEEK_V3, KIMI_K2)
