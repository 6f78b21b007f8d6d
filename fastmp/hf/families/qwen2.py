"""Qwen2: Llama with biases of queries, keys and values."""

from __future__ import annotations

from fastmp.hf.families import llama_like
from fastmp.hf.families.base import Conversion, Family, SlidingWindow

_BIAS = {"attention.qkv.bias": "self_attn.q_proj.bias self_attn.k_proj.bias self_attn.v_proj.bias"}

FAMILY = Family(
    "qwen2",
    Conversion(
        architecture="Qwen2ForCausalLM",
        layers=llama_like.LAYERS,
        model_weights=llama_like.MODEL_WEIGHTS,
        layer_weights=llama_like.LAYER_WEIGHTS | _BIAS,
        fields=llama_like.FIELDS,
        model=llama_like.MODEL | {"qkv_bias": True},
        window=SlidingWindow(4096, first_layer=28, opt_in=True, per_layer=True),
    ),
    llama_like.dense("Qwen2"),
)
