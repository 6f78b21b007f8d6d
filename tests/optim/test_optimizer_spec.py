"""An optimizer from outside of fastmp, in one file: its spec serves configuration, training and plans."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import toy_optimizer
from torch import nn

from fastmp.config import OPTIMIZERS, DataConfig, GPTConfig, OptimizerConfig, Recipe
from fastmp.config.recipe import parse_arguments
from fastmp.distributed.grid import RankGrid
from fastmp.distributed.groups import ParallelGroups
from fastmp.optim.from_config import make_grads, make_optimizer
from fastmp.optim.grad_norm import clip_coefficient, global_grad_norm
from fastmp.plan.memory import state_bytes
from fastmp.plan.parameters import rank_buffers
from fastmp.plan.shapes import shapes_of
from fastmp.testing.ranks import run_ranks

OPTIONS = {"lr": 0.1, "min_lr": 0.0, "momentum": 0.8, "bucket_size": 100}


@pytest.fixture(autouse=True)
def toy(monkeypatch):
    monkeypatch.setattr(OPTIMIZERS, "_specs", dict(OPTIMIZERS._specs))
    toy_optimizer.register()


def make_model():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 16)).double()


def batch(step, rank):
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(8, 16, dtype=torch.float64, generator=generator)


def train(rank, world):
    """Four steps on the rank's batches; one of them is skipped, as its gradient is not finite."""
    if "sgd" not in OPTIMIZERS:  # a rank is a process of its own
        toy_optimizer.register()
    groups = ParallelGroups.create(RankGrid(world_size=world)) if world > 1 else ParallelGroups.alone()
    model, config = make_model(), OptimizerConfig(name="sgd", **OPTIONS)
    grads = make_grads([model], config, groups)
    optimizer = make_optimizer(grads, config, groups)
    assert type(optimizer) is toy_optimizer.Sgd
    optimizer.gather.attach([model])
    for step in range(4):
        grads.zero()
        for other in range(2) if world == 1 else [rank]:
            loss = model(batch(step, other)).square().sum()
            (loss * torch.inf if step == 2 else loss).backward()
        grads.reduce()
        norm = global_grad_norm(grads, **groups.norm)
        optimizer.step(grad_norm=norm, clip_coefficient=clip_coefficient(norm, 5.0))
    optimizer.gather.wait()
    state = optimizer.state_dict()
    assert (int(state["step"]), int(state["skipped_steps"])) == (3, 1)
    assert all(entry.keys() == {"velocity"} for entry in state["state"].values())
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def reference():
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=OPTIONS["lr"], momentum=OPTIONS["momentum"])
    for step in (0, 1, 3):
        optimizer.zero_grad()
        for rank in range(2):
            model(batch(step, rank)).square().sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
    return dict(model.named_parameters())


def test_it_trains_on_one_rank_and_sharded_over_two():
    expected = reference()
    for found in (train(0, 1), *run_ranks(train, 2)):
        for name, param in expected.items():
            torch.testing.assert_close(found[name], param.detach(), rtol=1e-9, atol=1e-12)


def test_choices_help_and_plans_have_it(capsys):
    with pytest.raises(SystemExit):
        parse_arguments(["--help-all"])
    assert "sgd (momentum)" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(ValueError, match="name must be one of adamw, muon, sgd, got 'other'"):
        OptimizerConfig(name="other")
    model = GPTConfig(num_layers=2, hidden_size=64, num_heads=4, vocab_size=64, max_seq_len=16)
    recipe = Recipe(model=model, data=DataConfig(seq_len=16), optimizer=OptimizerConfig(name="sgd"))
    shapes = shapes_of(recipe, 1)
    assert state_bytes(recipe, shapes) == 4 + (0 if shapes.itemsize == 4 else 4)
    assert not any(buffer.whole for buffer in rank_buffers(recipe, shapes, 0))


@pytest.mark.parametrize(
    ("name", "matrix", "bytes_of"),
    [("adamw", False, (8, 12, 4, 6)), ("muon", False, (8, 12, 4, 6)), ("muon", True, (4, 8, 4, 6))],
)
def test_state_bytes(name, matrix, bytes_of):
    """Of float32 and bfloat16 parameters, with classic and with small states."""
    state = OPTIMIZERS[name].state_of(matrix)
    found = [state.bytes(itemsize, small) for small in (False, True) for itemsize in (4, 2)]
    assert tuple(found) == bytes_of
    assert replace(state, narrow=False).bytes(4, small=True) == 4 * len(state.moments)
