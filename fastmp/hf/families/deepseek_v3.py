"""DeepSeek-V3: multi-head latent attention, groups of experts. Import and export are not supported."""

from __future__ import annotations

from fastmp.hf.families import llama_like
from fastmp.hf.families.base import Acceleration, Family, TPTable
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

FAMILY = Family(
    "deepseek_v3",
    acceleration=Acceleration(
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
