"""Hooks do with graphs what they do without."""

from __future__ import annotations

from collections import Counter
from itertools import groupby

import pytest
import torch
from layout_tools import MOE_4, Layout, Training
from small_tools import SHAPE, Parts, assert_same_as_eager, eager, linear, managed, total, train_chain
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import prune

from fastmp.cuda_graphs.explanation.report import explain
from fastmp.cuda_graphs.partition import Span
from fastmp.distributed.groups import ParallelGroups
from fastmp.nn import LayerChain, SingleSegment
from fastmp.ops.wgrad import WgradQueue, defer_wgrad
from fastmp.schedule.schedule import BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Step
from fastmp.tensor_parallel.layers import ColumnParallelLinear


def doubles_inputs(module):
    return module.register_forward_pre_hook(lambda module, args: tuple(2 * each for each in args))


def doubles_inputs_by_name(module):
    return module.register_forward_pre_hook(
        lambda module, args, kwargs: (tuple(2 * each for each in args), kwargs), with_kwargs=True
    )


def doubles_output(module):
    return module.register_forward_hook(lambda module, args, output: 2 * output)


def doubles_gradient(module):
    return module.register_full_backward_pre_hook(lambda module, grads: tuple(2 * each for each in grads))


def doubles_gradient_of_weight(module):
    return next(module.parameters()).register_hook(lambda grad: 2 * grad)


CHANGES = (
    doubles_inputs,
    doubles_inputs_by_name,
    doubles_output,
    doubles_gradient,
    doubles_gradient_of_weight,
)


def inside(chain):
    return chain[0].module


def layer(chain):
    return chain[0]


@pytest.mark.filterwarnings("ignore:Full backward hook")
@pytest.mark.parametrize("segment", (SingleSegment, eager), ids=("captured", "eager"))
@pytest.mark.parametrize("of", (layer, inside))
@pytest.mark.parametrize("hook", CHANGES)
def test_a_hook_that_changes_tensors(hook, of, segment):
    def run(graphs):
        chain = LayerChain([segment(linear()), linear()])
        hook(of(chain))
        return train_chain(chain, graphs)

    assert_same_as_eager(run)


@pytest.mark.filterwarnings("ignore:Full backward hook")
@pytest.mark.parametrize("hook", CHANGES)
def test_a_hook_that_comes_and_goes(hook):
    """Before shapes are known, with graphs, and behind a step that shows other shapes."""

    def run(graphs):
        chain, handles = LayerChain([linear(), nn.Tanh(), linear()]), []

        def before(step):
            if step in (1, 4, 8):
                handles.append(hook(inside(chain)))
            if step in (2, 6):
                handles.pop().remove()

        return train_chain(chain, graphs, 10, before, sizes=[3] * 7 + [2] * 3)

    assert_same_as_eager(run)


def test_a_hook_of_all_modules():
    def run(graphs):
        chain = LayerChain([linear(), linear()])
        handle = register_module_forward_hook(
            lambda module, args, output: 2 * output if type(module) is nn.Linear else None
        )
        try:
            return train_chain(chain, graphs)
        finally:
            handle.remove()

    assert_same_as_eager(run)


def test_what_comes_between_the_segments_of_a_layer_with_a_hook():
    """The layer is called: its tensors come from the run before it, and what it returns beside is kept."""

    def run(graphs):
        parts = Parts(
            ("first", True, lambda layer, x: (torch.tanh(layer.weight(x)), x)),
            ("second", True, lambda layer, y, x: (y + x, y.square())),
            weight=linear(),
        )
        parts.register_forward_hook(lambda module, args, output: (output[0] * 3, *output[1:]))
        return train_chain(LayerChain([linear(), parts, linear()]), graphs)

    assert_same_as_eager(run)


def test_a_layer_with_a_hook_that_is_there_twice():
    def run(graphs):
        layer = SingleSegment(linear())
        doubles_output(layer)
        return train_chain(LayerChain([layer, layer, linear()]), graphs)

    assert_same_as_eager(run)


@pytest.mark.parametrize("with_kwargs", (False, True))
def test_a_hook_before_forward_gets_its_arguments(with_kwargs):
    def run(graphs):
        chain, seen = LayerChain([linear()]), []
        chain[0].module.register_forward_pre_hook(
            lambda module, args, *kwargs: seen.append(args[0].shape), with_kwargs=with_kwargs
        )
        train_chain(chain, graphs)
        return seen

    assert_same_as_eager(run)


def deferring():
    return ColumnParallelLinear(4, 4, group=None, dtype=torch.float64)


def marked(order, make=linear, split=False, main=False):
    """Layers of which some are there twice, in runs of their own, with what hooks behind gradients see."""

    def run(graphs):
        layers = {"a": make(), "b": make(), "|": eager()}
        chain, seen, queue = LayerChain([layers[name] for name in order]), [], WgradQueue()
        for name in "ab":
            for param in layers[name].parameters():
                nn.init.ones_(param)  # so that sums have no last bits
                if main:
                    param.main_grad = torch.zeros_like(param)

                def hook(param, name=name):
                    grad = param.main_grad if main and param.grad is None else param.grad
                    seen.append((name, param.shape, bool(queue_runs), grad.tolist()))

                param.register_post_accumulate_grad_hook(hook)
        manager, x, queue_runs = managed(chain, graphs), torch.ones(SHAPE, dtype=torch.float64), []
        if graphs and split:
            kinds = (FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)
            manager.order = tuple(Step(kind, i, 0) for i in (0, 1) for kind in kinds)
        for _ in range(5):
            chain.zero_grad()
            if graphs:
                manager.begin_step()
            for weight in (1, 10):
                with defer_wgrad(queue if split else None):
                    (chain(x)[0].sum() * weight).backward()
                queue_runs.append(True)
                WgradQueue.run(queue.take())
                queue_runs.clear()
            seen.append("step")
        assert not graphs or manager.num_graphs
        return [sorted(own) for end, own in groupby(seen, lambda each: each == "step") if not end]

    return run


ORDERS = pytest.mark.parametrize("order", ("a|a", "ab|ba|b", "ab|a"))


@ORDERS
def test_a_hook_behind_a_gradient_that_several_runs_make_runs_once(order):
    assert_same_as_eager(marked(order))


@ORDERS
@pytest.mark.parametrize("main", (False, True), ids=("grad", "main_grad"))
@pytest.mark.parametrize("split", (False, True), ids=("plain", "split"))
def test_a_hook_is_called_behind_exactly_the_gradients_that_there_are(order, split, main):
    """Once in a backward, and that of a deferred gradient once it is there; biases are not deferred."""
    run = marked(order, deferring, split, main)
    assert_same_as_eager(run)
    calls = [(name, shape, late) for name, shape, late, _ in run(True)[-1]]
    shapes = ((4,), False), ((4, 4), split)
    assert calls == [(name, *each) for name in sorted({*order} - {"|"}) for each in shapes for _ in range(2)]


@pytest.mark.parametrize("runs", (2, 8))
def test_the_hooks_of_graphs_are_looked_up_once(runs, monkeypatch):
    """Each run's parameters are visited once for all graphs, and again by no later step."""
    chain = LayerChain([each for _ in range(runs) for each in (linear(), eager())])
    for param in chain.parameters():
        param.register_post_accumulate_grad_hook(lambda _: None)
    manager = managed(chain, True)
    train_with(manager, chain, steps=4)
    (graph_set,) = manager._all()
    assert len(graph_set.done) == 2 * runs  # forwards and backwards
    visits, whole = [], Span.parameters.fget
    monkeypatch.setattr(Span, "parameters", property(lambda part: visits.append(part) or whole(part)))
    train_with(manager, chain)
    assert not visits
    graph_set.hooks = None  # as before the first step
    train_with(manager, chain)
    assert len(visits) == runs


def test_a_hook_behind_a_gradient_that_moves_between_steps():
    """It is added, goes to a parameter of another run, and is removed, while the graphs stay."""

    def run(graphs):
        chain = LayerChain([linear(), eager(), linear()])
        first, second = (next(chain[layer].parameters()) for layer in (0, 2))
        manager, seen, handles = managed(chain, graphs), [], []

        def hook(param):
            seen.append((param is first, param.grad.tolist()))

        def before(param, args):
            seen.append("before")

        before.replayed = True
        for step in range(8):
            if step in (4, 5):
                handles.append((second, first)[step - 4].register_post_accumulate_grad_hook(hook))
                handles.append(chain[step - 4 and 2].module.register_forward_pre_hook(before))
            if step in (5, 6):
                handles.pop(0).remove()
                handles.pop(0).remove()
            chain.zero_grad()
            seen.append(step)
            if manager is not None:
                manager.begin_step()
            for _ in range(2):
                total(chain(torch.ones(SHAPE, dtype=torch.float64))).backward()
        if manager is not None:
            assert manager.num_graphs == 4
        return seen

    assert_same_as_eager(run)


@pytest.mark.parametrize("schedule", (pytest.param("1f1b", marks=pytest.mark.full), "zero_bubble"))
def test_hooks_of_a_model_are_called_as_often_as_it_has_gradients(schedule):
    """Dense products, experts, routers and norms, whose gradients ops or autograd add to `main_grad`."""
    layout, seen = Layout(MOE_4, microbatches=2, vpp=2, schedule=schedule), []
    for graphs in (False, True):
        training = Training(layout, ParallelGroups.alone(), graphs=graphs, **{"warmup": 1} if graphs else {})
        calls = Counter()
        for name, param in training.parameters.items():
            param.register_post_accumulate_grad_hook(lambda _, name=name, calls=calls: calls.update([name]))
        for _ in range(3 if graphs else 1):  # eager, captured, replayed
            calls.clear()
            training.gradients()
            seen.append(dict(calls))
    assert len(seen) == 4 and all(calls == seen[0] for calls in seen)
    assert training.manager.num_graphs
    # the loss has a backward of its own, and the table of embeddings a gradient in both
    assert seen[0] == {name: 4 if "word_embedding" in name else 2 for name in training.parameters}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "wrapped",
    (
        lambda: nn.utils.weight_norm(linear()),
        lambda: nn.utils.spectral_norm(linear()),
        lambda: prune.l1_unstructured(linear(), "weight", 0.5),
    ),
    ids=("weight_norm", "spectral_norm", "prune"),
)
def test_a_weight_that_a_hook_makes_before_forward(wrapped):
    def run(graphs):
        chain = LayerChain([wrapped(), linear()])

        def before(step):
            with torch.no_grad():
                for param in chain.parameters():
                    param.mul_(0.9)

        return train_chain(chain, graphs, before=before)

    assert_same_as_eager(run)


@pytest.mark.parametrize("of", (layer, inside))
def test_other_layers_are_captured_and_explain_says_why_this_one_is_not(of):
    chain = LayerChain([linear(), linear()])
    doubles_output(of(chain))
    report = explain(chain, torch.ones(3, 4, dtype=torch.float64))
    assert [segment.captured for segment in report.segments] == [False, True]
    (problem,) = report.segments[0].problems
    assert problem.kind == "hook" and "module.register_forward_hook(" in problem.line
    assert f"a hook of {type(of(chain)).__name__}: replay would skip it" in problem.message
    manager = managed(chain, True)
    train_with(manager, chain)
    assert [run.name for run in manager.plan.chunks[0]] == ["1.Linear"]


def train_with(manager, chain, steps=3):
    for _ in range(steps):
        manager.begin_step()
        for _ in range(2):
            chain(torch.ones(3, 4, dtype=torch.float64))[0].sum().backward()
