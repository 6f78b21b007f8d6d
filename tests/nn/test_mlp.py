"""The MLP: one fused bias-GeLU between the products, one all-reduce each way, the plain formula."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from nn_tools import QWEN, SEED, SMALL, Calls, shard_of, sum_partial_gradients, tp_groups

from fastmp.nn import MLP
from fastmp.parallel.rng import RngTracker
from fastmp.testing import run_ranks
from fastmp.testing.parallel import count_collectives

CLOSE = {"rtol": 1e-10, "atol": 1e-10}


def make(group=None, tp_rank=0, activation="gelu", **options):
    config = replace(SMALL, activation=activation)
    mlp = MLP(config, group=group, rng=RngTracker(SEED, tp_rank=tp_rank), dtype=torch.float64, **options)
    with torch.no_grad():
        for param in (mlp.up.bias, mlp.down.bias):
            size = mlp.up.output_size if param is mlp.up.bias else SMALL.hidden_size
            param.copy_(shard_of(torch.linspace(-1, 1, size, dtype=torch.float64), param, group))
    return mlp


def inputs():
    return torch.randn(
        8, 3, SMALL.hidden_size, dtype=torch.float64, generator=torch.Generator().manual_seed(5)
    )


def plain(mlp, x_SBH):
    up_SBF = F.linear(x_SBH, mlp.up.weight, mlp.up.bias)
    if mlp.gated:
        gate_SBF, up_SBF = up_SBF.chunk(2, dim=-1)
        return F.linear(F.silu(gate_SBF) * up_SBF, mlp.down.weight)
    return F.linear(F.gelu(up_SBF, approximate="tanh"), mlp.down.weight)


def test_mlp_is_the_plain_formula_and_leaves_its_bias_to_the_caller():
    mlp, x_SBH = make(), inputs()
    output, bias = mlp(x_SBH)
    torch.testing.assert_close(output, plain(mlp, x_SBH), **CLOSE)
    assert bias is mlp.down.bias


@pytest.mark.parametrize("activation, op", (("gelu", "bias_gelu"), ("swiglu", "gated_activation")))
def test_bias_and_activation_are_one_op_each_way(activation, op):
    mlp, x_SBH = make(activation=activation), inputs().requires_grad_()
    with Calls() as calls:
        mlp(x_SBH)[0].sum().backward()
    assert calls.ops == {op: 1, f"{op}_backward": 1}


def test_swiglu_without_biases_is_the_plain_formula():
    mlp, x_SBH = MLP(QWEN, group=None, dtype=torch.float64), inputs()
    gate, up = mlp.up.weight.chunk(2)
    output, bias = mlp(x_SBH)
    assert bias is None and mlp.up.bias is None
    torch.testing.assert_close(output, (F.silu(x_SBH @ gate.T) * (x_SBH @ up.T)) @ mlp.down.weight.T, **CLOSE)


@pytest.mark.parametrize("activation", ("gelu", "swiglu"))
@pytest.mark.parametrize("sequence_parallel", (False, True), ids=("plain", "sequence"))
def test_mlp_over_two_ranks(sequence_parallel, activation):
    def case(rank, world):
        group = tp_groups(world).tp
        one = make(activation=activation)
        many = make(group, rank, activation=activation, sequence_parallel=sequence_parallel)
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
