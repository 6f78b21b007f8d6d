"""The time that the pipeline's runner takes for a step, and how long its ranks idle.

`python -m benchmarks.bench_pipeline` prints three tables. The first has CPU times of chunks that do next to
nothing on one rank, beside a bare loop over the same forwards and backwards; the difference is the runner.
The second has the same for two ranks, with a message for each step. The third has the bubbles of four ranks
that sleep through their steps, beside those of the simulator. There is no rival.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.fx.experimental.symbolic_shapes  # a first backward imports it: in every forked rank
from torch import Tensor, nn

from fastmp.distributed.grid import RankGrid
from fastmp.distributed.groups import ParallelGroups
from fastmp.ops.wgrad import deferral
from fastmp.pipeline.runner import Pipeline
from fastmp.schedule.schedule import SCHEDULES, Schedule, Step
from fastmp.schedule.simulate import Costs, simulate
from fastmp.testing.ranks import run_ranks

WORKLOADS = ()
MICROBATCHES, CHUNKS = 64, 2
STEPS = 2 * MICROBATCHES * CHUNKS
ROUNDS = 4


class _Shift(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shift


def make() -> tuple[Callable[[], object], Callable[[], object]]:
    """Return a step of the runner, and the bare loop."""
    chunks, data = [_Shift() for _ in range(CHUNKS)], [torch.zeros(1)] * MICROBATCHES
    order = Schedule(1, MICROBATCHES, CHUNKS).orders()
    pipeline = Pipeline(chunks, order, group=None, inputs=lambda x: x, loss=lambda y, _: y.sum())

    def bare() -> None:
        for x in data:
            graphs, y = [], x
            for chunk in chunks:
                y = y.detach().requires_grad_(y.requires_grad)
                graphs.append((y, chunk(y)))
                y = graphs[-1][1]
            last = y.detach().requires_grad_()
            last.sum().backward()
            grad = last.grad
            for start, end in reversed(graphs):
                torch.autograd.backward(end, grad)
                grad = start.grad

    return lambda: pipeline.train(data), bare


def _least(call: Callable[[], object], rounds: int = 15) -> float:
    times = []
    for _ in range(rounds):
        began = time.process_time()
        call()
        times.append(time.process_time() - began)
    return 1e6 * min(times) / STEPS


def between_ranks(rank: int, world: int) -> tuple[float, float]:
    """Return the times of a step of two ranks that send to each other, by the runner and by a bare loop."""
    group = ParallelGroups.create(RankGrid(world_size=world, pp=world)).pp
    chunk, data = _Shift(), [torch.zeros(1)] * MICROBATCHES
    options: dict[str, Any] = {"inputs": lambda x: x, "loss": lambda y, _: y.sum()}
    pipeline = Pipeline([chunk], Schedule(world, MICROBATCHES).orders(), group=group, **options)
    other = {"group": group, "group_dst": 1 - rank}

    def receive() -> Tensor:
        x = torch.empty(1)
        dist.irecv(x, group=group, group_src=1 - rank).wait()
        return x

    def bare() -> None:
        sent, made = [], []
        for x in data if rank == 0 else ():
            made.append(chunk(x))
            sent.append(dist.isend(made[-1].detach(), **other))
            if len(made) > 1:
                torch.autograd.backward(made[-2], receive())
        for _ in () if rank == 0 else data:
            x = receive().requires_grad_()
            y = chunk(x)
            last = y.detach().requires_grad_()
            last.sum().backward()
            torch.autograd.backward(y, last.grad)
            sent.append(dist.isend(x.grad, **other))
        if rank == 0:
            torch.autograd.backward(made[-1], receive())
        for work in sent:
            work.wait()

    def together(call: Callable[[], object]) -> float:
        times = []
        for _ in range(40):
            dist.barrier()
            began = time.thread_time()  # without the backend's threads, which carry the messages
            call()
            times.append(time.thread_time() - began)
        return 1e6 * min(times) / (2 * MICROBATCHES)

    return together(lambda: pipeline.train(data)), together(bare)


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, stage: Asleep, defer: Callable[..., None] | None) -> Tensor:
        stage.sleep(stage.costs.forward)
        ctx.stage, ctx.defer = stage, defer
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        stage = ctx.stage
        stage.sleep(stage.costs.backward_input)
        if ctx.defer is None:
            stage.sleep(stage.costs.backward_weight)
        else:
            ctx.defer(lambda: stage.sleep(stage.costs.backward_weight))
        return grad, None, None


class Asleep(nn.Module):
    """Takes its costs in seconds; `busy` is the time that it has slept."""

    def __init__(self, costs: Costs) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.costs, self.busy = costs, 0.0

    def sleep(self, seconds: float) -> None:
        start = time.perf_counter()
        time.sleep(seconds)
        self.busy += time.perf_counter() - start

    def forward(self, x: Tensor) -> Tensor:
        return _Sleep.apply(x, self, deferral(self.weight))


def run_asleep(
    every: Sequence[Sequence[Step]], vpp: int, costs: Costs, placement: str = "looped"
) -> tuple[float, float]:
    """Return the seconds of the fastest of a few steps, and how long the ranks slept in it.

    Whatever else runs on the machine can only prolong a step.
    """
    groups = ParallelGroups.create(RankGrid(world_size=len(every), pp=len(every)))
    chunks, rounds = [Asleep(costs) for _ in range(vpp)], []
    functions = {"inputs": lambda x: x, "loss": lambda y, _: y.sum()}
    pipeline = Pipeline(chunks, every, group=groups.pp, placement=placement, **functions)
    data = [torch.ones(4, requires_grad=True)] * (1 + max(step.microbatch for step in every[0]))
    expected = simulate(every, costs, placement=placement).makespan
    while len(rounds) < ROUNDS and min(rounds, default=(2 * expected,))[0] > 1.01 * expected:
        dist.barrier()
        start, before = time.perf_counter(), sum(chunk.busy for chunk in chunks)
        pipeline.train(data)
        took = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
        busy = torch.tensor(sum(chunk.busy for chunk in chunks) - before, dtype=torch.float64)
        dist.all_reduce(took, op=dist.ReduceOp.MAX)
        dist.all_reduce(busy)
        rounds.append((float(took), float(busy)))
    return min(rounds)


def bubble(rank: int, world: int, vpp: int, number: int, schedule: str, costs: Costs) -> float:
    """Return the measured idle time over the working time of all ranks; a function for `run_ranks`."""
    planned = Schedule(world, number, vpp, name=schedule)
    took, busy = run_asleep(planned.orders(), vpp, costs, planned.placement)
    return (world * took - busy) / busy


def bubbles() -> Iterator[str]:
    costs = Costs(forward=0.16, backward_input=0.2, backward_weight=0.12)
    yield "bubble in % of the work, 4 ranks that sleep, 4 microbatches: measured, simulated"
    for vpp in (1, 2):
        for name in (spec.name for spec in SCHEDULES.values() if spec.vpp in (None, vpp)):
            schedule = Schedule(4, 4, vpp, name=name)
            expected = simulate(schedule.orders(), costs, placement=schedule.placement).bubble
            measured = run_ranks(bubble, 4, vpp, 4, name, costs)[0]
            yield f"{name:>12} vpp {vpp}{100 * measured:>10.2f}{100 * expected:>8.2f}"


def test_runner(benchmark):
    benchmark(make()[0])


def main() -> int:
    torch.set_num_threads(1)
    runner, bare = (_least(call) for call in make())
    print(f"CPU time of a step: runner {runner:.1f} us, bare loop {bare:.1f} us")
    print(f"cost of the runner: {runner - bare:.1f} us a step (goal: less than 50)")
    runner, bare = max(run_ranks(between_ranks, 2), key=lambda times: times[0] - times[1])
    cost = f"{runner - bare:.1f} us"
    print(f"with a message each: runner {runner:.1f} us, bare loop {bare:.1f} us, cost {cost}")
    for line in bubbles():
        print(line)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
