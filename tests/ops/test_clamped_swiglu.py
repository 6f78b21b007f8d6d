"""clamped_swiglu: kernels against the reference, threads, clamped values, special values, errors."""

from __future__ import annotations

import pytest
import torch
from marks import full

from fastmp.ops import OPS, clamped_swiglu
from fastmp.testing.ops import poisoned_memory
from fastmp.testing.samples.pointwise import clamp

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
TOLERANCE = {
    torch.float64: {"rtol": 1e-12, "atol": 1e-12},
    torch.float32: {"rtol": 1e-5, "atol": 3e-5},
    torch.bfloat16: {"rtol": 1e-2, "atol": 1e-5},
    torch.float16: {"rtol": 1e-3, "atol": 1e-5},
}
FORM = (1.702, 3.0)


def inputs(shape, dtype=torch.float64, seed=0):
    """x (..., 2F), a quarter of which is clamped, and the gradient of y (..., F)."""
    generator = torch.Generator().manual_seed(seed)
    x, grad = (
        torch.randn(size, generator=generator, dtype=torch.float64) * 3
        for size in (shape, (*shape[:-1], shape[-1] // 2))
    )
    return x.to(dtype), grad.to(dtype)


def run(backend, grad, x):
    names = ("clamped_swiglu", "clamped_swiglu_backward")
    forward, backward = (
        OPS[name].implementations[backend] if backend else OPS[name].overload for name in names
    )
    return forward(x, *FORM), backward(grad, x, *FORM)


def check(backend, x, grad):
    expected = run("reference", grad, x)
    with poisoned_memory():
        results = run(backend, grad, x)
    for value, want in zip(results, expected, strict=True):
        assert value.is_contiguous()
        torch.testing.assert_close(value, want, equal_nan=True, **TOLERANCE[x.dtype])


@pytest.mark.parametrize("dtype", [*DTYPES[1:3], *full([DTYPES[0], DTYPES[3]])], ids=str)
def test_compiled_kernel_equals_reference(dtype):
    for shape in ((70, 1000), (3, 2 * 8195), (1, 62), (5, 2), (2,)):
        check(None, *inputs(shape, dtype))
    x, grad = inputs((20, 40), dtype)
    check(None, x[:, 2:36], grad[:, 3:])


@pytest.mark.interpret
@pytest.mark.parametrize("dtype", [torch.bfloat16, *full(DTYPES[:2]), *full(DTYPES[3:])], ids=str)
@pytest.mark.parametrize(
    "shape",
    [(37, 130), (3, 2, 24), *full([((37, 2060),), ((2,),), ((130, 34),), ((0, 8),), ((3, 0),)])],
    ids=str,
)
def test_triton_kernels_equal_reference(shape, dtype):
    x, grad = inputs(shape, dtype)
    check("triton", x, grad)
    if len(shape) == 2:
        check("triton", torch.cat((x, x), -1)[:, : x.shape[1]], grad.t().contiguous().t())


@pytest.mark.parametrize("backend", [None, "reference"])
def test_results_do_not_depend_on_the_number_of_threads(backend):
    x, grad = inputs((301, 130), torch.float32)
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            results.append(run(backend, grad, x))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def special(backend):
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


@pytest.mark.parametrize("backend", [None, "reference"])
def test_special_pairs_are_those_of_torch(backend):
    special(backend)


@pytest.mark.interpret
@pytest.mark.full
@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")
def test_special_pairs_are_those_of_torch_in_triton():
    special("triton")


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
