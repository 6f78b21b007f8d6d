"""What may change from step to step, and what autograd and users may do with tensors of a chain: results are
those of eager training, or an error says what is not served."""

from __future__ import annotations

import pytest
import torch
from small_tools import SHAPE, Parts, Plus, assert_same_as_eager, eager, linear, managed, total, train_chain
from torch import nn

from fastmp.cuda_graphs.errors import GraphError
from fastmp.nn import LayerChain, SingleSegment


def test_a_parameter_that_is_trained_later():
    def run(graphs):
        chain = LayerChain([linear(), linear()])
        weight = chain[0].module.weight.requires_grad_(False)
        return train_chain(chain, graphs, 8, before=lambda step: weight.requires_grad_(step >= 4))

    assert_same_as_eager(run)


def test_a_parameter_that_comes_later():
    class Adapted(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module, self.weight = module, nn.Parameter(torch.ones(4, 4, dtype=torch.float64))

        def forward(self, x):
            return self.module(x) + x @ self.weight

    def run(graphs):
        chain = LayerChain([linear(), linear()])

        def before(step):
            if step == 4:
                chain[0].module = Adapted(chain[0].module)

        return train_chain(chain, graphs, 8, before=before)

    assert_same_as_eager(run, or_refused=True)


SIZES = [3, 3, 3, 3, 2, 2, 3]  # graphs of 3 rows, then a step that shows 2, and a change before the next


def test_a_mode_that_changes_behind_a_step_that_shows_shapes():
    def run(graphs):
        chain = LayerChain([linear(), nn.Dropout(0.5), linear()])
        return train_chain(chain, graphs, 7, lambda step: chain[1].module.train(step < 5), sizes=SIZES)

    assert_same_as_eager(run)


def test_a_parameter_that_moves_behind_a_step_that_shows_shapes():
    chain = LayerChain([linear(), linear()])

    def before(step):
        if step == 5:
            chain[0].module.weight.data = chain[0].module.weight.data * 3

    with pytest.raises(GraphError, match="has moved"):
        train_chain(chain, True, 7, before, sizes=SIZES)


def test_a_mode_that_changes_between_microbatches():
    def run(graphs):
        chain = LayerChain([linear(), nn.Dropout(0.5), linear()])
        return train_chain(chain, graphs, between=lambda step, weight: chain[1].module.train(weight == 1))

    assert_same_as_eager(run, or_refused=True)


def test_a_layer_that_is_replaced_before_graphs_are_captured():
    def run(graphs):
        chain = LayerChain([linear(), linear()])
        manager = managed(chain, graphs, 1)
        chain[1] = SingleSegment(linear())
        seen = []
        for _ in range(4):
            if graphs:
                manager.begin_step()
            value = total(chain(torch.ones(SHAPE, dtype=torch.float64)))
            value.backward()
            seen.append(value.detach())
        return seen

    assert_same_as_eager(run, or_refused=True)


def test_a_gradient_that_passes_through_an_eager_segment_to_a_leaf():
    def run(graphs):
        chain, x = LayerChain([eager(Plus()), linear()]), torch.ones(SHAPE, dtype=torch.float64)
        manager, seen = managed(chain, graphs), []
        for _ in range(4):
            if graphs:
                manager.begin_step()
            leaf = x.clone().requires_grad_()
            for weight in (1, 10):
                (chain(leaf)[0].sum() * weight).backward()
            seen.append(leaf.grad)
        return seen

    assert_same_as_eager(run)


def test_an_output_without_gradient_that_an_eager_segment_keeps_in_some_steps():
    def run(graphs):
        uses = []
        chain = LayerChain(
            [
                Parts(
                    ("gate", True, lambda layer, x: (layer.first(x), (x > 0).double())),
                    ("branch", False, lambda layer, x, gate: (x * gate if uses else x * 1.0,)),
                    ("rest", True, lambda layer, x: (torch.tanh(layer.second(torch.sigmoid(x))),)),
                    first=linear(),
                    second=linear(),
                )
            ]
        )
        return train_chain(chain, graphs, before=lambda step: uses.append(step) if step == 4 else None)

    assert_same_as_eager(run)


def test_an_output_that_is_used_in_some_steps():
    """Eagerly its weight has no gradient in the others, and no optimizer touches it."""

    def run(graphs):
        layer = Parts(
            ("both", True, lambda layer, x: (layer.first(x), layer.second(x))),
            first=linear(),
            second=linear(),
        )

        def loss(outputs, step):
            return total(outputs if step % 2 == 0 else outputs[:1])

        return train_chain(LayerChain([layer]), graphs, loss=loss)

    assert_same_as_eager(run, or_refused=True)


def changed_in_place(layer, x):
    y = x.detach().sign() * layer.weight
    return y, x.clamp_(min=0)


@pytest.mark.parametrize(
    "parts",
    (
        # A segment writes to its input and hands it on.
        (("change", True, changed_in_place), ("add", False, lambda layer, y, x: (y + x,))),
        # An eager segment writes to what a run made, of which there is a view.
        (
            ("views", True, lambda layer, x: ((y := x * layer.weight), y.view(-1))),
            ("write", False, lambda layer, y, view: (y.mul_(2) + view.view(SHAPE),)),
        ),
        # An eager segment writes to a view of what a run got.
        (
            ("views", True, lambda layer, x: (layer.weight * 2.0, x.view(-1), x)),
            ("write", False, lambda layer, y, view, x: (y * (view.add_(1).view(SHAPE) + x),)),
        ),
    ),
    ids=("input", "output", "view of input"),
)
def test_writing_in_place(parts):
    def run(graphs):
        weight = nn.Parameter(torch.ones(SHAPE, dtype=torch.float64))
        return train_chain(LayerChain([Parts(*parts, weight=weight)]), graphs)

    assert_same_as_eager(run, or_refused=True)


def test_gradients_that_are_asked_for_do_not_accumulate():
    def run(graphs):
        chain = LayerChain([linear()])
        manager, seen = managed(chain, graphs), []
        for _ in range(4):
            if graphs:
                manager.begin_step()
            for _ in range(2):
                x = torch.ones(SHAPE, dtype=torch.float64, requires_grad=True)
                seen += torch.autograd.grad(total(chain(x)), x)
        return [*seen, *(param.grad for param in chain.parameters())]

    assert_same_as_eager(run, or_refused=True)


def test_a_backward_of_the_step_before_is_not_taken_for_one_of_this():
    chain = LayerChain([linear()])
    manager = managed(chain, True, 1)
    losses = []
    for step in range(6):
        manager.begin_step()
        losses.append(total(chain(torch.full(SHAPE, 1.0 + step, dtype=torch.float64))))
        if step < 4:
            losses[-1].backward()
    with pytest.raises(GraphError):
        losses[4].backward()


@pytest.mark.parametrize("frozen", (True, False), ids=("frozen", "detached"))
def test_a_run_that_has_no_backward(frozen):
    def run(graphs):
        first = linear().requires_grad_(not frozen)
        cut = Parts(("cut", False, lambda layer, x: (x.detach(),)))
        return train_chain(LayerChain([first, eager() if frozen else cut, linear()]), graphs)

    assert_same_as_eager(run)


def test_gradients_are_there_after_a_capture_that_failed():
    class Fails(torch.autograd.Function):
        now = False

        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            if Fails.now:
                raise RuntimeError("on purpose")
            return grad

    class Layer(nn.Linear):
        def forward(self, x):
            return Fails.apply(super().forward(x))

    chain = LayerChain([Layer(4, 4, dtype=torch.float64)])
    manager = managed(chain, True, 1)
    for step in range(3):
        manager.begin_step()
        Fails.now = step == 2
        loss = total(chain(torch.ones(SHAPE, dtype=torch.float64)))
        if not Fails.now:
            loss.backward()
    with pytest.raises(RuntimeError, match="on purpose"):
        loss.backward()
    assert all(param.grad is not None for param in chain.parameters())


def test_gradients_in_another_order_of_dimensions_than_were_shown():
    """Graphs read them in the order of those that were: products may differ in the last bits."""

    def run(graphs):
        torch.manual_seed(0)
        chain, weight = LayerChain([nn.Linear(65, 65), nn.Tanh(), nn.Linear(65, 65)]), torch.randn(65, 33)
        manager, seen = managed(chain, graphs, 1), []
        for step in range(6):
            chain.zero_grad()
            if graphs:
                manager.begin_step()
            (y,) = chain(torch.ones(33, 65))
            ((y.t() * weight) if step % 2 else (y * weight.t().contiguous())).sum().backward()
            seen += [param.grad.clone() for param in chain.parameters()]
        return seen

    torch.testing.assert_close(run(True), run(False), rtol=0, atol=1e-5)


def test_a_layer_that_is_there_twice():
    def run(graphs):
        layer = Parts(("twice", True, lambda layer, x: (layer.first(x), x.detach())), first=linear())
        return train_chain(LayerChain([layer, layer, SingleSegment(linear()), layer]), graphs)

    assert_same_as_eager(run)
