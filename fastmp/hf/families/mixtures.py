"""Llama-like decoders with experts: Mixtral, Qwen3-MoE, dots.llm1, GLM-4.5 and GPT-OSS."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastmp.config import GPTConfig
from fastmp.hf.families import llama_like
from fastmp.hf.families.family import Family, Field, SlidingWindow
from fastmp.hf.patches import PartlyRotatedAttention, RMSNormInInputDtype

_EXPERTS = "block_sparse_moe.experts.{e}"
# Mixtral: Mistral with experts in every layer.
MIXTRAL = Family(
    "mixtral",
    llama_like.conversion(
        "MixtralForCausalLM",
        layer_weights={
            "moe.router.weight": "block_sparse_moe.gate.weight",
            "moe.experts.fc1": f"{_EXPERTS}.w1.weight {_EXPERTS}.w3.weight",
            "moe.experts.fc2": f"{_EXPERTS}.w2.weight",
        },
        fields=llama_like.HEAD_DIM
        | {
            "num_key_value_heads": Field("num_kv_heads", 8),
            "rms_norm_eps": Field("layernorm_epsilon", 1e-5),
            "intermediate_size": Field("moe.expert_ffn_hidden_size"),
            "num_local_experts": Field("moe.num_experts", 8),
            "num_experts_per_tok": Field("moe.top_k", 2),
        },
        moe={"normalize_topk": True},
        supported={"router_jitter_noise": (0.0, 0)},
        rope_base=1e6,
        window=SlidingWindow(None),
    ),
    llama_like.mixture("Mixtral"),
)


def _write_qwen3_moe(config: GPTConfig) -> dict[str, Any]:
    return {"decoder_sparse_step": 1, "mlp_only_layers": list(config.dense_layers)}


# Qwen3-MoE: Qwen3 with experts in some or all layers.
QWEN3_MOE = Family(
    "qwen3_moe",
    llama_like.conversion(
        "Qwen3MoeForCausalLM",
        layer_weights=llama_like.QK_NORM_WEIGHTS | llama_like.EXPERT_WEIGHTS,
        fields=llama_like.HEAD_DIM
        | llama_like.EXPERT_FIELDS
        | {
            "num_key_value_heads": Field("num_kv_heads", 4),
            "num_experts": Field("moe.num_experts"),
        },
        model={"qk_norm": True},
        moe={},
        supported=llama_like.NO_BIAS,
        window=SlidingWindow(4096, opt_in=True),
        write=_write_qwen3_moe,
    ),
    llama_like.mixture("Qwen3Moe", dense_layers=True),
)

# dots.llm1: DeepSeek-V3's router and shared experts, multi-head attention.
DOTS1 = Family(
    "dots1",
    llama_like.conversion(
        "Dots1ForCausalLM",
        layer_weights=llama_like.QK_NORM_WEIGHTS
        | llama_like.EXPERT_WEIGHTS
        | llama_like.SHARED_EXPERT_WEIGHTS
        | {"moe.router.expert_bias": "mlp.gate.e_score_correction_bias"},
        fields=llama_like.HEAD_DIM | llama_like.GROUPED_EXPERT_FIELDS,
        model={"qk_norm": True},
        moe={"score": "sigmoid", "expert_bias": True},
        supported=llama_like.NO_BIAS,
        aux_loss=None,
        window=SlidingWindow(4096, first_layer=62),
        read=llama_like.read_shared_experts,
        write=llama_like.write_shared_experts,
    ),
    llama_like.grouped_mixture("Dots1"),
)


def _write_glm4_moe(config: GPTConfig) -> dict[str, Any]:
    return llama_like.write_shared_experts(config) | {
        "partial_rotary_factor": config.rotary_fraction,  # which is a half where it is absent
    }


# GLM-4.5: DeepSeek-V3's experts, and heads half of which is turned.
GLM4_MOE = Family(
    "glm4_moe",
    llama_like.conversion(
        "Glm4MoeForCausalLM",
        layer_weights=llama_like.QKV_BIAS_WEIGHTS
        | llama_like.QK_NORM_WEIGHTS
        | llama_like.EXPERT_WEIGHTS
        | llama_like.SHARED_EXPERT_WEIGHTS
        | {"moe.router.expert_bias": "mlp.gate.e_score_correction_bias"},
        mtp_weights=llama_like.MTP_WEIGHTS,
        fields=llama_like.HEAD_DIM
        | llama_like.MTP_FIELDS
        | llama_like.GROUPED_EXPERT_FIELDS
        | {
            "num_key_value_heads": Field("num_kv_heads", 8),
            "rms_norm_eps": Field("layernorm_epsilon", 1e-5),
            "norm_topk_prob": Field("moe.normalize_topk", True),
            "attention_bias": Field("qkv_bias", False),
            "use_qk_norm": Field("qk_norm", False),
        },
        moe={"score": "sigmoid", "expert_bias": True},
        aux_loss=None,
        partial_rotary=True,
        defaults={"partial_rotary_factor": 0.5, "n_shared_experts": 1, "first_k_dense_replace": 1},
        read_keys=("num_mtp_layers",),
        read=llama_like.read_shared_experts,
        write=_write_glm4_moe,
    ),
    llama_like.grouped_mixture("Glm4Moe", PartlyRotatedAttention),
)

_ROPE = {
    **{"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
    **{"original_max_position_embeddings": 4096, "rope_theta": 150000.0},
}


def _read_gpt_oss(content: Mapping[str, Any], model: dict[str, Any]) -> None:
    """Read the windows of a file without `layer_types`."""
    if content.get("layer_types") is None and "sliding_window" in model:
        model["full_attention_layers"] = list(range(1, model["num_layers"], 2))


# GPT-OSS: attention sinks, windows in every second layer, experts with biases and a clamped gate.
GPT_OSS = Family(
    "gpt_oss",
    llama_like.conversion(
        "GptOssForCausalLM",
        layer_weights=llama_like.QKV_BIAS_WEIGHTS
        | {
            "attention.sinks": "self_attn.sinks",
            "attention.proj.bias": "self_attn.o_proj.bias",
            "moe.router.weight": "mlp.router.weight",
            "moe.router.bias": "mlp.router.bias",
            "moe.experts.fc1": "mlp.experts.gate_up_proj",
            "moe.experts.fc1_bias": "mlp.experts.gate_up_proj_bias",
            "moe.experts.fc2": "mlp.experts.down_proj",
            "moe.experts.fc2_bias": "mlp.experts.down_proj_bias",
        },
        fields={
            "head_dim": Field("head_size", 64),
            "num_key_value_heads": Field("num_kv_heads", 8),
            "rms_norm_eps": Field("layernorm_epsilon", 1e-5),
            "hidden_act": Field("activation", "silu", {"silu": "clamped_swiglu"}),
            "attention_bias": Field("linear_bias", True),
            "intermediate_size": Field("moe.expert_ffn_hidden_size"),
            "num_local_experts": Field("moe.num_experts", 128),
            "num_experts_per_tok": Field("moe.top_k", 4),
        },
        model={"attention_sinks": True},
        moe={"pre_softmax": False, "linear_bias": True, "router_bias": True},
        supported={"swiglu_limit": (7.0,), "swiglu_alpha": (1.702,)},
        transposed_experts=True,
        rope_base=150000.0,
        defaults={"rope_parameters": _ROPE},
        window=SlidingWindow(128, per_layer=True),
        read_keys=("initial_context_length", "experts_per_token"),
        read=_read_gpt_oss,
    ),
    llama_like.mixture("GptOss", norm=RMSNormInInputDtype),
)
FAMILIES = (MIXTRAL, QWEN3_MOE, DOTS1, GLM4_MOE, GPT_OSS)
