"""scaled_masked_softmax: hidden keys, empty rows, kernels and reference, threads, errors, costs."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from every_op_tools import implementation
from kernel_tools import DTYPES, KERNELS, ON_CPU, TOLERANCE, TRITON, check_kernel, random, threads_agree

from fastmp.ops import OPS, scaled_masked_softmax
from fastmp.ops import softmax as module

pytestmark = pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")


def _random(*shape, dtype=torch.float64, seed=0):
    return random(*shape, dtype=dtype, seed=seed, scale=3.0)


def _mask(*shape, seed=1):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.3


def _implementations(backend):
    return [implementation(f"scaled_masked_softmax{way}", backend) for way in ("", "_backward")]


def check(backend, x, mask=None, scale=0.3, causal=False, grad=None):
    grad = _random(*x.shape, dtype=x.dtype, seed=2) if grad is None else grad
    atol = min(TOLERANCE[x.dtype], 1e-6)  # probabilities are at most one
    (y,) = check_kernel(backend, "scaled_masked_softmax", x, mask, scale, causal, atol=atol)
    check_kernel(backend, "scaled_masked_softmax_backward", grad, y, scale, causal, atol=atol)


@pytest.mark.parametrize(("queries", "keys"), [(4, 4), (3, 7), (7, 3), (1, 5)])
def test_causal_is_aligned_to_the_bottom_right(queries, keys):
    y = scaled_masked_softmax(torch.zeros(queries, keys), causal=True)
    for query, key in itertools.product(range(queries), range(keys)):
        seen = query + 1 + keys - queries
        assert y[query, key].item() == pytest.approx(1 / seen if key < seen else 0.0)


def test_true_hides_as_in_megatron():
    """SDPA's masks are the other way round, and its causal form is aligned to the top left."""
    q, k, v = (_random(2, 3, 6, 8, seed=seed) for seed in range(3))
    mask = _mask(2, 1, 6, 6) & ~torch.eye(6, dtype=torch.bool)
    for hidden, causal in ((mask, False), (None, True)):
        y = scaled_masked_softmax(q @ k.transpose(-1, -2), hidden, scale=8**-0.5, causal=causal)
        shown = None if hidden is None else ~hidden
        want = F.scaled_dot_product_attention(q, k, v, attn_mask=shown, is_causal=causal)
        torch.testing.assert_close(y @ v, want)


@ON_CPU
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_hidden_cannot_be_seen(dtype, backend):
    """Rows with nothing to see are 0; NaN and infinity behind the mask, or in its gradient, go nowhere."""
    forward, backward = _implementations(backend)
    x, grad = _random(5, 40, dtype=dtype), _random(5, 40, dtype=dtype, seed=1)
    mask = torch.zeros(5, 40, dtype=torch.bool)
    mask[0], mask[1, 5:9], mask[2, 1:] = True, True, True
    x[3] = -torch.inf
    clean = forward(x, mask, 0.5, False)
    clean_dx = backward(grad, clean, 0.5, False)
    x[mask], grad[mask] = torch.nan, torch.inf
    y = forward(x, mask, 0.5, False)
    assert torch.equal(y, clean) and torch.equal(backward(grad, y, 0.5, False), clean_dx)
    assert not y[mask].any() and not y[3].any() and y.isfinite().all()
    assert y[2, 0] == 1 and clean_dx[2].count_nonzero() == 0 and not clean_dx[0].any()
    x[4, 7], mask[4, 20:] = torch.nan, True
    y = forward(x, mask, 0.5, False)
    assert y[4, :20].isnan().all() and not y[4, 20:].any() and torch.equal(y[:4], clean[:4])


@pytest.mark.parametrize("causal", (False, True))
@KERNELS
def test_equals_reference(backend, dtype, causal):
    shapes = [(1, 1), (2, 3, 9, 33), (70, 24), (24, 70), (0, 8), (3, 0)]
    shapes += [(1, 1030)] if backend == "triton" else [(2, 3, 17, 64), (40, 1031), (9, 5), (3, 2, 1, 1)]
    for shape in shapes:
        x = _random(*shape, dtype=dtype)
        masks = [_mask(shape[-1], shape[-2]).t(), _mask(shape[-2], 1), _mask(*shape)]
        for mask in (None, _mask(*shape[-2:]), *(masks if backend == "c++" else ())):
            check(backend, x, mask, causal=causal)
            if backend == "c++":
                check(backend, torch.cat([x, x], -1)[..., : shape[-1]], mask, causal=causal)


@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("dtype", (torch.float32, torch.float64), ids=str)
@pytest.mark.parametrize("backend", [TRITON])
def test_rows_longer_than_registers_hold(backend, dtype, causal):
    x = _random(3, 16400, dtype=dtype)
    assert not module.block_shape(*x.shape, x.element_size())[-1]
    mask = _mask(3, 16400)
    mask[0, :9000], mask[1] = True, True
    check(backend, x, mask, causal=causal)
    x[2, 5], x[2, 16000] = torch.inf, -torch.inf
    check(backend, x, causal=causal)


@pytest.mark.parametrize(
    "mask_shape", [(), (16,), (8, 1), (3, 1, 16), (2, 1, 1, 8, 16), (2, 1, 3, 1, 16), (3, 8, 16)]
)
@pytest.mark.parametrize("backend", ["c++", TRITON])
def test_masks_are_read_by_their_strides(backend, mask_shape):
    x = _random(2, 5, 3, 8, 16, dtype=torch.float32)
    check(backend, x, _mask(*mask_shape))
    check(backend, x, _mask(*mask_shape[::-1]).permute(tuple(reversed(range(len(mask_shape))))))


@pytest.mark.parametrize("backend", ["c++", TRITON])
def test_layouts(backend):
    x, grad = (_random(4, 20, 40, dtype=torch.float32, seed=seed) for seed in (0, 3))
    check(backend, x[..., :35], _mask(20, 35), causal=True, grad=grad[..., 5:])
    check(backend, x.transpose(1, 2), _mask(20), causal=True, grad=grad.transpose(1, 2))
    check(backend, x[:, ::2], causal=True, grad=torch.ones(()).expand(4, 10, 40))


@pytest.mark.parametrize("backend", ["c++", TRITON])
def test_special_values(backend):
    x = _random(8, 8, dtype=torch.float32)
    x[0, 1], x[1, 2], x[2, 3], x[3], x[4, 5] = torch.nan, torch.inf, -torch.inf, -torch.inf, 3e38
    mask = torch.zeros(8, 8, dtype=torch.bool)
    mask[:, 6:], mask[5], mask[6, :6] = True, True, True
    x[5, 0], x[7, 7] = torch.nan, torch.nan  # behind the mask
    check(backend, x, mask, scale=1.0)
    grad = _random(8, 8, dtype=torch.float32, seed=4)
    grad[:, 7] = torch.nan
    check(backend, x, mask, scale=1.0, grad=grad)


@pytest.mark.parametrize("backend", ["c++", TRITON])
def test_the_scale_is_not_rounded_to_float32(backend):
    check(backend, _random(4, 4) * 1e3, scale=1 / 3)


@ON_CPU
@pytest.mark.parametrize("shape", [(1, 200_000), (300, 1000)], ids=str)
def test_results_do_not_depend_on_the_number_of_threads(backend, shape):
    forward, backward = _implementations(backend)
    x, grad = (_random(*shape, dtype=torch.float32, seed=seed) for seed in (0, 1))
    mask = _mask(shape[-1])
    y = forward(x, mask, 0.5, True)
    assert threads_agree(lambda: (forward(x, mask, 0.5, True), backward(grad, y, 0.5, True)))


def test_a_broadcast_mask_is_not_made_whole():
    """Its strides reach the kernel: three groups of leading dimensions are the first that need a copy."""
    shape = (2, 5, 3, 8, 16)
    for mask, group_strides in (
        (_mask(16), (0, 0, 0, 1)),
        (_mask(8, 1), (0, 0, 1, 0)),
        (_mask(2, 1, 1, 1, 16), (16, 0, 0, 1)),
        (_mask(5, 1, 1, 16), ()),
        (_mask(2, 5, 1, 8, 16), (128, 0, 16, 1)),
        (_mask(2, 5, 3, 8, 16), (0, 128, 16, 1)),
    ):
        assert module._mask_strides(mask.shape, mask.stride(), shape)[1:] == group_strides


def test_saves_only_its_output():
    x, mask = _random(6, 8).requires_grad_(), _mask(6, 8)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = scaled_masked_softmax(x, mask, scale=0.5)
    assert [t.data_ptr() for t in saved] == [y.data_ptr()]
    y = scaled_masked_softmax(x, mask)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(y.mul_(2).sum(), x)


def test_autocast_keeps_the_dtype():
    with torch.autocast("cpu", torch.bfloat16):
        assert scaled_masked_softmax(torch.zeros(2, 3)).dtype == torch.float32
        assert scaled_masked_softmax(torch.zeros(2, 3, dtype=torch.bfloat16)).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("x", "mask", "message"),
    [
        (torch.zeros(3), None, r"\(..., queries, keys\), got shape \(3,\)"),
        (torch.zeros(2, 3).int(), None, "got torch.int32"),
        (torch.zeros(2, 3), torch.zeros(2, 3), r"torch.bool \(True hides\), got torch.float32"),
        (
            torch.zeros(2, 3),
            torch.zeros(3, 1).bool(),
            r"mask of shape \(2, 3\) for x of .*, got \(3, 1\)",
        ),
        (
            torch.zeros(2, 3),
            torch.zeros(1, 2, 3).bool(),
            r"for x of shape \(2, 3\), got \(1, 2, 3\)",
        ),
        (torch.zeros(2, 3), torch.zeros(3, device="meta").bool(), "x is on cpu but mask is on meta"),
    ],
)
def test_wrong_arguments(x, mask, message):
    with pytest.raises(ValueError, match=f"scaled_masked_softmax: .*{message}"):
        scaled_masked_softmax(x, mask)


def test_cost_formulas():
    x = torch.zeros(2, 3, 4, 8, dtype=torch.bfloat16)
    forward, backward = OPS["scaled_masked_softmax"], OPS["scaled_masked_softmax_backward"]
    assert forward.traffic(x, None, 1.0, False) == 2 * x.numel() * 2
    assert forward.traffic(x, _mask(2, 1, 1, 8).expand(2, 3, 4, 8), 1.0, False) == 2 * x.numel() * 2 + 16
    seen = 2 * 3 * (5 + 6 + 7 + 8)
    assert forward.traffic(x, None, 1.0, True) == (seen + x.numel()) * 2
    assert backward.traffic(x, x, 1.0, True) == (2 * seen + x.numel()) * 2
    assert forward.flops(x.transpose(2, 3), None, 1.0, True) == 6 * 2 * 3 * (1 + 2 + 3 + 4)
    with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
        scaled_masked_softmax(x)
    assert counter.get_total_flops() == 6 * x.numel()


@pytest.mark.parametrize("itemsize", (2, 4, 8))
@pytest.mark.parametrize("keys", (1, 17, 512, 1500, 4096, 16384, 16385, 1 << 20))
@pytest.mark.parametrize("queries", (1, 3, 4096))
def test_block_shapes(queries, keys, itemsize):
    block_m, block_n, num_warps, whole = module.block_shape(queries, keys, itemsize)
    assert math.log2(block_m) % 1 == math.log2(block_n) % 1 == 0 and 4 <= num_warps <= 32
    assert block_m * block_n // (32 * num_warps) <= 16
    assert block_m == 1 or block_m < 2 * queries
    assert whole == (keys <= (8192 if itemsize == 8 else 16384)) and (not whole or block_n >= keys)
