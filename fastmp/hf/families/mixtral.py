"""Mixtral: Mistral with experts in every layer."""

from __future__ import annotations

from fastmp.hf.families import llama_like
from fastmp.hf.families.family import Family, Field, SlidingWindow

_EXPERTS = "block_sparse_moe.experts.{e}"

FAMILY = Family(
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
