"""`store_first`: the first gradient of a step overwrites memory that `zero` has left as it was."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from small_tools import managed
from torch import nn

from fastmp.nn import LayerChain
from fastmp.nn.moe.router import router_logits
from fastmp.ops import grouped_mm, linear_cross_entropy, linear_log_probs
from fastmp.ops import wgrad as wgrad_module
from fastmp.ops.wgrad import (
    FirstGradient,
    WgradQueue,
    add_by,
    always_add,
    defer_wgrad,
    first_of,
    linear,
)
from fastmp.optim.grad_buffers import GradBuffer

T, H, E = 6, 8, 3
STORE = {"linear", "experts", "router", "norm"}  # the parameters whose first gradient can overwrite


class Model(nn.Module):
    """One parameter for each way to a main gradient."""

    def __init__(self, dtype=torch.float64):
        super().__init__()
        torch.manual_seed(0)
        make = lambda *shape: nn.Parameter(torch.randn(*shape, dtype=dtype) * 0.3)  # noqa: E731
        self.linear, self.experts, self.router, self.norm = make(H, H), make(E, H, H), make(E, H), make(H)
        self.head, self.unused = make(16, H), make(5)

    def forward(self, x, target):
        h = linear(x, self.linear) * self.norm
        offsets = torch.tensor([2, 2, T], dtype=torch.int32)  # the second expert has no rows
        y = grouped_mm(h, self.experts, offsets)
        y = y * router_logits(h, self.router).sum(-1, keepdim=True).to(y.dtype)
        return -linear_log_probs(y, self.head, target).sum()  # adds to the main gradient chunk by chunk


def undefined(model, value=torch.nan):
    """Overwrite every main gradient that counts as zeros without being zeros; return their names."""
    names = set()
    with torch.no_grad():
        for name, param in model.named_parameters():
            if first_of(param.main_grad).state == FirstGradient.UNDEFINED:
                param.main_grad.fill_(value)
                names.add(name)
    return names


def train(model, grads, steps, between=lambda step: None, split=False):
    """Return the main gradients after each step of two microbatches."""
    seen, data = [], torch.Generator().manual_seed(1)
    for step in range(steps):
        grads.zero()
        between(step)
        for _ in range(2):
            queue = WgradQueue() if split else None
            x = torch.randn(T, H, generator=data, dtype=torch.float64).to(model.norm.dtype)
            with defer_wgrad(queue):
                model(x, torch.randint(16, (T,), generator=data)).backward()
            if queue is not None:
                WgradQueue.run(queue.take())
        grads.reduce()
        seen.append({name: param.main_grad.clone() for name, param in model.named_parameters()})
    return seen


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("cpp", [True, False], ids=["c++", "python"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_sums_are_those_of_a_buffer_of_zeros_whatever_the_memory_holds(dtype, cpp, split, monkeypatch):
    if not cpp:
        monkeypatch.setattr(wgrad_module, "_in_cpp", None)
    model = Model(dtype)
    plain = copy.deepcopy(model)
    found = []
    sums = train(
        model,
        GradBuffer(model.named_parameters(), store_first=True),
        3,
        lambda step: found.append(undefined(model)),
        split,
    )
    expected = train(plain, GradBuffer(plain.named_parameters()), 3, split=split)
    assert found == [set(), STORE, STORE]
    for step, other in zip(sums, expected, strict=True):
        for name in other:
            assert torch.equal(step[name], other[name]), name


def test_a_parameter_without_a_gradient_in_a_step_is_zero_after_reduce():
    model = Model()
    grads = GradBuffer(model.named_parameters(), store_first=True)
    train(model, grads, 1)
    grads.zero()
    assert undefined(model) == STORE
    linear(torch.ones(1, H, dtype=torch.float64), model.linear).sum().backward()
    grads.reduce()
    for name, param in model.named_parameters():
        assert bool(param.main_grad.any()) == (name == "linear"), name
    grads.zero()
    assert undefined(model) == {"linear"}


def test_who_adds_without_asking_gets_zeros_from_then_on():
    model = Model()
    grads = GradBuffer(model.named_parameters(), store_first=True)
    train(model, grads, 1)
    grads.zero()
    undefined(model)
    always_add(model.linear.main_grad)
    model.linear.main_grad += 1
    assert torch.equal(model.linear.main_grad, torch.ones(H, H, dtype=torch.float64))
    linear(torch.zeros(1, H, dtype=torch.float64), model.linear).sum().backward()
    assert torch.equal(model.linear.main_grad, torch.ones(H, H, dtype=torch.float64))
    for _ in range(2):
        grads.zero()
        assert not model.linear.main_grad.any() and "linear" not in undefined(model)


def test_a_captured_backward_adds_to_zeros():
    """A graph repeats what it did at its capture, in the first microbatch of a step and in others."""

    def run(graphs, **options):
        torch.manual_seed(0)
        chain = LayerChain([nn.Linear(4, 4, dtype=torch.float64) for _ in range(2)])
        grads = GradBuffer(chain.named_parameters(), **options)
        manager, seen, data = managed(chain, graphs, 2), [], torch.Generator().manual_seed(1)
        for _ in range(5):
            grads.zero()
            if options:
                undefined(chain)
            if manager is not None:
                manager.begin_step()
            for _ in range(2):
                x = torch.randn(3, 4, generator=data, dtype=torch.float64)
                sum(y.square().sum() for y in chain(x)).backward()
            grads.reduce()
            seen.append([param.main_grad.clone() for param in chain.parameters()])
        assert not graphs or manager.num_graphs > 0
        return seen

    expected = run(False)
    for graphs in (False, True):
        for step, other in zip(run(graphs, store_first=True), expected, strict=True):
            assert all(map(torch.equal, step, other))


def test_a_captured_backward_adds_gradients_of_weights_outside_its_layers():
    class Held(nn.Module):
        def __init__(self, weight):
            super().__init__()
            self.held = [weight]  # no parameter of the layer

        def forward(self, x):
            return linear(x, self.held[0])

    def run(graphs, **options):
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(4, 4, dtype=torch.float64))
        chain = LayerChain([Held(weight), nn.Linear(4, 4, dtype=torch.float64)])
        grads = GradBuffer([("weight", weight), *chain.named_parameters()], **options)
        manager, seen, data = managed(chain, graphs, 2), [], torch.Generator().manual_seed(1)
        for _ in range(5):
            grads.zero()
            if manager is not None:
                manager.begin_step()
            for _ in range(2):
                x = torch.randn(3, 4, generator=data, dtype=torch.float64)
                sum(y.square().sum() for y in chain(x)).backward()
            grads.reduce()
            seen.append(weight.main_grad.clone())
        return seen

    for step, other in zip(run(True, store_first=True), run(False), strict=True):
        assert torch.equal(step, other)


def test_a_gradient_that_fails_leaves_the_memory_to_the_next_one():
    model = Model()
    grads = GradBuffer(model.named_parameters(), store_first=True)
    train(model, grads, 1)
    grads.zero()
    assert "linear" in undefined(model)
    main_grad = model.linear.main_grad

    def fails(add):
        raise ValueError("does not fit")

    with pytest.raises(ValueError, match="does not fit"):
        add_by(main_grad, fails)
    linear(torch.ones(1, H, dtype=torch.float64), model.linear).sum().backward()
    assert torch.equal(main_grad, torch.ones(H, H, dtype=torch.float64))


@pytest.mark.parametrize("tied", [True, False])
def test_compiled_losses_leave_the_first_gradient_to_autograd(tied):
    """Compiled code may hand a copy of a main gradient to an op, of which nobody knows what it holds."""
    torch.manual_seed(0)
    table, head = (nn.Parameter(torch.randn(16, H)) for _ in range(2))
    weight = table if tied else head

    def loss(tokens):
        return linear_cross_entropy(F.embedding(tokens, table), weight, tokens, reduction="sum")

    def run(function, **options):
        grads = GradBuffer([("table", table), *([] if tied else [("head", head)])], **options)
        seen = []
        for step in range(3):
            grads.zero()
            ((loss if step == 0 else function)(torch.arange(6) + step)).backward()
            grads.reduce()
            seen.append([param.main_grad.clone() for param in grads.parameters.values()])
        grads.remove_hooks()
        return seen

    compiled = torch.compile(loss, backend="aot_eager")
    for step, other in zip(run(compiled, store_first=True), run(loss), strict=True):
        torch.testing.assert_close(step, other)


def test_main_gradients_are_saved_as_tensors(tmp_path):
    model = nn.Linear(2, 2)
    GradBuffer(model.named_parameters(), store_first=True)
    torch.save(model.state_dict(keep_vars=True), tmp_path / "state.pt")
    assert torch.equal(torch.load(tmp_path / "state.pt")["weight"], model.weight)
