"""Replay programs in C++ against steps in Python: the same bits, copies and errors, and no leak."""

from __future__ import annotations

import gc
import random
import re
import warnings
import weakref
from collections import Counter

import pytest
import torch
from graph_tools import DENSE, MOE, assert_same_gpt, train_gpt
from small_tools import SHAPE, Parts, assert_same_as_eager, eager, linear, managed, total, train_chain
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fastmp.cuda_graphs import replay_program
from fastmp.cuda_graphs.errors import GraphError
from fastmp.cuda_graphs.executor import StepExecutor
from fastmp.cuda_graphs.manager import GraphManager
from fastmp.cuda_graphs.replay_program import ProgramExecutor, ReplayProgram
from fastmp.nn import LayerChain
from fastmp.schedule.schedule import Schedule
from tools.silent_graphs import SilentBackend

pytestmark = pytest.mark.skipif(
    replay_program.REPLAY is None, reason="fastmp._replay is not built for this torch"
)


@pytest.fixture
def both(monkeypatch):
    """Run a function by C++ and by Python from the same random numbers; return what each came to."""

    def run(function):
        came_to = []
        for module in (replay_program.REPLAY, None):
            monkeypatch.setattr(replay_program, "REPLAY", module)
            torch.manual_seed(0)
            try:
                came_to.append(function())
            except (GraphError, RuntimeError, ValueError) as error:
                came_to.append(error)
        return came_to

    return run


@pytest.fixture
def in_python(monkeypatch):
    """How many runs went through Python: in C++'s turn none may, once graphs are captured."""
    seen = Counter()
    run = StepExecutor.run_captured_span

    def count(self, *arguments):
        seen["C++" if isinstance(self, ProgramExecutor) else "Python"] += 1
        return run(self, *arguments)

    monkeypatch.setattr(StepExecutor, "run_captured_span", count)
    return seen


def assert_alike(ours, theirs):
    assert type(ours) is type(theirs), f"{ours!r} and {theirs!r}"
    if isinstance(ours, Exception):
        assert str(ours) == str(theirs)
        return
    for i, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        assert (mine is None) == (other is None), i
        assert mine is None or torch.equal(mine, other), f"number {i} of {len(ours)}"


def random_layer(draw):
    """Segments of one to three tensors; some eager, some handed on, without a gradient or views."""
    parts = []
    for number in range(draw.randint(1, 4)):
        make = [
            draw.choice(("product", "hand on", "integers", "view", "tanh")) for _ in range(draw.randint(1, 3))
        ]
        make[0] = draw.choice(("product", "tanh")) if number else "product"  # hidden states have a gradient

        def run(layer, *xs, make=tuple(make)):
            x = sum(each.double() for each in xs if each.shape == xs[0].shape)
            kinds = {
                "product": lambda: x @ layer.weight,
                "hand on": lambda: xs[-1],
                "integers": lambda: (x > 0).sum(1),
                "view": lambda: x.tanh().t(),
                "tanh": lambda: x.tanh(),
            }
            return tuple(kinds[each]() for each in make)

        parts.append((f"part{number}", draw.random() < 0.7 or number == 0, run))
    return Parts(*parts, weight=nn.Parameter(torch.randn(4, 4, dtype=torch.float64)))


@pytest.mark.full
@pytest.mark.parametrize("seed", range(12))
def test_random_models(seed, both, in_python):
    """Runs of several tensors, inputs without a gradient, gradients that are None or come in place."""

    def run():
        draw = random.Random(seed)
        chain = LayerChain([random_layer(draw) for _ in range(draw.randint(1, 3))])
        weights = [draw.choice((0, 1, 2)) for _ in range(16)]  # the gradient of what weighs nothing is None

        def loss(outputs, step):
            floating = [each for each in outputs if each.requires_grad]
            return sum(w * each.square().sum() for w, each in zip(weights, floating) if w) + total(
                floating[:1]
            )

        return train_chain(chain, True, loss=loss, span_size=draw.choice((None, 1)))

    assert_alike(*both(run))
    assert in_python["C++"] == 0 and in_python["Python"] > 0


@pytest.mark.full
@pytest.mark.parametrize("config", (DENSE, MOE), ids=("dense", "experts"))
@pytest.mark.parametrize("own_buffers", (True, False))
def test_training(config, own_buffers, both, in_python):
    """Dropout, several runs and eager parts; gradients in buffers of their own, or behind the replay."""
    scope = ("attn", "moe_router", "moe_preprocess") if config is MOE else None
    ours, theirs = both(lambda: train_gpt(config, graphs=True, own_buffers=own_buffers, scope=scope))
    assert_same_gpt(ours, theirs)
    assert in_python["C++"] == 0


def odd_steps():
    """What a fifth step does with a chain, its manager and an input that has no gradient."""

    def backward_twice(chain, manager, x):
        loss = total(chain(x))
        loss.backward(retain_graph=True)
        loss.backward()

    def second_derivative(chain, manager, x):
        torch.autograd.grad(total(chain(x.requires_grad_())), x, create_graph=True)

    def some_gradients(chain, manager, x):
        total(chain(x.requires_grad_())).backward(inputs=[x])

    def another_order(chain, manager, x):
        losses = [total(chain(x)), total(chain(x))]
        losses[0].backward()

    def too_many(chain, manager, x):
        for _ in range(3):
            total(chain(x)).backward()

    def after_the_step(chain, manager, x):
        loss = total(chain(x))
        manager.end_step()
        loss.backward()

    def after_removal(chain, manager, x):
        loss = total(chain(x))
        manager.remove()
        loss.backward()

    def another_shape(chain, manager, x):
        total(chain(x)).backward()
        total(chain(x[:2])).backward()

    def another_stride(chain, manager, x):
        for each in (x, torch.empty(SHAPE[::-1], dtype=x.dtype).t().copy_(x)):
            total(chain(each)).backward()

    def a_view_that_is_not_dense(chain, manager, x):
        for _ in range(2):
            total(chain(torch.cat((x, x), 1)[:, ::2])).backward()

    def zeros_without_memory(chain, manager, x):
        total(chain(torch._efficientzerotensor(SHAPE, dtype=x.dtype))).backward()
        chain(x)[0].backward(torch._efficientzerotensor(SHAPE, dtype=x.dtype))

    def a_sparse_input(chain, manager, x):
        total(chain(x)).backward()
        with warnings.catch_warnings(action="ignore"):
            chain(x.to_sparse_csr())

    def a_hook_that_ends_the_step(chain, manager, x):
        def hook(module, inputs):
            manager.end_step()

        hook.replayed = True
        with next(chain.children()).register_forward_pre_hook(hook):
            total(chain(x)).backward()

    def a_gradient_that_is_not_used(chain, manager, x):
        total(chain(x)).backward()
        chain(x)

    def a_tangent(chain, manager, x):
        with torch.autograd.forward_ad.dual_level():
            chain(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)))

    def transformed(chain, manager, x):
        torch.func.grad(lambda y: total(chain(y)))(x)

    return [each for each in locals().values() if callable(each)]


@pytest.mark.full
@pytest.mark.parametrize("odd", odd_steps(), ids=lambda odd: odd.__name__)
def test_what_the_program_does_not_say(odd, both):
    """The same results, or the same words; and the steps after that."""

    def run():
        chain = LayerChain([linear(), eager(), linear()])
        manager = managed(chain, True)
        seen = []
        for number in range(7):
            manager.begin_step()
            x = torch.full(SHAPE, 0.1 + number, dtype=torch.float64)
            if number == 4:
                try:
                    odd(chain, manager, x)
                except (GraphError, NotImplementedError, RuntimeError) as error:
                    seen.append(str(error))
            else:
                for _ in range(2):
                    total(chain(x)).backward()
            grads = [param.grad for param in chain.parameters()]
            seen += ["no gradient" if grad is None else grad.clone() for grad in grads]
            chain.zero_grad()
        return seen

    ours, theirs = both(run)
    for mine, other in zip(ours, theirs, strict=True):
        alike = torch.equal(mine, other) if isinstance(mine, torch.Tensor) else mine == other
        assert alike, f"{mine}\n{other}"


def test_inputs_that_are_not_dense(in_python):
    """Views that leave elements out, as in the step that was observed, and lists are in the program."""

    def narrow(layer, x):
        return [torch.cat((x, x), 1)[:, ::2]]

    def run(graphs):
        chain = LayerChain([linear(), Parts(("narrow", False, narrow)), linear()])
        return train_chain(chain, graphs)

    assert_same_as_eager(run)
    assert in_python["Python"] == 4 and in_python["C++"] == 0


class _Copies(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in ("copy_", "clone", "_foreach_copy_"):
            sources = args[1] if name == "_foreach_copy_" else [args[0]]
            self.counts[name, tuple(tuple(each.shape) for each in sources)] += 1
        return func(*args, **(kwargs or {}))


def silent(chain, microbatches=8, **options):
    return GraphManager([chain], Schedule(1, microbatches).order(0), backend=SilentBackend(), **options)


@pytest.mark.parametrize("width", (1, 5))
def test_it_copies_what_python_copies(width, both):
    def run():
        spread = ("spread", False, lambda layer, x: tuple(x * i for i in range(1, width + 1)))
        work = ("work", True, lambda layer, *xs: (sum(xs) * layer.weight, xs[0] + 1))
        chain = LayerChain([Parts(spread, work, weight=nn.Parameter(torch.ones(4)))])
        manager = silent(chain)
        for _ in range(4):
            manager.begin_step()
            with _Copies() as copies:
                for _ in range(8):
                    total(chain(torch.ones(4))).backward()
        return [torch.tensor(sorted(map(hash, copies.counts.items())))]

    assert_alike(*both(run))


def test_its_words_are_data():
    chain = LayerChain([linear(), eager(), linear()])
    manager = managed(chain, True)
    train_steps(chain, manager, 4)
    graph_set = manager._graph_set
    program = ReplayProgram(graph_set, manager._spans)
    assert program.forwards == [(0, 0), (0, 1)] and len(program.backwards) == 2
    first, last = (replay_program._forward(graph_set, slot, graph_set.captured[slot.graph], manager._spans[0])
                   for slot in graph_set.slots[:2])  # fmt: skip
    assert (first.is_last, last.is_last) == (False, True)
    assert first.output_sources == last.output_sources == [-1]
    assert first.storages == {first.made[0].untyped_storage().data_ptr()}


def train_steps(chain, manager, steps, microbatches=2):
    for _ in range(steps):
        manager.begin_step()
        for _ in range(microbatches):
            outputs = chain(torch.ones(SHAPE, dtype=torch.float64))
            total(outputs).backward()
    return outputs


@pytest.mark.full
def test_nothing_is_left_of_ten_thousand_replays():
    chain = LayerChain([linear(), eager(), linear()])
    manager = silent(chain, microbatches=10)
    train_steps(chain, manager, 3, 10)
    gc.collect()
    gc.disable()
    try:
        steps, tensors = [], []
        for number in range(250):  # of 10 microbatches, two runs forward and backward
            train_steps(chain, manager, 1, 10)
            steps.append(weakref.ref(manager._runner))
            if number % 100 == 1:
                tensors.append(sum(isinstance(each, torch.Tensor) for each in gc.get_objects()))
        assert sum(each() is not None for each in steps) == 1
        assert len(set(tensors)) == 1, tensors
    finally:
        gc.enable()


def test_a_manager_that_goes_before_what_it_made():
    chain = LayerChain([linear(), eager(), linear()])
    manager = managed(chain, True)
    made = train_steps(chain, manager, 4)[0]
    manager.begin_step()
    loss = total(chain(torch.ones(SHAPE, dtype=torch.float64)))
    values, graph_set = made.detach().clone(), weakref.ref(manager._graph_set)
    manager.remove()
    del manager
    assert torch.equal(made, values)
    with pytest.raises(GraphError, match="after its step is over"):
        loss.backward()
    del loss, made
    gc.collect()  # the frames of the error
    assert graph_set() is None


def test_a_replay_that_fails_says_why():
    chain = LayerChain([linear()])
    manager = silent(chain, microbatches=1)
    train_steps(chain, manager, 4, 1)

    def fail():
        raise MemoryError("no memory for a graph")

    for kind in ("forward", "backward"):
        captured = next(iter(manager._graph_set.captured.values()))
        graph = captured.forward if kind == "forward" else captured.backward.graph
        graph.replay = fail
        manager._graph_set.program = None
        with pytest.raises(MemoryError, match=re.escape("no memory for a graph")):
            train_steps(chain, manager, 1, 1)
        del graph.replay
