"""Small chains, trained with graphs and without, to compare bits."""

from __future__ import annotations

import torch
from graph_tools import assert_same_bits
from torch import nn

from fastmp.cuda_graphs.backends.recording import RecordingBackend
from fastmp.cuda_graphs.errors import CaptureError, GraphError
from fastmp.cuda_graphs.manager import GraphManager
from fastmp.nn import Segment, SingleSegment
from fastmp.nn.segment import SegmentedLayer
from fastmp.schedule.schedule import Schedule

SHAPE = (3, 4)


def linear():
    return nn.Linear(4, 4, dtype=torch.float64)


def eager(module=None):
    return SingleSegment(nn.Identity() if module is None else module, reason="on purpose")


class Plus(nn.Module):
    def forward(self, x):
        return x + 1


class Parts(SegmentedLayer):
    """Segments by (name, whether it can be captured, function of the layer and its tensors[, takes out])."""

    def __init__(self, *parts, **modules):
        super().__init__()
        self.parts = parts
        for name, module in modules.items():
            setattr(self, name, module)

    def segments(self):
        return tuple(
            Segment(
                name,
                lambda *x, run=run, **out: run(self, *x, **out),
                capturable,
                accepts_out=bool(takes),
            )
            for name, capturable, run, *takes in self.parts
        )


def managed(chain, graphs, microbatches=2, **options):
    options.setdefault("backend", RecordingBackend())
    return GraphManager([chain], Schedule(1, microbatches).order(0), **options) if graphs else None


def total(outputs):
    return sum(output.double().square().sum() for output in outputs)


def train_chain(
    chain, graphs, steps=6, before=None, between=None, loss=None, sizes=None, dtype=torch.float64, **options
):
    """Return losses, gradients and buffers of some steps, whose microbatches weigh 1 and 10."""
    manager, seen, data = managed(chain, graphs, **options), [], torch.Generator().manual_seed(5)
    for step in range(steps):
        if before is not None:
            before(step)
        for param in chain.parameters():
            param.grad = None
        if manager is not None:
            manager.begin_step()
        for weight in (1, 10):
            if between is not None:
                between(step, weight)
            rows = SHAPE[0] if sizes is None else sizes[step]
            outputs = chain(torch.randn(rows, 4, generator=data, dtype=dtype))
            value = (total(outputs) if loss is None else loss(outputs, step)) * weight
            value.backward()
            seen.append(value.detach())
        seen += [None if param.grad is None else param.grad.clone() for param in chain.parameters()]
    return [*seen, *(buffer.clone() for buffer in chain.buffers())]


def assert_same_as_eager(run, or_refused=False):
    """Compare `run(graphs=True)` and `run(graphs=False)`; or_refused: an error of graphs will do as well."""
    torch.manual_seed(0)
    expected = run(False)
    torch.manual_seed(0)
    try:
        graphed = run(True)
    except (CaptureError, GraphError):
        if or_refused:
            return
        raise
    assert_same_bits(graphed, expected)
