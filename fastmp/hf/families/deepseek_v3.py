"""DeepSeek-V3: multi-head latent attention, groups of experts chosen by sigmoid scores and a bias."""

from __future__ import annotations

from fastmp.hf.families import deepseek_like, llama_like
from fastmp.hf.families.family import Family, Field
from fastmp.hf.patches import GroupedRouter, InterleavedLatentAttention

CONVERSION = deepseek_like.conversion(
    "DeepseekV3ForCausalLM",
    mtp_weights=llama_like.MTP_WEIGHTS,
    fields=llama_like.MTP_FIELDS
    | {
        "rope_interleave": Field("rope_interleaved", True),
        "norm_topk_prob": Field("moe.normalize_topk", True),
        "routed_scaling_factor": Field("moe.routed_scale", 2.5),
        "n_group": Field("moe.num_groups", 8),
        "topk_group": Field("moe.group_topk", 4),
    },
    moe={"score": "sigmoid", "expert_bias": True},
    supported={
        "attention_bias": (False,),
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
        "moe_layer_freq": (1,),
    },
    read=deepseek_like.read,
    write=deepseek_like.write,
)
FAMILY = Family(
    "deepseek_v3",
    CONVERSION,
    deepseek_like.acceleration("DeepseekV3", InterleavedLatentAttention, GroupedRouter),
)
