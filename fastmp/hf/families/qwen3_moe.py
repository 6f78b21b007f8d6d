"""Qwen3-MoE: Qwen3 with experts in some or all layers."""

from __future__ import annotations

from typing import Any

from fastmp.config import GPTConfig
from fastmp.hf.families import decoder
from fastmp.hf.families.base import Conversion, Family, Field, SlidingWindow


def _write(config: GPTConfig) -> dict[str, Any]:
    return {"decoder_sparse_step": 1, "mlp_only_layers": list(config.dense_layers)}


FAMILY = Family(
    "qwen3_moe",
    Conversion(
        architecture="Qwen3MoeForCausalLM",
        layers=decoder.LAYERS,
        model_weights=decoder.MODEL_WEIGHTS,
        layer_weights=decoder.LAYER_WEIGHTS | decoder.QK_NORM_WEIGHTS | decoder.EXPERT_WEIGHTS,
        fields=decoder.FIELDS
        | decoder.HEAD_DIM
        | decoder.EXPERT_FIELDS
        | {
            "num_key_value_heads": Field("num_kv_heads", 4),
            "num_experts": Field("moe.num_experts"),
        },
        model=decoder.MODEL | {"qk_norm": True},
        moe={},
        supported=decoder.NO_BIAS,
        window=SlidingWindow(4096, opt_in=True),
        write=_write,
    ),
    decoder.mixture("Qwen3Moe", dense_layers=True),
)
