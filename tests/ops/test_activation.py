"""bias_gelu: kernels against the reference, threads, special values, errors."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from every_op_tools import implementation
from kernel_tools import DTYPES, KERNELS, ON_CPU, TRITON, check_kernel, random, threads_agree

from fastmp.ops import bias_gelu
from fastmp.ops.core import rowwise as tiles

FORMS = pytest.mark.parametrize("approximate", ("tanh", "none"))
pytestmark = pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")


def inputs(*shape, dtype=torch.float32):
    """x, bias, and the gradient of y."""
    x, grad = (random(*shape, dtype=dtype, seed=seed, scale=2.0) for seed in (0, 1))
    return x, random(shape[-1], dtype=dtype, seed=2), grad


def check(backend, x, bias, grad, approximate="tanh"):
    for shift in (bias, None):
        check_kernel(backend, "bias_gelu", x, shift, approximate)
        check_kernel(backend, "bias_gelu_backward", grad, x, shift, approximate)


@FORMS
@KERNELS
def test_equals_reference(backend, dtype, approximate):
    rows = 18 if backend == "triton" else 70  # of which the interpreter has five tiles, one cut short
    for shape in ((1,), (rows, 1030), (3, 2, 24), (130, 17), (3, 8195), (1, 31), (0, 8), (3, 0)):
        check(backend, *inputs(*shape, dtype=dtype), approximate)


@pytest.mark.parametrize("backend", [TRITON])
def test_layouts(backend):
    x, bias, grad = inputs(20, 40)
    check(backend, x[:, :35], bias[:35], grad[:, 5:])
    check(backend, x.t(), bias[:20], grad.t())
    check(backend, x, bias, torch.ones(()).expand(20, 40))
    check(backend, x, random(80, dtype=torch.float32, seed=4)[::2], grad)


@pytest.mark.full
@pytest.mark.parametrize("backend", [TRITON])
def test_many_strips(backend, monkeypatch):
    """More strips than one step of the second kernel takes, and a last strip cut short."""
    monkeypatch.setattr(tiles, "block_shape", lambda num_cols, itemsize: (2, 16))
    check(backend, *inputs(417, 19))


@ON_CPU
@FORMS
@pytest.mark.parametrize("cols", (1, 300))
def test_results_do_not_depend_on_the_number_of_threads(backend, approximate, cols):
    x, bias, grad = inputs(300_301 // cols, cols)
    forward, backward = (implementation(op, backend) for op in ("bias_gelu", "bias_gelu_backward"))
    assert threads_agree(lambda: (forward(x, bias, approximate), *backward(grad, x, bias, approximate)))


@FORMS
@pytest.mark.parametrize("backend", ["c++", "reference", TRITON])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_special_values_are_those_of_torch(dtype, backend, approximate):
    x = torch.tensor(
        [torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 100.0, -100.0, 1e4, -1e4, 13.5, -13.5], dtype=dtype
    )
    wide, grad = x.double().requires_grad_(), torch.ones_like(x)
    truth = F.gelu(wide, approximate=approximate)
    (slope,) = torch.autograd.grad(truth.sum(), wide)
    y = implementation("bias_gelu", backend)(x, None, approximate)
    dx, _ = implementation("bias_gelu_backward", backend)(grad, x, None, approximate)
    for value, want in ((y, truth.detach()), (dx, slope)):
        torch.testing.assert_close(value.double(), want, rtol=1e-2, atol=1e-6, equal_nan=True)


ONES = torch.ones(2, 3)


@pytest.mark.parametrize(
    ("x", "bias", "approximate", "message"),
    [
        (ONES, torch.zeros(4), "tanh", r"expected bias of shape .* for x .*, got \(4,\)"),
        (ONES, torch.zeros(3).double(), "tanh", r"x is torch.float32 but bias is torch.float64"),
        (ONES, torch.zeros(3, device="meta"), "tanh", r"x is on cpu but bias is on meta"),
        (ONES, None, "erf", r"approximate must be one of tanh, none, got 'erf'"),
        (ONES.int(), None, "tanh", r"got torch.int32"),
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


@pytest.mark.parametrize("sums", (None, torch.empty(1024)), ids=("without", "with"))
def test_without_sums_every_program_has_one_tile(sums, monkeypatch):
    """As many rows as a plain grid has: programs that walk over several have fewer bytes in flight."""
    launched = []
    monkeypatch.setattr(tiles.launcher, "launch", lambda *arguments: launched.append(arguments))
    x = torch.empty(100_000, 1024, dtype=torch.bfloat16, device="meta")
    tiles.launch_with_sums(None, (x, x), (), sums)
    (_, programs, arguments, constants), *_ = launched
    block_m, block_n = constants["BLOCK_M"], constants["BLOCK_N"]
    strips, rows = -(-len(x) // block_m), block_m
    if sums is not None:
        strips, rows = tiles.strip_shape(*x.shape, block_m, block_n)
        assert rows > block_m
    assert programs == strips * -(-1024 // block_n) and arguments[4] == rows
