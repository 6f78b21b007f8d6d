"""grouped_lora: the merged weights' results, frozen weights, memory, BF16 errors, errors, costs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from fastmp.ops import OPS, grouped_lora, grouped_mm
from fastmp.testing.ops import poisoned_memory

N, K = 6, 5


def ends(sizes):
    return torch.tensor(sizes, dtype=torch.int32).cumsum(0, dtype=torch.int32)


def problem(sizes, r, spare=0, *, transposed=False, n=N, k=K, dtype=torch.float64, seed=0):
    """x, w, a, b, offsets, a gradient of the result; x, a and b are leaves."""
    generator = torch.Generator().manual_seed(seed)
    rows, experts = sum(sizes) + spare, len(sizes)
    weight = (experts, k, n) if transposed else (experts, n, k)
    shapes = (rows, k), weight, (experts, r, k), (experts, n, r)
    x, w, a, b, grad = (
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        for shape in (*shapes, (rows, n))
    )
    return x.requires_grad_(), w, a.requires_grad_(), b.requires_grad_(), ends(sizes), grad


def merged(x, w, a, b, offsets, scale, transposed=False, bias=None):
    """The same by the weights of all experts, as PEFT merges them."""
    delta = scale * (b @ a)
    return grouped_mm(x, w + (delta.mT if transposed else delta), offsets, transposed=transposed, bias=bias)


@settings(max_examples=60)
@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=6),
    spare=st.integers(0, 3),
    r=st.integers(1, 20),
    transposed=st.booleans(),
    with_bias=st.booleans(),
)
def test_equals_merged_weights(sizes, spare, r, transposed, with_bias):
    x, w, a, b, offsets, grad = problem(sizes, r, spare, transposed=transposed)
    bias = torch.linspace(-1, 1, len(sizes) * N, dtype=x.dtype).view(len(sizes), N) if with_bias else None
    leaves = (x, a, b)
    if with_bias:
        leaves += (bias.requires_grad_(),)
    with poisoned_memory():
        y = grouped_lora(x, w, a, b, offsets, scale=0.7, transposed=transposed, bias=bias)
        got = [y, *torch.autograd.grad(y, leaves, grad)]
    truth = merged(x, w, a, b, offsets, 0.7, transposed, bias)
    want = [truth, *torch.autograd.grad(truth, leaves, grad)]
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_the_weight_has_no_gradient():
    """Not even memory for it: the largest tensor that backward allocates has the size of x or dy."""
    sizes, r = [40, 0, 30], 2
    x, w, a, b, offsets, grad = problem(sizes, r, n=64, k=48)
    assert w.numel() > 2 * max(x.numel(), grad.numel())
    made = []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            made.extend(t.numel() for t in (out if isinstance(out, tuple) else (out,)) if t is not None)
            return out

    with Sizes():
        y = grouped_lora(x, w, a, b, offsets)
        torch.autograd.grad(y, (x, a, b), grad)
    assert made and max(made) <= max(x.numel(), grad.numel())
    assert sum(size == y.numel() for size in made) == 1  # no third tensor of the result's size


def test_a_weight_that_requires_grad_raises():
    x, w, a, b, offsets, _ = problem([2, 3], 4)
    with pytest.raises(ValueError, match=r"grouped_lora: expected a frozen w.*w\.requires_grad_\(False\)"):
        grouped_lora(x, w.requires_grad_(), a, b, offsets)
    with torch.no_grad():
        assert grouped_lora(x, w, a, b, offsets).shape == (5, N)


def test_gradcheck():
    x, w, a, b, offsets, _ = problem([3, 0, 2], 3, 1)
    assert torch.autograd.gradcheck(lambda *t: grouped_lora(t[0], w, *t[1:], offsets, scale=2.0), (x, a, b))


def test_experts_do_not_see_rows_of_others():
    x, w, a, b, offsets, grad = problem([3, 4, 2], 4, 2)
    with torch.no_grad():
        x[3:7], x[9:], grad[3:7], grad[9:] = torch.nan, torch.inf, torch.inf, torch.nan
    y = grouped_lora(x, w, a, b, offsets)
    dx, da, db = torch.autograd.grad(y, (x, a, b), grad)
    for rows in (y, dx):
        assert rows[:3].isfinite().all() and rows[7:].isfinite().all() and not rows[9:].any()
    for gradient in (da, db):
        assert gradient[[0, 2]].isfinite().all() and gradient[1].isnan().all()


def composed(x, w, a, b, offsets, scale):
    """The three grouped GEMMs of torch, each of which rounds."""

    def product(rows, weight):
        return torch.nn.functional.grouped_mm(rows, weight.mT, offs=offsets)

    return product(x, w) + scale * product(product(x, a), b)


@pytest.mark.parametrize("scale", [2.0, 0.3])
def test_bf16_errors_are_those_of_torch(scale):
    """Root mean squares over 1e5 elements and more; 1.1 times torch's at most."""
    sizes = [300, 0, 420, 304]
    x, w, a, b, offsets, grad = problem(sizes, 16, n=256, k=192)
    with torch.no_grad():
        w *= 192**-0.5
        a *= 192**-0.5
        b *= 0.25
    exact = [t.detach().bfloat16() for t in (x, w, a, b, grad)]
    results = {}
    for name, function, dtype in (
        ("truth", grouped_lora, torch.float64),
        ("ours", grouped_lora, torch.bfloat16),
        ("torch", composed, torch.bfloat16),
    ):
        x, w, a, b, grad = (t.to(dtype) for t in exact)
        leaves = [t.requires_grad_() for t in (x, a, b)]
        more = {"scale": scale} if function is grouped_lora else {}
        y = function(x, w, a, b, offsets, **more or {"scale": scale})
        results[name] = [y, *torch.autograd.grad(y, leaves, grad)]
    for truth, ours, other in zip(results["truth"], results["ours"], results["torch"], strict=True):
        errors = [(t.double() - truth).square().mean().sqrt() for t in (ours, other)]
        assert errors[0] <= 1.1 * errors[1], [e.item() for e in errors]


def test_under_autocast():
    x, w, a, b, offsets, grad = problem([4, 5], 3, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y = grouped_lora(x, w, a, b, offsets)
        dx, da, db = torch.autograd.grad(y, (x, a, b), grad.bfloat16())
    narrow = [t.detach().bfloat16() for t in (x, w, a, b)]
    assert y.dtype == torch.bfloat16 and torch.equal(y, grouped_lora(*narrow, offsets))
    assert dx.dtype == da.dtype == db.dtype == torch.float32


def test_compiles_as_one_graph():
    x, w, a, b, offsets, grad = problem([4, 5], 3)

    def call(x, a, b):
        return grouped_lora(x, w, a, b, offsets, scale=2.0)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    results = []
    for function in (call, compiled):
        y = function(x, a, b)
        results.append([y, *torch.autograd.grad(y, (x, a, b), grad)])
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_flops():
    sizes, r = [40, 30], 4
    x, w, a, b, offsets, grad = problem(sizes, r, n=8, k=10)
    with FlopCounterMode(display=False) as counter:
        y = grouped_lora(x, w, a, b, offsets)
    assert counter.get_total_flops() == 2 * 70 * (8 * 10 + r * 10 + r * 8)
    with FlopCounterMode(display=False) as counter:
        torch.autograd.grad(y, (x, a, b), grad)
    assert counter.get_total_flops() == 2 * 70 * (8 * 10 + 2 * r * 10 + 2 * r * 8)
    assert OPS["grouped_mm_lora"].family == "grouped_lora"


ERRORS = {
    "x must be (M, K), got shape (3,)": {"x": torch.zeros(3)},
    "w must be (E, N, K), got shape (6, 5)": {"w": torch.zeros(6, 5)},
    "a must be (E, R, K), got shape (3, 5)": {"a": torch.zeros(3, 5)},
    "x (9, 5) does not fit w (2, 6, 4): expected 5 in dimension 2 of w": {"w": torch.zeros(2, 6, 4)},
    "expected a of shape (2, 3, 5) for w of shape (2, 6, 5), got (2, 3, 4)": {"a": torch.zeros(2, 3, 4)},
    "expected b of shape (2, 6, 3) for a of shape (2, 3, 5), got (2, 6, 4)": {"b": torch.zeros(2, 6, 4)},
    "expected bias of shape (2, 6) for w of shape (2, 6, 5), got (6,)": {"bias": torch.zeros(6)},
    "x is torch.float32 but a is torch.bfloat16": {"a": torch.zeros(2, 3, 5).bfloat16()},
    "x is on cpu but b is on meta": {"b": torch.zeros(2, 6, 3, device="meta")},
    "offsets must be int32, got torch.int64": {"offsets": torch.tensor([4, 9])},
    "offsets [5, 4] must not be negative, fall, or pass the 9 rows of x": {"offsets": ends([5, -1])},
}


@pytest.mark.parametrize("message", ERRORS)
def test_errors(message):
    arguments = {
        **{"x": torch.zeros(9, 5), "w": torch.zeros(2, 6, 5), "a": torch.zeros(2, 3, 5)},
        **{"b": torch.zeros(2, 6, 3), "offsets": ends([4, 5])},
    }
    with pytest.raises(ValueError) as caught:
        grouped_lora(**arguments | ERRORS[message])
    assert str(caught.value).startswith(f"grouped_lora: {message}")
