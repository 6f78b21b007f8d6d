"""Ranks that hold the same tensors are compared bit for bit; the one that differs is named."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from marks import full
from train_tools import DENSE, EXPERTS, Samples
from trainer_tools import make_groups, make_trainer

from fastmp.config import OptimizerConfig, ParallelConfig
from fastmp.optim.named_params import named_parameters
from fastmp.testing.ranks import run_ranks
from fastmp.training.replicas import ReplicaError, checksum

pytestmark = pytest.mark.usefixtures("one_thread")
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64]


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(DTYPES), st.integers(2, 40), st.data())
def test_a_changed_bit_and_an_exchange_change_the_checksum(dtype, size, data):
    x = torch.randn(size, dtype=torch.float64).mul(100).to(dtype)
    i = data.draw(st.integers(0, size - 1))
    j = data.draw(st.integers(0, size - 1).filter(lambda j: j != i))
    assert checksum(x) == checksum(x.clone()) and checksum(x).dtype == torch.int64
    changed = x.clone()
    raw = changed.view(torch.uint8).view(size, -1)
    raw[i, data.draw(st.integers(0, raw.shape[1] - 1))] ^= 1
    assert checksum(changed) != checksum(x)
    swapped = x.clone()
    swapped[[i, j]] = x[[j, i]]
    assert (checksum(swapped) == checksum(x)) == torch.equal(x[i], x[j])


def test_a_checksum_goes_on_over_blocks_and_tells_signs_of_zero(monkeypatch):
    x = torch.randn(100)
    whole = checksum(x)
    monkeypatch.setattr("fastmp.training.replicas._AT_ONCE", 7)
    assert checksum(x) == whole == checksum(x.view(10, 10)) == checksum(x.view(10, 10).t().contiguous().t())
    assert checksum(torch.tensor([0.0])) != checksum(torch.tensor([-0.0]))
    assert checksum(torch.empty(0)) == 0


def make(world_size, layout, model, shard):
    return make_trainer(
        make_groups(world_size, layout),
        layout,
        config=replace(model, num_layers=2),
        seed=5,
        dtype=torch.float32,
        data=Samples(1),
        optimizer=OptimizerConfig(lr=1e-3, min_lr=1e-4, warmup_steps=1, shard=shard),
        **{"steps": 4, "global_batch_size": 8, "check_replicas": 2},
    )


# World size, layout, model, whole gradients, and whose bit of which tensor is flipped; the message.
CASES = [
    (2, {}, DENSE, True, 1, "layers.0.mlp.up.weight", "ranks 0 and 1 should hold the same parameter"),
    (2, {"pp": 2}, DENSE, True, 1, "word_embedding.weight", "ranks 0 and 1 should hold the same parameter"),
    (4, {"tp": 2, "sequence_parallel": True}, DENSE, True, 2, "layers.1.mlp_norm.weight", "rank 2 should"),
    *full(
        [
            (4, {}, DENSE, False, 1, "gradient layers.0.mlp.up.weight", "rank 1 should hold"),
            (4, {"tp": 2}, DENSE, True, 3, "layers.0.mlp.up.weight", "ranks 1 and 3 should hold"),
            (4, {"pp": 2}, DENSE, True, 3, "word_embedding.weight", "rank 3 should hold"),
            (4, {"ep": 2}, EXPERTS, True, 3, "layers.0.moe.experts.fc1", "ranks 1 and 3 should hold"),
            (4, {"tp": 2, "ep": 2}, EXPERTS, True, 2, "layers.1.moe.router.weight", "rank 2 should hold"),
        ]
    ),
]  # fmt: skip


@pytest.mark.parametrize(("world", "layout", "model", "shard", "culprit", "name", "said"), CASES)
def test_the_rank_that_differs_is_named(world, layout, model, shard, culprit, name, said):
    """A healthy run passes, and exchanges no names for that; then one bit of one rank is flipped."""

    def rank_main(rank, world_size):
        trainer = make(world_size, ParallelConfig(**layout), model, shard)
        trainer.train()  # checks after steps 2 and 4
        trainer._replicas = None
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "all_gather_object", None)
            trainer.check_replicas()
        kind, _, parameter = name.rpartition(" ")
        parameters = dict(named_parameters(trainer.runner.chunks))
        if rank == culprit:
            tensor = parameters[parameter].main_grad if kind else parameters[parameter].data
            tensor.view(torch.int32).view(-1)[3] ^= 1
        with pytest.raises(ReplicaError) as error:
            trainer.check_replicas()
        dist.barrier()
        return str(error.value), sorted(parameters)

    for message, names in run_ranks(rank_main, world):
        assert message.startswith("step 4: ") and said in message, (message, names)
        assert f" {name.rpartition(' ')[2]}" in message and "differ" in message
