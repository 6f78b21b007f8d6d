"""Qwen3: Llama with norms of queries and keys."""

from __future__ import annotations

from fastmp.hf.families import llama_like
from fastmp.hf.families.family import Family, Field, SlidingWindow

FAMILY = Family(
    "qwen3",
    llama_like.conversion(
        "Qwen3ForCausalLM",
        layer_weights=llama_like.QK_NORM_WEIGHTS,
        fields={"head_dim": Field("head_size", 128)},
        model={"qk_norm": True},
        supported=llama_like.NO_BIAS,
        window=SlidingWindow(4096, first_layer=28, opt_in=True, per_layer=True),
    ),
    llama_like.dense("Qwen3"),
)
