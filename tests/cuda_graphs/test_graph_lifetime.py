"""What becomes of graphs: one manager for a backend, removed in time or let go; chains are copied without."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
from small_tools import SHAPE, Parts, assert_same_as_eager, linear, managed, total, train_chain
from torch import nn

from fastmp.cuda_graphs.backends.recording import RecordingBackend
from fastmp.cuda_graphs.errors import GraphError
from fastmp.cuda_graphs.manager import GraphManager
from fastmp.nn import LayerChain
from fastmp.ops.wgrad import WgradQueue, defer_wgrad
from fastmp.schedule.schedule import Schedule


def step(chain, manager=None):
    if manager is not None:
        manager.begin_step()
    loss = total(chain(torch.ones(SHAPE, dtype=torch.float64)))
    loss.backward()
    return loss.detach()


def test_a_backend_has_one_manager():
    chain, other, backend = LayerChain([linear()]), LayerChain([linear()]), RecordingBackend()
    manager = managed(chain, True, backend=backend)
    with pytest.raises(ValueError, match=r"belongs to another manager.*make a backend for each"):
        managed(other, True, backend=backend)
    assert other.runner is None
    manager.remove()
    second = managed(other, True, backend=backend)
    manager.remove()
    with pytest.raises(ValueError, match="belongs to another manager"):
        managed(chain, True, backend=backend)
    del second
    managed(chain, True, backend=backend)


@pytest.mark.parametrize("copied", (copy.deepcopy, lambda chain: pickle.loads(pickle.dumps(chain))))
@pytest.mark.parametrize("steps", (2, 4), ids=("in the step that shows shapes", "with graphs"))
def test_a_copy_of_the_model_runs_by_itself(steps, copied):
    def run(graphs):
        chain = LayerChain([linear(), linear()])
        manager = managed(chain, graphs, 1)
        for _ in range(steps):
            step(chain, manager)
        other = copied(chain)
        with torch.no_grad():
            for param in other.parameters():
                param.mul_(2)
        return [step(other), step(chain, manager), step(other)]

    assert_same_as_eager(run)


def test_removed_twice_and_on_the_way():
    chain = LayerChain([linear()])
    manager = managed(chain, True, 1)
    for _ in range(4):
        step(chain, manager)
    manager.begin_step()
    loss = total(chain(torch.ones(SHAPE, dtype=torch.float64)))
    manager.remove()
    manager.remove()
    with pytest.raises(GraphError, match="after its step is over"):
        loss.backward()
    assert chain.runner is None and manager.num_graphs == 0
    eager = step(chain)
    assert torch.equal(step(chain, manager), eager)


def test_removed_before_the_gradients_of_weights_are_made():
    chain, queue = LayerChain([linear()]), WgradQueue()
    manager = GraphManager(
        [chain], Schedule(1, 1, name="zero_bubble").order(0), backend=RecordingBackend(), warmup=1
    )
    for number in range(4):
        manager.begin_step()
        with defer_wgrad(queue):
            total(chain(torch.ones(SHAPE, dtype=torch.float64))).backward()
        if number < 3:
            queue.run(queue.take())
    manager.remove()
    with pytest.raises(
        GraphError, match=r"backward_weight.*is about to run, but the end of the step was pla"
    ):
        queue.run(queue.take())


def test_removed_before_the_last_one_of_the_same_chain():
    chain = LayerChain([linear()])
    first = managed(chain, True, 1)
    second = managed(chain, True, 1)
    first.remove()
    for _ in range(3):
        step(chain, second)
    assert second.num_graphs == 2


def test_graphs_go_with_their_manager():
    """Without the collector of garbage: a graph of collectives keeps process groups from closing."""
    chain, backend = LayerChain([linear()]), RecordingBackend()
    manager = managed(chain, True, 1, backend=backend)
    for _ in range(4):
        step(chain, manager)
    graphs = [weakref.ref(each.forward) for each in manager._graph_set.captured.values()]
    gc.disable()
    try:
        eager = copy.deepcopy(chain)
        del manager
        assert len(graphs) == 1 and graphs[0]() is None
        assert torch.equal(step(chain), step(eager))
    finally:
        gc.enable()


def test_a_model_goes_after_its_graphs():
    """Nothing that a capture has set on a parameter keeps it, nor is called in eager steps afterwards."""
    chain = LayerChain([linear()])
    manager = managed(chain, True, 1)
    for _ in range(4):
        step(chain, manager)
    visited = [list(each.backward.visited) for each in manager._graph_set.captured.values()]
    kept = [each.backward.visited for each in manager._graph_set.captured.values()]
    manager.remove()
    step(chain)
    assert kept == visited and all(visited)
    params = [weakref.ref(param) for param in chain.parameters()]
    del chain, manager, kept, visited
    gc.collect()
    assert params and not any(param() is not None for param in params)


def test_a_conjugate_that_crosses_from_a_graph_to_an_eager_segment():
    def run(graphs):
        def first(layer, x):
            return ((x.to(layer.weight.dtype) @ layer.weight).conj(),)

        weight = nn.Parameter(torch.randn(4, 4, dtype=torch.complex128))
        last = ("real", False, lambda layer, z: (z.real + 2 * z.imag,))
        return train_chain(LayerChain([Parts(("first", True, first), last, weight=weight)]), graphs)

    assert_same_as_eager(run)


def test_a_conjugate_that_is_copied_into_a_graph_beside_other_dtypes():
    def run(graphs):
        def spread(layer, x):
            return (x * layer.weight).conj(), x.float()

        weight = nn.Parameter(torch.randn(4, dtype=torch.complex128))
        last = ("real", True, lambda layer, z, x: (z.real + 2 * z.imag + x,))
        return train_chain(LayerChain([Parts(("spread", False, spread), last, weight=weight)]), graphs)

    assert_same_as_eager(run)


def test_two_managers_for_the_layers_of_two_models():
    """Each with a backend of its own, one of which starts later."""

    def run(graphs):
        chains = [LayerChain([linear(), nn.Tanh(), linear()]) for _ in range(2)]
        managers = [
            GraphManager([chain], Schedule(1, 1).order(0), backend=RecordingBackend(), warmup=warmup)
            for chain, warmup in zip(chains, (1, 3))
            if graphs
        ]
        seen = []
        for number in range(6):
            x = torch.full(SHAPE, 0.1 * (number + 1), dtype=torch.float64)
            params = [param for chain in chains for param in chain.parameters()]
            for param in params:
                param.grad = None
            for manager in managers:
                manager.begin_step()
            losses = [total(chain(x)) for chain in chains]
            for loss in reversed(losses):
                loss.backward()
            seen += [param.grad.clone() for param in params]
        return seen

    assert_same_as_eager(run)
