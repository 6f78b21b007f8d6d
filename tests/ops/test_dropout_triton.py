"""The Triton kernels of bias_dropout_add in Triton's interpreter: the mask bit for bit, values as the
reference's."""

from __future__ import annotations

import pytest
import torch
from marks import DTYPES

from fastmp.ops import dropout as module
from fastmp.ops.core import _triton
from fastmp.testing.ops import poisoned_memory

tl = _triton.tl
pytestmark = pytest.mark.interpret

TOLERANCE = {
    torch.float64: {"rtol": 1e-12, "atol": 1e-12},
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.bfloat16: {"rtol": 1e-2, "atol": 1e-5},
    torch.float16: {"rtol": 1e-3, "atol": 1e-5},
}
SEED = torch.tensor(-(3 << 60) + 12345)


def _random(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def _check(x, bias, residual, grad, p, seed=SEED):
    with_bias, dtype = bias is not None, x.dtype
    with poisoned_memory():
        results = [module.launch(x, bias, residual, p, seed)]
        results += module.launch_backward(grad, p, seed, dtype, with_bias) if seed is not None else ()
    expected = [module.reference(x, bias, residual, p, seed)]
    expected += module.reference_backward(grad, p, seed, dtype, with_bias) if seed is not None else ()
    for value, want in zip(results, expected, strict=True):
        assert value.is_contiguous() and value.dtype == want.dtype
        torch.testing.assert_close(value, want, **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1,), (9, 516), (3, 2, 24), (33, 17), (0, 8), (3, 0)], ids=str)
def test_equals_reference(shape, dtype):
    x, residual, grad = (_random(*shape, dtype=dtype, seed=seed) for seed in (0, 1, 2))
    _check(x, _random(shape[-1], dtype=dtype, seed=3), residual, grad, 0.3)
    _check(x, None, residual, grad, 0.0, None)


@pytest.mark.parametrize(
    ("shape", "dtype", "p", "seed"),
    [
        ((40, 130), torch.float32, 0.1, 0),
        ((6, 1028), torch.bfloat16, 0.5, -1),
        ((5, 1032), torch.bfloat16, 0.9, (1 << 62) + 7),
        ((5, 516), torch.float64, 0.3, 1 << 40),
        ((2, 9, 33), torch.float16, 0.5, 77),
    ],
    ids=str,
)
def test_masks_are_those_of_the_reference(shape, dtype, p, seed):
    expected = module.keep_mask(shape, p, torch.tensor([seed]))
    ones, zeros, key = torch.ones(shape, dtype=dtype), torch.zeros(shape, dtype=dtype), torch.tensor([seed])
    assert torch.equal(module.launch(ones, None, zeros, p, key) != 0, expected)
    assert torch.equal(module.launch_backward(ones, p, key, dtype, False)[0] != 0, expected)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("columns", (24, 17))
def test_a_float32_residual(columns, dtype):
    x, bias = _random(20, columns, dtype=dtype), _random(columns, dtype=dtype, seed=1)
    residual, grad = (_random(20, columns, seed=seed) for seed in (2, 3))
    _check(x, bias, residual, grad, 0.3)
    _check(x, bias, residual, grad, 0.0, None)


@pytest.mark.parametrize("layout", ("padded rows", "transposed", "expanded grad", "strided bias"))
def test_layouts(layout):
    x, residual, grad = (_random(20, 40, seed=seed) for seed in (3, 4, 5))
    bias = _random(40, seed=6)
    if layout == "padded rows":
        x, residual, grad, bias = x[:, :36], residual[:, 3:39], grad[:, 4:], bias[:36]
    elif layout == "transposed":
        x, residual, grad, bias = x.t(), residual.t(), grad.t(), bias[:20]
    elif layout == "expanded grad":
        grad = torch.ones(()).expand(20, 40)
    else:
        bias = _random(80, seed=7)[::2]
    _check(x, bias, residual, grad, 0.4)
    _check(x, bias, residual, grad, 0.0, None)


def test_many_strips(monkeypatch):
    """Several strips and blocks of columns, the last of which are cut short."""
    monkeypatch.setattr(module, "block_shape", lambda num_cols, itemsize: (4, 16))
    for columns in (19, 20):
        x, residual, grad = (_random(37, columns, seed=seed) for seed in (5, 6, 7))
        _check(x, _random(columns, seed=8), residual, grad, 0.2)


def test_what_is_dropped_leaves_no_trace():
    x, residual = torch.full((16, 32), torch.nan), _random(16, 32)
    kept = module.keep_mask((16, 32), 0.5, SEED)
    y = module.launch(x, None, residual, 0.5, SEED)
    assert torch.equal(y[~kept], residual[~kept]) and y[kept].isnan().all()
    assert torch.equal(module.launch(x, None, residual, 1.0, SEED), residual)
    assert not any(grad.any() for grad in module.launch_backward(x, 1.0, SEED, x.dtype, True))


@_triton.jit
def _philox_kernel(seed, counters, words, THEIRS: tl.constexpr, N: tl.constexpr):
    index = tl.arange(0, N)
    counter = tl.load(counters + index)
    if THEIRS:
        a0, a1, a2, a3 = tl.randint4x(tl.load(seed), counter)
    else:
        a0, a1, a2, a3 = module.four_words(tl.load(seed), counter)
    tl.store(words + 4 * index, a0.to(tl.uint32, bitcast=True).to(tl.int64))
    tl.store(words + 4 * index + 1, a1.to(tl.uint32, bitcast=True).to(tl.int64))
    tl.store(words + 4 * index + 2, a2.to(tl.uint32, bitcast=True).to(tl.int64))
    tl.store(words + 4 * index + 3, a3.to(tl.uint32, bitcast=True).to(tl.int64))


@pytest.mark.parametrize("theirs", (False, True), ids=("ours", "tl.randint4x"))
def test_words_are_those_of_the_reference_and_of_triton(theirs):
    """Also where the counter, and the number of an element, are beyond 32 bits."""
    starts = torch.tensor([0, (1 << 29) - 8, (1 << 31) - 8, (1 << 32) - 8, (1 << 40) + 3])
    counters = torch.cat([(starts[:, None] + torch.arange(16)).flatten(), torch.arange(48)])
    for seed in (0, -1, 0x0123456789ABCDEF):
        words = torch.empty(4 * len(counters), dtype=torch.int64)
        _philox_kernel[(1,)](torch.tensor(seed), counters, words, THEIRS=theirs, N=len(counters))
        assert torch.equal(words.view(-1, 4), module.philox(torch.tensor(seed), counters))
