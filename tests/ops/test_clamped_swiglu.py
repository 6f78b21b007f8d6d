"""clamped_swiglu: kernels against the reference, threads, clamped values, special values, errors."""

from __future__ import annotations

import pytest
import torch
from every_op_tools import implementation
from kernel_tools import DTYPES, KERNELS, ON_CPU, TRITON, check_kernel, random, threads_agree

from fastmp.ops import clamped_swiglu
from fastmp.testing.samples.pointwise import clamp

FORM = (1.702, 3.0)


def inputs(*shape, dtype=torch.float32):
    """x (..., 2F), a quarter of which is clamped, and the gradient of y (..., F)."""
    return random(*shape, dtype=dtype, scale=3.0), random(*shape[:-1], shape[-1] // 2, dtype=dtype, seed=1)


def run(backend, grad, x):
    forward, backward = (implementation(f"clamped_swiglu{way}", backend) for way in ("", "_backward"))
    return forward(x, *FORM), backward(grad, x, *FORM)


def check(backend, x, grad):
    check_kernel(backend, "clamped_swiglu", x, *FORM)
    check_kernel(backend, "clamped_swiglu_backward", grad, x, *FORM)


@KERNELS
def test_equals_reference(backend, dtype):
    rows = 37 if backend == "triton" else 70
    for shape in ((2,), (rows, 1000), (3, 2, 24), (130, 34), (1, 62), (5, 2), (0, 8), (3, 0)):
        check(backend, *inputs(*shape, dtype=dtype))
    if backend == "c++":
        check(backend, *inputs(3, 2 * 8195, dtype=dtype))


@pytest.mark.parametrize("backend", ["c++", TRITON])
def test_layouts(backend):
    x, grad = inputs(20, 40)
    check(backend, x[:, 2:36], grad[:, 3:])
    check(backend, x, grad.t().contiguous().t())


@ON_CPU
def test_results_do_not_depend_on_the_number_of_threads(backend):
    x, grad = inputs(301, 130)
    assert threads_agree(lambda: run(backend, grad, x))


@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")
@pytest.mark.parametrize(
    "backend", ["c++", "reference", pytest.param("triton", marks=(pytest.mark.interpret, pytest.mark.full))]
)
def test_special_pairs_are_those_of_torch(backend):
    """Every pair of special gates and ups, against torch in float64."""
    values = [torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 3.0, -3.0, 100.0, -100.0, 6e4, -6e4]
    pairs = torch.cartesian_prod(*[torch.tensor(values, dtype=torch.float64)] * 2).flatten()
    for dtype in DTYPES:
        x = pairs.to(dtype)
        leaf = x.double().requires_grad_()
        gate, up = clamp(leaf[::2], -torch.inf, 3.0), clamp(leaf[1::2], -3.0, 3.0)
        truth = (up + 1) * (gate * torch.sigmoid(gate * 1.702))
        (slope,) = torch.autograd.grad(truth.sum(), leaf)
        y, dx = run(backend, torch.ones(len(x) // 2, dtype=dtype), x)
        for value, want in ((y, truth.detach()), (dx, slope)):
            torch.testing.assert_close(value.double(), want, rtol=1e-2, atol=1e-6, equal_nan=True)


def test_what_is_clamped_has_no_gradient():
    x = torch.tensor([2.0, 8.0, 8.0, 2.0, -8.0, -8.0, 7.0, -7.0], requires_grad=True)
    (dx,) = torch.autograd.grad(clamped_swiglu(x).sum(), x)
    assert (dx != 0).tolist() == [True, False, False, True, True, False, True, True]


@pytest.mark.parametrize(
    ("x", "options", "message"),
    [
        (torch.zeros(2, 5), {}, r"dimension of even size, got shape \(2, 5\)"),
        (torch.zeros(2, 6, dtype=torch.int32), {}, "got torch.int32"),
        (torch.tensor(1.0), {}, r"at least one dimension, got shape \(\)"),
        (torch.zeros(2, 6), {"limit": 0.0}, "limit must be positive, got 0.0"),
        (torch.zeros(2, 6), {"limit": float("nan")}, "limit must be positive, got nan"),
    ],
)
def test_wrong_arguments(x, options, message):
    with pytest.raises(ValueError, match=f"clamped_swiglu: .*{message}"):
        clamped_swiglu(x, **options)
