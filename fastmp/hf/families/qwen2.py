"""Qwen2: Llama with biases of queries, keys and values."""

from __future__ import annotations

from fastmp.hf.families import llama_like
from fastmp.hf.families.base import Family, SlidingWindow

_BIAS = {"attention.qkv.bias": "self_attn.q_proj.bias self_attn.k_proj.bias self_attn.v_proj.bias"}

FAMILY = Family(
    "qwen2",
    llama_like.conversion(
        "Qwen2ForCausalLM",
        layer_weights=_BIAS,
        model={"qkv_bias": True},
        window=SlidingWindow(4096, first_layer=28, opt_in=True, per_layer=True),
    ),
    llama_like.dense("Qwen2"),
)
