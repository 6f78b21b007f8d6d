"""Deferred weight gradients are made when the queue runs and are the same; nothing else changes."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from fastmp.ops import grouped_mlp_in, grouped_mm
from fastmp.ops.wgrad import WgradQueue, defer_wgrad, linear


def parameter(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.nn.Parameter(torch.randn(*shape, dtype=torch.float64, generator=generator))


OFFSETS = torch.tensor([3, 3, 8], dtype=torch.int32)
PRODUCTS = {
    "linear": (lambda x, w: linear(x, w), (5, 4)),
    "grouped": (lambda x, w: grouped_mm(x, w, OFFSETS), (3, 5, 4)),
    "grouped, loop": (lambda x, w: grouped_mm(x, w, OFFSETS, sizes=[3, 0, 5]), (3, 5, 4)),
    "grouped, transposed": (lambda x, w: grouped_mm(x, w, OFFSETS, transposed=True), (3, 4, 5)),
    "mlp": (lambda x, w: grouped_mlp_in(x, w, OFFSETS, form="silu", gated=True), (3, 6, 4)),
}


@pytest.mark.parametrize("main", [False, True])
@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("name", PRODUCTS)
def test_the_weight_gets_its_gradient_when_the_queue_runs(name, recomputed, main):
    product, shape = PRODUCTS[name]
    x, w, queue = parameter(8, 4, seed=1), parameter(*shape), WgradQueue()
    at_once = torch.autograd.grad(product(x, w).sin().sum(), (x, w))
    if main:
        w.main_grad = torch.ones(shape, dtype=torch.float64)
    for time in (1, 2):
        with defer_wgrad(queue):
            y = checkpoint(product, x, w, use_reentrant=False) if recomputed else product(x, w)
            y.sin().sum().backward()
        torch.testing.assert_close(x.grad, time * at_once[0])
        before = w.main_grad - 1 if main else w.grad
        expected = None if time == 1 and not main else (time - 1) * at_once[1]
        assert before is None if expected is None else torch.allclose(before, expected)
        tasks = queue.take()
        assert len(tasks) == 1 and not queue.take()
        queue.run(tasks)
        after = w.main_grad - 1 if main else w.grad
        torch.testing.assert_close(after, time * at_once[1])
    assert not (main and w.grad is not None)


def test_what_cannot_be_deferred_is_made_at_once():
    x, w, queue = parameter(8, 4, seed=1), parameter(5, 4), WgradQueue()
    with defer_wgrad(queue):
        linear(x, w * 2).sum().backward()
        linear(x, w.detach()).sum().backward()
        with torch.no_grad():
            linear(x, w)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            linear(x.float(), w.float()).sum().backward()
    linear(x, w).sum().backward()
    assert w.grad is not None and not queue.take()


def test_a_bias_gets_its_gradient_in_backward():
    x, w, b, queue = parameter(2, 3, 4, seed=1), parameter(5, 4), parameter(5), WgradQueue()
    expected = torch.autograd.grad(linear(x, w, b).sin().sum(), (x, w, b))
    with defer_wgrad(queue):
        linear(x, w, b).sin().sum().backward()
    torch.testing.assert_close((x.grad, b.grad), (expected[0], expected[2]))
    queue.run(queue.take())
    torch.testing.assert_close(w.grad, expected[1])
