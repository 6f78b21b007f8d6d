"""Qwen3: Llama with norms of queries and keys."""

from __future__ import annotations

from fastmp.hf.families import decoder
from fastmp.hf.families.base import Conversion, Family, Field, SlidingWindow

FAMILY = Family(
    "qwen3",
    Conversion(
        architecture="Qwen3ForCausalLM",
        layers=decoder.LAYERS,
        model_weights=decoder.MODEL_WEIGHTS,
        layer_weights=decoder.LAYER_WEIGHTS | decoder.QK_NORM_WEIGHTS,
        fields=decoder.FIELDS | {"head_dim": Field("head_size", 128)},
        model=decoder.MODEL | {"qk_norm": True},
        supported=decoder.NO_BIAS,
        window=SlidingWindow(4096, first_layer=28, opt_in=True, per_layer=True),
    ),
    decoder.dense("Qwen3"),
)
