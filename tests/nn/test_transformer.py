"""The transformer layer: its segments, its dropout, and one graph under torch.compile."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch._dynamo  # imported before ranks are forked
from nn_tools import tp_groups

from fastmp.distributed.collectives import group_rank
from fastmp.distributed.grid import RankGrid
from fastmp.distributed.groups import ParallelGroups
from fastmp.distributed.rng import RngTracker
from fastmp.nn import Placement, TransformerLayer
from fastmp.nn.dropout import Dropout
from fastmp.tensor_parallel.attributes import parallel_attributes
from fastmp.testing.ranks import run_ranks
from tools.small_models import EXPERTS, SEED, SMALL, placed

S, B, H = 8, 3, SMALL.hidden_size
CLOSE = {"rtol": 1e-10, "atol": 1e-10}


def make(config=SMALL, groups=ParallelGroups.alone(), **options):
    rng = RngTracker(SEED, tp_rank=group_rank(groups.tp))
    on, others = placed(groups, rng=rng, dtype=torch.float64, **options)
    return TransformerLayer(config, on, **others)


def inputs():
    return torch.randn(S, B, H, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


def test_experts_in_place_of_the_mlp():
    """Their segments between the norm and the addition, one after the other as a whole."""
    layer, x_SBH = make(EXPERTS), inputs()
    names = ["attention", "router", "preprocess", "shared_experts", "dispatch", "experts", "combine"]
    assert [segment.name for segment in layer.segments()] == names and layer.mlp is None
    tensors = (x_SBH,)
    for segment in layer.segments():
        assert segment.capturable  # on one rank: nothing waits for the device
        tensors = segment.run(*tensors)
    (after_SBH,) = layer.segments()[0].run(x_SBH)
    output_SBH, aux, counts_E = layer.moe(layer.mlp_norm(after_SBH))
    for part, whole, expected in zip(tensors, layer(x_SBH), (after_SBH + output_SBH, aux, counts_E)):
        assert torch.equal(part, whole) and torch.equal(whole, expected)


@pytest.mark.parametrize("sequence_parallel", (False, True))
def test_parameters_carry_their_partition(sequence_parallel):
    marks = {
        name: parallel_attributes(param)
        for name, param in make(sequence_parallel=sequence_parallel).named_parameters()
    }
    divided = {
        "attention.qkv.weight": 0,
        "attention.qkv.bias": 0,
        "attention.proj.weight": 1,
        "mlp.up.weight": 0,
        "mlp.up.bias": 0,
        "mlp.down.weight": 1,
    }
    for name, mark in marks.items():
        assert mark.tensor_model_parallel == (name in divided), name
        assert mark.partition_dim == divided.get(name, -1), name
        assert mark.sequence_parallel == (sequence_parallel and name not in divided), name
    assert len(marks) == 12


def test_both_outputs_are_dropped_with_their_bias_before_they_are_added():
    layer, x_SBH = make(replace(SMALL, dropout=0.3)), inputs()
    with torch.no_grad():
        for projection in (layer.attention.proj, layer.mlp.down):
            projection.weight.zero_()
            projection.bias.fill_(1.0)
    added = ((layer(x_SBH) - x_SBH) * 0.7).round(decimals=6)
    assert set(added.unique().tolist()) == {0.0, 1.0, 2.0}
    assert abs((added == 0).double().mean() - 0.3**2) < 0.04
    torch.testing.assert_close(layer.eval()(x_SBH), x_SBH + 2.0, **CLOSE)


@pytest.mark.parametrize("dtype", (torch.float64, torch.float32))
def test_without_dropout_a_layer_is_bitwise_the_sum_of_its_parts(dtype):
    """Forward and backward, as autograd differentiates the two additions."""
    layer, x_SBH = make().to(dtype), inputs().to(dtype).requires_grad_()

    def plain(x_SBH):
        for norm, part in ((layer.attention_norm, layer.attention), (layer.mlp_norm, layer.mlp)):
            output_SBH, bias_H = part(norm(x_SBH))
            x_SBH = x_SBH + (output_SBH + bias_H)
        return x_SBH

    leaves = (x_SBH, *layer.parameters())
    results = [(y, *torch.autograd.grad(y.square().sum(), leaves)) for y in (layer(x_SBH), plain(x_SBH))]
    assert all(torch.equal(a, b) for a, b in zip(*results))


def test_hidden_dropout_is_equal_on_replicas_and_different_on_sequence_shards():
    def case(rank, world):
        ones, on = torch.ones(40, 50), Placement(tp_groups(world), rng=RngTracker(SEED, tp_rank=rank))
        replica, shard = Dropout(0.3, on), Dropout(0.3, replace(on, sequence_parallel=True))
        zeros, bias, residual = torch.zeros(40, 50), torch.full((50,), 0.7), torch.full((40, 50), 5.0)
        results = []
        for run in (lambda part: part(ones), lambda part: part.add(zeros, bias, residual) - residual):
            results.append((run(replica), run(shard), run(shard), torch.get_rng_state()))
        shard.eval()
        assert shard(ones) is ones
        assert torch.equal(shard.add(zeros, bias, residual), residual + bias)
        return results

    for one, other, kept in zip(*run_ranks(case, 2), (1 / 0.7, 1.0)):
        (replica, shard, again, state), (replica1, shard1, _, state1) = one, other
        assert torch.equal(replica, replica1) and torch.equal(state, state1)
        assert not torch.equal(shard, shard1) and not torch.equal(shard, again)
        for mask in (replica, shard, shard1):
            assert abs((mask == 0).float().mean() - 0.3) < 0.05
            torch.testing.assert_close(mask.unique(), torch.tensor([0.0, kept]))


def test_dropout_of_shards_without_a_tracker_is_refused():
    def case(rank, world):
        with pytest.raises(
            ValueError, match=r"Dropout: dropout 0.1 of tensor-parallel shards over 2 ranks needs rng"
        ):
            on = Placement(tp_groups(world), sequence_parallel=True)
            TransformerLayer(replace(SMALL, dropout=0.1), on)

    run_ranks(case, 2)


@pytest.mark.parametrize(
    "tp, sequence_parallel",
    [
        (2, True),
        *(pytest.param(*each, marks=pytest.mark.full) for each in ((1, False), (1, True), (2, False))),
    ],
)
def test_a_layer_compiles_to_one_graph(tp, sequence_parallel):
    def case(rank, world):
        torch._dynamo.reset()
        compare_compiled(make(groups=tp_groups(tp), sequence_parallel=sequence_parallel), rank, tp)

    run_ranks(case, tp)


@pytest.mark.full
def test_a_layer_of_a_context_parallel_rank_compiles_to_one_graph():
    def case(rank, world):
        torch._dynamo.reset()
        compare_compiled(make(groups=ParallelGroups.create(RankGrid(world_size=world, cp=world))))

    run_ranks(case, 2)


def test_a_layer_with_experts_compiles_to_one_graph():
    torch._dynamo.reset()
    compare_compiled(make(EXPERTS))


def compare_compiled(layer, rank=0, tp=1):
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x_SBH = (inputs().chunk(tp)[rank] if layer.dropout.sharded else inputs()).requires_grad_()
    results = []
    for run in (layer, compiled):
        layer.zero_grad()
        x_SBH.grad = None
        outputs = run(x_SBH)
        output, *aux = outputs if isinstance(outputs, tuple) else (outputs,)
        (output.square().sum() + sum(aux[:1])).backward()
        results.append([output.detach(), x_SBH.grad, *(param.grad for param in layer.parameters())])
    for eager, graph in zip(*results):
        torch.testing.assert_close(graph, eager, **CLOSE)
