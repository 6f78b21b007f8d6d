"""Mistral: Llama with a sliding window in all layers."""

from __future__ import annotations

from fastmp.hf.families import llama_like
from fastmp.hf.families.family import Family, Field, SlidingWindow

FAMILY = Family(
    "mistral",
    llama_like.conversion(
        "MistralForCausalLM",
        fields=llama_like.HEAD_DIM | {"num_key_value_heads": Field("num_kv_heads", 8)},
        window=SlidingWindow(4096),
    ),
    llama_like.dense("Mistral"),
)
