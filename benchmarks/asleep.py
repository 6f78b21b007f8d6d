"""Models whose modules sleep through their forwards and backwards, and note when.

Their steps take the times that they are given, whatever else runs on the machine. A module is like a linear
layer: its weight has a gradient in `main_grad`, which can be deferred, and graphs repeat its sleep, which is
an op. The arithmetic is next to none.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.fx.experimental.symbolic_shapes  # a first backward imports it: in every forked rank
from torch import Tensor, nn

from fastmp.nn.segment import LayerChain, Segment, SegmentedLayer
from fastmp.ops.wgrad import deferral, leaf_of
from fastmp.schedule.schedule import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD

__all__ = ["Asleep", "AsleepLayer", "AsleepModel", "OneSample", "Slept", "Times", "slept"]


class Slept(NamedTuple):
    """An interval in which a module slept, in seconds of `time.perf_counter`, with the kind of step."""

    start: float
    end: float
    kind: str


slept: list[Slept] = []
_KINDS = (FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)


_library = torch.library.Library("fastmp_benchmarks", "DEF")
_library.define("sleep(Tensor(a!) x, float seconds, int kind) -> ()")


def _asleep(x: Tensor, seconds: float, kind: int) -> None:
    start = time.perf_counter()
    time.sleep(seconds)
    slept.append(Slept(start, time.perf_counter(), _KINDS[kind]))


_library.impl("sleep", _asleep, "CPU")
_sleep = torch.ops.fastmp_benchmarks.sleep.default


class Times(NamedTuple):
    """Seconds of a module: forward, backward of the input, backward of the weight."""

    forward: float
    backward_input: float
    backward_weight: float

    def scaled(self, factor: float) -> Times:
        """These times by a factor."""
        return Times(*(factor * seconds for seconds in self))


class _Work(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, module: Asleep, defer: Callable[..., None] | None):
        ctx.module, ctx.defer = module, defer
        made = x * 1
        _sleep(made, module.times.forward, 0)
        return made

    @staticmethod
    def backward(ctx: Any, grad: Tensor):
        module, made = ctx.module, grad * 1
        _, inputs, weight = module.times

        def make(kind: int = 3) -> None:
            _sleep(made, weight, kind)
            module.weight.main_grad.add_(1e-3)

        if ctx.defer is None:
            _sleep(made, inputs, 1)
            make(1)
        else:
            _sleep(made, inputs, 2)
            ctx.defer(make)
        return made, None, None, None


class Asleep(nn.Module):
    """A module with a weight of `size` elements; it needs a `GradBuffer`."""

    def __init__(self, size: float, times: Times) -> None:
        super().__init__()
        self.times, self.weight = times, nn.Parameter(torch.zeros(int(size)))

    def forward(self, x: Tensor) -> Tensor:
        defer = deferral(self.weight)
        return _Work.apply(x, self.weight if defer is None else leaf_of(self.weight), self, defer)


class AsleepLayer(SegmentedLayer):
    """A layer of two segments. attention: the share of the parameters and of the times that the first has."""

    def __init__(self, size: float, times: Times, attention: tuple[float, float]) -> None:
        super().__init__()
        of_size, of_times = attention
        self.attention = Asleep(of_size * size, times.scaled(of_times))
        self.mlp = Asleep((1 - of_size) * size, times.scaled(1 - of_times))

    def segments(self) -> tuple[Segment, ...]:
        return (
            Segment("attention", lambda x: (self.attention(x),)),
            Segment("mlp", lambda x: (self.mlp(x),)),
        )


class AsleepModel(nn.Module):
    """A table, a chain of layers, and what makes the output; a stage of a pipeline may have any of them.

    Takes and returns a tensor of any shape. The table and the output are not in graphs.
    """

    def __init__(
        self, before: Sequence[Asleep], layers: Sequence[AsleepLayer], behind: Sequence[Asleep]
    ) -> None:
        super().__init__()
        self.before, self.layers = nn.Sequential(*before), LayerChain(layers)
        self.behind = nn.Sequential(*behind)

    def forward(self, x: Tensor) -> Tensor:
        return self.behind(self.layers(self.before(x))[0])


class OneSample:
    """Data of one token, the same in every microbatch; see `fastmp.training.microbatches.TrainData`."""

    micro_batch_size = 1

    def batch(self, *which: int) -> dict[str, Tensor]:
        return {"x": torch.ones(1, requires_grad=True)}

    def validation_batches(self, *which: int, max_batches: int | None) -> list[dict[str, Tensor]]:
        return []
