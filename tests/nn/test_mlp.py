"""The MLP: one fused bias-GeLU between the products, one all-reduce each way, the plain formula."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from nn_tools import SEED, SMALL, Calls, shard_of, sum_partial_gradients, tp_groups

from fastmp.nn import MLP
from fastmp.parallel.rng import RngTracker
from fastmp.testing import run_ranks
from fastmp.testing.parallel import count_collectives

CLOSE = {"rtol": 1e-10, "atol": 1e-10}


def make(group=None, tp_rank=0, **options):
    mlp = MLP(SMALL, group=group, rng=RngTracker(SEED, tp_rank=tp_rank), dtype=torch.float64, **options)
    with torch.no_grad():
        for param in (mlp.up.bias, mlp.down.bias):
            size = SMALL.ffn_size if param is mlp.up.bias else SMALL.hidden_size
            param.copy_(shard_of(torch.linspace(-1, 1, size, dtype=torch.float64), param, group))
    return mlp


def inputs():
    return torch.randn(
        8, 3, SMALL.hidden_size, dtype=torch.float64, generator=torch.Generator().manual_seed(5)
    )


def plain(mlp, x_SBH):
    ffn_SBF = F.gelu(F.linear(x_SBH, mlp.up.weight, mlp.up.bias), approximate="tanh")
    return F.linear(ffn_SBF, mlp.down.weight)


def test_mlp_is_the_plain_formula_and_leaves_its_bias_to_the_caller():
    mlp, x_SBH = make(), inputs()
    output, bias = mlp(x_SBH)
    torch.testing.assert_close(output, plain(mlp, x_SBH), **CLOSE)
    assert bias is mlp.down.bias


def test_bias_and_gelu_are_one_op_each_way():
    mlp, x_SBH = make(), inputs().requires_grad_()
    with Calls() as calls:
        mlp(x_SBH)[0].sum().backward()
    assert calls.ops == {"bias_gelu": 1, "bias_gelu_backward": 1}


@pytest.mark.parametrize("sequence_parallel", (False, True), ids=("plain", "sequence"))
def test_mlp_over_two_ranks(sequence_parallel):
    def case(rank, world):
        group = tp_groups(world).tp
        one, many = make(), make(group, rank, sequence_parallel=sequence_parallel)
        part = slice(rank * 4, rank * 4 + 4) if sequence_parallel else slice(None)
        x_SBH = inputs().requires_grad_()
        own_SBH = x_SBH.detach()[part].requires_grad_()
        (plain(one, x_SBH) + one.down.bias).square().sum().backward()
        with count_collectives() as forward:
            output, bias = many(own_SBH)
        with count_collectives() as backward:
            (output + bias).square().sum().backward()
        if sequence_parallel:
            assert forward.counts == {"all_gather": 1, "reduce_scatter": 1}
            assert backward.counts == {"all_gather": 2, "reduce_scatter": 1}  # X again, dY; dX
        else:
            assert forward.counts == backward.counts == {"all_reduce": 1}
        torch.testing.assert_close(own_SBH.grad, x_SBH.grad[part], **CLOSE)
        sum_partial_gradients(many.parameters(), group)
        for (name, full), param in zip(one.named_parameters(), many.parameters()):
            assert torch.equal(shard_of(full.detach(), param, group), param), name
            torch.testing.assert_close(param.grad, shard_of(full.grad, param, group), **CLOSE)

    run_ranks(case, 2)


def test_an_ffn_size_that_tp_does_not_divide_is_refused():
    def case(rank, world):
        with pytest.raises(
            ValueError, match="ffn_hidden_size 97 is not divisible by the tensor-parallel size 2"
        ):
            MLP(replace(SMALL, ffn_hidden_size=97), group=tp_groups(world).tp)

    run_ranks(case, 2)
