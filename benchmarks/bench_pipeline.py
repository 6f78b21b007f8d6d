"""What the pipeline's executor costs per step, beside a bare loop over the same forwards and backwards.

`python -m benchmarks.bench_pipeline` prints CPU times. Chunks that do next to nothing on one rank: what is
left is the executor. No rival, no message.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from fastmp.parallel.pipeline import Pipeline
from fastmp.parallel.schedule import orders

WORKLOADS = ()
MICROBATCHES, CHUNKS = 64, 2
STEPS = 2 * MICROBATCHES * CHUNKS


class _Shift(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shift


def make() -> tuple[Callable[[], object], Callable[[], object]]:
    """A step of the executor, and the bare loop."""
    chunks, data = [_Shift() for _ in range(CHUNKS)], [torch.zeros(1)] * MICROBATCHES
    order = orders(1, MICROBATCHES, CHUNKS)
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


def test_executor(benchmark):
    benchmark(make()[0])


def main() -> int:
    torch.set_num_threads(1)
    executor, bare = (_least(call) for call in make())
    print(f"CPU time of a step: executor {executor:.1f} us, bare loop {bare:.1f} us")
    print(f"cost of the executor: {executor - bare:.1f} us a step (goal: less than 50)")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
