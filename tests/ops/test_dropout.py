"""bias_dropout_add on the CPU: the mask and its statistics, values, gradients, random state, errors."""

from __future__ import annotations

import ctypes
import math

import pytest
import torch
import torch.nn.functional as F
from cpp_tools import compiled, pointers, runnable

from fastmp.distributed.rng import RngTracker
from fastmp.ops import bias_dropout_add
from fastmp.ops import dropout as module
from fastmp.testing.ranks import run_ranks

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
HALVES = DTYPES[2:]
EXACT = {"rtol": 1e-12, "atol": 1e-12}
SEEDS = (0, -1, 123_456_789_012_345, -(1 << 62) + 5)


def key(number: int) -> torch.Tensor:
    return torch.tensor(number, dtype=torch.int64)


def random(*shape, dtype=torch.float64, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def inputs(*shape, dtype=torch.float64):
    """x, bias, residual that require grad, and a gradient."""
    x, residual, grad = (random(*shape, dtype=dtype, seed=seed) for seed in (0, 1, 2))
    bias = random(shape[-1], dtype=dtype, seed=3)
    return x.requires_grad_(), bias.requires_grad_(), residual.requires_grad_(), grad


def words(count: int, seed: int, first: int = 0) -> torch.Tensor:
    """The words of elements 4 * first up to 4 * first + count, int64."""
    return module.philox(key(seed), first + torch.arange(-(-count // 4))).flatten()[:count]


def in_plain_python(counter: tuple[int, ...], seed: tuple[int, int]) -> list[int]:
    """Philox-4x32-10 as its authors write it."""
    (a, b, c, d), (k0, k1) = counter, seed
    for _ in range(10):
        p, q = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = (q >> 32) ^ b ^ k0, q & 0xFFFFFFFF, (p >> 32) ^ d ^ k1, p & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return [a, b, c, d]


def test_known_answers():
    """The Random123 library publishes them, for plain Python: masks count in the first half only, and other
    ops name a stream in the third quarter."""
    ones = 0xFFFFFFFF
    assert in_plain_python((0, 0, 0, 0), (0, 0)) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert in_plain_python((ones,) * 4, (ones, ones)) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    answer = [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]
    assert in_plain_python(pi, (0xA4093822, 0x299F31D0)) == answer
    for seed in SEEDS:
        for counter in (0, 1, (1 << 29) - 1, (1 << 32) - 1, 1 << 32, (1 << 62) + 12345):
            for stream in (0, 1, ones):
                parts = (counter & ones, counter >> 32, stream, 0), (seed & ones, (seed >> 32) & ones)
                made = module.philox(key(seed), key(counter), stream)
                assert made.tolist() == in_plain_python(*parts)


KERNEL = """
#include "cpu/dropout.cpp"
namespace fastmp::FASTMP_ISA {
extern "C" void drop(const void* x, const void* zeros, void* y, int bits, int64_t rows, int64_t cols,
                     int64_t first, int64_t seed, uint32_t threshold) {
  DropTile tile{};
  tile.x = x, tile.residual = zeros, tile.out = y;
  tile.num_rows = rows, tile.num_cols = tile.width = cols;
  tile.x_pitch = tile.residual_pitch = tile.out_pitch = cols;
  tile.first = first, tile.seed = seed, tile.threshold = threshold, tile.drops = true, tile.scale = 1.0;
  tile.dtype = bits == 64 ? ScalarType::Double : bits == 32 ? ScalarType::Float : ScalarType::BFloat16;
  bias_dropout_add_tile(tile);
}
}
"""


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    return compiled(tmp_path_factory.mktemp("kernels"), KERNEL, runnable())


@pytest.mark.full
@pytest.mark.parametrize("isa", runnable())
def test_every_instruction_set_has_the_same_masks(kernels, isa):
    """Also where the number of an element is beyond 31 bits, or that of a counter beyond 32."""
    for dtype in DTYPES[:3]:
        for rows, cols in ((3, 100), (5, 33), (40, 1)):
            for first in (0, 7, (1 << 31) - 50, (1 << 34) - 50):
                x, zeros, y = (torch.full((rows, cols), fill, dtype=dtype) for fill in (1, 0, 2))
                sizes = (ctypes.c_int64(n) for n in (rows, cols, first, SEEDS[2]))
                bits, threshold = ctypes.c_int(8 * dtype.itemsize), ctypes.c_uint32(1 << 31)
                kernels[isa].drop(*pointers(x, zeros, y), bits, *sizes, threshold)
                made = words(first % 4 + x.numel(), SEEDS[2], first // 4)[first % 4 :]
                assert torch.equal(y.flatten(), (made >= 1 << 31).to(dtype))


def test_the_mask_does_not_depend_on_layout():
    mask = module.keep_mask((33, 20), 0.5, key(3))
    wide = torch.ones(40, 66)
    for ones in (wide.t()[:33, :20], wide[:33, 20:], wide[3:36, ::2][:, :20], torch.ones(()).expand(33, 20)):
        for zeros in (torch.zeros(33, 20), torch.zeros(20, 33).t(), torch.zeros(33, 27)[:, 3:23]):
            y = bias_dropout_add(ones[:, :20], None, zeros, p=0.5, seed=key(3))
            assert torch.equal(y != 0, mask) and y.is_contiguous()


@pytest.mark.parametrize("p", (0.01, 0.1, 0.5, 0.9))
def test_the_share_that_is_kept(p):
    """Within four standard deviations for each of several seeds."""
    for seed in range(8):
        n = 1 << 16
        kept = module.keep_mask((n,), p, key(seed)).sum().item()
        assert abs(kept - n * (1 - p)) < 4 * math.sqrt(n * p * (1 - p))


def chi_square(counts: torch.Tensor, expected: torch.Tensor | float) -> float:
    """Pearson's statistic, standardised: about normal for many cells."""
    statistic = ((counts - expected) ** 2 / expected).sum().item()
    freedom = counts.numel() - 1
    return (statistic - freedom) / math.sqrt(2 * freedom)


@pytest.mark.parametrize("seed", SEEDS)
def test_words_are_uniform(seed):
    """The upper and the lower byte of each of the four words of a counter, near zero and near 2^32."""
    for first in (0, (1 << 32) - (1 << 15)):
        made = words(1 << 17, seed, first).view(-1, 4)
        for word in range(4):
            for shift in (0, 24):
                counts = torch.bincount(made[:, word] >> shift & 255, minlength=256)
                assert abs(chi_square(counts, len(made) / 256)) < 4.5


def joint(one: torch.Tensor, other: torch.Tensor, p: float) -> float:
    """Chi-square of two masks being dropped together, alone or not at all, against independence."""
    cells = 2 * one.flatten() + other.flatten()
    probability = torch.tensor([p * p, p * (1 - p), p * (1 - p), (1 - p) ** 2], dtype=torch.float64)
    counts = torch.bincount(cells, minlength=4)
    return ((counts - len(cells) * probability) ** 2 / (len(cells) * probability)).sum().item()


@pytest.mark.full
@pytest.mark.parametrize("p", (0.1, 0.5))
def test_masks_are_independent(p):
    """A mask is independent of other seeds, near and far, and of itself shifted by elements, fours, rows.

    The chi-square statistic of 3 degrees of freedom is below 21 in all but one of 10,000 cases.
    """
    shape = (512, 384)
    mask = module.keep_mask(shape, p, key(1)).long()
    for seed in (0, 2, 3, -1, 1 + (1 << 32), (1 << 63) - 1, 1 ^ (1 << 40)):
        assert joint(mask, module.keep_mask(shape, p, key(seed)).long(), p) < 21, seed
    flat = mask.flatten()
    for shift in (1, 2, 3, 4, 5, 8, 64, 384, 4 * 384, 1 << 16):
        assert joint(flat[:-shift], flat[shift:], p) < 21, shift


def test_rows_and_columns_are_dropped_alike():
    mask, p = module.keep_mask((1024, 768), 0.1, key(11)).double(), 0.1
    for dim, length in ((0, 1024), (1, 768)):
        spread = (mask.sum(dim) - length * (1 - p)) ** 2 / (length * p * (1 - p))
        cells = spread.numel()
        assert abs(spread.sum().item() - cells) < 4.5 * math.sqrt(2 * cells)


@pytest.mark.parametrize("dtype", (torch.float64, torch.float32), ids=str)
@pytest.mark.parametrize("off", ({"p": 0.0}, {"p": 0.4, "training": False}), ids=("p = 0", "not training"))
def test_without_dropout_it_is_bitwise_two_additions(dtype, off):
    """Values and gradients as autograd has them, no random number drawn, and nothing kept."""
    x, bias, residual, grad = inputs(6, 5, 40, dtype=dtype)
    state = torch.get_rng_state()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: pytest.fail("saved"), lambda t: t):
        y = bias_dropout_add(x, bias, residual, **off)
    assert torch.equal(state, torch.get_rng_state())
    expected = residual + (x + bias)
    assert torch.equal(y, expected)
    leaves = (x, bias, residual)
    pairs = zip(torch.autograd.grad(y, leaves, grad), torch.autograd.grad(expected, leaves, grad))
    assert all(torch.equal(a, b) for a, b in pairs)


def test_half_precision_is_rounded_once():
    x, bias, residual, _ = inputs(64, 64, dtype=torch.bfloat16)
    wide = residual.float() + (x.float() + bias.float())
    assert torch.equal(bias_dropout_add(x, bias, residual, p=0.0), wide.bfloat16())
    kept = module.keep_mask(x.shape, 0.25, key(2))
    wide = residual.float() + torch.where(kept, (x.float() + bias.float()) / 0.75, 0)
    y = bias_dropout_add(x, bias, residual, p=0.25, seed=key(2))
    assert (y == wide.bfloat16()).float().mean() > 0.999  # / 0.75 rounds unlike * 4 / 3


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_everything_is_dropped_at_one(dtype):
    x, bias, residual, grad = inputs(5, 9, dtype=dtype)
    with torch.no_grad():
        x[0, 0], bias[1] = math.nan, math.inf
    y = bias_dropout_add(x, bias, residual, p=1.0)
    dx, dbias, dresidual = torch.autograd.grad(y, (x, bias, residual), grad)
    assert torch.equal(y, residual) and torch.equal(dresidual, grad) and not dx.any() and not dbias.any()


def test_values_and_gradients():
    x, bias, residual, grad = inputs(4, 6, 10)
    y = bias_dropout_add(x, bias, residual, p=0.2, seed=key(4))
    scale = module.keep_mask(x.shape, 0.2, key(4)) / 0.8
    torch.testing.assert_close(y, residual + (x + bias) * scale, **EXACT)
    dx, dbias, dresidual = torch.autograd.grad(y, (x, bias, residual), grad)
    torch.testing.assert_close(dx, grad * scale, **EXACT)
    torch.testing.assert_close(dbias, (grad * scale).sum((0, 1)), **EXACT)
    assert dresidual.data_ptr() == grad.data_ptr()  # no copy


def test_keeps_the_seed_only():
    x, bias, residual, _ = inputs(6, 8)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        bias_dropout_add(x, bias, residual, p=0.5)
    assert [(t.dtype, t.numel()) for t in saved] == [(torch.int64, 1)]


def test_frozen_inputs_cost_nothing():
    x, bias, residual, grad = inputs(5, 8)
    expected = torch.autograd.grad(
        bias_dropout_add(x, bias, residual, p=0.5, seed=key(1)), (x, bias, residual), grad
    )
    for number, leaf in enumerate((x, bias, residual)):
        frozen = [t if t is leaf else t.detach() for t in (x, bias, residual)]
        (value,) = torch.autograd.grad(bias_dropout_add(*frozen, p=0.5, seed=key(1)), leaf, grad)
        assert torch.equal(value, expected[number])
    y = bias_dropout_add(x.detach(), bias.detach(), residual, p=0.5)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        y.backward(grad)
    assert "fastmp::bias_dropout_add_backward" not in {event.key for event in profile.key_averages()}


@pytest.mark.parametrize("training", (True, False))
@pytest.mark.parametrize("wide", (True, False))
@pytest.mark.parametrize("contiguous", (True, False))
def test_a_result_goes_where_it_is_wanted(contiguous, wide, training):
    x, bias, residual, grad = inputs(6, 5, 40, dtype=torch.bfloat16)
    if wide:
        residual, grad = residual.detach().float().requires_grad_(), grad.float()
    options = {"p": 0.3, "training": training, "seed": key(5)}
    out = torch.full(x.shape, torch.nan, dtype=residual.dtype)
    out = out if contiguous else out.transpose(0, 2).contiguous().transpose(0, 2)
    expected, y = (
        bias_dropout_add(x, bias, residual, **options, out=place) for place in (None, out.detach())
    )
    assert torch.equal(y, expected) and torch.equal(out, expected) and y.data_ptr() == out.data_ptr()
    grads = [torch.autograd.grad(each, (x, bias, residual), grad) for each in (y, expected)]
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True)) and not out.requires_grad


@pytest.mark.parametrize("p", (0.0, 0.3))
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_float32_residual_stays_float32(dtype, p):
    x, bias, _, _ = inputs(6, 5, 40, dtype=dtype)
    residual, grad = random(6, 5, 40, dtype=torch.float32).requires_grad_(), random(6, 5, 40).float()
    y = bias_dropout_add(x, bias, residual, p=p, seed=key(5))
    scale = module.keep_mask(x.shape, p, key(5)) / (1 - p)
    torch.testing.assert_close(y, residual + (x.float() + bias.float()) * scale)
    grads = torch.autograd.grad(y, (x, bias, residual), grad)
    assert [g.dtype for g in grads] == [dtype, dtype, torch.float32]
    torch.testing.assert_close(grads[0], (grad * scale).to(dtype))
    torch.testing.assert_close(grads[1], (grad * scale).sum((0, 1)).to(dtype))


def test_autocast_leaves_the_residual_alone():
    """A linear layer's output has the narrow dtype, its bias float32, the stream of residuals float32."""
    x, bias, residual, grad = inputs(6, 5, 40, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y = bias_dropout_add(x.bfloat16(), bias, residual, p=0.3, seed=key(5))
    assert torch.equal(y, bias_dropout_add(x.bfloat16(), bias.bfloat16(), residual, p=0.3, seed=key(5)))
    assert [g.dtype for g in torch.autograd.grad(y, (x, bias, residual), grad)] == [torch.float32] * 3


def test_the_seed_is_drawn_from_the_default_generator():
    x, bias, residual, _ = inputs(30, 40)
    torch.manual_seed(3)
    first, second, third = bias_dropout_add(x, bias, residual, p=0.5), torch.rand(()), torch.rand(())
    torch.manual_seed(3)
    assert torch.equal(bias_dropout_add(x, bias, residual, p=0.5), first) and torch.rand(()) == second
    assert not torch.equal(bias_dropout_add(x, bias, residual, p=0.5), first) and torch.rand(()) != third


def test_a_given_seed_draws_nothing():
    x, bias, residual, _ = inputs(30, 40)
    state = torch.get_rng_state()
    first, second = (bias_dropout_add(x, bias, residual, p=0.5, seed=key(5)) for _ in range(2))
    assert torch.equal(first, second) and torch.equal(state, torch.get_rng_state())


def test_shards_drop_differently_and_replicas_alike():
    def case(rank, world):
        rng = RngTracker(5, tp_rank=rank)
        ones, zeros = torch.ones(40, 64), torch.zeros(40, 64)
        outside = bias_dropout_add(ones, None, zeros, p=0.5)
        with rng.fork("tensor-parallel"):
            inside = bias_dropout_add(ones, None, zeros, p=0.5)
        return outside, inside, bias_dropout_add(ones, None, zeros, p=0.5)

    (outside, inside, after), (outside1, inside1, after1) = run_ranks(case, 2)
    assert torch.equal(outside, outside1) and torch.equal(after, after1) and not torch.equal(outside, after)
    assert joint((inside != 0).long(), (inside1 != 0).long(), 0.5) < 21


@pytest.mark.parametrize("seed", (key(3), None), ids=("seed", "drawn"))
def test_compiles_as_one_graph(seed):
    x, bias, residual, grad = inputs(6, 8, dtype=torch.float32)

    def f(x, bias, residual):
        return bias_dropout_add(x * 2, bias, residual, p=0.5, seed=seed) + 1

    for dynamic in (False, True):
        torch.compiler.reset()
        results = []
        for function in (f, torch.compile(f, backend="aot_eager", fullgraph=True, dynamic=dynamic)):
            torch.manual_seed(1)
            y = function(x, bias, residual)
            results.append((y, *torch.autograd.grad(y, (x, bias, residual), grad)))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"p": -0.1}, r"p must lie between 0 and 1, got -0.1"),
        ({"p": math.nan}, r"p must lie between 0 and 1, got nan"),
        ({"x": torch.zeros(2, 3, dtype=torch.int32)}, r"got torch.int32"),
        ({"x": torch.tensor(1.0)}, r"at least one dimension, got shape \(\)"),
        ({"residual": torch.zeros(3)}, r"expected residual of .* for x of shape \(2, 3\), got \(3,\)"),
        ({"residual": torch.zeros(2, 3).bfloat16()}, r"x is torch.float32 but residual is torch.bfloat16"),
        ({"residual": torch.zeros(2, 3, device="meta")}, r"x is on cpu but residual is on meta"),
        ({"bias": torch.zeros(4)}, r"expected bias of .* for x of shape \(2, 3\), got \(4,\)"),
        ({"bias": torch.zeros(3).double()}, r"x is torch.float32 but bias is torch.float64"),
        ({"bias": torch.zeros(3, device="meta")}, r"x is on cpu but bias is on meta"),
        ({"seed": torch.zeros(2, dtype=torch.int64)}, r"one int64 number, got torch.int64 of shape \(2,\)"),
        ({"seed": torch.zeros(())}, r"one int64 number, got torch.float32 of shape \(\)"),
        ({"seed": key(0).to("meta")}, r"x is on cpu but seed is on meta"),
        ({"out": torch.zeros(3, 2)}, r"out is \(3, 2\), torch.float32 on cpu, .* must be \(2, 3\)"),
        ({"out": torch.zeros(2, 3).bfloat16()}, r"out is .* torch.bfloat16 on cpu"),
        ({"out": torch.zeros(2, 3, device="meta")}, r"on meta, .* must be .* on cpu"),
        ({"out": torch.zeros(2, 3, requires_grad=True)}, r"requires_grad=True"),
    ],
    ids=str,
)
def test_wrong_arguments(change, message):
    arguments = {"x": torch.zeros(2, 3), "bias": torch.zeros(3), "residual": torch.zeros(2, 3), "p": 0.1}
    with pytest.raises(ValueError, match="bias_dropout_add: .*" + message):
        bias_dropout_add(**(arguments | change))


@pytest.mark.exhaustive
def test_more_than_two_to_the_31_elements():
    """4.3 GB: the last rows, whose elements have numbers beyond 31 bits, have the mask of the definition."""
    rows, columns = (1 << 19) + 5, 1 << 12
    ones, zeros = (torch.full((columns,), fill, dtype=torch.bfloat16).expand(rows, -1) for fill in (1, 0))
    y = torch.ops.fastmp.bias_dropout_add(ones, None, zeros, 0.5, key(1))
    expected = words(8 * columns, 1, (rows - 8) * columns // 4) >= 1 << 31
    assert torch.equal((y[-8:] != 0).flatten(), expected)


def test_the_mean_is_that_without_dropout():
    x, residual = random(1 << 18, seed=5), torch.zeros(1 << 18, dtype=torch.float64)
    y = bias_dropout_add(x + 1, None, residual, p=0.25, seed=key(6))
    assert abs(y.mean() - (x + 1).mean()) < 4 * math.sqrt(2 * 0.25 / 0.75 / len(x))
    theirs = F.dropout(x + 1, 0.25)
    assert abs(y.var() / theirs.var() - 1) < 0.02


@pytest.mark.gpu
def test_masks_on_a_gpu_are_those_of_the_cpu_and_new_at_each_replay_of_a_graph():
    ones, zeros = torch.ones(257, 516, device="cuda"), torch.zeros(257, 516, device="cuda")
    y = bias_dropout_add(ones, None, zeros, p=0.3, seed=key(5).cuda())
    assert torch.equal((y != 0).cpu(), module.keep_mask((257, 516), 0.3, key(5)))
    graph, masks = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        y = bias_dropout_add(ones, None, zeros, p=0.3)
    for _ in range(2):
        graph.replay()
        masks.append(y != 0)
    assert not torch.equal(*masks) and all(abs(mask.float().mean() - 0.7) < 0.01 for mask in masks)
