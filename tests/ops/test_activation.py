"""bias_gelu on the CPU: values, gradients, accuracy, layouts, special values, torch.compile and errors."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

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


@pytest.mark.parametrize("with_bias", (True, False), ids=("bias", "no-bias"))
@pytest.mark.parametrize("approximate", FORMS)
@pytest.mark.parametrize(
    "shape", [(1,), (7,), (3, 5, 17), (130, 9001), (65, 64), (0, 8), (4, 0), (2, 0, 3)], ids=str
)
def test_equals_torch_in_float64(shape, approximate, with_bias):
    inputs = _inputs(shape, with_bias=with_bias)
    for ours, theirs in zip(_ours(*inputs, approximate), _eager(*inputs, approximate), strict=True):
        torch.testing.assert_close(ours, theirs, **EXACT)


def _rms(value, truth):
    return (value.double() - truth).square().mean().sqrt().item()


@pytest.mark.parametrize("approximate", FORMS)
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32), ids=str)
def test_no_less_accurate_than_torch(dtype, approximate):
    """Root mean square error against float64 over 1e5 elements, at most 1.1 times that of torch's own ops."""
    x, bias, grad = _inputs((256, 512), dtype)
    truths = _eager(x.double(), bias.double(), grad.double(), approximate)
    slack = 1.1 if dtype.itemsize == 2 else 2.0  # fp32: both are at a few units in the last place
    for ours, theirs, truth in zip(
        _ours(x, bias, grad, approximate), _eager(x, bias, grad, approximate), truths, strict=True
    ):
        assert _rms(ours, truth) <= slack * _rms(theirs, truth)


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


@settings(max_examples=60)
@given(
    rows=st.sampled_from((0, 1, 2, 13, 67)),
    cols=st.sampled_from((0, 1, 2, 15, 16, 17, 31, 127)),
    dtype=st.sampled_from((torch.float64, torch.float32, torch.bfloat16)),
    layout=st.sampled_from(
        ("contiguous", "padded rows", "transposed", "every second", "expanded", "3d slice")
    ),
    approximate=st.sampled_from(FORMS),
    with_bias=st.booleans(),
)
def test_any_size_and_layout(rows, cols, dtype, layout, approximate, with_bias):
    _, bias, _ = _inputs((1, cols), dtype, with_bias)
    shape = {
        "contiguous": (rows, cols),
        "padded rows": (rows, cols + 3),
        "transposed": (cols, rows),
        "every second": (rows, 2 * cols),
        "expanded": (1, cols),
        "3d slice": (rows, 2, cols + 1),
    }[layout]
    x, _, grad = _inputs(shape, dtype)

    def view(t):
        if layout == "transposed":
            return t.t()
        if layout == "every second":
            return t[:, ::2]
        return t.expand(rows, cols) if layout == "expanded" else t[..., :cols]

    x, grad = view(x), view(grad)
    ours, dx, *dbias = _ours(x, bias, grad, approximate)
    assert ours.is_contiguous() and dx.is_contiguous()
    wide = None if bias is None else bias.double()
    truths = _eager(x.double(), wide, grad.double(), approximate)
    tolerance = 1e-12 if dtype == torch.float64 else 2e-5 if dtype == torch.float32 else 1e-2
    for value, truth in zip((ours, dx, *dbias), truths, strict=True):
        scale = max(1.0, truth.abs().max().item() if truth.numel() else 0.0)
        torch.testing.assert_close(value.double(), truth, rtol=tolerance, atol=tolerance * scale)


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


@pytest.mark.parametrize("approximate", FORMS)
@pytest.mark.parametrize("with_bias", (True, False), ids=("bias", "no-bias"))
def test_gradcheck(approximate, with_bias):
    x, bias, _ = _inputs((3, 5), with_bias=with_bias)
    inputs = (x.requires_grad_(), None if bias is None else bias.requires_grad_())
    assert torch.autograd.gradcheck(lambda a, b: bias_gelu(a, b, approximate=approximate), inputs)


@pytest.mark.parametrize("approximate", FORMS)
@pytest.mark.parametrize("with_bias", (True, False), ids=("bias", "no-bias"))
def test_opcheck(approximate, with_bias):
    x, bias, grad = _inputs((6, 9), torch.float32, with_bias)
    padded = _inputs((6, 12), torch.float32)[0][:, :9]
    for value in (x, padded):
        leaf = value.detach().requires_grad_()
        parameter = None if bias is None else bias.detach().requires_grad_()
        torch.library.opcheck(torch.ops.fastmp.bias_gelu.default, (leaf, parameter, approximate))
        torch.library.opcheck(torch.ops.fastmp.bias_gelu_backward.default, (grad, value, bias, approximate))


def test_compiles_as_one_graph():
    x, bias, grad = _inputs((6, 8), torch.float32)

    def f(x, bias):
        return bias_gelu(x * 2, bias, approximate="none") + 1

    for dynamic in (False, True):
        compiled = torch.compile(f, backend="aot_eager", fullgraph=True, dynamic=dynamic)
        results = []
        for function in (f, compiled):
            leaves = x.detach().requires_grad_(), bias.detach().requires_grad_()
            y = function(*leaves)
            results.append((y, *torch.autograd.grad(y, leaves, grad)))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_saves_only_its_inputs():
    x, bias, _ = _inputs((6, 8))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        bias_gelu(x.requires_grad_(), bias.requires_grad_())
    assert {t.data_ptr() for t in saved} == {x.data_ptr(), bias.data_ptr()}


def test_second_derivative_raises():
    x, bias, _ = _inputs((3, 4))
    y = bias_gelu(x.requires_grad_(), bias)
    (dx,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="bias_gelu: its backward is not differentiable"):
        dx.sum().backward()


def test_frozen_bias_and_frozen_input():
    x, bias, grad = _inputs((3, 4))
    expected = _eager(x, bias, grad, "tanh")
    leaf = x.detach().requires_grad_()
    (dx,) = torch.autograd.grad(bias_gelu(leaf, bias), leaf, grad)
    leaf = bias.detach().requires_grad_()
    (dbias,) = torch.autograd.grad(bias_gelu(x, leaf), leaf, grad)
    torch.testing.assert_close((dx, dbias), expected[1:], **EXACT)


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


def test_cost_formulas():
    x, bias, grad = _inputs((6, 8), torch.bfloat16)
    forward, backward = OPS["bias_gelu"], OPS["bias_gelu_backward"]
    assert forward.traffic(x, bias, "tanh") == 2 * (2 * 48 + 8)
    assert forward.traffic(x, None, "tanh") == 2 * (2 * 48)
    assert backward.traffic(grad, x, bias, "tanh") == 2 * (3 * 48 + 2 * 8)
    assert forward.flops(x, bias, "tanh") == 9 * 48
    with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
        bias_gelu(x, bias)
    assert counter.get_total_flops() == 9 * 48


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
