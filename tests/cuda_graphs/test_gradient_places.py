"""Gradients that kernels write where a graph reads them, and numbers that are copied once for all layers."""

from __future__ import annotations

import copy
from collections import Counter

import numpy as np
import pytest
import torch
from small_tools import SHAPE, Parts, assert_same_as_eager, linear, managed, total, train_chain
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fastmp.cuda_graphs import replay_program
from fastmp.nn import LayerChain
from fastmp.ops import permute, unpermute
from fastmp.ops.core import backends
from fastmp.optim.grad_buffers import GradBuffer
from tools.silent_graphs import SilentBackend

pytestmark = pytest.mark.skipif(
    replay_program.REPLAY is None or bool(backends.AUTOGRAD_ABSENT), reason="not compiled for this torch"
)
ROW_OF = torch.tensor([[4, 0], [1, -1], [3, 2]], dtype=torch.int32)
PROBS = torch.tensor([[0.25, 2.0], [1.0, 3.0], [0.5, 0.0]], dtype=torch.float64)


def experts(rows):
    return torch.tanh(rows)


def once(layer, x, probs):
    return x + unpermute(experts(permute(x, ROW_OF, 5)), ROW_OF, probs), probs


def only(layer, x, probs):
    return unpermute(experts(permute(x, ROW_OF, 5)), ROW_OF, probs), probs.detach()


def two_writers(layer, x, probs):
    """Both kernels could write to the place."""
    rows = permute(x, ROW_OF, 5) * permute(x, ROW_OF, 5)
    return unpermute(rows, ROW_OF, probs) + unpermute(experts(rows), ROW_OF, probs), probs


def a_view(layer, x, probs):
    return unpermute(permute(x.t().contiguous().t(), ROW_OF, 5), ROW_OF, probs.clone()), probs


def a_hook(layer, x, probs):
    """That writes to the gradient, where it lies, and another that replaces it."""
    if x.requires_grad:
        x.register_hook(lambda grad: grad.mul_(3))
        probs.register_hook(lambda grad: grad + 1)
    return once(layer, x, probs)


def another_dtype(layer, x, probs):
    return unpermute(permute(x.float(), ROW_OF, 5), ROW_OF, probs.float()).double(), probs


def begin(layer, x):
    return x * layer.first, PROBS * layer.first.sum()


def end(layer, x, probs):
    return x * layer.last, probs.sum() * layer.last.sum()


def layer_of(mix):
    first, last = (nn.Parameter(torch.linspace(0.5, to, 4, dtype=torch.float64)) for to in (1, 2))
    return Parts(("begin", True, begin), ("mix", False, mix), ("end", True, end), first=first, last=last)


@pytest.mark.full
@pytest.mark.parametrize("mix", (once, only, two_writers, a_view, a_hook, another_dtype))
def test_the_bits_are_eager_ones(mix):
    assert_same_as_eager(
        lambda graphs: train_chain(LayerChain([linear(), layer_of(mix), layer_of(mix)]), graphs)
    )


@pytest.mark.full
@pytest.mark.parametrize("turn", (torch.Tensor.t, torch._neg_view))
def test_a_hook_may_return_another_view_of_a_place(turn):
    row_of = torch.arange(8, dtype=torch.int32).view(4, 2)

    def mix(layer, x, probs):
        if x.requires_grad:
            x.register_hook(turn)
        return unpermute(experts(permute(x, row_of, 8)), row_of), probs

    assert_same_as_eager(
        lambda graphs: train_chain(LayerChain([layer_of(mix), layer_of(mix)]), graphs, sizes=[4] * 6)
    )


@pytest.mark.full
@pytest.mark.parametrize("asks", (False, True), ids=("by a hook", "asked for"))
def test_gradients_outside_of_a_chain_may_be_kept(asks):
    def run(graphs):
        chain, kept = LayerChain([layer_of(only)]), []

        def loss(outputs, step):
            output, total = outputs[0], permute(outputs[0], ROW_OF, 5).square().sum() * (step + 1)
            if not asks:
                output.register_hook(kept.append)
                return total
            kept.extend(torch.autograd.grad(total, output))
            return (output * kept[-1]).sum()

        return [*train_chain(chain, graphs, loss=loss), *kept]

    assert_same_as_eager(run)


class Launches(TorchDispatchMode):
    """Counts copies, and what writes gradients."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if "copy_" in name or name.startswith("unpermute"):
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def backward_of_the_last_step(chain, loss, silent=False):
    manager = managed(chain, True, **({"backend": SilentBackend()} if silent else {}))
    for _ in range(5):
        manager.begin_step()
        for _ in range(2):
            value = loss(chain(torch.ones(SHAPE, dtype=torch.float64)))
            with Launches() as launches:
                value.backward()
    return launches.counts


def written(counts):
    return {name: number for name, number in counts.items() if name.startswith("unpermute")}


def test_kernels_write_gradients_where_the_graph_in_front_reads_them():
    """One each, though another could, too."""
    into = {"unpermute_into": 1, "unpermute_backward_into": 1}
    assert written(backward_of_the_last_step(LayerChain([layer_of(only)]), total)) == into
    twice = written(backward_of_the_last_step(LayerChain([layer_of(two_writers)]), total))
    assert twice == {**into, "unpermute": 1, "unpermute_backward": 1}


def auxiliary(outputs, weights=None):
    """The first output, and the sum of the numbers behind it."""
    numbers = torch.stack([each for each in outputs if each.dim() == 0])
    return outputs[0].square().sum() + (numbers if weights is None else numbers * weights).sum()


@pytest.mark.parametrize("weights", (None, torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)))
def test_a_number_is_copied_once_for_all_layers_and_again_in_the_next_backward(weights):
    """Microbatches weigh 1 and 10, so that gradients differ where their memory is the same."""
    chain = LayerChain([layer_of(only) for _ in range(3)])

    def loss(outputs, step=0):
        return auxiliary(outputs, weights) * (1 + step)

    assert_same_as_eager(lambda graphs: train_chain(copy.deepcopy(chain), graphs, loss=loss))
    counts = backward_of_the_last_step(chain, loss, silent=True)
    assert counts["copy_"] + counts["_foreach_copy_"] == (1 if weights is None else 3)


class OneBuffer(torch.autograd.Function):
    """Hands a number on; its gradient lies in the same memory each time, which torch does not know of."""

    memory = np.zeros(())

    @staticmethod
    def forward(ctx, number):
        return number.clone()

    @staticmethod
    def backward(ctx, grad):
        OneBuffer.memory[...] = grad.numpy()
        return torch.from_numpy(OneBuffer.memory)


@pytest.mark.full
def test_another_number_in_the_same_memory_is_copied():
    def begin(layer, x):
        return x * layer.first, (x * layer.first).sum()

    def mix(layer, x, number):
        return x, OneBuffer.apply(number)

    def end(layer, x, number):
        return (x * layer.last * number,)

    def layer():
        first, last = (nn.Parameter(torch.linspace(0.5, to, 4, dtype=torch.float64)) for to in (1, 2))
        return Parts(("begin", True, begin), ("mix", False, mix), ("end", True, end), first=first, last=last)

    assert_same_as_eager(lambda graphs: train_chain(LayerChain([layer() for _ in range(3)]), graphs))


def numbers(layer, x):
    t = torch.tanh(x)
    return t, t.sum() * 0.1, (t * t).sum() * 0.2


def test_a_number_is_copied_that_a_replay_has_left_where_another_was():
    """Both gradients of two numbers lie in one block, from layer to layer; replays raise no version."""
    parts = (
        ("numbers", True, numbers),
        ("sum", False, lambda layer, x, first, second: (x * 1.0, first + second)),
        ("product", True, lambda layer, x, number: (torch.sin(x) * number,)),
        ("between", False, lambda layer, x: (x * 1.0,)),
        ("tanh", True, lambda layer, x: (torch.tanh(x),)),
        ("behind", False, lambda layer, x: (x * 1.0,)),
    )
    assert_same_as_eager(
        lambda graphs: train_chain(LayerChain([linear(), *(Parts(*parts) for _ in range(2))]), graphs)
    )


@pytest.mark.parametrize("turn", (torch.Tensor.t, torch._neg_view))
def test_another_view_of_a_place_is_read_rightly_where_python_goes_on(turn):
    """The last steps leave the replay program, because an output has no gradient in them."""
    row_of, step_of = torch.arange(8, dtype=torch.int32).view(4, 2), []

    def mix(layer, x, probs):
        if x.requires_grad:
            x.register_hook(turn)
        probs = probs.detach() if step_of[-1] >= 4 else probs
        return (unpermute(experts(permute(x, row_of, 8)), row_of, probs),)

    def layer():
        begin = ("begin", True, lambda layer, x: (torch.tanh(x), x[:, :2] * 1.5))
        return Parts(begin, ("mix", False, mix), ("end", True, lambda layer, x: (torch.sin(x),)))

    def run(graphs):
        chain = LayerChain([linear(), layer(), layer()])
        grads, seen = GradBuffer(chain.named_parameters()), []

        def before(step):
            step_of.append(step)
            grads.zero()

        def keep(step, weight):
            seen.extend(param.main_grad.clone() for param in chain.parameters())

        train_chain(chain, graphs, sizes=[4] * 6, before=before, between=keep)
        return seen

    assert_same_as_eager(run)
