"""Llama 2 and 3."""

from __future__ import annotations

from fastmp.hf.families import decoder
from fastmp.hf.families.base import Conversion, Family, Field

FAMILY = Family(
    "llama",
    Conversion(
        architecture="LlamaForCausalLM",
        layers=decoder.LAYERS,
        model_weights=decoder.MODEL_WEIGHTS,
        layer_weights=decoder.LAYER_WEIGHTS,
        fields=decoder.FIELDS | decoder.HEAD_DIM | {"num_key_value_heads": Field("num_kv_heads", None)},
        model=decoder.MODEL,
        supported=decoder.NO_BIAS,
    ),
    decoder.dense("Llama"),
)
