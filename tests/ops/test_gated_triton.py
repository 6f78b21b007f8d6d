"""The Triton kernels of swiglu and geglu in Triton's interpreter, against the reference."""

from __future__ import annotations

import pytest
import torch
from marks import full

from fastmp.ops import gated as module
from fastmp.ops.core import rowwise as rows
from fastmp.testing.ops import poisoned_memory

pytestmark = [
    pytest.mark.interpret,
    pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value"),
]

FORMS = ("silu", "gelu_tanh", "gelu")
TOLERANCE = {
    torch.float64: {"rtol": 1e-12, "atol": 1e-12},
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.bfloat16: {"rtol": 1e-2, "atol": 1e-5},
    torch.float16: {"rtol": 1e-3, "atol": 1e-5},
}


def _check(x, bias, grad, activation):
    with poisoned_memory():
        results = module.launch(x, bias, activation), *module.launch_backward(grad, x, bias, activation)
    expected = module.reference(x, bias, activation), *module.reference_backward(grad, x, bias, activation)
    for value, want in zip(results, expected, strict=True):
        assert value.is_contiguous()
        torch.testing.assert_close(value, want, equal_nan=True, **TOLERANCE[x.dtype])


def _random(*shape, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * 2).to(dtype)


SHAPES = [(2,), (3, 2, 24), (130, 34), (0, 8), (3, 0)]
SEVERAL_TILES = (37, 2060)
OF_DTYPES = [(torch.float32, form) for form in FORMS[1:]] + [(dtype, "silu") for dtype in TOLERANCE]


@pytest.mark.parametrize(
    ("shape", "dtype", "activation"),
    [
        *((shape, *each) for shape in SHAPES for each in OF_DTYPES),
        (SEVERAL_TILES, torch.float32, "silu"),
        *full([(SEVERAL_TILES, *each) for each in OF_DTYPES if each != (torch.float32, "silu")]),
    ],
    ids=str,
)
def test_equals_reference(shape, dtype, activation):
    x = _random(*shape, dtype=dtype, seed=0)
    grad = _random(*shape[:-1], shape[-1] // 2, dtype=dtype, seed=1)
    _check(x, _random(shape[-1], dtype=dtype, seed=2), grad, activation)
    _check(x, None, grad, activation)


@pytest.mark.parametrize("layout", ("padded rows", "transposed", "expanded grad", "strided bias"))
def test_layouts(layout):
    x, grad, bias = (_random(*shape, dtype=torch.float32, seed=3) for shape in ((20, 40), (20, 20), (40,)))
    if layout == "padded rows":
        x, grad, bias = x[:, :34], grad[:, 3:], bias[:34]
    elif layout == "transposed":
        x, grad, bias = x.t(), grad[:10].reshape(10, 20)[:, :10].repeat(4, 1), bias[:20]
    elif layout == "expanded grad":
        grad = torch.ones(()).expand(20, 20)
    else:
        bias = _random(80, dtype=torch.float32, seed=4)[::2]
    _check(x, bias, grad, "silu")


@pytest.mark.parametrize("activation", FORMS)
def test_special_values(activation):
    gate = torch.tensor([[torch.inf, -torch.inf, torch.nan, 0.0, 100.0, -100.0, 1e4, -1e4]])
    x, grad = torch.cat([gate, torch.full_like(gate, 2.0)], -1), torch.ones_like(gate)
    results = module.launch(x, None, activation), module.launch_backward(grad, x, None, activation)[0]
    wide = x.double(), None, activation
    truths = module.reference(*wide), module.reference_backward(grad.double(), *wide)[0]
    for value, truth in zip(results, truths, strict=True):
        torch.testing.assert_close(value, truth.float(), equal_nan=True, **TOLERANCE[torch.float32])


@pytest.mark.full
def test_many_strips(monkeypatch):
    """More strips than one step of the second kernel takes, and a last strip cut short."""
    monkeypatch.setattr(rows, "block_shape", lambda num_cols, itemsize: (4, 16))
    x, grad = _random(289, 38, dtype=torch.float32, seed=5), _random(289, 19, dtype=torch.float32, seed=6)
    _check(x, _random(38, dtype=torch.float32, seed=7), grad, "gelu_tanh")
