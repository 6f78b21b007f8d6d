"""Qwen3-MoE: Qwen3 with experts in some or all layers."""

from __future__ import annotations

from typing import Any

from fastmp.config import GPTConfig
from fastmp.hf.families import llama_like
from fastmp.hf.families.family import Family, Field, SlidingWindow


def _write(config: GPTConfig) -> dict[str, Any]:
    return {"decoder_sparse_step": 1, "mlp_only_layers": list(config.dense_layers)}


FAMILY = Family(
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
        write=_write,
    ),
    llama_like.mixture("Qwen3Moe", dense_layers=True),
)
