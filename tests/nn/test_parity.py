"""GPT divided over TP is the undivided GPT: loss and every gradient, float64, in each way of running it."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from nn_tools import assert_same_gradients, sum_partial_gradients, text, tp_groups

from fastmp.testing.parallel import count_collectives
from fastmp.testing.ranks import run_ranks
from tools.small_models import QWEN, SMALL, make_gpt

CLOSE = {"rtol": 1e-10, "atol": 1e-10}
VARIANTS = {
    "plain": {},
    "recompute": {"recompute": True},
    "recompute-sharded": {"recompute": True, "shard_recompute_input": True},
    "sequence": {"sequence_parallel": True},
    "sequence-recompute": {"sequence_parallel": True, "recompute": True},
}


def step(model, upstream, **options):
    tokens_BS, targets_BS = text(SMALL)
    weight_BS = torch.rand(tokens_BS.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(11))
    upstream = {"loss_grad_BS": weight_BS} if upstream else {}
    loss_BS = model.loss(tokens_BS, targets_BS, **upstream, **options)
    (loss_BS * weight_BS).sum().backward()
    sum_partial_gradients(model.parameters(), model.group)
    return loss_BS.detach()


SMOOTHED = {"label_smoothing": 0.1, "z_loss": 1e-2}
QUICK = [*((2, variant, {}) for variant in VARIANTS), (4, "sequence", SMOOTHED)]
CASES = [(tp, variant, options) for tp in (2, 4) for variant in VARIANTS for options in ({}, SMOOTHED)]


@pytest.mark.parametrize(
    "tp, variant, loss_options",
    [case if case in QUICK else pytest.param(*case, marks=pytest.mark.full) for case in CASES],
    ids=[f"{tp}-{variant}-{'smoothed' if options else 'cross-entropy'}" for tp, variant, options in CASES],
)
def test_loss_and_every_gradient(tp, variant, loss_options):
    compare(SMALL, tp, variant, loss_options)


@pytest.mark.parametrize(
    "tp, variant",
    (
        (2, "plain"),  # in which only norms of heads have partial gradients
        *(pytest.param(4, variant, marks=pytest.mark.full) for variant in ("plain", "sequence-recompute")),
    ),
)
def test_loss_and_every_gradient_of_a_qwen(tp, variant):
    """A rank rotates whole sequences of its own heads, and its norms of queries and keys see only those."""
    compare(QWEN, tp, variant, {})


def compare(config, tp, variant, loss_options):
    def case(rank, world):
        groups = tp_groups(tp)
        one, many = make_gpt(config), make_gpt(config, groups, **VARIANTS[variant])
        losses = step(one, upstream=False, **loss_options), step(many, upstream=tp == 4, **loss_options)
        torch.testing.assert_close(losses[1], losses[0], **CLOSE)
        assert_same_gradients(many, one, groups)
        return losses[1]

    losses = run_ranks(case, tp)
    assert all(torch.equal(loss, losses[0]) for loss in losses)  # the same bits on every rank


# (forward, backward) of L layers, with embedding and output layer around them; the loss gathers once,
# forward. Recomputing a layer repeats one of its two sums: nothing needs the last. With loss_grad, the output
# layer sums forward what it otherwise sums backward.
COLLECTIVES = {
    "plain": lambda L: ({"all_reduce": 2 * L + 1, "all_gather": 1}, {"all_reduce": 2 * L + 1}),
    "recompute": lambda L: ({"all_reduce": 2 * L + 1, "all_gather": 1}, {"all_reduce": 3 * L + 1}),
    "recompute-sharded": lambda L: (
        {"all_reduce": 2 * L + 1, "all_gather": 1},
        {"all_reduce": 3 * L + 1, "all_gather": L},
    ),
    "sequence": lambda L: (
        {"all_gather": 2 * L + 1 + 1, "reduce_scatter": 2 * L + 1},
        {"all_gather": 4 * L + 1, "reduce_scatter": 2 * L + 1},
    ),
}


@pytest.mark.parametrize("variant", COLLECTIVES)
def test_collectives_of_a_step(variant):
    def case(rank, world):
        model, counted = make_gpt(SMALL, tp_groups(world), **VARIANTS[variant]), []
        for upstream in ({}, {"loss_grad_BS": 1.0}):
            with count_collectives() as forward:
                loss = model.loss(*text(SMALL), **upstream).sum()
            with count_collectives() as backward:
                loss.backward()
            counted.append((forward.counts, backward.counts))
        return counted

    sum_of_hidden = Counter({"reduce_scatter" if variant == "sequence" else "all_reduce": 1})
    for (forward, backward), upstream in run_ranks(case, 2):
        assert (forward, backward) == COLLECTIVES[variant](SMALL.num_layers)
        assert upstream == (dict(Counter(forward) + sum_of_hidden), dict(Counter(backward) - sum_of_hidden))
