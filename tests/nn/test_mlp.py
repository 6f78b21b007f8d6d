"""The MLP: one fused bias and activation between the GEMMs, by the plain formula."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from dispatch_modes import CalledOps
from nn_tools import PLAIN_ACTIVATIONS, tp_groups

from fastmp.config import ACTIVATIONS, DataConfig, MoEConfig, Recipe
from fastmp.config.sizes import num_parameters
from fastmp.distributed.collectives import group_rank
from fastmp.distributed.groups import ParallelGroups
from fastmp.distributed.rng import RngTracker
from fastmp.nn import GPT, MLP, Placement
from fastmp.nn.activation import activation_function
from fastmp.nn.moe.experts import GroupedExperts
from fastmp.plan.shapes import shapes_of
from fastmp.testing.ranks import run_ranks
from tools.small_models import SEED, SMALL, local_shard

CLOSE = {"rtol": 1e-10, "atol": 1e-10}


def make(groups=ParallelGroups.alone(), activation="gelu_tanh", **options):
    config, rng = replace(SMALL, activation=activation), RngTracker(SEED, tp_rank=group_rank(groups.tp))
    mlp = MLP(config, Placement(groups, rng=rng, dtype=torch.float64, **options))
    with torch.no_grad():
        for param in (mlp.up.bias, mlp.down.bias):
            size = mlp.up.output_size if param is mlp.up.bias else SMALL.hidden_size
            param.copy_(local_shard(torch.linspace(-1, 1, size, dtype=torch.float64), param, groups.tp))
    return mlp


def inputs():
    return torch.randn(
        8, 3, SMALL.hidden_size, dtype=torch.float64, generator=torch.Generator().manual_seed(5)
    )


def plain(mlp, x_SBH, activation="gelu_tanh"):
    up_SBF = F.linear(x_SBH, mlp.up.weight, mlp.up.bias)
    return F.linear(PLAIN_ACTIVATIONS[activation](up_SBF), mlp.down.weight)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_mlp_is_the_plain_formula_and_leaves_its_bias_to_the_caller(activation):
    mlp, x_SBH = make(activation=activation), inputs()
    output, bias = mlp(x_SBH)
    torch.testing.assert_close(output, plain(mlp, x_SBH, activation), **CLOSE)
    assert bias is mlp.down.bias


def test_an_activation_of_the_table_is_known_everywhere():
    """MLP, experts, parameter counts and plans read one table."""
    dense = replace(SMALL, activation="geglu_erf")
    sparse = replace(dense, moe=MoEConfig(num_experts=2, top_k=1, expert_ffn_hidden_size=16))
    experts = GroupedExperts(sparse, Placement(dtype=torch.float64))
    rows_MH = inputs().flatten(0, 1)
    output_MH = experts(rows_MH, torch.tensor([0, len(rows_MH)], dtype=torch.int32))
    hidden_MF = PLAIN_ACTIVATIONS["geglu_erf"](rows_MH @ experts.fc1[1].T)
    torch.testing.assert_close(output_MH, hidden_MF @ experts.fc2[1].T, **CLOSE)
    for config in (dense, sparse):
        model = GPT(config)
        assert sum(p.numel() for p in model.parameters()) == num_parameters(config, 256)
        assert shapes_of(Recipe(model=config, data=DataConfig(seq_len=16)), 1).projections == 2


def test_an_unknown_activation_is_not_supported():
    known = ", ".join(ACTIVATIONS)
    with pytest.raises(ValueError, match=f"activation must be one of {known}, got 'relu'"):
        replace(SMALL, activation="relu")
    with pytest.raises(ValueError, match=f"unknown activation 'relu': expected one of {known}"):
        activation_function("relu")


@pytest.mark.parametrize("activation, op", (("gelu", "bias_gelu"), ("swiglu", "gated_activation")))
def test_bias_and_activation_are_one_op_each_way(activation, op):
    mlp, x_SBH = make(activation=activation), inputs().requires_grad_()
    with CalledOps() as calls:
        mlp(x_SBH)[0].sum().backward()
    assert Counter(calls.names) == {op: 1, f"{op}_backward": 1}


def test_an_ffn_size_that_tp_does_not_divide_is_refused():
    def case(rank, world):
        with pytest.raises(
            ValueError, match="ffn_hidden_size 97 is not divisible by the tensor-parallel size 2"
        ):
            MLP(replace(SMALL, ffn_hidden_size=97), Placement(tp_groups(world)))

    run_ranks(case, 2)
