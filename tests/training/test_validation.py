"""Held-out loss: a mean over tokens, however they are divided over batches and ranks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fastmp.distributed.grid import RankGrid
from fastmp.distributed.groups import ParallelGroups
from fastmp.testing.ranks import run_ranks
from fastmp.training.microbatches import MicrobatchRunner
from fastmp.training.validation import Evaluation, evaluate

BATCHES = [[1.0, 2.0, 3.0], [10.0], [4.0, 5.0], []]  # the loss of each token; the last batch is all padding


class Losses:
    """Batches are lists of losses; rank r of n has every n-th batch."""

    def __init__(self, **validation):
        if validation:
            self.validation = SimpleNamespace(info=SimpleNamespace(**validation))

    def validation_batches(self, dp_rank, dp_size, *, max_batches=None):
        for batch in BATCHES[dp_rank::dp_size][:max_batches]:
            yield {"loss": torch.tensor(batch, dtype=torch.float64)}


class Model(nn.Module):
    def forward(self, loss):
        assert not self.training and not torch.is_grad_enabled()
        return loss


def loss_fn(model, batch):
    return model(batch["loss"]).sum(), torch.tensor(batch["loss"].numel())


def test_mean_over_tokens_and_bytes():
    model = Model().train()
    data = Losses(bytes_per_token=2.5, unigram_entropy=3.0)
    evaluation = evaluate(MicrobatchRunner([model], loss_fn), data)
    assert evaluation == Evaluation(25.0 / 6, 6, bytes_per_token=2.5, unigram_entropy=3.0)
    assert evaluation.loss_per_byte == pytest.approx(25.0 / 6 / 2.5)
    assert model.training
    assert evaluate(MicrobatchRunner([model.eval()], loss_fn), Losses(), max_batches=2) == Evaluation(4.0, 4)
    assert not model.training


def test_each_module_is_in_its_own_mode_again():
    model = Model().train()
    model.frozen = nn.Dropout().eval()
    evaluate(MicrobatchRunner([model], loss_fn), Losses())
    assert model.training and not model.frozen.training


def test_ranks_share_the_batches_and_get_the_same_numbers():
    def rank_main(rank, world_size):
        groups = ParallelGroups.create(RankGrid(world_size=world_size))
        return evaluate(MicrobatchRunner([Model()], loss_fn), Losses(), groups=groups)

    assert run_ranks(rank_main, 2) == [Evaluation(25.0 / 6, 6)] * 2


def test_nothing_to_evaluate_is_an_error():
    model = Model().train()
    with pytest.raises(ValueError, match="no held-out batches"):
        evaluate(MicrobatchRunner([model], loss_fn), Losses(), max_batches=0)
    with pytest.raises(ValueError, match="hold no tokens"):
        nothing = MicrobatchRunner([model], lambda model, batch: (torch.tensor(0.0), torch.tensor(0)))
        evaluate(nothing, Losses())
    assert model.training
