"""The Triton kernels of scaled_masked_softmax in Triton's interpreter, against the reference."""

from __future__ import annotations

import pytest
import torch
from marks import DTYPES

from fastmp.ops import softmax as module
from fastmp.testing.ops import poisoned_memory

pytestmark = [
    pytest.mark.interpret,
    pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value"),
]

TOLERANCE = {
    torch.float64: {"rtol": 1e-12, "atol": 1e-12},
    torch.float32: {"rtol": 1e-5, "atol": 1e-6},
    torch.bfloat16: {"rtol": 1e-2, "atol": 1e-5},
    torch.float16: {"rtol": 1e-3, "atol": 1e-5},
}


def _random(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * 3).to(dtype)


def _mask(*shape, seed=1):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.3


def _check(x, mask=None, scale=0.3, causal=False, grad=None):
    grad = _random(*x.shape, dtype=x.dtype, seed=2) if grad is None else grad
    y = module.reference(x, mask, scale, causal)
    with poisoned_memory():
        results = module.launch(x, mask, scale, causal), module.launch_backward(grad, y, scale, causal)
    expected = y, module.reference_backward(grad, y, scale, causal)
    for value, want in zip(results, expected, strict=True):
        assert value.is_contiguous()
        torch.testing.assert_close(value, want, equal_nan=True, **TOLERANCE[x.dtype])


@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape", [(1, 1), (2, 3, 9, 33), (70, 24), (24, 70), (1, 1030), (0, 8), (3, 0)], ids=str
)
def test_equals_reference(shape, dtype, causal):
    x = _random(*shape, dtype=dtype)
    _check(x, causal=causal)
    _check(x, _mask(*shape[-2:]), causal=causal)


@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("dtype", (torch.float32, torch.float64), ids=str)
def test_rows_longer_than_registers_hold(dtype, causal):
    x = _random(3, 16400, dtype=dtype)
    assert not module.block_shape(*x.shape, x.element_size())[-1]
    mask = _mask(3, 16400)
    mask[0, :9000], mask[1] = True, True
    _check(x, mask, causal=causal)
    x[2, 5], x[2, 16000] = torch.inf, -torch.inf
    _check(x, causal=causal)


@pytest.mark.parametrize(
    "mask_shape", [(), (16,), (8, 1), (3, 1, 16), (2, 1, 1, 8, 16), (2, 1, 3, 1, 16), (3, 8, 16)]
)
def test_masks_are_read_by_their_strides(mask_shape):
    x = _random(2, 5, 3, 8, 16)
    _check(x, _mask(*mask_shape))
    _check(x, _mask(*mask_shape[::-1]).permute(tuple(reversed(range(len(mask_shape))))))


def test_layouts():
    x, grad = _random(4, 20, 40), _random(4, 20, 40, seed=3)
    _check(x[..., :35], _mask(20, 35), causal=True, grad=grad[..., 5:])
    _check(x.transpose(1, 2), _mask(20), causal=True, grad=grad.transpose(1, 2))
    _check(x[:, ::2], causal=True, grad=torch.ones(()).expand(4, 10, 40))


def test_special_values():
    x = _random(8, 8)
    x[0, 1], x[1, 2], x[2, 3], x[3], x[4, 5] = torch.nan, torch.inf, -torch.inf, -torch.inf, 3e38
    mask = torch.zeros(8, 8, dtype=torch.bool)
    mask[:, 6:], mask[5], mask[6, :6] = True, True, True
    x[5, 0], x[7, 7] = torch.nan, torch.nan  # behind the mask
    _check(x, mask, scale=1.0)
    grad = _random(8, 8, seed=4)
    grad[:, 7] = torch.nan
    _check(x, mask, scale=1.0, grad=grad)


def test_the_scale_is_not_rounded_to_float32():
    x = _random(4, 4, dtype=torch.float64) * 1e3
    _check(x, scale=1 / 3)
