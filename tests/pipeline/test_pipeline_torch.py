"""torch's own pipeline runtime, with the same stages and microbatches, has the same losses and gradients."""

from __future__ import annotations

import pytest
import torch
from marks import full
from pipeline_tools import CLOSE, Block, batches, make
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage

from fastmp.distributed.grid import RankGrid
from fastmp.distributed.groups import ParallelGroups
from fastmp.schedule.schedule import Schedule
from fastmp.testing.ranks import run_ranks

NUMBER = 8


def torch_step(name, groups, places, data):
    """This rank's blocks with their gradients, and after the last stage the losses of all microbatches."""
    own = places.stages(groups.pp.rank())
    blocks = [Block(stage) for stage in own]
    stages = [
        PipelineStage(block, stage, len(places), torch.device("cpu"), group=groups.pp)
        for stage, block in zip(own, blocks, strict=True)
    ]
    schedule = getattr(pipelining, name)(
        stages[0] if name == "Schedule1F1B" else stages,
        NUMBER,
        loss_fn=lambda out, y: (out - y).square().sum(),
        scale_grads=False,
    )
    losses: list[torch.Tensor] = []
    inputs = (torch.cat([batch["x"] for batch in data]),) if 0 in own else ()
    target = torch.cat([batch["y"] for batch in data])
    last = {"target": target, "losses": losses} if places.last in own else {}
    schedule.step(*inputs, **last)
    return blocks, losses


def outside_case(rank, world, name, schedule, vpp):
    groups = ParallelGroups.create(RankGrid(world_size=world, pp=world))
    data = batches(NUMBER)
    places = Schedule(world, NUMBER, vpp, name=schedule).stages
    blocks, losses = torch_step(name, groups, places, data)
    pipeline = make(groups, vpp, NUMBER, schedule=schedule)
    result = pipeline.train(data)
    for ours, theirs in zip(pipeline.chunks, blocks, strict=True):
        for param, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(param.grad, expected.grad, **CLOSE)
    if places.last in places.stages(rank):
        torch.testing.assert_close(result.loss, torch.stack(losses).sum().detach(), **CLOSE)
    return True


@pytest.mark.parametrize("world", [2, *full([4])])
@pytest.mark.parametrize(
    ("name", "schedule", "vpp"),
    [
        ("Schedule1F1B", "1f1b", 1),
        ("ScheduleInterleaved1F1B", "1f1b", 2),
        ("ScheduleInterleavedZeroBubble", "zero_bubble", 2),
        ("ScheduleDualPipeV", "dualpipe_v", 2),
    ],
)
def test_torch_runs_the_same_step(world, name, schedule, vpp):
    if name == "ScheduleDualPipeV" and torch.__version__ < (2, 13):
        pytest.skip(f"torch {torch.__version__} loses a connection of gloo where its stages turn")
    assert all(run_ranks(outside_case, world, name, schedule, vpp))
