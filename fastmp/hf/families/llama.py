"""Llama 2 and 3."""

from __future__ import annotations

from fastmp.hf.families import llama_like
from fastmp.hf.families.family import Family, Field

FAMILY = Family(
    "llama",
    llama_like.conversion(
        "LlamaForCausalLM",
        fields=llama_like.HEAD_DIM | {"num_key_value_heads": Field("num_kv_heads", None)},
        supported=llama_like.NO_BIAS,
    ),
    llama_like.dense("Llama"),
)
