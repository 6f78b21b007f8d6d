"""Mistral: Llama with a sliding window in all layers."""

from __future__ import annotations

from fastmp.hf.families import llama_like
from fastmp.hf.families.base import Conversion, Family, Field, SlidingWindow

FAMILY = Family(
    "mistral",
    Conversion(
        architecture="MistralForCausalLM",
        layers=llama_like.LAYERS,
        model_weights=llama_like.MODEL_WEIGHTS,
        layer_weights=llama_like.LAYER_WEIGHTS,
        fields=llama_like.FIELDS | llama_like.HEAD_DIM | {"num_key_value_heads": Field("num_kv_heads", 8)},
        model=llama_like.MODEL,
        window=SlidingWindow(4096),
    ),
    llama_like.dense("Mistral"),
)
