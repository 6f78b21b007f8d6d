"""GPT-OSS: attention sinks, windows in every second layer, experts with biases and a clamped gate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastmp.hf.families import llama_like
from fastmp.hf.families.family import Family, Field, SlidingWindow
from fastmp.hf.patches import RMSNormInInputDtype

_ROPE = {
    **{"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
    **{"original_max_position_embeddings": 4096, "rope_theta": 150000.0},
}


def _read(content: Mapping[str, Any], model: dict[str, Any]) -> None:
    """Read the windows of a file without `layer_types`."""
    if content.get("layer_types") is None and "sliding_window" in model:
        model["full_attention_layers"] = list(range(1, model["num_layers"], 2))


FAMILY = Family(
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
        read=_read,
    ),
    llama_like.mixture("GptOss", norm=RMSNormInInputDtype),
)
