"""Shared by the tests of the pipeline runner: small stages, the undivided model, a step beside it."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
import torch.fx.experimental.symbolic_shapes  # a first backward imports it: in every forked rank
from hypothesis import assume
from hypothesis import strategies as st
from torch import nn

from fastmp.distributed.collectives import group_rank
from fastmp.distributed.collectives import group_size as size_of
from fastmp.ops.wgrad import deferral
from fastmp.pipeline.runner import Pipeline
from fastmp.schedule.schedule import SCHEDULES, Schedule

CLOSE = {"rtol": 1e-10, "atol": 1e-10}
SIZE = 6


@st.composite
def accepted_sizes(draw: st.DrawFn, most_ranks: int = 9, most_chunks: int = 4) -> tuple[int, int, int, int]:
    """(pp, num_microbatches, vpp, group_size) that `Schedule` accepts, also with short last groups."""
    pp, vpp = draw(st.integers(1, most_ranks)), draw(st.integers(1, most_chunks))
    group_size, number = draw(st.integers(pp, 2 * pp + 2)), draw(st.integers(1, 3 * pp + 3))
    assume(vpp == 1 or not 0 < number % group_size < pp)
    return pp, number, vpp, group_size


@st.composite
def accepted_schedules(draw: st.DrawFn, most_ranks: int = 9, most_chunks: int = 4) -> Schedule:
    """A schedule by any name, of any sizes that it accepts."""
    name = draw(st.sampled_from(tuple(SCHEDULES)))
    if (vpp := SCHEDULES[name].vpp) is None:
        return Schedule(*draw(accepted_sizes(most_ranks, most_chunks)), name)
    pp = draw(st.integers(1, most_ranks))
    return Schedule(pp, draw(st.integers(1, 3 * pp + 3)), vpp, name=name)


def schedules_of(vpp: int) -> list[str]:
    """The names of the schedules with so many chunks of a rank."""
    return [spec.name for spec in SCHEDULES.values() if spec.vpp in (None, vpp)]


class Block(nn.Module):
    """Keeps what it multiplies; its result is no input of its own backward."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(stage)
        weight = torch.randn(SIZE, SIZE, dtype=torch.float64, generator=generator)
        self.weight = nn.Parameter(weight)
        self.bias = nn.Parameter(torch.ones(SIZE, dtype=torch.float64))

    def forward(self, x):
        return x + torch.tanh(x @ self.weight) * self.bias


class _Token:
    """Lives as long as the graph, or the put-off gradient, that holds it."""


class _Hold(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, defer, token):
        ctx.defer, ctx.token = defer, token
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        if ctx.defer is not None:
            ctx.defer(lambda token=ctx.token: None)
        return grad, None, None


class Counted(nn.Module):
    """Some blocks, or none, in a row. `alive` has a token for each forward that is not wholly backwarded;
    `most` is how many there have been at once in all stages that share `alive`."""

    def __init__(self, stage: int, depth: int, alive: weakref.WeakSet) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(10 * stage + i) for i in range(depth)))
        self.shift = nn.Parameter(torch.zeros(SIZE, dtype=torch.float64))
        self.alive, self.most = alive, 0

    def forward(self, x):
        token = _Token()
        y = _Hold.apply(self.blocks(x) + self.shift, deferral(self.shift), token)
        if torch.is_grad_enabled():
            self.alive.add(token)
            self.most = max(self.most, len(self.alive))
        return y


def batches(number: int, rows: int = 3) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(11)
    return [
        {
            "x": torch.randn(rows, SIZE, dtype=torch.float64, generator=generator),
            "y": torch.randn(rows, SIZE, dtype=torch.float64, generator=generator),
        }
        for _ in range(number)
    ]


def first(batch):
    return batch["x"]


def square(out, batch):
    return (out - batch["y"]).square().sum()


def reference(num_stages: int, data, blocks=None, loss=square):
    """Loss and gradients, by stage, of the undivided model."""
    blocks = [Block(stage) for stage in range(num_stages)] if blocks is None else blocks
    total = sum(loss(nn.Sequential(*blocks)(first(batch)), batch) for batch in data)
    total.backward()
    return total.detach(), [[p.grad for p in block.parameters()] for block in blocks]


def own_chunks(groups, planned: Schedule) -> list[nn.Module]:
    return [Block(stage) for stage in planned.stages.stages(group_rank(groups.pp))]


def make(
    groups, vpp, number, *, chunks=None, group_size=None, schedule="1f1b", loss=square, **options
) -> Pipeline:
    planned = Schedule(size_of(groups.pp), number, vpp, group_size, schedule)
    return Pipeline(
        own_chunks(groups, planned) if chunks is None else chunks,
        planned.orders(),
        placement=planned.placement,
        group=groups.pp,
        backward_group=groups.pp_backward,
        inputs=first,
        loss=loss,
        **options,
    )


def check_parity(groups, vpp, number, schedule, group_size=None, depths: Sequence[int] = ()):
    """Two steps and an evaluation: losses, gradients, what ran, and how many graphs were alive.

    depths: how many blocks each stage has; one, where nothing is said.
    """
    rank, size = group_rank(groups.pp), size_of(groups.pp)
    label = f"pp {size} vpp {vpp} M {number} group {group_size} {schedule} rank {rank}"
    data, depths, alive = batches(number), depths or [1] * size * vpp, weakref.WeakSet()
    stages = [Counted(stage, depth, weakref.WeakSet()) for stage, depth in enumerate(depths)]
    loss, grads = reference(size * vpp, data, stages)
    planned = Schedule(size, number, vpp, group_size, schedule)
    own = planned.stages.stages(rank)
    chunks = [Counted(stage, depths[stage], alive) for stage in own]
    options = {"group_size": group_size, "schedule": schedule}
    pipeline = make(groups, vpp, number, chunks=chunks, **options)
    for step in (1, 2):  # the second with the shapes of the first
        result = pipeline.train(data)
        assert result.trace == planned.order(rank), label
        assert result.peak == planned.peak_in_flight(rank), label
        assert max(chunk.most for chunk in chunks) == result.peak and not alive, label
        assert (result.loss is not None) == (planned.stages.last in own), label
        if result.loss is not None:
            torch.testing.assert_close(result.loss, loss, msg=lambda text: f"{label}: {text}", **CLOSE)
        for stage, block in zip(own, pipeline.chunks, strict=True):
            for param, grad in zip(block.parameters(), grads[stage], strict=True):
                torch.testing.assert_close(
                    param.grad, step * grad, msg=lambda text: f"{label}: {text}", **CLOSE
                )
    evaluated = pipeline.evaluate(batches(3))
    if evaluated.loss is not None:
        expected = reference(size * vpp, batches(3), stages)[0]
        torch.testing.assert_close(evaluated.loss, expected, **CLOSE)
    assert evaluated.peak == 0 and not alive
