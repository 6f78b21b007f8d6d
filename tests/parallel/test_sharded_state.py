"""torch's distributed checkpoints of parallel layers: all shards, read back over any number of ranks."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo  # DTensor imports it: otherwise in every forked rank
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from fastmp.config import GPTConfig, MoEConfig
from fastmp.nn.moe import MoELayer
from fastmp.parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    sharded_state_dict,
)
from fastmp.testing import run_ranks


def parts(seed):
    """The undivided layers."""
    torch.manual_seed(seed)
    return nn.ModuleDict(
        {
            "embedding": nn.Embedding(16, 8),
            "norm": nn.LayerNorm(8),
            "qkv": nn.Linear(8, 24),
            "up": nn.Linear(8, 16),
            "down": nn.Linear(32, 8),
        }
    )


def divided(whole, group):
    return nn.ModuleDict(
        {
            "embedding": VocabParallelEmbedding.from_embedding(whole["embedding"], group=group),
            "norm": whole["norm"],
            "qkv": ColumnParallelLinear.from_linear(whole["qkv"], group=group, stride=3),
            "up": ColumnParallelLinear.from_linear(whole["up"], group=group),
            "down": RowParallelLinear.from_linear(whole["down"], group=group, stride=2),
        }
    )


def group_of(world):
    return dist.group.WORLD if world > 1 else None


def save(rank, world, path):
    dcp.save(sharded_state_dict(divided(parts(1), group_of(world))), checkpoint_id=path)


def load(rank, world, path):
    model, expected = divided(parts(2), group_of(world)), divided(parts(1), group_of(world)).state_dict()
    dcp.load(sharded_state_dict(model), checkpoint_id=path)
    return all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(("saved_by", "read_by"), [(2, 4), (4, 1)])
def test_a_checkpoint_is_read_over_any_number_of_ranks(tmp_path, saved_by, read_by):
    run_ranks(save, saved_by, str(tmp_path))
    assert all(run_ranks(load, read_by, str(tmp_path)))


def test_entries_share_memory_with_parameters_and_blocks_have_names():
    model = divided(parts(1), None)
    state = sharded_state_dict(model)
    assert [name for name in state if name.startswith("qkv")] == [
        f"qkv.{name}[{block}]" for name in ("weight", "bias") for block in range(3)
    ]
    assert state["qkv.weight[1]"].data_ptr() == model["qkv"].weight[8:].data_ptr()


def test_experts_are_refused():
    layer = MoELayer(GPTConfig(moe=MoEConfig()))
    with pytest.raises(ValueError, match=r"experts\.fc1 belongs to experts, which are divided"):
        sharded_state_dict(layer)
