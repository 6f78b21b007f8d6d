"""Numbers that a model and an optimizer hold: what changes them between steps, graphs notice."""

from __future__ import annotations

import gc
import warnings
import weakref

import pytest
import torch
from graph_tools import assert_same_bits
from marks import full
from small_tools import managed
from torch import nn

from fastmp.config import GPTConfig
from fastmp.cuda_graphs.backends.recording import RecordingBackend
from fastmp.cuda_graphs.errors import CaptureError
from fastmp.cuda_graphs.function_graph import FunctionGraph
from fastmp.cuda_graphs.manager import GraphManager
from fastmp.distributed.rng import RngTracker
from fastmp.nn import GPT, LayerChain, Placement, SingleSegment
from fastmp.nn.dropout import Dropout
from fastmp.optim.adamw import AdamW
from fastmp.optim.grad_buffers import GradBuffer
from fastmp.schedule.schedule import Schedule

pytestmark = pytest.mark.usefixtures("one_thread")


class Block(nn.Module):
    """Reads numbers of many kinds, its own and those of modules inside."""

    def __init__(self):
        super().__init__()
        self.norm, self.linear, self.dropout = nn.LayerNorm(4), nn.Linear(4, 4), nn.Dropout(0.5)
        self.factor, self.repeat, self.gated, self.form, self.scales = 2.0, 1, False, "tanh", (1.0, 2.0)

    def forward(self, x):
        for _ in range(self.repeat):
            x = x + self.dropout(getattr(torch, self.form)(self.linear(self.norm(x)))) * self.factor
        return x.sigmoid() if self.gated else x * self.scales[1]


def set_to(name, *values):
    """Return a function that sets an attribute from the fourth step on, to one value after the other."""

    def change(block, step):
        if step >= 4 and step - 4 < len(values):
            owner, _, attribute = name.rpartition(".")
            setattr(block.get_submodule(owner), attribute, values[step - 4])

    return change


CHANGES = {
    "dropout": set_to("dropout.p", 0.25),
    "no dropout": set_to("dropout.p", 0.0),
    "schedule": set_to("dropout.p", *(0.1 * step for step in range(6))),
    "factor": set_to("factor", -1.0),
    "epsilon": set_to("norm.eps", 0.5),
    "count": set_to("repeat", 2),
    "flag": set_to("gated", True),
    "text": set_to("form", "sin"),
    "tuple": set_to("scales", (1.0, 3.0)),
    "mode": set_to("dropout.training", False),
    "the same again": set_to("dropout.p", *(step * 0.5 / step for step in range(1, 7))),
}


def train(graphs, change, *, late=False, steps=10, make=Block):
    """Return losses and gradients of steps of two microbatches, and the manager; late: in the step itself."""
    torch.manual_seed(0)
    chain, seen = LayerChain([make().double(), SingleSegment(make().double(), reason="eager")]), []
    manager, data = managed(chain, graphs), torch.Generator().manual_seed(5)
    for step in range(steps):
        if not late:
            change(chain[0].module, step)
        if manager is not None:
            manager.begin_step()
        if late:
            change(chain[0].module, step)
        for weight in (1, 10):
            (y,) = chain(torch.randn(3, 4, generator=data, dtype=torch.float64))
            loss = y.square().sum() * weight
            loss.backward()
            seen.append(loss.detach())
        seen += [param.grad.clone() for param in chain.parameters()]
    return seen, manager


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.filterwarnings("ignore:graphs. .0.module.dropout.p. of chunk 0 has changed 4 times")
def test_a_change_is_captured_again(name, late):
    """With eager's bits from the step of the change on, and graphs two steps later, which then stay."""
    graphed, manager = train(True, CHANGES[name], late=late, steps=14)
    assert_same_bits(graphed, train(False, CHANGES[name], late=late, steps=14)[0])
    assert manager.num_graphs == 2 and not manager.pending


def test_an_equal_number_captures_nothing_again():
    _, manager = train(True, CHANGES["the same again"])
    assert manager.num_graphs == 2 and not manager._graph_sets._changes


def test_a_number_of_an_eager_layer_captures_nothing_again():
    eager = Block().double()
    torch.manual_seed(0)
    chain = LayerChain([Block().double(), SingleSegment(eager, reason="eager")])
    manager, sets = managed(chain, True, 1), []
    for step in range(8):
        eager.dropout.p = 0.05 * step
        manager.begin_step()
        chain(torch.randn(3, 4, dtype=torch.float64))[0].sum().backward()
        sets.append(next(iter(manager._graph_sets.values()), None))
    assert sets[-1] is sets[2] is not None and manager.num_graphs == 2


def test_a_number_that_changes_in_every_step_costs_a_warning():
    with pytest.warns(
        UserWarning, match=r"'0.module.dropout.p' of chunk 0 has changed 4 times.* tensor"
    ) as seen:
        train(True, set_to("dropout.p", *(0.05 * step for step in range(12))), steps=14)
    assert len(seen) == 1


class Counting(Block):
    """Changes attributes of its own in each forward."""

    def __init__(self):
        super().__init__()
        self.calls, self.shape, self.first = 0, None, True

    def forward(self, x):
        self.calls, self.shape, self.first = self.calls + 1, tuple(x.shape), False
        self.linear.seen = self.calls
        return super().forward(x)


def test_numbers_that_a_forward_changes_by_itself_capture_nothing_again():
    """Not those that appear there, either; another number of the same module still does."""
    with warnings.catch_warnings(action="error"):
        graphed, manager = train(True, lambda *_: None, make=Counting)
        sets = [*manager._graph_sets.values()]
    assert_same_bits(graphed, train(False, lambda *_: None, make=Counting)[0])
    assert len(sets) == 1 and manager.num_graphs == 2
    graphed, manager = train(True, CHANGES["factor"], make=Counting)
    assert_same_bits(graphed, train(False, CHANGES["factor"], make=Counting)[0])
    assert manager.num_graphs == 2


def test_numbers_that_an_evaluation_changes_capture_nothing_again():
    class Evaluated(Block):
        evaluations = 0

        def forward(self, x):
            if not self.training:
                self.evaluations += 1
            return super().forward(x)

    torch.manual_seed(0)
    chain = LayerChain([Evaluated().double()])
    manager, sets = managed(chain, True, 1), []
    for _ in range(6):
        manager.begin_step()
        chain(torch.randn(3, 4, dtype=torch.float64))[0].sum().backward()
        chain.eval()(torch.randn(3, 4, dtype=torch.float64))
        chain.train()
        sets.append(next(iter(manager._graph_sets.values()), None))
    assert sets[-1] is sets[2] is not None and manager.num_graphs == 2


@pytest.mark.parametrize("scope", [None, *full([["attn"], ["full"]])])
def test_dropout_of_a_gpt(scope):
    config = GPTConfig(
        **{"num_layers": 2, "hidden_size": 32, "num_heads": 4, "vocab_size": 64, "max_seq_len": 16},
        dropout=0.2,
        attention_dropout=0.1,
    )

    def run(graphs):
        rng, seen = RngTracker(1), []
        model = GPT(config, Placement(rng=rng, dtype=torch.float64))
        grads = GradBuffer(model.named_parameters())
        optimizer, data = AdamW(grads, lr=1e-2), torch.Generator().manual_seed(5)
        if graphs:
            order = Schedule(1, 2).order(0)
            graphs = GraphManager([model.layers], order, backend=RecordingBackend(rng), scope=scope)
        for step in range(8):
            if step == 4:
                for module in model.modules():
                    if isinstance(module, Dropout):
                        module.probability /= 2
            grads.zero()
            if graphs:
                graphs.begin_step()
            for _ in range(2):
                ids = torch.randint(64, (2, 9), generator=data)
                loss = model.loss(ids[:, :-1], ids[:, 1:]).sum()
                loss.backward()
                seen.append(loss.detach())
            optimizer.step()
        assert not graphs or graphs.num_graphs
        return seen

    assert_same_bits(run(True), run(False))


def constant_rate(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def own(model):
    return AdamW(GradBuffer(model.named_parameters()), lr=0.1)


def of_group(key, value):
    return lambda optimizer, model: optimizer.param_groups[0].update({key: value})


def restored(optimizer, model):
    optimizer.load_state_dict(optimizer.state_dict())


def of_some(model):
    return torch.optim.SGD([model.linear.weight], lr=0.1)


def added(optimizer, model):
    optimizer.add_param_group({"params": [model.extra], "lr": 1.0})


OPTIMIZERS = {
    "lr": (constant_rate, of_group("lr", 0.5)),
    "momentum": (constant_rate, of_group("momentum", 0.5)),
    "weight decay": (constant_rate, of_group("weight_decay", 0.1)),
    "nesterov": (constant_rate, of_group("nesterov", True)),
    "state": (constant_rate, restored),
    "group": (of_some, added),
    "own lr": (own, lambda optimizer, model: setattr(optimizer, "lr", 0.5)),
    "dropout": (constant_rate, lambda optimizer, model: setattr(model.dropout, "p", 0.1)),
    "epsilon": (constant_rate, lambda optimizer, model: setattr(model.norm, "eps", 0.5)),
}


def function_of(make, in_graph, before=lambda optimizer: None):
    """Return a whole step as a function, or as one graph, its optimizer and its model."""
    torch.manual_seed(0)
    model = Counting().double()
    model.extra = nn.Parameter(torch.ones(4, dtype=torch.float64))
    optimizer = make(model)

    def step(x):
        for param in model.parameters():
            getattr(param, "main_grad", torch.zeros_like(param) if param.grad is None else param.grad).zero_()
        loss = (model(x) * model.extra).square().mean()
        loss.backward()
        before(optimizer)
        optimizer.step()
        return loss.detach()

    if not in_graph:
        return step, optimizer, model
    texts = {"name": "a step", "advice": "do without"}
    return FunctionGraph(step, [model], backend=RecordingBackend(), trains=True, **texts), optimizer, model


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_as_one_graph_notices_numbers(name):
    make, change = OPTIMIZERS[name]

    def run(in_graph):
        function, optimizer, model = function_of(make, in_graph)
        data, seen = torch.Generator().manual_seed(3), []
        for step in range(9):
            if step == 5:
                change(optimizer, model)
            seen.append(function(torch.randn(3, 4, generator=data, dtype=torch.float64)))
            if in_graph and step >= 7:
                assert function.num_graphs == 1
        return seen + [param.detach() for param in model.parameters()]

    graphed, eager = run(True), run(False)
    assert_same_bits(graphed, eager)


def test_a_schedule_inside_of_a_graph_is_an_error():
    def halve(optimizer):
        optimizer.param_groups[0]["lr"] /= 2

    function, *_ = function_of(constant_rate, True, halve)
    function(torch.ones(3, 4, dtype=torch.float64))
    for _ in range(2):
        with pytest.raises(CaptureError, match=r"changes an option of an optimizer.* outside"):
            function(torch.ones(3, 4, dtype=torch.float64))


def stepping_by(rate, in_graph):
    """Return a step of a model by the learning rate `rate(argument)`, its optimizer and its model."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4, dtype=torch.float64)
    optimizer = AdamW(GradBuffer(model.named_parameters()), lr=1.0)

    def step(x, argument):
        for param in model.parameters():
            param.main_grad.zero_()
        model(x).square().sum().backward()
        optimizer.step(rate(argument))

    if in_graph:
        texts = {"name": "a step", "advice": "do without"}
        step = FunctionGraph(step, [model], backend=RecordingBackend(), trains=True, **texts)
    return step, optimizer, model


@pytest.mark.parametrize("as_tensor", [False, True])
def test_a_learning_rate_is_an_argument_of_a_step(as_tensor):
    def run(in_graph):
        step, optimizer, model = stepping_by(lambda lr: lr, in_graph)
        x, seen = torch.ones(2, 4, dtype=torch.float64), []
        for number in range(12):
            lr = (0.2, 0.1)[number % 2]
            step(x, torch.tensor(lr, dtype=torch.float64) if as_tensor else lr)
            seen.append(torch.as_tensor(optimizer.lr, dtype=torch.float64).clone())
        assert not in_graph or step.num_graphs == 2 - as_tensor
        return seen + [param.detach() for param in model.parameters()]

    assert_same_bits(run(True), run(False))


def test_a_step_without_a_learning_rate_takes_the_one_of_the_last_replay():
    def run(in_graph):
        step, _, model = stepping_by(lambda lr: lr, in_graph)
        for lr in (0.2, 0.2, 0.2, None, None, None, 0.1, 0.1, 0.1, None, None, 0.2, None):
            step(torch.ones(2, 4, dtype=torch.float64), lr)
        return [param.detach() for param in model.parameters()]

    assert_same_bits(run(True), run(False))


def test_a_learning_rate_that_no_argument_tells_is_an_error():
    rates = iter((0.2, 0.1))
    step, *_ = stepping_by(lambda _: next(rates), True)
    x = torch.ones(2, 4, dtype=torch.float64)
    step(x, None)
    with pytest.raises(CaptureError, match=r"changes an option of an optimizer.* outside"):
        step(x, None)


@pytest.mark.parametrize(
    ("make", "change", "name"),
    [
        (constant_rate, lambda optimizer: optimizer.param_groups[0].update(lr=0.9 * rate(optimizer)), "SGD"),
        (own, lambda optimizer: setattr(optimizer, "lr", 0.9 * optimizer.lr), "AdamW"),
    ],
)
def test_a_schedule_that_captures_again_and_again_is_warned_of(make, change, name):
    function, optimizer, _ = function_of(make, True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(20):
            function(torch.ones(3, 4, dtype=torch.float64))
            change(optimizer)
    messages = [str(each.message) for each in caught if "captured again" in str(each.message)]
    assert len(messages) == 1
    assert messages[0].startswith("graphs: 'lr' of ") and name in messages[0]
    assert "use a tensor lr (with capturable=True" in messages[0]


def rate(optimizer):
    return optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize("let_go", [FunctionGraph.recapture, FunctionGraph.remove])
def test_optimizers_are_let_go_with_the_graphs(let_go):
    holder = {}

    def step(x):
        model.zero_grad()
        model(x).sum().backward()
        holder["optimizer"].step()

    model = nn.Linear(4, 4)
    texts = {"name": "a step", "advice": "do without"}
    function = FunctionGraph(step, [model], backend=RecordingBackend(), trains=True, **texts)
    holder["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.1)
    before = weakref.ref(holder["optimizer"])
    for _ in range(3):
        function(torch.ones(2, 4))
    let_go(function)
    holder["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.1)
    gc.collect()
    assert before() is None
