"""The implementations of the cross-entropy ops against each other, and the C++ vectors against float64.

C++ kernels are compiled here for each instruction set, since a machine serves only its best one.
"""

from __future__ import annotations

import ctypes
import math

import pytest
import torch
from cpp_tools import compiled, pointers, runnable
from every_op_tools import implementation
from torch import Tensor

from fastmp.ops.core.registry import OPS
from fastmp.testing.ops import check_op, relative_error, run, samples

CHECK = "cross_entropy_promise_"  # takes no logits, and is no kernel of ours on a GPU
CROSS_ENTROPY = [name for name in OPS if name.startswith("cross_entropy") and name != CHECK]

VECTOR_FUNCTIONS = """
#include "cpu/simd.h"
namespace fastmp::FASTMP_ISA {
extern "C" void apply(int function, const float* x, float* y, int64_t n) {
  for (int64_t i = 0; i < n; i += kFloats) {
    const floats v = load(x + i, n - i, 0.0f);
    const floats results[] = {exp(v), sigmoid(v), normal(v).cdf, normal(v).pdf};
    store(y + i, results[function], n - i);
  }
}
template <typename T>
void round_trip(const float* x, T* stored, float* y, int64_t n) {
  int64_t i = 0;
  for (; i + 2 * kFloats <= n; i += 2 * kFloats) {
    store_pair<true>(stored + i, {load(x + i), load(x + i + kFloats)});
    const Pair<floats> pair = load_pair(stored + i);
    store(y + i, pair.first);
    store(y + i + kFloats, pair.second);
  }
  for (; i < n; i += kFloats) {
    store(stored + i, load(x + i, n - i, 0.0f), n - i);
    store(y + i, load(stored + i, n - i, 0.0f), n - i);
  }
}
extern "C" void round_trip_half(const float* x, void* stored, float* y, int64_t n) {
  round_trip(x, static_cast<Half*>(stored), y, n);
}
extern "C" void store_bfloat16(const float* x, BFloat16* stored, int64_t n) {
  for (int64_t i = 0; i < n; i += kFloats) store(stored + i, load(x + i, n - i, 0.0f), n - i);
}
extern "C" void store_bfloat16_pairs(const BFloat16* x, BFloat16* stored, int64_t n) {
  for (int64_t i = 0; i < n; i += 2 * kFloats) store_pair<true>(stored + i, load_pair(x + i));
}
extern "C" int lanes() { return kFloats; }
}  // namespace fastmp::FASTMP_ISA
"""

KERNELS = """
#include "cpu/cross_entropy.cpp"
#include <vector>
namespace fastmp::FASTMP_ISA {
extern "C" void stats_float(const float* x, const int64_t* target, float* out, int64_t rows,
                            int64_t columns) {
  stats<float, float>(x, target, out, Shard{columns, columns, columns, 0}, true, nullptr, 0, rows);
}
extern "C" void grad_bfloat16(const BFloat16* x, BFloat16* out, const int64_t* target, const float* merged,
                              const float* grad_loss, int64_t rows, int64_t columns, bool keep) {
  const Shard shard{columns, columns, columns, 0};
  const int64_t stride = columns + 16;
  std::vector<float> stats_of(5 * rows), values(rows * stride), references(rows);
  const Exponentials<float> kept{values.data(), references.data(), stride};
  if (keep) stats(x, target, stats_of.data(), shard, true, &kept, 0, rows);
  grad<BFloat16, float>(x, out, target, merged, grad_loss, nullptr, shard, columns,
                        GradOptions{columns, -100, 0.1, 1e-3}, keep ? &kept : nullptr, 0, rows);
}
}  // namespace fastmp::FASTMP_ISA
"""


@pytest.fixture(scope="module")
def vectors(tmp_path_factory):
    return compiled(tmp_path_factory.mktemp("vectors"), VECTOR_FUNCTIONS, runnable())


FUNCTIONS = {  # number, range, truth, absolute bound, relative bound
    "exp": (0, -86.5, 88.7, torch.exp, math.inf, 1e-7),
    "sigmoid": (1, -86.0, 40.0, torch.sigmoid, math.inf, 2e-7),
    "cdf": (2, -12.0, 12.0, lambda x: torch.erfc(-x / math.sqrt(2)) / 2, 2.5e-7, 1e-5),
    "pdf": (3, -12.0, 12.0, lambda x: (-x * x / 2).exp() / math.sqrt(2 * math.pi), 1e-7, 1e-5),
}


@pytest.mark.full
@pytest.mark.parametrize("isa", runnable())
@pytest.mark.parametrize("name", FUNCTIONS)
def test_vector_functions_keep_their_bounds(vectors, isa, name):
    number, low, high, truth, absolute, relative = FUNCTIONS[name]
    x = torch.linspace(low, high, 400_003)
    y = torch.empty_like(x)
    vectors[isa].apply(number, *pointers(x, y), ctypes.c_int64(len(x)))
    expected = truth(x.double())
    error = (y.double() - expected).abs()
    assert error.max() < absolute
    assert (error / expected.abs()).max() < relative


@pytest.mark.parametrize("isa", runnable())
def test_exponential_of_special_values(vectors, isa):
    x = torch.tensor([math.nan, math.inf, -math.inf, 1e30, -1e30, 0.0, -87.0, 89.0])
    y = torch.empty_like(x)
    vectors[isa].apply(0, *pointers(x, y), ctypes.c_int64(len(x)))
    assert y[0].isnan() and y[1:].tolist() == [math.inf, 0, math.inf, 0, 1, 0, math.inf]


@pytest.mark.parametrize("isa", runnable())
def test_conversions_round_as_torch_does(vectors, isa):
    """Every 16-bit pattern back and forth, and float32 patterns of all kinds: subnormal, NaN, on ties."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (1 << 20,), generator=generator).to(torch.int32)
    ties = torch.arange(-(2**15), 2**15, dtype=torch.int32) * 65536 + 32768
    halves = torch.arange(-(2**15), 2**15, dtype=torch.int16)
    x = torch.cat([bits.view(torch.float32), ties.view(torch.float32), halves.view(torch.float16).float()])
    x = torch.cat(
        [x, halves.view(torch.float16).float() * (1 + 2**-11), torch.tensor([65519.9, 65520.0, 2**-25])]
    )
    n, y = ctypes.c_int64(len(x)), torch.empty_like(x)

    stored = torch.empty(len(x), dtype=torch.float16)
    vectors[isa].round_trip_half(*pointers(x, stored, y), n)
    assert equal_but_for_nan_payload(stored, x.half()) and torch.equal(
        y.nan_to_num(7), stored.float().nan_to_num(7)
    )

    stored = torch.empty(len(x), dtype=torch.bfloat16)
    vectors[isa].store_bfloat16(*pointers(x, stored), n)
    assert equal_but_for_nan_payload(stored, x.bfloat16())

    patterns = halves.view(torch.bfloat16)
    stored = torch.empty_like(patterns)
    vectors[isa].store_bfloat16_pairs(*pointers(patterns, stored), ctypes.c_int64(len(patterns)))
    assert equal_but_for_nan_payload(stored, patterns)


def equal_but_for_nan_payload(a: Tensor, b: Tensor) -> bool:
    same = a.view(torch.int16) == b.view(torch.int16)
    return bool((same | (a.isnan() & b.isnan())).all())


@pytest.mark.full
def test_instruction_sets_agree(tmp_path):
    """The kernels of the sets that this machine would not choose, on rows of every kind of tail."""
    isas = runnable()[:2]
    for isa, library in compiled(tmp_path, KERNELS, isas).items():
        for columns in (1, 7, 33, 1009):
            arguments = samples_of(columns)
            logits, target, grad_loss = arguments
            out = torch.full((4, 5), math.nan)
            sizes = [ctypes.c_int64(4), ctypes.c_int64(columns)]
            library.stats_float(*pointers(logits, target, out), *sizes)
            truth = OPS["cross_entropy_stats"].implementations["reference"](
                logits.double(), target, 0, columns, True
            )
            assert relative_error(out, truth) < 1e-6, isa

            x = logits.bfloat16()
            top = x.float().amax(1)
            merged = torch.stack([top, (x.float() - top[:, None]).exp().sum(1)], 1)
            truth = OPS["cross_entropy_grad"].implementations["reference"](
                x.double(), target, merged.double(), grad_loss.double(), None, 0, columns, -100, 0.1, 1e-3
            )
            for keep in (False, True):
                grad = torch.full_like(x, math.nan)
                tensors = pointers(x, grad, target, merged, grad_loss)
                library.grad_bfloat16(*tensors, *sizes, ctypes.c_bool(keep))
                assert relative_error(grad, truth) < 4e-3, (isa, keep)


def samples_of(columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows that climb steeply, too: the reference of the exponentials moves, so that none are kept."""
    generator = torch.Generator().manual_seed(columns)
    target = torch.randint(columns, (4,), generator=generator)
    target[1] = -100
    logits = torch.randn(4, columns, generator=generator) * torch.tensor([1.0, 1.0, 1.0, 20.0])[:, None]
    logits[2] += torch.linspace(0, 60, columns)
    return logits, target, torch.randn(4, generator=generator)


@pytest.mark.full
@pytest.mark.interpret
@pytest.mark.parametrize("op", CROSS_ENTROPY)
def test_triton_is_right_on_poisoned_memory(op):
    """Not bfloat16: the interpreter truncates instead of rounding."""
    results = [r for r in check_op(op, "cpu", backend="triton") if r.dtype != "bfloat16"]
    assert len(results) == 3 and all(r.ok for r in results), results


@pytest.mark.interpret
@pytest.mark.parametrize("offset", [1, 3])
def test_triton_on_rows_that_start_anywhere(offset):
    """Rows off the 16-byte boundary, over the edges of several blocks."""
    for op in (name for name in CROSS_ENTROPY if name != "cross_entropy_merge"):
        for arguments in samples(op, device="cpu", dtype=torch.float16)[2:4]:
            logits = arguments[0]
            memory = torch.zeros(logits.shape[0] * logits.stride(0) + offset, dtype=logits.dtype)
            shifted = memory.as_strided(logits.shape, logits.stride(), offset).copy_(logits)
            entry = OPS[op].implementations
            expected = run(op, entry["reference"], arguments)
            for a, b in zip(run(op, entry["triton"], (shifted, *arguments[1:])), expected):
                assert relative_error(a, b) < 1e-3


@pytest.mark.interpret
@pytest.mark.parametrize("op", [name for name in CROSS_ENTROPY if name != "cross_entropy_merge"])
def test_triton_refuses_columns_apart(op):
    logits, *options = samples(op, device="cpu", dtype=torch.float32)[0]
    apart = logits.t().contiguous().t()
    with pytest.raises(RuntimeError, match=r"cross_entropy.*next to each other, got stride 16"):
        OPS[op].implementations["triton"](apart, *options)


@pytest.mark.interpret
@pytest.mark.parametrize("backend", ["c++", "triton"])
def test_statistics_of_another_width_are_refused(backend):
    """A kernel that read them would read the next row's, or beyond the last."""
    target, ones = torch.zeros(4, dtype=torch.int64), torch.ones(4)
    for width, smoothing in ((3, 0.1), (4, 0.1), (4, 0.0)):
        with pytest.raises(RuntimeError, match=r"stats .*\(P, N, 3\), or \(P, N, 5\)"):
            merge = implementation("cross_entropy_merge", backend)
            merge(torch.ones(2, 4, width), target, None, 6, -100, smoothing, 0.0)
    for merged in (ones, torch.ones(4, 3), torch.ones(3, 2)):
        for op in ("cross_entropy_grad", "cross_entropy_grad_"):
            with pytest.raises(RuntimeError, match=r"merged.*4, 2"):
                grad = implementation(op, backend)
                grad(torch.ones(4, 6), target, merged, ones, None, 0, 6, -100, 0.0, 0.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.zeros(2, 3), torch.zeros(3, dtype=torch.int64)), r"target must be .*\(2\)"),
        ((torch.zeros(2, 3), torch.zeros(2)), "target must be Long"),
        ((torch.zeros(6), torch.zeros(2, dtype=torch.int64)), r"\(N, V\), got 1"),
        ((torch.zeros(3, 2).T, torch.zeros(2, dtype=torch.int64)), "next to each other.*stride 2"),
        ((torch.zeros(2, 3, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)), "dtype must be float"),
    ],
)
def test_the_compiled_kernel_refuses_what_it_cannot_read(arguments, message):
    if OPS["cross_entropy_stats"].serving["cpu"] != "c++":
        pytest.skip(f"no compiled kernel: {OPS['cross_entropy_stats'].reasons['cpu']}")
    with pytest.raises(RuntimeError, match=f"cross_entropy_stats.*{message}"):
        torch.ops.fastmp.cross_entropy_stats(*arguments, 0, 3, False)
