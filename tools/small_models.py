"""Small models for comparisons between layouts: their configurations, and a rank's part of a whole tensor."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from fastmp.config import GPTConfig, MoEConfig
from fastmp.distributed.collectives import group_rank, group_size
from fastmp.distributed.groups import ParallelGroups
from fastmp.distributed.rng import RngTracker
from fastmp.nn import GPT, Placement
from fastmp.tensor_parallel import attributes

SEED = 4321
SMALL = GPTConfig(
    num_layers=2,
    hidden_size=32,
    num_heads=8,
    num_kv_heads=4,
    ffn_hidden_size=96,
    vocab_size=131,
    max_seq_len=20,
    init_std=0.2,
)
QWEN = replace(  # every option that differs from GPT-2's form, heads wider than hidden_size / num_heads
    SMALL,
    head_size=6,
    norm="rmsnorm",
    position="rope",
    activation="swiglu",
    linear_bias=False,
    tie_embeddings=False,
    qk_norm=True,
)


EXPERTS = replace(
    QWEN,
    moe=MoEConfig(
        num_experts=8,
        top_k=3,
        expert_ffn_hidden_size=20,
        aux_loss=0.3,
        sequence_aux_loss=0.2,
        z_loss=0.1,
        shared_expert_ffn_hidden_size=24,
        shared_expert_gate=True,
    ),
)


def placed(groups: ParallelGroups, **options: Any) -> tuple[Placement, dict[str, Any]]:
    """Split `options` into a placement and the remaining options."""
    names = {each.name for each in fields(Placement)} & set(options)
    on = Placement(groups, **{name: options.pop(name) for name in names})
    return on, options


def make_gpt(
    config: GPTConfig, groups: ParallelGroups = ParallelGroups.alone(), dtype=torch.float64, **options
) -> GPT:
    """Return the model with the seed of all tests: the same weights at every tensor-parallel size."""
    device = options.get("device", "cpu")
    rng = RngTracker(SEED, tp_rank=group_rank(groups.tp), cp_rank=group_rank(groups.cp), device=device)
    on, others = placed(groups, rng=rng, dtype=dtype, **options)
    return GPT(config, on, **others)


def local_shard(
    full: torch.Tensor, param: torch.nn.Parameter, group: dist.ProcessGroup | None
) -> torch.Tensor:
    """Return this rank's shard of a full tensor; its vocabulary is padded or cut to the size of `param`
    first.
    """
    parallel, dim = param.tensor_model_parallel, param.partition_dim
    if not parallel:
        return full
    wanted = param.shape[dim] * group_size(group)
    if wanted != full.shape[dim]:
        assert dim == 0, "only the vocabulary is padded"
        full = F.pad(full, (*(0, 0) * (full.dim() - 1), 0, wanted - full.shape[0]))
    return attributes.local_shard(full, dim, param.partition_stride, group_size(group), group_rank(group))


def part_of(full: torch.Tensor, param: torch.nn.Parameter, groups: ParallelGroups) -> torch.Tensor:
    """Return this rank's shard as `local_shard`, also for parameters of experts."""
    if not getattr(param, "expert_parallel", False):
        return local_shard(full, param, groups.tp)
    return local_shard(full.chunk(group_size(groups.ep))[group_rank(groups.ep)], param, groups.etp)
