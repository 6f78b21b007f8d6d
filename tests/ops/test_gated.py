"""swiglu and geglu: kernels against the reference, threads, special values, two tensors, errors."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from every_op_tools import implementation
from kernel_tools import DTYPES, KERNELS, ON_CPU, TOLERANCE, TRITON, check_kernel, random, threads_agree

from fastmp.ops import bias_gelu, geglu, quantize_rows, swiglu
from fastmp.ops import gated as module
from fastmp.ops.core import rowwise as rows
from fastmp.ops.core.fp8 import E4M3

pytestmark = pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")
FORMS = pytest.mark.parametrize("activation", ("silu", "gelu_tanh", "gelu"))
EAGER = {
    "silu": F.silu,
    "gelu_tanh": lambda h: F.gelu(h, approximate="tanh"),
    "gelu": F.gelu,
}


def _inputs(*shape, dtype=torch.float32):
    """x (..., 2F), bias (2F,), and the gradient of y (..., F)."""
    x, bias = random(*shape, dtype=dtype, scale=2.0), random(shape[-1], dtype=dtype, seed=1)
    return x, bias, random(*shape[:-1], shape[-1] // 2, dtype=dtype, seed=2)


def _implementations(backend):
    return [implementation(f"gated_activation{way}", backend) for way in ("", "_backward")]


def check(backend, x, bias, grad, activation):
    for shift in (bias, None):
        check_kernel(backend, "gated_activation", x, shift, activation)
        check_kernel(backend, "gated_activation_backward", grad, x, shift, activation)


@FORMS
@KERNELS
def test_equals_reference(backend, dtype, activation):
    rows = 37 if backend == "triton" else 70  # of which the interpreter has several tiles
    for shape in ((2,), (rows, 1000), (3, 2, 24), (130, 34), (3, 2060), (1, 62), (5, 2), (0, 8), (3, 0)):
        check(backend, *_inputs(*shape, dtype=dtype), activation)
    if backend == "c++":
        check(backend, *_inputs(3, 2 * 8195, dtype=dtype), activation)


@pytest.mark.parametrize("backend", ["c++", TRITON])
def test_layouts(backend):
    x, bias, grad = _inputs(20, 40)
    check(backend, x[:, :34], bias[:34], grad[:, 3:], "silu")
    check(backend, x.t(), bias[:20], grad[:10].reshape(10, 20)[:, :10].repeat(4, 1), "silu")
    check(backend, x, bias, torch.ones(()).expand(20, 20), "silu")
    check(backend, x, random(80, dtype=torch.float32, seed=4)[::2], grad, "silu")


@pytest.mark.full
@pytest.mark.parametrize("backend", [TRITON])
def test_many_strips(backend, monkeypatch):
    """More strips than one step of the second kernel takes, and a last strip cut short."""
    monkeypatch.setattr(rows, "block_shape", lambda num_cols, itemsize: (4, 16))
    check(backend, *_inputs(289, 38), "gelu_tanh")


@ON_CPU
@FORMS
@pytest.mark.parametrize("columns", (2, 300))
def test_results_do_not_depend_on_the_number_of_threads(backend, activation, columns):
    x, bias, grad = _inputs(300_301 // columns, columns)
    forward, backward = _implementations(backend)
    assert threads_agree(lambda: (forward(x, bias, activation), *backward(grad, x, bias, activation)))


@pytest.mark.parametrize("backend", ["c++", "reference", TRITON])
@FORMS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_special_gates_are_those_of_torch(dtype, activation, backend):
    gate = torch.tensor(
        [torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 100.0, -100.0, 1e4, -1e4, 13.5, -13.5], dtype=dtype
    )
    x = torch.cat([gate, torch.ones_like(gate)])
    forward, backward = _implementations(backend)
    leaf = gate.double().requires_grad_()
    truth = EAGER[activation](leaf)
    (slope,) = torch.autograd.grad(truth.sum(), leaf)
    results = forward(x, None, activation), backward(torch.ones_like(gate), x, None, activation)[0]
    for value, want in zip(results, (truth.detach(), torch.cat([slope, truth.detach()])), strict=True):
        torch.testing.assert_close(value.double(), want, rtol=TOLERANCE[dtype], atol=1e-6, equal_nan=True)


def test_geglu_agrees_with_bias_gelu():
    x, bias, _ = _inputs(5, 24, dtype=torch.float64)
    for approximate in ("tanh", "none"):
        gate = bias_gelu(x[:, :12], bias[:12], approximate=approximate)
        ours = geglu(x, bias=bias, approximate=approximate)
        torch.testing.assert_close(ours, gate * (x[:, 12:] + bias[12:]), rtol=1e-13, atol=1e-13)
    assert torch.equal(geglu(x), geglu(x, approximate="tanh"))


@pytest.mark.parametrize("function", (swiglu, geglu))
@pytest.mark.parametrize(
    ("x", "bias", "message"),
    [
        (torch.zeros(2, 6), torch.zeros(3), r"expected bias of .* for x of shape \(2, 6\), got \(3,\)"),
        (torch.zeros(2, 6), torch.zeros(6).double(), r"x is torch.float32 but bias is torch.float64"),
        (torch.zeros(2, 6), torch.zeros(6, device="meta"), r"x is on cpu but bias is on meta"),
        (torch.zeros(2, 6, dtype=torch.int32), None, r"got torch.int32"),
        (torch.zeros(2, 5), None, r"dimension of even size, got shape \(2, 5\)"),
        (torch.tensor(1.0), None, r"at least one dimension, got shape \(\)"),
    ],
)
def test_wrong_arguments(function, x, bias, message):
    with pytest.raises(ValueError, match=f"{function.__name__}: .*{message}"):
        function(x, bias=bias)


@ON_CPU
@FORMS
@pytest.mark.parametrize("with_bias", (True, False))
def test_two_tensors_give_the_same_bits_as_one(activation, with_bias, backend):
    """gate and up in tensors of their own, also with rows apart and of different strides."""
    x, bias, grad = _inputs(37, 130)
    bias = bias if with_bias else None
    gate, up = x.chunk(2, -1)
    forward, backward = _implementations(backend)
    y, (dx, nothing, dbias) = forward(x, bias, activation), backward(grad, x, bias, activation)
    assert nothing.numel() == 0
    for first, second in ((gate, up), (gate.contiguous(), up), (gate.t().contiguous().t(), up.contiguous())):
        dgate, dup, again = backward(grad, first, bias, activation, second)
        assert torch.equal(forward(first, bias, activation, second), y)
        assert torch.equal(torch.cat((dgate, dup), -1), dx) and torch.equal(again, dbias)
        assert dgate.is_contiguous() and dup.is_contiguous()


@pytest.mark.parametrize(
    ("up", "message"),
    [
        (torch.zeros(2, 4), r"expected up of .* for gate of shape \(2, 3\), got \(2, 4\)"),
        (torch.zeros(2, 3).half(), r"gate is torch.float32 but up is torch.float16"),
        (torch.zeros(2, 3, device="meta"), r"gate is on cpu but up is on meta"),
    ],
)
def test_wrong_second_tensor(up, message):
    with pytest.raises(ValueError, match=f"swiglu: {message}"):
        swiglu(torch.zeros(2, 3), up)
    with pytest.raises(ValueError, match=r"swiglu: expected bias of .* for gate of .*, got \(3,\)"):
        swiglu(torch.zeros(2, 3), torch.zeros(2, 3), bias=torch.zeros(3))


def test_unknown_form():
    with pytest.raises(ValueError, match="geglu: approximate must be one of tanh, none, got 'erf'"):
        geglu(torch.zeros(2, 6), approximate="erf")


@pytest.mark.parametrize("num_cols", (1, 8, 100, 768, 14336, 53248))
@pytest.mark.parametrize("itemsize", (2, 4, 8))
def test_backward_blocks(num_cols, itemsize):
    block_m, block_n = module.backward_block_shape(num_cols, itemsize)
    assert block_m >= 1 and block_m * block_n * itemsize == 2 * 32 * rows.NUM_WARPS * 16


@pytest.mark.parametrize("backend", ["c++", TRITON])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_quantized_result_is_the_quantised_result(dtype, backend):
    """Byte for byte, of one tensor or two, with a bias or without."""
    x, bias, grad = _inputs(37, 512, dtype=dtype)
    plain, quantized = (implementation(f"gated_activation{end}", backend) for end in ("", "_quantized"))
    for gates, shift, up, block in ((x, bias, None, 128), (x[:, :256], None, grad, 32)):
        q, s = quantized(gates, shift, "silu", up, block, E4M3)
        want, scales = quantize_rows(plain(gates, shift, "silu", up), block=block)
        assert torch.equal(q.view(torch.uint8), want.view(torch.uint8)) and torch.equal(
            s.float(), scales.float()
        )
    with pytest.raises(ValueError, match=r"swiglu: F must be a multiple of block \(128\), got 100"):
        swiglu(x[:, :200], quantize=True)
