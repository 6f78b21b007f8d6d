"""GPT divided over TP is the undivided GPT: loss and every gradient, float64, in each way of running it."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from nn_tools import QWEN, SMALL, make_gpt, shard_of, sum_partial_gradients, text, tp_groups

from fastmp.testing import run_ranks
from fastmp.testing.parallel import count_collectives

CLOSE = {"rtol": 1e-10, "atol": 1e-10}
VARIANTS = {
    "plain": {},
    "recompute": {"recompute": True},
    "recompute-sharded": {"recompute": True, "shard_recompute_input": True},
    "sequence": {"sequence_parallel": True},
    "sequence-recompute": {"sequence_parallel": True, "recompute": True},
}


def step(model, promised, **options):
    tokens_BS, targets_BS = text(SMALL)
    weight_BS = torch.rand(tokens_BS.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(11))
    promise = {"loss_grad_BS": weight_BS} if promised else {}
    loss_BS = model.loss(tokens_BS, targets_BS, **promise, **options)
    (loss_BS * weight_BS).sum().backward()
    sum_partial_gradients(model.parameters(), model.group)
    return loss_BS.detach()


@pytest.mark.parametrize(
    "loss_options", ({}, {"label_smoothing": 0.1, "z_loss": 1e-2}), ids=("cross-entropy", "smoothed")
)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("tp", (2, 4))
def test_loss_and_every_gradient(tp, variant, loss_options):
    compare(SMALL, tp, variant, loss_options)


@pytest.mark.parametrize("tp, variant", ((2, "sequence"), (4, "plain"), (4, "sequence-recompute")))
def test_loss_and_every_gradient_of_a_qwen(tp, variant):
    """A rank rotates whole sequences of its own heads, and its norms of queries and keys see only those."""
    compare(QWEN, tp, variant, {})


def compare(config, tp, variant, loss_options):
    def case(rank, world):
        one, many = make_gpt(config, None), make_gpt(config, tp_groups(tp), **VARIANTS[variant])
        losses = step(one, promised=False, **loss_options), step(many, promised=tp == 4, **loss_options)
        torch.testing.assert_close(losses[1], losses[0], **CLOSE)
        for (name, full), param in zip(one.named_parameters(), many.parameters()):
            expected = shard_of(full.grad, param, many.group)
            torch.testing.assert_close(
                param.grad, expected, msg=lambda text, name=name: f"{name}: {text}", **CLOSE
            )
        return losses[1]

    losses = run_ranks(case, tp)
    assert all(torch.equal(loss, losses[0]) for loss in losses)  # the same bits on every rank


# (forward, backward) of L layers, with embedding and output layer around them; the loss gathers once,
# forward. Recomputing a layer repeats one of its two sums: nothing needs the last. With a promise, the output
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
        for promise in ({}, {"loss_grad_BS": 1.0}):
            with count_collectives() as forward:
                loss = model.loss(*text(SMALL), **promise).sum()
            with count_collectives() as backward:
                loss.backward()
            counted.append((forward.counts, backward.counts))
        return counted

    sum_of_hidden = Counter({"reduce_scatter" if variant == "sequence" else "all_reduce": 1})
    for (forward, backward), promised in run_ranks(case, 2):
        assert (forward, backward) == COLLECTIVES[variant](SMALL.num_layers)
        assert promised == (dict(Counter(forward) + sum_of_hidden), dict(Counter(backward) - sum_of_hidden))
