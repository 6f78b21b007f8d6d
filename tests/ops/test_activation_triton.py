"""The Triton kernels of bias_gelu in Triton's interpreter, against the reference."""

from __future__ import annotations

import pytest
import torch
from marks import DTYPES

from fastmp.ops import activation as module
from fastmp.ops.core import rowwise as rows
from fastmp.testing.ops import poisoned_memory

pytestmark = pytest.mark.interpret

TOLERANCE = {
    torch.float64: {"rtol": 1e-12, "atol": 1e-12},
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.bfloat16: {"rtol": 1e-2, "atol": 1e-5},
    torch.float16: {"rtol": 1e-3, "atol": 1e-5},
}


def _check(x, bias, grad, approximate):
    with poisoned_memory():
        results = module.launch(x, bias, approximate), *module.launch_backward(grad, x, bias, approximate)
    expected = module.reference(x, bias, approximate), *module.reference_backward(grad, x, bias, approximate)
    for value, want in zip(results, expected, strict=True):
        assert value.is_contiguous()
        torch.testing.assert_close(value, want, equal_nan=True, **TOLERANCE[x.dtype])


def _random(*shape, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * 2).to(dtype)


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("approximate", ("tanh", "none"))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1,), (37, 1030), (3, 2, 24), (130, 17), (0, 8), (3, 0)], ids=str)
def test_equals_reference(shape, dtype, approximate):
    x, grad = (_random(*shape, dtype=dtype, seed=seed) for seed in (0, 1))
    bias = _random(shape[-1], dtype=dtype, seed=2)
    _check(x, bias, grad, approximate)
    _check(x, None, grad, approximate)


@pytest.mark.parametrize("layout", ("padded rows", "transposed", "expanded grad", "strided bias"))
def test_layouts(layout):
    x, grad, bias = (_random(*shape, dtype=torch.float32, seed=3) for shape in ((20, 40), (20, 40), (40,)))
    if layout == "padded rows":
        x, grad = x[:, :35], grad[:, 5:]
        bias = bias[:35]
    elif layout == "transposed":
        x, grad, bias = x.t(), grad.t(), bias[:20]
    elif layout == "expanded grad":
        grad = torch.ones(()).expand(20, 40)
    else:
        bias = _random(80, dtype=torch.float32, seed=4)[::2]
    _check(x, bias, grad, "tanh")


@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")
@pytest.mark.parametrize("approximate", ("tanh", "none"))
def test_special_values(approximate):
    x = torch.tensor([[torch.inf, -torch.inf, torch.nan, 0.0, 100.0, -100.0, 1e4, -1e4]])
    grad = torch.ones_like(x)
    results = module.launch(x, None, approximate), module.launch_backward(grad, x, None, approximate)[0]
    wide = x.double(), None, approximate
    truths = module.reference(*wide), module.reference_backward(grad.double(), *wide)[0]
    for value, truth in zip(results, truths, strict=True):
        torch.testing.assert_close(value, truth.float(), equal_nan=True, **TOLERANCE[torch.float32])


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.full
def test_many_strips(monkeypatch):
    """More strips than one step of the second kernel takes, and a last strip cut short."""
    monkeypatch.setattr(rows, "block_shape", lambda num_cols, itemsize: (2, 16))
    x, grad = (_random(417, 19, dtype=torch.float32, seed=seed) for seed in (5, 6))
    _check(x, _random(19, dtype=torch.float32, seed=7), grad, "tanh")
