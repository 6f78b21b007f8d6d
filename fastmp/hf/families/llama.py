"""Llama 2 and 3."""

from __future__ import annotations

from fastmp.hf.families import llama_like
from fastmp.hf.families.base import Conversion, Family, Field

FAMILY = Family(
    "llama",
    Conversion(
        architecture="LlamaForCausalLM",
        layers=llama_like.LAYERS,
        model_weights=llama_like.MODEL_WEIGHTS,
        layer_weights=llama_like.LAYER_WEIGHTS,
        fields=llama_like.FIELDS | llama_like.HEAD_DIM | {"num_key_value_heads": Field("num_kv_heads", None)},
        model=llama_like.MODEL,
        supported=llama_like.NO_BIAS,
    ),
    llama_like.dense("Llama"),
)
