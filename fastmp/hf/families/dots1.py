"""dots.llm1: DeepSeek-V3's router and shared experts, multi-head attention. `accelerate` is not supported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastmp.config import GPTConfig
from fastmp.hf.families import llama_like
from fastmp.hf.families.base import Family, Field, SlidingWindow, optional_int

_SHARED = "mlp.shared_experts"


def _read(content: Mapping[str, Any], model: dict[str, Any]) -> None:
    shared = optional_int(content, "n_shared_experts", None) or 0
    model["moe"]["shared_expert_ffn_hidden_size"] = shared * model["moe"]["expert_ffn_hidden_size"]


def _write(config: GPTConfig) -> dict[str, Any]:
    moe = config.moe
    assert moe is not None
    return {
        "first_k_dense_replace": len(config.dense_layers),
        "n_shared_experts": moe.shared_expert_ffn_hidden_size // moe.expert_ffn_hidden_size,
    }


FAMILY = Family(
    "dots1",
    llama_like.conversion(
        "Dots1ForCausalLM",
        layer_weights=llama_like.QK_NORM_WEIGHTS
        | llama_like.EXPERT_WEIGHTS
        | {
            "moe.router.expert_bias": "mlp.gate.e_score_correction_bias",
            "moe.shared_experts.mlp.up.weight": f"{_SHARED}.gate_proj.weight {_SHARED}.up_proj.weight",
            "moe.shared_experts.mlp.down.weight": f"{_SHARED}.down_proj.weight",
        },
        fields=llama_like.HEAD_DIM
        | llama_like.EXPERT_FIELDS
        | {
            "n_routed_experts": Field("moe.num_experts"),
            "routed_scaling_factor": Field("moe.routed_scale", 1.0),
            "n_group": Field("moe.num_groups", 1),
            "topk_group": Field("moe.group_topk", 1),
        },
        model={"qk_norm": True},
        moe={"score": "sigmoid", "expert_bias": True},
        supported=llama_like.NO_BIAS,
        aux_loss=None,
        window=SlidingWindow(4096, first_layer=62),
        read=_read,
        write=_write,
    ),
)
