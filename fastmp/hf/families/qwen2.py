"""Qwen2: Llama with biases of queries, keys and values."""

from __future__ import annotations

from fastmp.hf.families import llama_like
from fastmp.hf.families.family import Family, SlidingWindow

FAMILY = Family(
    "qwen2",
    llama_like.conversion(
        "Qwen2ForCausalLM",
        layer_weights=llama_like.QKV_BIAS_WEIGHTS,
        model={"qkv_bias": True},
        window=SlidingWindow(4096, first_layer=28, opt_in=True, per_layer=True),
    ),
    llama_like.dense("Qwen2"),
)
