"""dots.llm1: DeepSeek-V3's router and shared experts, multi-head attention."""

from __future__ import annotations

from fastmp.hf.families import llama_like
from fastmp.hf.families.family import Family, SlidingWindow

FAMILY = Family(
    "dots1",
    llama_like.conversion(
        "Dots1ForCausalLM",
        layer_weights=llama_like.QK_NORM_WEIGHTS
        | llama_like.EXPERT_WEIGHTS
        | llama_like.SHARED_EXPERT_WEIGHTS
        | {"moe.router.expert_bias": "mlp.gate.e_score_correction_bias"},
        fields=llama_like.HEAD_DIM | llama_like.GROUPED_EXPERT_FIELDS,
        model={"qk_norm": True},
        moe={"score": "sigmoid", "expert_bias": True},
        supported=llama_like.NO_BIAS,
        aux_loss=None,
        window=SlidingWindow(4096, first_layer=62),
        read=llama_like.read_shared_experts,
        write=llama_like.write_shared_experts,
    ),
    llama_like.grouped_mixture("Dots1"),
)
