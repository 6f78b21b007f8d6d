"""bias_dropout_add: the masks of its kernels bit for bit, values as the reference's, threads."""

from __future__ import annotations

import pytest
import torch
from every_op_tools import implementation
from kernel_tools import DTYPES, KERNELS, ON_CPU, TRITON, check_kernel, random, threads_agree

from fastmp.ops import dropout as module
from fastmp.ops.core import _triton

tl = _triton.tl
SEED = torch.tensor(-(3 << 60) + 12345)
WIDTHS = [(dtype, dtype) for dtype in DTYPES] + [(dtype, torch.float32) for dtype in DTYPES[2:]]


def _implementations(backend):
    return [implementation(f"bias_dropout_add{way}", backend) for way in ("", "_backward")]


def inputs(*shape, dtype=torch.float32):
    """x, bias, residual, and the gradient of y."""
    x, residual, grad = (random(*shape, dtype=dtype, seed=seed) for seed in (0, 1, 2))
    return x, random(shape[-1], dtype=dtype, seed=3), residual, grad


def check(backend, x, bias, residual, grad, p):
    for shift in (bias, None):
        check_kernel(backend, "bias_dropout_add", x, shift, residual, p, SEED if p else None)
        if p:
            check_kernel(backend, "bias_dropout_add_backward", grad, p, SEED, x.dtype, shift is not None)


@KERNELS
def test_equals_reference(backend, dtype):
    shapes = ((1,), (9, 516), (3, 2, 24), (33, 17), (1, 31), (0, 8), (3, 0))
    for shape in (*shapes, *(((70, 100), (3, 8195), (200, 2)) if backend == "c++" else ())):
        for p in (0.0, 0.3, 1.0):
            check(backend, *inputs(*shape, dtype=dtype), p)


SHAPES = [(1,), (5,), (1000, 1), (1000, 3), (3, 64), (7, 33), (130, 129), (3, 8195), (65, 1024), (2, 3, 20)]


@pytest.mark.parametrize(
    ("backend", "shape", "p", "seed", "widths"),
    [
        *(
            ("c++", shape, p, seed, WIDTHS)
            for shape in SHAPES
            for p, seed in ((0.1, 0), (0.5, -1), (0.9, 123_456_789_012_345))
        ),
        *(
            pytest.param("triton", *case, [(dtype, dtype)], marks=pytest.mark.interpret)
            for *case, dtype in (
                ((40, 130), 0.1, 0, torch.float32),
                ((6, 1028), 0.5, -1, torch.bfloat16),
                ((5, 1032), 0.9, (1 << 62) + 7, torch.bfloat16),
                ((5, 516), 0.3, 1 << 40, torch.float64),
                ((2, 9, 33), 0.5, 77, torch.float16),
            )
        ),
    ],
)
def test_masks_are_those_of_the_reference(backend, shape, p, seed, widths):
    """Forward and backward, with a residual and a gradient of x's dtype and of float32."""
    key, (forward, backward) = torch.tensor(seed), _implementations(backend)
    mask = module.keep_mask(shape, p, key)
    for dtype, wide in widths:
        ones, zeros = torch.ones(shape, dtype=dtype), torch.zeros(shape, dtype=wide)
        y = forward(ones, None, zeros, p, key)
        assert torch.equal(y != 0, mask) and y.dtype == wide
        grads = backward(ones.to(wide), p, key, dtype, True)
        assert torch.equal(grads[0] != 0, mask) and grads[0].dtype == grads[1].dtype == dtype


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("columns", (24, 17))
@pytest.mark.parametrize("backend", ["c++", TRITON])
def test_a_float32_residual(backend, columns, dtype):
    _, _, residual, grad = inputs(20, columns)
    for p in (0.3, 0.0):
        check(backend, *inputs(20, columns, dtype=dtype)[:2], residual, grad, p)


@pytest.mark.parametrize("backend", ["c++", TRITON])
def test_layouts(backend):
    x, bias, residual, grad = inputs(20, 40)
    for case in (
        (x[:, :36], bias[:36], residual[:, 3:39], grad[:, 4:]),
        (x.t(), bias[:20], residual.t(), grad.t()),
        (x, bias, residual, torch.ones(()).expand(20, 40)),
        (x, random(80, dtype=torch.float32, seed=7)[::2], residual, grad),
    ):
        for p in (0.4, 0.0):
            check(backend, *case, p)


@pytest.mark.parametrize("backend", [TRITON])
def test_many_strips(backend, monkeypatch):
    """Several strips and blocks of columns, the last of which are cut short."""
    monkeypatch.setattr(module, "block_shape", lambda num_cols, itemsize: (4, 16))
    for columns in (19, 20):
        check(backend, *inputs(37, columns), 0.2)


@pytest.mark.parametrize("backend", ["c++", "reference", TRITON])
def test_what_is_dropped_leaves_no_trace(backend):
    """Unlike a product with a mask, which keeps NaN and makes one of infinity."""
    kept, residual = module.keep_mask((16, 32), 0.5, SEED), random(16, 32, dtype=torch.float32)
    forward, backward = _implementations(backend)
    for value in (torch.nan, torch.inf, -torch.inf):
        x = torch.full((16, 32), value)
        y = forward(x, None, residual, 0.5, SEED)
        assert torch.equal(y[~kept], residual[~kept])
        torch.testing.assert_close(y[kept], x[kept], equal_nan=True)
        assert torch.equal(forward(x, None, residual, 1.0, SEED), residual)
        assert not any(grad.any() for grad in backward(x, 1.0, SEED, x.dtype, True))


@ON_CPU
@pytest.mark.parametrize("cols", (1, 300))
def test_results_do_not_depend_on_the_number_of_threads(backend, cols):
    x, bias, residual, grad = inputs(300_300 // cols, cols)
    forward, backward = _implementations(backend)
    assert threads_agree(
        lambda: (forward(x, bias, residual, 0.3, SEED), *backward(grad, 0.3, SEED, x.dtype, True))
    )


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


@pytest.mark.interpret
@pytest.mark.parametrize("theirs", (False, True), ids=("ours", "tl.randint4x"))
def test_words_are_those_of_the_reference_and_of_triton(theirs):
    """Also where the counter, and the number of an element, are beyond 32 bits."""
    starts = torch.tensor([0, (1 << 29) - 8, (1 << 31) - 8, (1 << 32) - 8, (1 << 40) + 3])
    counters = torch.cat([(starts[:, None] + torch.arange(16)).flatten(), torch.arange(48)])
    for seed in (0, -1, 0x0123456789ABCDEF):
        words = torch.empty(4 * len(counters), dtype=torch.int64)
        _philox_kernel[(1,)](torch.tensor(seed), counters, words, THEIRS=theirs, N=len(counters))
        assert torch.equal(words.view(-1, 4), module.philox(torch.tensor(seed), counters))
