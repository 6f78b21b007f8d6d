"""Layers in parts, by segments of any kind: gradients as without, parts on the streams for their kinds."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from torch import nn

from fastmp.nn import overlap
from fastmp.nn.segment import LayerChain, Segment, SegmentedLayer
from fastmp.parallel.schedule import BACKWARD, FORWARD, Schedule


class Layer(SegmentedLayer):
    """compute | exchange | compute | exchange, with a residual and integers that are handed on; a loss."""

    def __init__(self, exchanges=True):
        super().__init__()
        self.first, self.second, self.exchanges = nn.Linear(8, 8), nn.Linear(8, 8), exchanges

    def segments(self):
        return (
            Segment("first", self._first),
            Segment("there", self._there, exchanges=self.exchanges),
            Segment("second", self._second),
            Segment("back", self._back, exchanges=self.exchanges),
        )

    def _first(self, x, *, scale=1.0):
        y = torch.tanh(self.first(x)) * scale
        return y, torch.arange(len(x), device=x.device).flip(0), y.square().sum(), x

    def _there(self, y, order, aux, x):
        return y[order], order, aux, x

    def _second(self, rows, order, aux, x):
        return self.second(rows), order, aux, x

    def _back(self, rows, order, aux, x):
        return x + rows[order], aux


def train(device, overlapped, *, frozen=False):
    """The losses of 4 microbatches, the gradients of parameters, and of the chain's inputs."""
    torch.manual_seed(3)
    chain = LayerChain([Layer(), Layer(exchanges=False), Layer()]).to(device, torch.float64)
    inputs = [torch.randn(5, 8, dtype=torch.float64, device=device) for _ in range(4)]
    embedding = torch.ones(8, dtype=torch.float64, device=device, requires_grad=not frozen)
    layers = overlap.OverlappedLayers([chain]) if overlapped else None
    losses, done = {}, []
    schedule = Schedule(1, 4, overlap=overlapped)

    def forward(microbatch):
        out, *aux = chain(inputs[microbatch] * embedding, scale=0.5)
        losses[microbatch] = out.square().sum() + sum(aux)
        done.append(losses[microbatch].item())

    for steps in schedule.together(0):
        forwards, backwards = (
            [s.microbatch for s in steps if s.kind == kind] for kind in (FORWARD, BACKWARD)
        )
        for microbatch in backwards:
            losses.pop(microbatch).backward()
        for microbatch in forwards:
            if layers is None:
                forward(microbatch)
                continue
            with layers.forward((microbatch, 0), *((other, 0) for other in backwards)):
                forward(microbatch)
        for microbatch in backwards if layers is not None else ():
            layers.backward((microbatch, 0))
    assert layers is None or not layers._live
    return done, [p.grad for p in (*chain.parameters(), *([] if frozen else [embedding]))]


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_gradients_are_as_without(device, frozen):
    (losses, grads), (expected, plain) = (train(device, each, frozen=frozen) for each in (True, False))
    assert losses == expected
    assert all(torch.equal(a, b) and a.any() for a, b in zip(grads, plain, strict=True))


class Stream:
    def __init__(self, name, log):
        self.name, self.log = name, log

    def wait_stream(self, other):
        self.log.append((self.name, "waits for all of", other.name))

    def wait_event(self, event):
        self.log.append((self.name, "waits for", event))

    def record_event(self):
        return f"{self.name} {len(self.log)}"


def test_a_part_waits_for_the_one_before_alone(monkeypatch):
    """On streams that note what they are told: not for what else is on the stream of that part."""
    log = []
    main, exchanges = Stream("main", log), Stream("exchanges", log)

    @contextmanager
    def on(stream):
        log.append((stream.name, "runs"))
        yield

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: main)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(overlap, "exchange_stream", lambda device: exchanges)
    lane = overlap._Lane(torch.empty(1))
    lane._device = torch.device("cuda")
    for exchange in (False, True, False, True):
        with lane.on(exchange, ()):
            pass
    lane.join(())
    assert log == [
        ("main", "waits for all of", "main"),
        ("main", "runs"),
        ("exchanges", "waits for", "main 2"),
        ("exchanges", "runs"),
        ("main", "waits for", "exchanges 4"),
        ("main", "runs"),
        ("exchanges", "waits for", "main 6"),
        ("exchanges", "runs"),
        ("main", "waits for", "exchanges 8"),
    ]
