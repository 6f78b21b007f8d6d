"""torch's own pipeline runtime, with the same stages and microbatches, has the same losses and gradients."""

from __future__ import annotations

import pytest
import torch
from pipeline_tools import CLOSE, Block, batches, make
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage

from fastmp.distributed.grid import RankGrid
from fastmp.distributed.groups import ParallelGroups
from fastmp.testing.ranks import run_ranks

NUMBER = 8


def torch_step(name, groups, vpp, data):
    """This rank's blocks with their gradients, and on the last rank the losses of all microbatches."""
    rank, size = groups.pp.rank(), groups.pp.size()
    blocks = [Block(chunk * size + rank) for chunk in range(vpp)]
    stages = [
        PipelineStage(block, chunk * size + rank, size * vpp, torch.device("cpu"), group=groups.pp)
        for chunk, block in enumerate(blocks)
    ]
    schedule = getattr(pipelining, name)(
        stages[0] if name == "Schedule1F1B" else stages,
        NUMBER,
        loss_fn=lambda out, y: (out - y).square().sum(),
        scale_grads=False,
    )
    losses: list[torch.Tensor] = []
    inputs = (torch.cat([batch["x"] for batch in data]),) if rank == 0 else ()
    last = {"target": torch.cat([batch["y"] for batch in data]), "losses": losses} if rank == size - 1 else {}
    schedule.step(*inputs, **last)
    return blocks, losses


def outside_case(rank, world, name, schedule, vpp):
    groups = ParallelGroups.create(RankGrid(world_size=world, pp=world))
    data = batches(NUMBER)
    blocks, losses = torch_step(name, groups, vpp, data)
    pipeline = make(groups, vpp, NUMBER, schedule=schedule)
    result = pipeline.train(data)
    for ours, theirs in zip(pipeline.chunks, blocks, strict=True):
        for param, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(param.grad, expected.grad, **CLOSE)
    if rank == world - 1:
        torch.testing.assert_close(result.loss, torch.stack(losses).sum().detach(), **CLOSE)
    return True


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(
    ("name", "schedule", "vpp"),
    [
        ("Schedule1F1B", "1f1b", 1),
        ("ScheduleInterleaved1F1B", "1f1b", 2),
        ("ScheduleInterleavedZeroBubble", "zero_bubble", 2),
    ],
)
def test_torch_runs_the_same_step(world, name, schedule, vpp):
    assert all(run_ranks(outside_case, world, name, schedule, vpp))
