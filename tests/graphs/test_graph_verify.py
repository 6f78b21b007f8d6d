"""Verification compares; what is trained is as without it."""

from __future__ import annotations

import pytest
import torch
from small_tools import SHAPE, assert_same, linear, managed, total, train
from torch import nn

from fastmp.graphs.errors import GraphError
from fastmp.graphs.manager import GraphManager
from fastmp.graphs.recording import RecordingBackend
from fastmp.nn import LayerChain
from fastmp.parallel.schedule import BACKWARD, FORWARD, Step


def test_buffers_are_as_after_one_forward():
    def run(graphs):
        chain = LayerChain([linear(), nn.BatchNorm1d(4, dtype=torch.float64)])
        return train(chain, graphs, verify_every=1)

    assert_same(run)


def test_buffers_where_microbatches_overlap():
    """Autograd has saved the statistics for a backward, and another forward runs twice before it."""

    def run(graphs):
        chain, data = LayerChain([linear(), nn.BatchNorm1d(4, dtype=torch.float64)]), torch.Generator()
        steps = [Step(kind, i, 0) for kind in (FORWARD, BACKWARD) for i in (0, 1)]
        manager, seen = None, []
        if graphs:
            manager = GraphManager([chain], steps, backend=RecordingBackend(), verify_every=1)
        for _ in range(5):
            chain.zero_grad()
            if graphs:
                manager.begin_step()
            losses = [total(chain(torch.randn(SHAPE, generator=data, dtype=torch.float64))) for _ in "01"]
            for loss in losses:
                loss.backward()
            seen += [param.grad.clone() for param in chain.parameters()]
        return [*seen, *(buffer.clone() for buffer in chain.buffers())]

    assert_same(run)


def test_a_segment_that_updates_a_buffer_it_reads():
    def run(graphs):
        chain = LayerChain([nn.utils.parametrizations.spectral_norm(linear())])
        return train(chain, graphs, verify_every=1)

    assert_same(run)


def test_gradients_stay_where_they_are():
    """As views of one buffer, which is what is reduced and read."""

    def run(graphs):
        chain = LayerChain([linear(), linear()])
        params, manager = list(chain.parameters()), managed(chain, graphs, verify_every=3)
        flat, seen = torch.zeros(40, dtype=torch.float64), []
        for param, part in zip(params, flat.split([param.numel() for param in params])):
            param.grad = part.view_as(param)
        for _ in range(6):
            flat.zero_()
            if graphs:
                manager.begin_step()
            for _ in range(2):
                total(chain(torch.ones(SHAPE, dtype=torch.float64))).backward()
            seen.append(flat.clone())
        return seen

    assert_same(run)


def test_eager_forwards_are_let_go_with_their_backward():
    chain = LayerChain([linear(), nn.Tanh(), linear()])
    manager = managed(chain, True, 8, verify_every=1)
    for _ in range(4):
        manager.begin_step()
        for _ in range(8):
            total(chain(torch.ones(SHAPE, dtype=torch.float64))).backward()
            assert manager._verifier is not None and not manager._verifier._eager


def test_a_buffer_that_a_graph_leaves_otherwise():
    chain = LayerChain([linear(), nn.BatchNorm1d(4, dtype=torch.float64)])
    manager, x = managed(chain, True, 1, verify_every=1), torch.ones(SHAPE, dtype=torch.float64)
    for _ in range(3):
        manager.begin_step()
        total(chain(x)).backward()
    (variant,) = manager._variants.values()
    graph, mean = variant.captured[0].forward, chain[1].module.running_mean
    replay = graph.replay
    graph.replay = lambda: (replay(), mean.add_(1))
    manager.begin_step()
    with pytest.raises(GraphError, match=r"buffer '1.module.running_mean' is up to 1 from"):
        chain(x)
