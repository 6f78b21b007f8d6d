"""GPT divided over TP is the undivided GPT: loss and every gradient, float64, in each way of running it."""

from __future__ import annotations

import pytest
import torch
from nn_tools import SMALL, make_gpt, shard_of, sum_partial_gradients, text, tp_groups

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


def step(model, **options):
    tokens_BS, targets_BS = text(SMALL)
    weight_BS = torch.rand(tokens_BS.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(11))
    loss_BS = model.loss(tokens_BS, targets_BS, **options)
    (loss_BS * weight_BS).sum().backward()
    sum_partial_gradients(model.parameters(), model.group)
    return loss_BS.detach()


@pytest.mark.parametrize(
    "loss_options", ({}, {"label_smoothing": 0.1, "z_loss": 1e-2}), ids=("cross-entropy", "smoothed")
)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("tp", (2, 4))
def test_loss_and_every_gradient(tp, variant, loss_options):
    def case(rank, world):
        one, many = make_gpt(SMALL, None), make_gpt(SMALL, tp_groups(tp), **VARIANTS[variant])
        losses = step(one, **loss_options), step(many, **loss_options)
        torch.testing.assert_close(losses[1], losses[0], **CLOSE)
        for (name, full), param in zip(one.named_parameters(), many.parameters()):
            expected = shard_of(full.grad, param, many.group)
            torch.testing.assert_close(
                param.grad, expected, msg=lambda text, name=name: f"{name}: {text}", **CLOSE
            )
        return losses[1]

    losses = run_ranks(case, tp)
    assert all(torch.equal(loss, losses[0]) for loss in losses)  # the same bits on every rank


# (forward, backward) of L layers, with embedding and logits around them; the loss gathers once, forward.
# Recomputing a layer repeats one of its two sums: nothing needs the last.
COLLECTIVES = {
    "plain": lambda L: ({"all_reduce": 2 * L + 1, "all_gather": 1}, {"all_reduce": 2 * L + 1}),
    "recompute": lambda L: ({"all_reduce": 2 * L + 1, "all_gather": 1}, {"all_reduce": 3 * L + 1}),
    "recompute-sharded": lambda L: (
        {"all_reduce": 2 * L + 1, "all_gather": 1},
        {"all_reduce": 3 * L + 1, "all_gather": L},
    ),
    "sequence": lambda L: (
        {"all_gather": 2 * L + 1 + 1, "reduce_scatter": 2 * L + 1},
        {"all_gather": 4 * L + 2, "reduce_scatter": 2 * L + 1},
    ),
}


@pytest.mark.parametrize("variant", COLLECTIVES)
def test_collectives_of_a_step(variant):
    def case(rank, world):
        model = make_gpt(SMALL, tp_groups(world), **VARIANTS[variant])
        with count_collectives() as forward:
            loss = model.loss(*text(SMALL)).sum()
        with count_collectives() as backward:
            loss.backward()
        return forward.counts, backward.counts

    for counted in run_ranks(case, 2):
        assert counted == COLLECTIVES[variant](SMALL.num_layers)
