"""Tensors that graphs and eager segments share memory with: nobody sees a value that is not his.

A backward reads gradients where the graph before left them; in some steps they come otherwise. Eager segments
write into static inputs, and may hand on what a graph holds. All results are those of eager training.
"""

from __future__ import annotations

import pytest
import torch
from small_tools import SHAPE, Parts, assert_same_as_eager, eager, linear, managed, total, train_chain
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fastmp.cuda_graphs.errors import GraphError
from fastmp.nn import LayerChain
from fastmp.ops import bias_dropout_add


def clipped(layer, a, b):
    a = a.view_as(a)
    if a.requires_grad:
        a.register_hook(lambda grad: grad if layer.usual else grad * 0.5)
    return (a + b,)


def run(number):
    return lambda layer, x: tuple(each(x) for each in layer.own[:number])


SWITCHED = {
    "two readers": (run(2), lambda layer, a, b: ((a if layer.usual else 2 * a) + b,)),
    "the other reader": (run(2), lambda layer, a, b: ((a + 2 * b) if layer.usual else (2 * a + b),)),
    "around the run": (
        lambda layer, x: (layer.own[0](x), x),
        lambda layer, a, b: ((a if layer.usual else 2 * a) + b,),
    ),
    "a hook": (run(2), clipped),
    "no gradient": (lambda layer, x: (2 * x, 3 * x), lambda layer, a, b: ((a if layer.usual else 0) + b,)),
    "expanded": (run(1), lambda layer, a: ((a if layer.usual else 2 * a).sum(),)),
}


@pytest.mark.parametrize(("first", "between"), SWITCHED.values(), ids=SWITCHED)
def test_gradients_that_come_otherwise_in_one_step(first, between):
    def run(graphs):
        layer = Parts(
            ("before", False, lambda layer, x: (x * layer.weight,)),
            ("first", True, first),
            ("between", False, between),
            ("last", True, lambda layer, x: (x * layer.scale,)),
            own=nn.ModuleList([linear(), linear()]),
            weight=nn.Parameter(torch.ones(4, dtype=torch.float64)),
            scale=nn.Parameter(torch.ones(4, dtype=torch.float64)),
        )
        return train_chain(
            LayerChain([layer]), graphs, before=lambda step: setattr(layer, "usual", step != 4)
        )

    assert_same_as_eager(run)


def test_gradients_that_are_conjugate_in_some_steps():
    def conjugate(layer, x):
        return (x.conj() if layer.usual else x,)

    def run(graphs):
        one, two = (nn.Parameter(torch.randn(4, dtype=torch.complex128)) for _ in range(2))
        parts = (
            ("first", True, lambda layer, x: (x * layer.one,)),
            ("between", False, conjugate),
            ("last", True, lambda layer, x: (x * layer.two,)),
        )
        layer = Parts(*parts, one=one, two=two)
        return train_chain(
            LayerChain([layer]),
            graphs,
            before=lambda step: setattr(layer, "usual", step != 4),
            dtype=torch.complex128,
            loss=lambda outputs, step: outputs[0].abs().square().sum(),
        )

    assert_same_as_eager(run)


@pytest.mark.parametrize(
    "last",
    (lambda layer, x: (x.view_as(x),), lambda layer, x: ((x.view(3, 2, 2) + layer.bias).view(SHAPE),)),
)
def test_a_run_whose_gradient_is_a_view_of_the_one_it_gets(last):
    def run(graphs):
        parts = (
            ("first", True, lambda layer, x: (layer.one(x), layer.two(x))),
            ("between", False, lambda layer, a, b: (b + 2 * a,)),
            ("last", True, last),
        )
        bias = nn.Parameter(torch.zeros(3, 2, 2, dtype=torch.float64))
        return train_chain(LayerChain([Parts(*parts, one=linear(), two=linear(), bias=bias)]), graphs)

    assert_same_as_eager(run)


def add(layer, x, residual, out=None):
    return (bias_dropout_add(x, None, residual, p=0.0, out=out),)


def add_and_return(layer, x, residual, out=None):
    return add(layer, x, residual, out) * 2


@pytest.mark.parametrize("last", (add, add_and_return))
def test_outputs_stay_as_they_are_where_an_eager_segment_wrote_into_a_graph(last):
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = linear()

        def forward(self, x):
            return torch.relu(self.linear(x)), x

    def run(graphs):
        parts = (
            ("front", True, lambda layer, x: (layer.one(x), x)),
            ("experts", False, lambda layer, a, x: (layer.two(a), x)),
            ("combine", False, last, True),
        )
        chain = LayerChain([Parts(*parts, one=linear(), two=linear()), Both()])
        manager, data, seen = managed(chain, graphs), torch.Generator().manual_seed(1), []
        for _ in range(5):
            if graphs:
                manager.begin_step()
            kept = []
            for _ in range(2):
                outputs = chain(torch.randn(SHAPE, generator=data, dtype=torch.float64))
                kept += [output.detach() for output in outputs]
                total(outputs).backward()
            seen += [tensor.clone() for tensor in kept]
        return [*seen, *(param.grad for param in chain.parameters())]

    assert_same_as_eager(run)


@pytest.mark.parametrize("used", (lambda step, weight: step >= 4, lambda step, weight: weight == 10))
def test_a_leaf_that_an_eager_segment_uses_now_and_then(used):
    def run(graphs):
        layer = Parts(
            ("add", False, lambda layer, x: (x + layer.weight.view(SHAPE) if layer.used else x,)),
            weight=nn.Parameter(torch.zeros(12, dtype=torch.float64)),
        )
        chain = LayerChain([linear(), layer, linear(), nn.ReLU(), linear()])

        def between(step, weight):
            layer.used = used(step, weight)

        return train_chain(chain, graphs, between=between)

    assert_same_as_eager(run)


def test_a_leaf_that_is_handed_on_around_a_run():
    def run(graphs):
        parts = (
            ("begin", False, lambda layer, x: (x, layer.weight.view(SHAPE))),
            ("first", True, lambda layer, x, y: (layer.one(x), y)),
            ("between", False, lambda layer, x, y: (x + y,)),
            ("last", True, lambda layer, x: (torch.relu(layer.two(x)),)),
        )
        weight = nn.Parameter(torch.ones(12, dtype=torch.float64))
        return train_chain(LayerChain([Parts(*parts, one=linear(), two=linear(), weight=weight)]), graphs)

    assert_same_as_eager(run)


def test_a_step_that_fails_behind_frozen_layers():
    """Their graphs are not a round of their own: what comes after them may still need what they made."""

    def run(graphs):
        def middle(layer, x):
            if layer.fails:
                raise ValueError("on purpose")
            return (layer.one(x),)

        def last(layer, x):
            return (torch.relu(layer.three(torch.relu(layer.two(x)) * x)) * x,)

        frozen = linear().requires_grad_(False)
        layer = Parts(
            ("middle", False, middle), ("last", True, last), one=linear(), two=linear(), three=linear()
        )
        chain = LayerChain([frozen, layer])
        manager, data, seen = managed(chain, graphs), torch.Generator().manual_seed(1), []
        for step in range(7):
            if graphs:
                manager.begin_step()
            layer.fails = step == 2
            for x in [torch.randn(SHAPE, generator=data, dtype=torch.float64) for _ in range(2)]:
                if layer.fails:
                    with pytest.raises(ValueError, match="on purpose"):
                        chain(x)
                    break
                total(chain(x)).backward()
            seen += [param.grad.clone() for param in layer.parameters()]
        return seen

    assert_same_as_eager(run)


def test_a_run_that_gets_no_gradient_from_an_eager_function():
    class Stop(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            return None

    def run(graphs):
        layer = Parts(("stop", False, lambda layer, x: (layer.one(Stop.apply(x)),)), one=linear())
        return train_chain(LayerChain([linear(), layer, linear()]), graphs)

    assert_same_as_eager(run)


@pytest.mark.parametrize("what", ("a layer", "a module", "a bias"))
def test_what_is_added_is_noticed(what):
    chain = LayerChain([nn.Sequential(nn.Linear(4, 4, bias=False, dtype=torch.float64)), eager(), linear()])

    def before(step):
        if step == 4 and what == "a layer":
            chain.append(eager())
        elif step == 4 and what == "a module":
            chain[0].module.append(linear())
        elif step == 4:
            chain[0].module[0].bias = nn.Parameter(torch.ones(4, dtype=torch.float64))

    with pytest.raises(GraphError, match="of chunk 0 or its main gradient has moved"):
        train_chain(chain, True, before=before)


def test_distributed_data_parallel_is_refused(tmp_path):
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        chain = LayerChain([linear()])
        wrapped, manager = DistributedDataParallel(chain), managed(chain, True, 1)
        manager.begin_step()
        with pytest.raises(GraphError, match="DistributedDataParallel reduces gradients by hooks"):
            wrapped(torch.ones(SHAPE, dtype=torch.float64))
    finally:
        torch.distributed.destroy_process_group()
