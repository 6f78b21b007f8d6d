"""Weight gradients go to `main_grad`, and to it or to `grad` when the queue runs; nothing else changes."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from fastmp.ops import OPS, grouped_mlp_in, grouped_mm
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


@pytest.mark.parametrize("recomputed", [False, True])
def test_the_gradient_is_added_to_main_grad(recomputed):
    x, w, b = parameter(2, 3, 4, seed=1), parameter(5, 4), parameter(5)
    expected = torch.autograd.grad(linear(x, w, b).sin().sum(), (x, w, b))
    w.main_grad = torch.ones_like(w.detach())
    for time in (1, 2):
        y = checkpoint(linear, x, w, b, use_reentrant=False) if recomputed else linear(x, w, b)
        y.sin().sum().backward()
        torch.testing.assert_close((x.grad, b.grad), (time * expected[0], time * expected[2]))
        torch.testing.assert_close(w.main_grad - 1, time * expected[1])
    assert w.grad is None


def test_a_weight_that_lies_transposed():
    x, w = parameter(7, 4, seed=1), torch.nn.Parameter(parameter(4, 5).detach().t())
    w.main_grad = torch.zeros_like(w)
    assert w.main_grad.stride() == (1, 5)
    expected = torch.autograd.grad(torch.nn.functional.linear(x, w).sin().sum(), w)[0]
    linear(x, w).sin().sum().backward()
    torch.testing.assert_close(w.main_grad, expected)


@pytest.mark.parametrize("deferred", [False, True])
def test_under_autocast_products_are_narrow_and_the_sum_is_wide(deferred):
    x, w, queue = parameter(300, 4, seed=1), parameter(5, 4), WgradQueue()
    x, w = (torch.nn.Parameter(t.detach().float()) for t in (x, w))
    w.main_grad = torch.zeros(5, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16), defer_wgrad(queue if deferred else None):
        y = linear(x, w)
    back = torch.randn(300, 5).bfloat16()
    y.backward(back)
    tasks = queue.take()
    assert len(tasks) == deferred
    queue.run(tasks)
    expected = back.double().t() @ x.detach().bfloat16().double()
    torch.testing.assert_close(w.main_grad.double(), expected, rtol=0, atol=1e-4)
    assert y.dtype == torch.bfloat16 and x.grad.dtype == torch.float32 and w.grad is None


def test_what_compilers_and_functional_transforms_see_has_a_gradient():
    x, w = parameter(8, 4, seed=1), parameter(5, 4)
    expected = torch.autograd.grad(linear(x, w).sin().sum(), w)[0]
    w.main_grad = torch.zeros_like(w.detach())
    torch.compile(linear, fullgraph=True, backend="aot_eager")(x, w).sin().sum().backward()
    torch.testing.assert_close(w.grad, expected)
    torch.testing.assert_close(torch.func.grad(lambda w: linear(x, w).sin().sum())(w), expected)
    torch.func.grad(lambda x: linear(x, w).sin().sum())(x)
    assert not w.main_grad.any()


def test_errors():
    x, w = parameter(8, 4, seed=1), parameter(5, 4)
    w.main_grad = torch.zeros(4, 5, dtype=torch.float64)
    with pytest.raises(
        ValueError, match=r"linear: main_grad of shape \(4, 5\) does not fit weight of shape \(5, 4\)"
    ):
        linear(x, w)
    w.main_grad = torch.zeros(5, 4, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="linear: its backward is not differentiable"):
        torch.autograd.grad(linear(x, w).sum(), x, create_graph=True)


def test_on_a_gpu_one_product_of_torch_adds_in_float32():
    """Seen by who records ops: tensors that are said to be on a GPU, and no GPU."""
    calls = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            if op.namespace == "prim" or op.is_view:
                return op(*args, **kwargs)
            calls.append((op, args, kwargs))
            return kwargs["out"]

    with FakeTensorMode():
        total = torch.empty(6, 5, device="cuda")
        grad, x = (torch.empty(4, size, device="cuda", dtype=torch.bfloat16) for size in (6, 5))
        with Recorder():
            OPS["accumulate_weight_grad_"].implementations["reference"](total, grad, x)
    [(op, (added, left, right, dtype), options)] = calls
    assert op is torch.ops.aten.addmm.dtype_out and dtype == torch.float32
    assert added is total and options == {"out": total} and right is x
    assert left.dtype == right.dtype == torch.bfloat16 and left.shape == (6, 4)


def test_costs():
    op = OPS["accumulate_weight_grad_"]
    arguments = torch.zeros(6, 5), torch.zeros(4, 6).bfloat16(), torch.zeros(4, 5).bfloat16()
    assert op.flops(*arguments) == 2 * 4 * 6 * 5
    assert op.traffic(*arguments) == 2 * 6 * 5 * 4 + (4 * 6 + 4 * 5) * 2
