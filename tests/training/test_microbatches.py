"""The runner of microbatches: the counts of experts, from stages and from losses."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fastmp.distributed.grid import RankGrid
from fastmp.distributed.groups import ParallelGroups
from fastmp.nn.segment import StageOutput
from fastmp.testing.ranks import run_ranks
from fastmp.training.microbatches import ExpertStats, MicrobatchLosses, MicrobatchRunner, PipelineLoss


class Stage(nn.Linear):
    """Two layers of experts, whose counts are the microbatch's number and the one after it."""

    def forward(self, x_BH, number):
        counts = number.to(torch.int32) + torch.arange(2, dtype=torch.int32).repeat(3, 1).T
        return StageOutput(super().forward(x_BH), None, counts)


def loss_of(y_BH, batch, layers=1):
    counts = (10 * batch["number"]).to(torch.int32).expand(layers, 3)
    return MicrobatchLosses(y_BH.sum(), torch.tensor(4), ExpertStats(y_BH.new_zeros(()), counts))


def fetch(number):
    return {"x": torch.ones(2, 4), "number": torch.tensor(number)}


def test_counts_of_a_stage_and_of_its_loss_are_rows_of_one_table():
    functions = PipelineLoss(inputs=lambda batch: (batch["x"], batch["number"]), loss=loss_of)
    runner = MicrobatchRunner([Stage(4, 4)], functions, num_microbatches=2)
    sums = runner.train(fetch)
    assert sums.counts.tolist() == [[1] * 3, [3] * 3, [10] * 3]
    assert sums.loads.tolist() == [[1] * 3, [13] * 3]
    assert torch.equal(runner.own_rows(sums.counts), sums.counts)


def test_a_whole_model_may_have_experts_in_some_steps_only():
    layers = 0

    def loss_fn(model, batch):
        losses = loss_of(model(batch["x"]), batch, layers)
        return losses if layers else losses._replace(experts=None)

    runner = MicrobatchRunner([nn.Linear(4, 4)], loss_fn, num_microbatches=2)
    assert runner.train(fetch).counts is None
    layers = 2
    assert runner.train(fetch).counts.tolist() == [[10] * 3] * 2


def different_case(rank, world):
    groups = ParallelGroups.create(RankGrid(world_size=world))
    with pytest.raises(ValueError) as error:
        MicrobatchRunner([nn.Linear(4, 4)], loss_of, groups=groups, num_microbatches=2 + rank)
    return str(error.value)


def test_ranks_with_different_steps_are_told_before_one_hangs():
    message = (
        "Trainer: ranks 0 and 1 of a pipeline stage have different steps: instruction 6 is 'nothing' and "
    )
    assert (
        run_ranks(different_case, 2)
        == [message + "'fetch m2 batch'; give all ranks one recipe and one model"] * 2
    )
