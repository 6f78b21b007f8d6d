"""FSDP2 beside fastmp: `fully_shard` over GPTs, by the example of docs/fsdp2.md, against one process."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from fastmp.config import GPTConfig, MoEConfig
from fastmp.cuda_graphs.backends.recording import RecordingBackend
from fastmp.cuda_graphs.manager import GraphManager
from fastmp.distributed.collectives import group_rank, group_size
from fastmp.distributed.grid import RankGrid
from fastmp.distributed.groups import ParallelGroups
from fastmp.nn import GPT, Placement
from fastmp.schedule.schedule import Schedule
from fastmp.tensor_parallel.attributes import parallel_attributes
from fastmp.testing.ranks import run_ranks

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "fsdp2.md").read_text()
EXAMPLE = {"__name__": "example"}
exec(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[0], EXAMPLE)
SummedLoss, shard, clip_ = (EXAMPLE[name] for name in ("SummedLoss", "shard", "clip_"))

GPT2 = GPTConfig(num_layers=2, hidden_size=16, num_heads=2, vocab_size=50, max_seq_len=8)
LLAMA = replace(
    GPT2, norm="rmsnorm", activation="swiglu", position="rope", linear_bias=False, tie_embeddings=False
)
EXPERTS = replace(
    LLAMA,
    moe=MoEConfig(
        num_experts=4, expert_ffn_hidden_size=8, aux_loss=0.1, z_loss=0.1, shared_expert_ffn_hidden_size=8
    ),
)


def make(config, groups=None, **options):
    torch.manual_seed(3)
    on = Placement(ParallelGroups.alone() if groups is None else groups, dtype=torch.float64)
    return SummedLoss(GPT(config, on, **options))


def text(step, dp):
    ids = torch.randint(50, (dp, 2, 9), generator=torch.Generator().manual_seed(step))
    return ids[..., :-1], ids[..., 1:]


def gradients(root, part, dp, step=0):
    """The gradients of this rank's `part` of a step's text, whole; where there are shards, their sums."""
    tokens, targets = (ids[part].flatten(0, -2) for ids in text(step, dp))
    root(tokens, targets, dp * 16).backward()
    return {name: whole(param.grad) for name, param in root.named_parameters()}


def whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def train(root, part, dp, clip, **options):
    """The gradients of the first of three clipped steps of AdamW, and the parameters after them."""
    optimizer = torch.optim.AdamW(root.parameters(), lr=1e-2, **options)
    first = None
    for step in range(3):
        grads = gradients(root, part, dp, step)
        first = grads if first is None else first
        clip(root.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
    return first, {name: whole(param) for name, param in root.named_parameters()}


def assert_same(found, expected):
    for name, tensor in found.items():
        torch.testing.assert_close(
            tensor, expected[name], rtol=1e-10, atol=1e-12, msg=lambda said, name=name: f"{name}: {said}"
        )


def own_part(full, mine, groups):
    """This rank's experts of a tensor of all of them."""
    if full.shape == mine.shape:
        return full
    assert full.shape[0] == len(mine) * group_size(groups.ep)
    return full.chunk(group_size(groups.ep))[group_rank(groups.ep)]


def compare(rank, world_size, config, ep, recompute):
    groups = ParallelGroups.create(RankGrid(world_size=world_size, ep=ep))
    expected = train(make(config), slice(None), world_size, torch.nn.utils.clip_grad_norm_)
    root = make(config, groups, recompute=recompute)
    shard(root, groups)
    assert all(isinstance(param, DTensor) for param in root.parameters())
    for got, right in zip(train(root, rank, world_size, clip_, foreach=True), expected, strict=True):
        assert_same(got, {name: own_part(right[name], tensor, groups) for name, tensor in got.items()})


@pytest.mark.parametrize(
    ("config", "world_size", "ep", "recompute"),
    [
        (GPT2, 2, 1, True),
        (EXPERTS, 4, 2, True),
        pytest.param(replace(LLAMA, mtp_depth=2), 2, 1, False, marks=pytest.mark.full),
        pytest.param(GPT2, 4, 1, False, marks=pytest.mark.full),
        pytest.param(LLAMA, 3, 1, True, marks=pytest.mark.full),
        pytest.param(EXPERTS, 2, 1, True, marks=pytest.mark.full),
        pytest.param(EXPERTS, 2, 2, False, marks=pytest.mark.full),
        pytest.param(EXPERTS, 4, 4, True, marks=pytest.mark.full),
        pytest.param(EXPERTS, 4, 1, False, marks=pytest.mark.full),
    ],
    ids=[
        "dense",
        "experts",
        "mtp",
        "dense-4",
        "llama-3",
        "experts-edp2",
        "experts-ep2",
        "experts-ep4",
        "experts-edp4",
    ],
)
def test_gradients_and_steps_are_those_of_one_process(config, world_size, ep, recompute):
    run_ranks(compare, world_size, config, ep, recompute)


def with_a_root_of_its_own(rank, world_size):
    groups = ParallelGroups.create(RankGrid(world_size=world_size))
    expected = gradients(make(GPT2), slice(None), world_size)
    model = make(GPT2, groups).model
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    tokens, targets = (ids[rank] for ids in text(0, world_size))
    with pytest.raises(
        ValueError, match=r"GPT: its parameters are the shards of fully_shard, .*register_fsdp"
    ):
        model.loss(tokens, targets)
    register_fsdp_forward_method(model, "loss")
    model.loss(tokens, targets).mean().backward()  # divided by 16 tokens, and by torch by the number of ranks
    assert_same({f"model.{name}": whole(param.grad) for name, param in model.named_parameters()}, expected)


def test_the_loss_of_a_gpt_that_is_the_root_itself():
    run_ranks(with_a_root_of_its_own, 2)


def in_bfloat16(rank, world_size):
    groups = ParallelGroups.create(RankGrid(world_size=world_size))
    exact = gradients(make(LLAMA), slice(None), world_size)
    plain = make(LLAMA).to(torch.bfloat16)
    root = make(LLAMA, groups).float()
    shard(root, groups, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    got, alone = gradients(root, rank, world_size), gradients(plain, slice(None), world_size)
    assert {grad.dtype for grad in got.values()} == {torch.float32}

    def error(grads):
        return sum((grads[name].double() - grad).square().sum() for name, grad in exact.items()).sqrt()

    size = sum(grad.square().sum() for grad in exact.values()).sqrt()
    return (error(got) / size).item(), (error(alone) / size).item()


def test_bfloat16_is_as_exact_as_a_bfloat16_model():
    sharded, alone = run_ranks(in_bfloat16, 2)[0]
    assert 1e-4 < sharded <= 1.1 * alone


def beside_tensor_parallelism(rank, world_size):
    groups = ParallelGroups.create(RankGrid(world_size=world_size, tp=2))
    expected = gradients(make(GPT2), slice(None), 2)
    root = make(GPT2, groups)
    named = root.named_parameters()
    replicated = [name for name, param in named if not parallel_attributes(param).tensor_model_parallel]
    shard(root, groups)
    got = gradients(root, group_rank(groups.dp), 2)
    assert len(replicated) > 10
    apart = SummedLoss(GPT(GPT2, Placement(groups, sequence_parallel=True)))
    shard(apart, groups)
    with pytest.raises(ValueError, match=r"sequence_parallel=True over 2 ranks, .* fully_shard"):
        gradients(apart, group_rank(groups.dp), 2)
    assert_same({name: got[name] for name in replicated}, expected)


@pytest.mark.full
def test_tensor_parallel_ranks_get_the_gradients_of_one_process():
    run_ranks(beside_tensor_parallelism, 4)


def under_a_graph_manager(rank, world_size):
    groups = ParallelGroups.create(RankGrid(world_size=world_size))
    expected = gradients(make(GPT2), slice(None), world_size)
    root = make(GPT2, groups)
    shard(root, groups)
    manager = GraphManager([root.model.layers], Schedule(1, 1).orders()[0], backend=RecordingBackend())
    for _ in range(4):
        root.zero_grad()
        manager.begin_step()
        got = gradients(root, rank, world_size)
        manager.end_step()
    assert_same(got, expected)
    return manager.num_graphs


@pytest.mark.full
def test_layers_of_fully_shard_run_eagerly_under_a_graph_manager():
    assert run_ranks(under_a_graph_manager, 2) == [0, 0]


def save(rank, world_size, path, config, ep):
    groups = ParallelGroups.create(RankGrid(world_size=world_size, ep=ep))
    root = make(config, groups)
    shard(root, groups)
    try:
        dcp.save(root.state_dict(), checkpoint_id=path)
    except dcp.api.CheckpointException as error:
        return str(error)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torchs_checkpoints_hold_whole_weights_or_say_that_they_cannot(tmp_path):
    assert run_ranks(save, 2, str(tmp_path / "dense"), GPT2, 1) == [None, None]
    expected, loaded = make(GPT2).state_dict(), make(replace(GPT2, init_std=0.5)).state_dict()
    dcp.load(loaded, checkpoint_id=str(tmp_path / "dense"))
    for name, tensor in expected.items():
        assert torch.equal(loaded[name], tensor), name
    for said in run_ranks(save, 2, str(tmp_path / "experts"), EXPERTS, 2):
        assert "one rank's shard of a parallel layer" in said
