"""Weight gradients go to `main_grad`, and to it or to `grad` when the queue runs; nothing else changes."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.nn.functional as F
from dispatch_modes import CalledOps
from marks import full
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from fastmp.nn.moe.router import router_logits
from fastmp.ops import OPS, grouped_mlp_in, grouped_mm, linear_cross_entropy, wgrad
from fastmp.ops.core import backends
from fastmp.ops.wgrad import WgradQueue, defer_wgrad, linear
from fastmp.testing.ops import poisoned_memory


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


@pytest.fixture(params=["c++", "python"])
def way(request, monkeypatch):
    """Whose node a product with a `main_grad` gets; without `_C_autograd` it is Python's twice."""
    if request.param == "python":
        monkeypatch.setattr(wgrad, "_in_cpp", None)


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


@pytest.mark.usefixtures("way")
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


def test_the_node_is_in_cpp_where_that_is_built():
    x, w = parameter(8, 4, seed=1), parameter(5, 4)
    w.main_grad = torch.zeros_like(w.detach())
    assert linear(x, w).grad_fn.name() == ("linearBackward" if backends.AUTOGRAD_ABSENT else "LinearBackward")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_python_and_cpp_give_the_same_bits(dims, dtype, monkeypatch):
    x, w, b = (parameter(*shape).to(dtype) for shape in ((12, 4, 3)[-dims:], (5, 3), (5,)))
    x = x.detach().swapaxes(0, -1).contiguous().swapaxes(0, -1)
    grad = torch.randn(*x.shape[:-1], 5, generator=torch.Generator().manual_seed(2)).to(dtype)
    found = []
    for in_cpp in (wgrad._in_cpp, None):
        monkeypatch.setattr(wgrad, "_in_cpp", in_cpp)
        leaves = [torch.nn.Parameter(t.detach()) for t in (x, w, b)]
        leaves[1].main_grad = torch.ones(5, 3)
        y = linear(*leaves)
        y.backward(grad)
        assert leaves[1].grad is None
        found.append([y.detach(), leaves[0].grad, leaves[2].grad, leaves[1].main_grad])
    torch.testing.assert_close(*found, rtol=0, atol=0)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("deferred", [False, True])
def test_a_recomputation_leaves_out_the_last_product(deferred):
    """Its operands are saved before it runs, so that backward makes the two gradients alone."""
    x, w, queue = parameter(8, 4, seed=1), parameter(5, 4), WgradQueue()
    w.main_grad = torch.zeros_like(w.detach())
    with defer_wgrad(queue if deferred else None), FlopCounterMode(display=False) as counter:
        y = checkpoint(linear, x, w, use_reentrant=False).sum()
        assert counter.get_total_flops() == 2 * 8 * 5 * 4
        y.backward()
        queue.run(queue.take())
    assert counter.get_total_flops() == 3 * 2 * 8 * 5 * 4


@pytest.mark.usefixtures("way")
def test_autograd_keeps_the_operands_that_backward_wants():
    x, w, packed = parameter(8, 4, seed=1), parameter(5, 4), []
    w.main_grad = torch.zeros_like(w.detach())
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t.shape) or t, lambda t: t):
        linear(x, w)
        assert packed == [x.shape, w.shape]
        linear(x.detach(), w).sum().backward()
    assert packed[2:] == [x.shape]
    torch.testing.assert_close(w.main_grad, x.detach().sum(0).expand(5, 4))
    y = linear(x, w).sum()
    w.main_grad.zero_()  # as every other microbatch does, too
    y.backward(retain_graph=True)
    y.backward()
    torch.testing.assert_close(w.main_grad, 2 * x.detach().sum(0).expand(5, 4))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.backward()
    y = linear(x, w).sum()
    with torch.no_grad():
        w.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


@pytest.mark.usefixtures("way")
def test_hooks_of_the_weight_see_that_it_has_no_gradient():
    """A captured graph and a `GradBuffer` have hooks there, which run for every weight in backward."""
    x, w, seen = parameter(8, 4, seed=1), parameter(5, 4), []
    w.main_grad = torch.zeros_like(w.detach())
    w.register_post_accumulate_grad_hook(lambda w: seen.append(w.grad))
    torch.autograd.backward(linear(x, w).sum(), inputs=[x])  # x alone: the product is added all the same
    assert seen == [] and x.grad is not None and w.main_grad.any()
    linear(x, w).sum().backward()
    assert seen == [None]


@pytest.mark.parametrize("main", [False, True])
@pytest.mark.parametrize("name", PRODUCTS)
def test_hooks_of_a_weight_are_called_when_its_deferred_gradient_is_there(name, main):
    """Once, after the last of several; and not by the backward that has none for it."""
    product, shape = PRODUCTS[name]
    x, w, seen, queue = parameter(8, 4, seed=1), parameter(*shape), [], WgradQueue()
    if main:
        w.main_grad = torch.zeros(shape, dtype=torch.float64)
    w.register_post_accumulate_grad_hook(lambda w: seen.append(w.main_grad.sum() if main else w.grad.sum()))
    with defer_wgrad(queue):
        y = product(x, w).sum() + product(x.detach() + 1, w).sum()
    y.backward()
    assert seen == [] and x.grad is not None
    queue.run(queue.take())
    assert len(seen) == 1 and torch.equal(seen[0], w.main_grad.sum() if main else w.grad.sum())


class NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return None


@pytest.mark.usefixtures("way")
def test_an_output_without_a_gradient_adds_nothing():
    x, w = parameter(8, 4, seed=1), parameter(5, 4)
    w.main_grad = torch.zeros_like(w.detach())
    NoGradient.apply(linear(x, w)).sum().backward()
    assert not w.main_grad.any() and (x.grad is None or not x.grad.any())


@pytest.mark.usefixtures("way")
def test_a_weight_that_lies_transposed():
    x, w = parameter(7, 4, seed=1), torch.nn.Parameter(parameter(4, 5).detach().t())
    w.main_grad = torch.zeros_like(w)
    assert w.main_grad.stride() == (1, 5)
    expected = torch.autograd.grad(torch.nn.functional.linear(x, w).sin().sum(), w)[0]
    linear(x, w).sin().sum().backward()
    torch.testing.assert_close(w.main_grad, expected)


NARROW_PRODUCTS = {
    **PRODUCTS,
    "router": (router_logits, (5, 4)),
    "loss, one chunk": (
        lambda x, w: linear_cross_entropy(x, w, torch.arange(8) % 5, reduction="none"),
        (5, 4),
    ),
    "loss": (
        lambda x, w: linear_cross_entropy(x, w, torch.arange(8) % 5, workspace=40, reduction="none"),
        (5, 4),
    ),
    "loss, known": (
        lambda x, w: linear_cross_entropy(
            x, w, torch.arange(8) % 5, workspace=40, loss_grad=1.0, reduction="none"
        ),
        (5, 4),
    ),
}


@pytest.fixture
def many_logits(monkeypatch):
    """No logits are so few that the loss is two ops."""
    monkeypatch.setattr(sys.modules["fastmp.ops.linear_cross_entropy"], "_FEW_LOGITS", 0)


@pytest.mark.usefixtures("way", "many_logits")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", NARROW_PRODUCTS)
def test_an_addition_to_a_narrow_main_grad_is_rounded_once(name, dtype):
    """Bit for bit what a float32 `main_grad` with the same start holds, rounded; deferred, too."""
    product, shape = NARROW_PRODUCTS[name]
    start = parameter(*shape, seed=2).detach().to(dtype)
    found = []
    for main in (dtype, torch.float32):
        for queue in (None, WgradQueue()):
            x, w = (torch.nn.Parameter(p.detach().to(dtype)) for p in (parameter(8, 4), parameter(*shape)))
            w.main_grad = start.to(main, copy=True)
            with defer_wgrad(queue), poisoned_memory():
                product(x, w).sum().backward()
            if queue is not None:
                queue.run(queue.take())
            found.append(w.main_grad)
            assert w.grad is None and w.main_grad.dtype == main
    torch.testing.assert_close(found[0], found[2].to(dtype), rtol=0, atol=0)
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)
    assert not torch.equal(found[0], start)


@pytest.mark.usefixtures("many_logits")
@pytest.mark.parametrize("name", NARROW_PRODUCTS)
def test_sums_in_bfloat16_are_no_worse_than_those_of_torch(name):
    """Over eight microbatches, against float64; torch rounds a product, and then its sum."""
    product, shape = NARROW_PRODUCTS[name]
    if name.startswith("loss"):
        target, options = torch.randint(256, (128,)), {"loss_grad": 1.0} if "known" in name else {}
        size = 1 << 30 if "one" in name else 1 << 13

        def product(x, w):
            return linear_cross_entropy(x, w, target, workspace=size, **options, reduction="none")

        shape = (4, 8)
    shape, draw = (*shape[:-2], 64 * shape[-2], 64 * shape[-1]), torch.Generator().manual_seed(0)
    width = shape[-2] if "transposed" in name else shape[-1]
    weight = (torch.randn(shape, generator=draw) * width**-0.5).bfloat16()
    ours, theirs, exact = (torch.nn.Parameter(weight.to(d)) for d in (*[torch.bfloat16] * 2, torch.float64))
    ours.main_grad = torch.zeros_like(weight)
    for _ in range(8):
        rows, back = torch.randn(128, width, generator=draw).bfloat16(), None
        for w in (ours, theirs, exact):
            y = product(rows.to(w.dtype), w)
            if back is None:
                back = torch.randn(y.shape, generator=draw).to(y.dtype)
                back = torch.ones_like(y) if name.startswith("loss") else back
            y.backward(back.to(y.dtype))
    error = [(g.double() - exact.grad).square().mean().sqrt() for g in (ours.main_grad, theirs.grad)]
    assert ours.grad is None and error[0] <= 1.1 * error[1]


@pytest.mark.parametrize(("dtype", "main"), [
    (torch.float64, torch.float32), (torch.float32, torch.bfloat16), (torch.float32, torch.float64),
    (torch.bfloat16, torch.float16), (torch.float16, torch.float64),
], ids=str)  # fmt: skip
@pytest.mark.usefixtures("way")
def test_a_main_grad_of_another_dtype_is_refused_before_anything_is_made(dtype, main):
    for product, shape in NARROW_PRODUCTS.values():
        x, w = torch.ones(8, shape[-1], dtype=dtype), torch.nn.Parameter(torch.ones(shape, dtype=dtype))
        if product is NARROW_PRODUCTS["grouped, transposed"][0]:
            x = torch.ones(8, shape[-2], dtype=dtype)
        w.main_grad = torch.zeros(shape, dtype=main)
        with pytest.raises(ValueError, match=rf": main_grad is {main} but \w+ is {dtype}: make it "):
            product(x, w)


@pytest.mark.usefixtures("way")
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
    queue = WgradQueue()
    with defer_wgrad(queue):
        torch.testing.assert_close(torch.func.grad(lambda w: linear(x, w).sin().sum())(w), expected)
    assert not w.main_grad.any() and not queue.take()


@pytest.mark.usefixtures("way")
def test_errors():
    x, w = parameter(8, 4, seed=1), parameter(5, 4)
    w.main_grad = torch.zeros(4, 5, dtype=torch.float64)
    with pytest.raises(
        ValueError, match=r"linear: expected main_grad of .* for weight of shape \(5, 4\), got \(4, 5\)"
    ):
        linear(x, w)
    w.main_grad = torch.zeros(5, 4, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="linear: its backward is not differentiable"):
        torch.autograd.grad(linear(x, w).sum(), x, create_graph=True)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=r"forward.mode"):
        linear(forward_ad.make_dual(x, x.detach()), w)
    w.main_grad = torch.zeros(5, 4, dtype=torch.float64, device="meta")
    with pytest.raises(ValueError, match="linear: weight is on cpu but main_grad is on meta"):
        linear(x, w)


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


@pytest.mark.parametrize("allowed", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_on_a_gpu_no_part_of_a_narrow_sum_is_rounded(dtype, allowed, monkeypatch):
    matmul, found = torch.backends.cuda.matmul, []
    option = f"allow_{'bf16' if dtype == torch.bfloat16 else 'fp16'}_reduced_precision_reduction"
    before = getattr(matmul, option)

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            if op is torch.ops.aten.addmm_.default:
                found.append(getattr(matmul, option))
                return args[0]
            return op(*args, **(kwargs or {}))

    try:
        setattr(matmul, option, allowed)
        with FakeTensorMode():
            total = torch.empty(6, 5, device="cuda", dtype=dtype)
            grad, x = (torch.empty(4, size, device="cuda", dtype=dtype) for size in (6, 5))
            with Recorder():
                OPS["accumulate_weight_grad_"].implementations["reference"](total, grad, x)
        assert found == [False] and getattr(matmul, option) == allowed
    finally:
        setattr(matmul, option, before)


@pytest.mark.parametrize("dtype", [torch.float32, *full([torch.float64, torch.bfloat16, torch.float16])])
def test_a_few_rows_without_gradient(dtype):
    """Each row as by itself, to the last bit, and near float64; more rows, and all else, as ever."""
    generator = torch.Generator().manual_seed(2)
    weight, bias = (torch.randn(size, generator=generator) for size in ((37, 1029), (37,)))
    weight, bias = torch.nn.Parameter(weight.to(dtype)), bias.to(dtype)
    for shape in ((1, 1), (1, 5), (2, 4)):
        x = torch.randn(*shape, 1029, generator=generator).to(dtype)
        with torch.no_grad(), CalledOps() as ops:
            y = linear(x, weight, bias)
        assert ops.names == ["few_rows_linear"] and y.shape == (*shape, 37)
        expected = F.linear(x.double(), weight.detach().double(), bias.double())
        error, theirs = (each.double().sub(expected).norm() for each in (y, F.linear(x, weight, bias)))
        rounding = torch.finfo(torch.promote_types(dtype, torch.float32)).eps * expected.norm()
        assert error <= max(1.1 * theirs, 8 * rounding)
        with torch.no_grad():
            alone = torch.stack([linear(row, weight, bias) for row in x.flatten(0, 1)])
        assert torch.equal(y.flatten(0, 1), alone) or OPS["few_rows_linear"].serving["cpu"] != "c++"
    for x, context in (
        (torch.ones(9, 1029, dtype=dtype), torch.no_grad()),
        (torch.ones(0, 1029, dtype=dtype), torch.no_grad()),
        (torch.ones(2, 1029, dtype=dtype), torch.enable_grad()),
    ):
        with context, CalledOps() as ops:
            linear(x, weight)
        assert not ops.names
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert linear(torch.ones(2, 1029, dtype=dtype), weight).dtype == (
            dtype if dtype == torch.float64 else torch.bfloat16
        )
