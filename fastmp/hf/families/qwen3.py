"""Qwen3: Llama with norms of queries and keys."""

from __future__ import annotations

from fastmp.hf.families import llama_like
from fastmp.hf.families.base import Conversion, Family, Field, SlidingWindow

FAMILY = Family(
    "qwen3",
    Conversion(
        architecture="Qwen3ForCausalLM",
        layers=llama_like.LAYERS,
        model_weights=llama_like.MODEL_WEIGHTS,
        layer_weights=llama_like.LAYER_WEIGHTS | llama_like.QK_NORM_WEIGHTS,
        fields=llama_like.FIELDS | {"head_dim": Field("head_size", 128)},
        model=llama_like.MODEL | {"qk_norm": True},
        supported=llama_like.NO_BIAS,
        window=SlidingWindow(4096, first_layer=28, opt_in=True, per_layer=True),
    ),
    llama_like.dense("Qwen3"),
)
