"""GLM-4.5: DeepSeek-V3's experts, and heads half of which is turned."""

from __future__ import annotations

from typing import Any

from fastmp.config import GPTConfig
from fastmp.hf.families import llama_like
from fastmp.hf.families.family import Family, Field
from fastmp.hf.patches import PartlyRotatedAttention


def _write(config: GPTConfig) -> dict[str, Any]:
    return llama_like.write_shared_experts(config) | {
        "partial_rotary_factor": config.rotary_fraction,  # which is a half where it is absent
    }


FAMILY = Family(
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
        write=_write,
    ),
    llama_like.grouped_mixture("Glm4Moe", PartlyRotatedAttention),
)
