"""bias_gelu on the CPU: compiled kernel against the reference, threads, special values, errors."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fastmp.ops import OPS, bias_gelu
from fastmp.ops import activation as module
from fastmp.ops.core import rowwise as tiles

FORMS = ("tanh", "none")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
EXACT = {"rtol": 1e-12, "atol": 1e-12}


def _inputs(shape, dtype=torch.float64, with_bias=True, scale=2.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype)
    grad = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    bias = torch.randn(shape[-1], generator=generator, dtype=torch.float64).to(dtype) if with_bias else None
    return x, bias, grad


def _eager(x, bias, grad, approximate):
    """Output and gradients of plain torch."""
    x = x.detach().requires_grad_()
    bias = None if bias is None else bias.detach().requires_grad_()
    y = F.gelu(x if bias is None else x + bias, approximate=approximate)
    return (y, *torch.autograd.grad(y, [x] if bias is None else [x, bias], grad))


def _ours(x, bias, grad, approximate):
    x = x.detach().requires_grad_()
    bias = None if bias is None else bias.detach().requires_grad_()
    y = bias_gelu(x, bias, approximate=approximate)
    return (y, *torch.autograd.grad(y, [x] if bias is None else [x, bias], grad))


@pytest.mark.parametrize("approximate", FORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_compiled_kernel_equals_reference(dtype, approximate):
    if OPS["bias_gelu"].serving["cpu"] != "c++":
        pytest.skip(f"no compiled kernel: {OPS['bias_gelu'].reasons['cpu']}")
    tolerance = {torch.float64: EXACT, torch.float32: {"rtol": 1e-5, "atol": 1e-5}}.get(
        dtype, {"rtol": torch.finfo(dtype).eps, "atol": 1e-5}
    )
    for shape in ((70, 1000), (3, 8195), (1, 31)):
        x, bias, grad = _inputs(shape, dtype)
        ours = torch.ops.fastmp.bias_gelu(x, bias, approximate)
        torch.testing.assert_close(ours, module.reference(x, bias, approximate), **tolerance)
        for name in ("bias", "no bias"):
            arguments = (grad, x, bias if name == "bias" else None, approximate)
            expected = module.reference_backward(*arguments)
            for value, want in zip(torch.ops.fastmp.bias_gelu_backward(*arguments), expected, strict=True):
                torch.testing.assert_close(value, want, msg=lambda m, name=name: f"{name}: {m}", **tolerance)


@pytest.mark.parametrize("backend", (None, "reference"))
@pytest.mark.parametrize("approximate", FORMS)
@pytest.mark.parametrize("cols", (1, 300))
def test_results_do_not_depend_on_the_number_of_threads(backend, approximate, cols):
    x, bias, grad = _inputs((300_301 // cols, cols), torch.float32)
    forward, backward = (
        OPS[op].implementations[backend] if backend else OPS[op].overload
        for op in ("bias_gelu", "bias_gelu_backward")
    )
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            results.append((forward(x, bias, approximate), *backward(grad, x, bias, approximate)))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("approximate", FORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_special_values_are_those_of_torch(dtype, approximate):
    x = torch.tensor(
        [torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 100.0, -100.0, 1e4, -1e4, 13.5, -13.5], dtype=dtype
    )
    grad = torch.ones_like(x)
    wide = _eager(x.double(), None, grad.double(), approximate)
    reference = (
        module.reference(x, None, approximate),
        module.reference_backward(grad, x, None, approximate)[0],
    )
    for results in (_ours(x, None, grad, approximate), reference):
        for ours, truth in zip(results, wide, strict=True):
            torch.testing.assert_close(ours.double(), truth, rtol=1e-2, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize(
    ("x", "bias", "approximate", "message"),
    [
        (
            torch.zeros(2, 3),
            torch.zeros(4),
            "tanh",
            r"expected bias of shape .* for x .*, got \(4,\)",
        ),
        (torch.zeros(2, 3), torch.zeros(3).double(), "tanh", r"x is torch.float32 but bias is torch.float64"),
        (torch.zeros(2, 3), torch.zeros(3, device="meta"), "tanh", r"x is on cpu but bias is on meta"),
        (torch.zeros(2, 3), None, "erf", r"approximate must be one of tanh, none, got 'erf'"),
        (torch.zeros(2, 3, dtype=torch.int32), None, "tanh", r"got torch.int32"),
        (torch.tensor(1.0), None, "tanh", r"at least one dimension, got shape \(\)"),
    ],
)
def test_wrong_arguments(x, bias, approximate, message):
    with pytest.raises(ValueError, match="bias_gelu: .*" + message):
        bias_gelu(x, bias, approximate=approximate)


@pytest.mark.parametrize("num_cols", (1, 8, 100, 768, 1024, 3072, 16384, 49152))
@pytest.mark.parametrize("itemsize", (2, 4, 8))
def test_block_shapes(num_cols, itemsize):
    block_m, block_n = tiles.block_shape(num_cols, itemsize)
    assert block_m & (block_m - 1) == 0 and block_n & (block_n - 1) == 0
    assert block_m * block_n * itemsize == 4 * 32 * tiles.NUM_WARPS * 16  # four 16-byte loads a thread
    padded = -(-num_cols // block_n) * block_n
    assert padded < 2 * num_cols or padded == 16
    for num_rows in (1, 63, 8192, 1 << 22):
        strips, rows = tiles.strip_shape(num_rows, num_cols, block_m, block_n)
        assert (strips - 1) * rows < num_rows <= strips * rows and rows % block_m == 0
        assert strips == 1 or strips * -(-num_cols // block_n) <= 1024
