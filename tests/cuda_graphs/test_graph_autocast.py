"""Steps under autocast, and some not."""

from __future__ import annotations

import pytest
import torch
from small_tools import assert_same_as_eager, eager, managed
from torch import nn

from fastmp.nn import LayerChain


def narrow(enabled=True, dtype=torch.bfloat16):
    return torch.autocast("cpu", dtype, enabled=enabled)


def train(chain, graphs, context, call=None):
    """Outputs and gradients; `call`: what comes before the chain, in the same context."""
    manager, seen, data = managed(chain, graphs), [], torch.Generator().manual_seed(5)
    optimizer = torch.optim.SGD(chain.parameters(), lr=0.1)
    for step in range(7):
        optimizer.zero_grad()
        if graphs:
            manager.begin_step()
        for microbatch in range(2):
            x = torch.randn(3, 4, generator=data)
            with context(step, microbatch):
                if call is not None:
                    call(x)
                (y,) = chain(x)
            y.float().square().mean().backward()
            seen.append(y.detach().clone())
        seen += [param.grad.clone() for param in chain.parameters()]
        optimizer.step()
    return seen


@pytest.mark.parametrize(
    "context",
    (
        lambda step, microbatch: narrow(step < 4),
        lambda step, microbatch: narrow(step >= 4),
        lambda step, microbatch: narrow(dtype=torch.bfloat16 if step < 4 else torch.float16),
        lambda step, microbatch: narrow(step < 4 or microbatch == 0),
        lambda step, microbatch: narrow(step % 2 == microbatch),
    ),
    ids=("switched off", "switched on", "another dtype", "within a step", "now and then"),
)
def test_autocast_that_changes(context):
    assert_same_as_eager(
        lambda graphs: train(LayerChain([nn.Linear(4, 4), nn.Linear(4, 4)]), graphs, context)
    )


def test_a_weight_that_autocast_has_cast_before():
    """And has kept: outside of the graph, which must not read it there."""

    def run(graphs):
        chain = LayerChain([nn.Linear(4, 4)])
        return train(chain, graphs, lambda *_: narrow(), lambda x: chain[0](x).detach())

    assert_same_as_eager(run)


class Detached(nn.Module):
    """So that its weight has no gradient from here: two are added in another order than without graphs."""

    def __init__(self, linear):
        super().__init__()
        self.linear = linear

    def forward(self, x):
        return x + self.linear(x).detach()


@pytest.mark.parametrize(
    "layers", (lambda own, other: [own, other], lambda own, other: [other, own]), ids=("after", "before")
)
def test_a_weight_that_a_graph_and_an_eager_segment_use(layers):
    def run(graphs):
        own = nn.Linear(4, 4)
        return train(LayerChain(layers(own, eager(Detached(own)))), graphs, lambda *_: narrow())

    assert_same_as_eager(run)


def test_a_weight_that_a_run_uses_twice():
    """It is cast once, and its gradients are added before they are cast back."""

    def run(graphs):
        own = nn.Linear(4, 4)
        return train(LayerChain([own, own]), graphs, lambda *_: narrow())

    assert_same_as_eager(run)
