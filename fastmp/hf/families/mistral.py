"""Mistral: Llama with a sliding window in all layers."""

from __future__ import annotations

from fastmp.hf.families import decoder
from fastmp.hf.families.base import Conversion, Family, Field, SlidingWindow

FAMILY = Family(
    "mistral",
    Conversion(
        architecture="MistralForCausalLM",
        layers=decoder.LAYERS,
        model_weights=decoder.MODEL_WEIGHTS,
        layer_weights=decoder.LAYER_WEIGHTS,
        fields=decoder.FIELDS | decoder.HEAD_DIM | {"num_key_value_heads": Field("num_kv_heads", 8)},
        model=decoder.MODEL,
        window=SlidingWindow(4096),
    ),
    decoder.dense("Mistral"),
)
