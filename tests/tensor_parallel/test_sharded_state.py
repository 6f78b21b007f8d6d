"""torch's distributed checkpoints of parallel layers: all shards, read back over any number of ranks."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch._dynamo  # DTensor imports it: otherwise in every forked rank
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from fastmp.config import GPTConfig, MoEConfig
from fastmp.distributed.grid import RankGrid
from fastmp.distributed.groups import ParallelGroups
from fastmp.nn import Placement
from fastmp.nn.moe.layer import MoELayer
from fastmp.tensor_parallel.embedding import VocabParallelEmbedding
from fastmp.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from fastmp.tensor_parallel.sharded_state import sharded_state_dict
from fastmp.testing.ranks import run_ranks


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


def save_while_training(rank, world, path):
    """As the docstring says: changes after the call are not in the checkpoint."""
    model = divided(parts(1), group_of(world))
    state = {name: tensor.clone() for name, tensor in sharded_state_dict(model).items()}
    saved = dcp.async_save(state, checkpoint_id=path)
    with torch.no_grad():
        model["qkv"].weight.zero_()
    saved.result()


def test_copies_are_saved_asynchronously(tmp_path):
    run_ranks(save_while_training, 2, str(tmp_path))
    assert load(0, 1, str(tmp_path))


def test_entries_share_memory_with_parameters_and_blocks_have_names():
    model = divided(parts(1), None)
    state = sharded_state_dict(model)
    assert [name for name in state if name.startswith("qkv")] == [
        f"qkv.{name}[{block}]" for name in ("weight", "bias") for block in range(3)
    ]
    assert state["qkv.weight[1]"].data_ptr() == model["qkv"].weight[8:].data_ptr()
    assert not any(vars(tensor) for tensor in model.state_dict().values()), "one rank's are saved plainly"


def test_experts_are_refused():
    layer = MoELayer(GPTConfig(moe=MoEConfig()))
    with pytest.raises(ValueError, match=r"experts\.fc1 belongs to experts, which are sharded"):
        sharded_state_dict(layer)


def refusal(attempt):
    with pytest.raises(dcp.api.CheckpointException) as caught:
        attempt()
    return str(caught.value)


def save_plainly(rank, world, path):
    model = divided(parts(1), dist.group.WORLD)
    attempts = {
        "state_dict": lambda: dcp.save(model.state_dict(), checkpoint_id=path),
        "stateful": lambda: dcp.save({"model": model}, checkpoint_id=path),
        "get_model_state_dict": lambda: dcp.save(get_model_state_dict(model), checkpoint_id=path),
        "a copy": lambda: dcp.save(copy.deepcopy(model.state_dict()), checkpoint_id=path),
        "async_save": lambda: dcp.async_save(model.state_dict(), checkpoint_id=path).result(),
    }
    return {name: refusal(attempt) for name, attempt in attempts.items()}


@pytest.mark.parametrize("world", [2, 4])
def test_a_plain_state_dict_is_not_saved(tmp_path, world):
    for refused in run_ranks(save_plainly, world, str(tmp_path)):
        for name, message in refused.items():
            assert "embedding.weight is one rank's shard of a parallel layer" in message, name
            assert "give it sharded_state_dict(module)" in message, name


def load_plainly(rank, world, path):
    layer = ColumnParallelLinear(4, 4, group=dist.group.WORLD, bias=False)
    dcp.save({"weight": torch.zeros(2, 4)}, checkpoint_id=path)  # has the shape of a shard
    return refusal(lambda: dcp.load(layer.state_dict(), checkpoint_id=path))


def test_a_plain_state_dict_is_not_loaded(tmp_path):
    assert all(
        "give it sharded_state_dict(module)" in text for text in run_ranks(load_plainly, 2, str(tmp_path))
    )


def save_experts(rank, world, path):
    groups = ParallelGroups.create(RankGrid(world_size=world, ep=world))
    layer = MoELayer(GPTConfig(moe=MoEConfig()), Placement(groups))
    return refusal(lambda: dcp.save(layer.state_dict(), checkpoint_id=path))


def test_experts_over_ranks_are_not_saved_plainly(tmp_path):
    assert all(
        "experts.fc1 is one rank's shard" in text for text in run_ranks(save_experts, 2, str(tmp_path))
    )


def use_otherwise(rank, world):
    """The state dict of parallel layers, in other hands than torch's DCP."""
    model, other = (divided(parts(seed), dist.group.WORLD) for seed in (1, 2))
    state, whole = model.state_dict(), model.state_dict(keep_vars=True)
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    for copied in (
        torch.load(file),
        load_safetensors(save_safetensors(state)),
        copy.deepcopy(state),
        {name: tensor.clone() for name, tensor in state.items()},
    ):
        assert all(torch.equal(tensor, state[name]) for name, tensor in copied.items())
    assert all(type(tensor) is torch.Tensor for tensor in state.values())
    assert all(tensor is dict(model.named_parameters())[name] for name, tensor in whole.items())
    assert state["up.weight"].data_ptr() == model["up"].weight.data_ptr()
    x = torch.randn(3, 8)
    expected = model["up"](x)
    assert torch.equal(torch.func.functional_call(other["up"], model["up"].state_dict(), (x,)), expected)
    other.load_state_dict(state, assign=True)
    assert type(other["up"].weight) is nn.Parameter and torch.equal(other["up"](x), expected)


def test_a_plain_state_dict_is_as_before_elsewhere():
    run_ranks(use_otherwise, 2)
