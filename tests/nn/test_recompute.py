"""Recomputation: for less memory, bit for bit the gradients of a run that keeps everything."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import pytest
import torch
from marks import full
from nn_tools import text, tp_groups

from fastmp.distributed.rng import RngTracker
from fastmp.nn import Placement, TransformerLayer
from fastmp.nn.recompute import recompute
from fastmp.testing.ranks import run_ranks
from tools.small_models import SEED, SMALL, make_gpt

DROPOUT = replace(SMALL, dropout=0.2, attention_dropout=0.3)


def step(groups, dtype, **options):
    """Loss, every gradient, and the random streams afterwards, of two microbatches."""
    model = make_gpt(DROPOUT, groups, dtype, **options)
    tokens_BS, targets_BS = text(DROPOUT)
    losses = []
    for tokens, targets in ((tokens_BS, targets_BS), (targets_BS, tokens_BS)):
        loss_BS = model.loss(tokens, targets)
        loss_BS.mean().backward()
        losses.append(loss_BS.detach())
    return losses + [param.grad for param in model.parameters()], model.rng.states()


@pytest.mark.parametrize(
    ("tp", "variant"),
    [
        *((1, "whole"), (2, "sharded"), (2, "sequence")),
        *full([(1, "sharded"), (1, "sequence"), (2, "whole")]),
        *full([(4, "whole"), (4, "sharded"), (4, "sequence")]),
    ],
)
def test_gradients_are_bitwise_those_without_recomputation(tp, variant):
    options = {"sequence_parallel": variant == "sequence"}
    sharded = {"shard_recompute_input": variant == "sharded"}

    def case(rank, world):
        groups = tp_groups(tp)
        for dtype in (torch.float64, torch.float32):
            kept, streams = step(groups, dtype, **options)
            again, streams_again = step(groups, dtype, recompute=True, **options, **sharded)
            assert all(torch.equal(a, b) for a, b in zip(kept, again))
            assert all(torch.equal(streams[name], streams_again[name]) for name in streams)
            torch.manual_seed(0)
            assert not torch.equal(kept[0], kept[1])

    run_ranks(case, tp)


def saved_bytes(run) -> int:
    """Bytes that autograd keeps of what `run` computes, each storage once."""
    storages = {}

    def pack(tensor):
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = run()
    del output
    return sum(storages.values())


def test_only_a_part_of_the_input_is_kept():
    def case(rank, world):
        groups = tp_groups(world)
        group = groups.tp
        layer = TransformerLayer(SMALL, Placement(groups, rng=RngTracker(SEED, tp_rank=rank)))
        leaf = torch.randn(8, 3, SMALL.hidden_size, requires_grad=True)
        size = leaf.numel() * leaf.element_size()
        kept = saved_bytes(lambda: layer(leaf * 1.0))
        whole = saved_bytes(lambda: recompute(layer, leaf * 1.0, rng=layer.attention.rng))
        part = saved_bytes(lambda: recompute(layer, leaf * 1.0, rng=layer.attention.rng, shard_over=group))
        assert whole == size and part == size // world and kept > 4 * size

        hidden = leaf + 1.0
        alive = weakref.ref(hidden)
        output = recompute(layer, hidden, rng=layer.attention.rng, shard_over=group)
        del hidden
        gc.collect()
        assert alive() is None  # the undivided input is gone before backward
        output.sum().backward()

    run_ranks(case, 4)


def test_other_arguments_pass_through():
    layer = TransformerLayer(SMALL)
    x_SBH, mask_BS = (
        torch.randn(8, 3, SMALL.hidden_size, requires_grad=True),
        torch.arange(8).expand(3, 8) > 5,
    )
    output = recompute(layer, x_SBH, mask_BS, rng=None)
    assert torch.equal(output, layer(x_SBH, mask_BS))
    (again,) = torch.autograd.grad(output.square().sum(), x_SBH)
    (direct,) = torch.autograd.grad(layer(x_SBH, mask_BS).square().sum(), x_SBH)
    assert torch.equal(again, direct)


def test_a_frozen_layer_passes_the_gradient_on():
    def case(rank, world):
        groups = tp_groups(world)
        group = groups.tp
        layer = TransformerLayer(SMALL, Placement(groups)).requires_grad_(False)
        x_SBH = torch.randn(8, 3, SMALL.hidden_size, requires_grad=True)
        (again,) = torch.autograd.grad(
            recompute(layer, x_SBH, rng=None, shard_over=group).square().sum(), x_SBH
        )
        (direct,) = torch.autograd.grad(layer(x_SBH).square().sum(), x_SBH)
        assert torch.equal(again, direct)

    run_ranks(case, 2)


def test_without_a_tracker_the_default_generator_is_restored():
    x = torch.ones(1000, requires_grad=True)
    output = recompute(torch.nn.Dropout(0.5), x, rng=None)
    torch.rand(3)
    (grad,) = torch.autograd.grad(output.sum(), x)
    assert torch.equal(grad, output)


def test_no_gradient_no_recomputation():
    layer = TransformerLayer(SMALL)
    with torch.no_grad():
        assert not recompute(layer, torch.randn(4, 1, SMALL.hidden_size), rng=None).requires_grad


def test_an_input_that_cannot_be_divided_is_refused():
    def case(rank, world):
        with pytest.raises(
            ValueError, match="recompute: an input of 5 elements cannot be divided over 2 ranks"
        ):
            recompute(torch.nn.Identity(), torch.ones(5), rng=None, shard_over=tp_groups(world).tp)

    run_ranks(case, 2)
