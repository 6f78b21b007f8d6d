"""A step that goes wrong on one rank ends the job in seconds, and the error names the rank and the step."""

from __future__ import annotations

import os
import re
import signal

import pytest
import torch
from marks import full
from pipeline_tools import CLOSE, SIZE, Block, batches, first, make, square
from torch import nn

from fastmp.distributed.grid import RankGrid
from fastmp.distributed.groups import ParallelGroups
from fastmp.pipeline.runner import Pipeline, PipelineError
from fastmp.pipeline.transfers import Mail
from fastmp.schedule.schedule import Schedule
from fastmp.tensor_parallel.layers import ColumnParallelLinear
from fastmp.testing.ranks import RankError, run_ranks


class _Break(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        raise FloatingPointError("too cold")


class Failing(Block):
    """Goes wrong at its third call, in the way that it is told."""

    def __init__(self, stage, how):
        super().__init__(stage)
        self.how, self.calls = how, 0

    def forward(self, x):
        self.calls += 1
        y = super().forward(x)
        if self.calls != 3 or self.how == "no":
            return y
        if self.how == "raise":
            raise FloatingPointError("too hot")
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        others = {"shape": lambda: y[:1], "dtype": y.float, "number": lambda: (y, y), "detached": y.detach}
        return others[self.how]() if self.how in others else _Break.apply(y)


def failing_case(rank, world, how, schedule):
    groups = ParallelGroups.create(RankGrid(world_size=world, pp=world))
    chunks = [Failing(rank, how if rank == 1 else "no")]
    make(groups, 1, 8, chunks=chunks, schedule=schedule).train(batches(8))


FORWARD, BACKWARD = "forward m2 chunk 0: ", "backward m2 chunk 0: "


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raise", FORWARD + "FloatingPointError: too hot"),
        ("shape", FORWARD + r"ValueError: stage 1 outputs \[1, 6\] float64, but \[3, 6\] float64 before"),
        *full(
            [
                ("dtype", FORWARD + r"ValueError: stage 1 outputs \[3, 6\] float32, but"),
                (
                    "number",
                    FORWARD + r"ValueError: stage 1 outputs \[3, 6\] float64 and \[3, 6\] float64, but",
                ),
                ("detached", FORWARD + r"ValueError: stage 1 outputs \[3, 6\] float64 without gradient, but"),
            ]
        ),
        ("backward", BACKWARD + "FloatingPointError: too cold"),
    ],
)
def test_a_failing_stage_ends_the_job(how, message):
    with pytest.raises(
        RankError, match=r"Error: pipeline rank 1, instruction \d+ of \d+, " + message
    ) as caught:
        run_ranks(failing_case, 4, how, "1f1b")
    assert caught.value.rank == 1
    check_others(str(caught.value))


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_a_killed_rank_ends_the_job(schedule):
    with pytest.raises(RankError, match=r"rank 1 of 4 died without a report \(killed by SIGKILL\)") as caught:
        run_ranks(failing_case, 4, "kill", schedule)
    check_others(str(caught.value))


def check_others(message):
    """Its neighbours say in which step they missed it."""
    for rank in (0, 2):
        where = rf"rank {rank}: .*PipelineError: pipeline rank {rank}, instruction \d+ of \d+, "
        assert re.search(where + r"\w+ m\d [\w ]+: RuntimeError", message), message


def callbacks_case(rank, world, where):
    groups = ParallelGroups.create(RankGrid(world_size=world, pp=world))

    def fail(*_):
        raise LookupError("nothing there")

    callbacks = {"inputs": first, "loss": square} | {where: fail}
    Pipeline([Block(rank)], Schedule(2, 2).orders(), group=groups.pp, **callbacks).train(batches(2))


@pytest.mark.parametrize("where", ["inputs", "loss"])
def test_what_the_caller_gives_fails(where):
    rank = 0 if where == "inputs" else 1
    message = (
        f"pipeline rank {rank}, .* forward m0 {'loss' if rank else 'chunk 0'}: LookupError: nothing there"
    )
    with pytest.raises(RankError, match=message) as caught:
        run_ranks(callbacks_case, 2, where)
    assert caught.value.rank == rank


@pytest.mark.parametrize(
    ("made", "message"),
    [(lambda y: {"y": y}, "got dict"), (lambda y: (y, None), r"got tuple of \['Tensor', 'NoneType'\]")],
    ids=["dict", "None"],
)
def test_what_is_no_tensor_is_refused(made, message):
    class Odd(Block):
        def forward(self, x):
            return made(super().forward(x))

    with pytest.raises(PipelineError, match=f"chunk 0: ValueError: a stage .* tensors, {message}"):
        make(ParallelGroups.alone(), 1, 2, chunks=[Odd(0)]).train(batches(2))


def test_a_loss_function_returns_a_loss():
    """One that forgets to would train with gradients of zero."""
    for made in (None, (None, torch.ones(()))):
        with pytest.raises(
            PipelineError, match=r"m0 loss: ValueError: a loss .* \(loss, stats\), got loss No"
        ):
            make(ParallelGroups.alone(), 1, 2, loss=lambda *_, made=made: made).train(batches(2))


def test_errors_of_data_are_raised_as_they_are():
    def fetch(microbatch):
        raise OSError("truncated")

    with pytest.raises(OSError, match=r"^truncated$"):
        make(ParallelGroups.alone(), 1, 2).train(fetch)


def test_sends_that_fail_after_the_last_instruction(monkeypatch):
    def fails(mail, most=0):
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(Mail, "finish", fails)
    with pytest.raises(
        PipelineError, match=r"rank 0, instruction 9 of 10, backward m1 .*: Connection closed"
    ):
        make(ParallelGroups.alone(), 1, 2).train(batches(2))


def test_the_cause_of_an_error_is_kept():
    with pytest.raises(
        PipelineError, match="pipeline rank 0, instruction 11 of 20, forward m2 chunk 0"
    ) as caught:
        make(ParallelGroups.alone(), 1, 4, chunks=[Failing(0, "raise")]).train(batches(4))
    assert isinstance(caught.value.__cause__, FloatingPointError)


def test_nothing_of_a_failed_step_is_in_the_next():
    """A single rank may go on after an error: gradients that were deferred are gone with it."""

    class Stage(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = ColumnParallelLinear(SIZE, SIZE, group=None, dtype=torch.float64)
            self.start = nn.Parameter(torch.ones(SIZE, dtype=torch.float64))
            self.broken = True

        def forward(self, x):
            x = x * self.start
            return self.layer(_Break.apply(x) if self.broken else x)

    torch.manual_seed(3)
    stage, data = Stage(), batches(2)
    pipeline = make(ParallelGroups.alone(), 1, 2, chunks=[stage], schedule="zero_bubble")
    with pytest.raises(PipelineError, match="dgrad m0 chunk 0: FloatingPointError"):
        pipeline.train(data)
    stage.broken = False
    stage.zero_grad()
    pipeline.train(data)
    grads = [param.grad for param in stage.parameters()]
    stage.zero_grad()
    sum(square(stage(first(batch)), batch) for batch in data).backward()
    for grad, param in zip(grads, stage.parameters(), strict=True):
        torch.testing.assert_close(grad, param.grad, **CLOSE)
