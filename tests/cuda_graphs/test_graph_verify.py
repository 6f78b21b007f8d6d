"""Verification compares; what is trained is as without it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from layout_tools import MOE_4, Layout, Training
from small_tools import SHAPE, assert_same_as_eager, linear, managed, total, train_chain
from torch import nn

from fastmp.cuda_graphs.backends.recording import RecordingBackend
from fastmp.cuda_graphs.errors import GraphError
from fastmp.cuda_graphs.manager import GraphManager
from fastmp.distributed.grid import RankGrid
from fastmp.distributed.groups import ParallelGroups
from fastmp.nn import LayerChain
from fastmp.schedule.schedule import BACKWARD, FORWARD, Step
from fastmp.testing.ranks import run_ranks


def test_buffers_are_as_after_one_forward():
    def run(graphs):
        chain = LayerChain([linear(), nn.BatchNorm1d(4, dtype=torch.float64)])
        return train_chain(chain, graphs, verify_every=1)

    assert_same_as_eager(run)


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

    assert_same_as_eager(run)


def test_a_segment_that_updates_a_buffer_it_reads():
    def run(graphs):
        chain = LayerChain([nn.utils.parametrizations.spectral_norm(linear())])
        return train_chain(chain, graphs, verify_every=1)

    assert_same_as_eager(run)


def test_gradients_stay_where_they_are():
    """Gradients are views of one buffer, which is what is reduced and read."""

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

    assert_same_as_eager(run)


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
    (graph_set,) = manager._graph_sets.values()
    graph, mean = graph_set.captured[0].forward, chain[1].module.running_mean
    replay = graph.replay
    graph.replay = lambda: (replay(), mean.add_(1))
    manager.begin_step()
    with pytest.raises(GraphError, match=r"buffer '1.module.running_mean' is up to 1 from"):
        chain(x)


TWO = replace(MOE_4, num_layers=2)  # its auxiliary loss is summed over data-parallel ranks, inside a run


def unequal(rank, world, graphs):
    """In a step, and in a microbatch of another, a rank has fewer rows. With which forwards were verified."""
    groups = ParallelGroups.create(RankGrid(world_size=world))
    options = {"verify_every": 1, "group": groups.tp_cp_dp} if graphs else {}
    training, seen, verified = Training(Layout(TWO, microbatches=2), groups, graphs=graphs, **options), [], []
    if graphs:
        agree = training.manager._all_replay
        training.manager._all_replay = lambda own: verified.append(agree(own)) or verified[-1]
    for step in range(8):
        training.pipeline.forget_shapes()
        rows = {(1, 5): (2, 2), (0, 6): (3, 2)}.get((rank, step), (3, 3))
        cut = [(a[:n], b[:n], c) for n, (a, b, c) in zip(rows, training.batches(2, sequences=3))]
        draw, training.batches = training.batches, lambda number, cut=cut: cut
        seen += training.gradients()
        training.batches = draw
        training.optimizer.step()
    return seen, verified


def test_ranks_of_which_one_has_another_shape():
    """What one did twice alone would meet the other's next collective."""
    eager, graphed = (run_ranks(unequal, 2, graphs, timeout=60) for graphs in (False, True))
    for (seen, verified), (expected, _) in zip(graphed, eager):
        assert all(torch.equal(a, b) for a, b in zip(seen, expected, strict=True))
        assert verified == [False] * 5 + [True] * 5 + [False] * 2 + [True, False] + [True] * 2
