"""DeepSeek-V3: multi-head latent attention, groups of experts chosen by sigmoid scores and a bias."""

from __future__ import annotations

from fastmp.hf.families import deepseek_like, llama_like
from fastmp.hf.families.base import Acceleration, Family, Field, TPTable
from fastmp.hf.heads import CausalLMWithRouters
from fastmp.hf.patches import GroupedRouter, LatentAttention
from fastmp.hf.tp_modules import ColumnParallel, ColumnParallelWithCopy, LatentHeads, RowParallel

_ATTENTION_PLAN: TPTable = {
    "": LatentHeads,
    "q_proj": ColumnParallelWithCopy,
    "q_b_proj": ColumnParallelWithCopy,
    "kv_b_proj": ColumnParallel,
    "o_proj": RowParallel,
    **dict.fromkeys(("q_a_proj", "q_a_layernorm", "kv_a_proj_with_mqa", "kv_a_layernorm")),
}

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
    read_keys=("auto_map",),
    read=deepseek_like.read,
    write=deepseek_like.write,
)
FAMILY = Family(
    "deepseek_v3",
    CONVERSION,
    Acceleration(
        llama_like.dense(
            "DeepseekV3", CausalLMWithRouters, Attention=LatentAttention, TopkRouter=GroupedRouter
        ).patches,
        experts="DeepseekV3Experts",
        tp_plan={
            "DeepseekV3Attention": _ATTENTION_PLAN,
            "DeepseekV3MLP": llama_like.MLP_PLAN,
            "DeepseekV3Experts": llama_like.EXPERTS_PLAN,
        },
    ),
)
