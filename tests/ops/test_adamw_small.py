"""adamw_ with the small state: masters split into parameters and remainders, averages in bfloat16."""

from __future__ import annotations

import ctypes
import math
from functools import partial

import every_op_tools
import pytest
import torch
from adamw_tools import (
    BETA1,
    BETA2,
    DECAY,
    EPS,
    LR,
    REMAINDER,
    SEED,
    bits,
    drawn,
    exact_inputs,
    masters,
    replaced,
    same,
)  # fmt: skip
from cpp_tools import compiled, pointers, runnable
from kernel_tools import ON_CPU, TRITON

from fastmp.ops import OPS, adamw_
from fastmp.ops.adamw import join_master, split_master
from fastmp.ops.core.philox import philox
from fastmp.testing.ops import run

ON = pytest.mark.parametrize("backend", ["c++", "reference", TRITON])
implementation = partial(every_op_tools.implementation, "adamw_")


def test_parameters_are_the_nearest_bfloat16_and_ties_go_away_from_zero():
    master = masters()
    param, remainder = split_master(master)
    assert same((join_master(param, remainder),), (master,))
    below = (bits(master) & -65536).view(torch.float32).double()  # towards zero
    above = ((bits(master) & -65536) + 65536).view(torch.float32).double()
    exact = master.double()
    up = (exact - below).abs() >= (above - exact).abs()
    nearest = torch.where(up & exact.isfinite(), above, below)
    finite = above.isfinite()  # the others may become infinite, as in any rounding
    assert torch.equal(param.double()[finite], nearest[finite])


@ON
def test_masters_are_restored_bitwise(backend):
    """A learning rate of zero changes nothing: what is read is what is written."""
    master = masters()[:: 1 << 8 if backend == "triton" else 1]
    inputs = drawn(len(master), noisy=False)
    param, remainder = split_master(master)
    inputs = replaced(
        inputs, {0: param, 1: torch.zeros_like(param), REMAINDER: remainder, LR: 0.0, DECAY: 0.0}
    )
    results = run("adamw_", implementation(backend), inputs)
    assert same((results[0], results[-1]), (param, remainder))


@ON_CPU
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
def test_masters_are_those_of_the_classic_state(dtype, backend):
    """With float32 averages every step is bitwise the same; the parameter is the nearest bfloat16."""
    classic, small = (
        list(drawn(1031, dtype, steps=3, first=5, scalars=True, split=split, noisy=False))
        for split in (False, True)
    )
    classic[5] = None
    for t in range(6):
        grad = torch.randn(1031, generator=torch.Generator().manual_seed(t)).to(dtype)
        classic[1] = small[1] = grad
        implementation(backend)(*classic)
        implementation(backend)(*small)
        assert same((join_master(small[0], small[REMAINDER]), *small[2:5]), (classic[0], *classic[2:5]))
        assert same(split_master(classic[0]), (small[0], small[REMAINDER]))


def rounded(exact, noise):
    """The bfloat16 numbers that are the upper halves once noise is added to the lower ones."""
    return ((bits(exact.float()).long() + noise) >> 16).to(torch.int16).view(torch.bfloat16)


@ON
@pytest.mark.parametrize("first", (0, 3, 66, (1 << 34) + 1))
def test_averages_are_rounded_with_the_words_of_their_places(first, backend):
    for num_elements in (33, 2100) if backend == "triton" else (0, 1, 2, 5, 33, 1031):
        inputs = exact_inputs(num_elements, first, steps=41)
        results = run("adamw_", implementation(backend), inputs)
        grad, m, v = (inputs[i].double() for i in (1, 2, 3))
        place = first + torch.arange(num_elements)
        words = philox(inputs[SEED], place // 4, 42).gather(-1, (place % 4)[:, None])[:, 0]
        expected = rounded((m + grad) / 2, words & 0xFFFF), rounded((v + grad * grad) / 2, words >> 16)
        assert same(results[1:3], expected)


def test_rounding_is_right_on_average():
    """Changes are a quarter of half a unit in the last place: rounded to nearest, nothing would change."""
    size, steps, beta = 4096, 800, 0.999
    one = torch.ones(size, dtype=torch.bfloat16)
    assert torch.equal((one * beta + (1 - beta) * 2).bfloat16(), one)
    inputs = replaced(drawn(size), {1: one * 2, 2: one.clone(), 3: one * 2, BETA1: beta, BETA2: beta})
    for _ in range(steps):
        OPS["adamw_"].overload(*inputs)
    gone = beta**steps
    for average, start, end in ((inputs[2], 1, 2), (inputs[3], 2, 4)):
        mean = average.double().mean().item()
        assert mean == pytest.approx(end + (start - end) * gone, abs=0.01 * (end - start))


@ON
def test_numbers_that_bfloat16_has_stay(backend):
    """Also infinities; and what is no number stays none, whatever its payload."""
    grad = torch.tensor([1.0, -2.0, 0.0, -0.0, 2.0**-60, math.inf, -math.inf, math.nan] * 4)
    bits(grad)[7::8] = torch.tensor([0x7FFFFFFF, 0x7F800001, -1, 0x7FC00000], dtype=torch.int32)
    inputs = replaced(drawn(32), {1: grad, BETA1: 0.0, BETA2: 0.0})
    for seed in range(2 if backend == "triton" else 20):
        param, m, v, _, _ = run("adamw_", implementation(backend), replaced(inputs, {SEED: seed}))
        assert torch.equal(m.isnan(), grad.isnan()) and torch.equal(v.isnan(), grad.isnan())
        kept = ~grad.isnan()
        assert torch.equal(m.float()[kept], grad[kept]) and torch.equal(v.float()[kept], grad[kept].square())
        assert torch.equal(param.isnan(), grad.isnan() | grad.isinf())  # inf / inf


@ON_CPU
def test_seed_count_and_place_draw_other_numbers(backend):
    inputs = exact_inputs(1031, 0)
    usual = run("adamw_", implementation(backend), inputs)
    for change in ({SEED: 1}, {4: torch.tensor(1)}, {18: 4}):
        other = run("adamw_", implementation(backend), replaced(inputs, change))
        for a, b in zip(usual[1:3], other[1:3], strict=True):
            assert 0.2 < (a != b).double().mean() < 0.6  # two coins differ in half of the cases at most
        assert same((usual[1],), (other[1],)) is False


@ON_CPU
@pytest.mark.parametrize("noisy", (False, True))
def test_slices_are_updated_as_in_the_whole(noisy, backend):
    """The groups and the random bits are those of the elements' places, on as many threads as may be."""
    inputs = drawn(70_001, torch.bfloat16, steps=2, first=75, noisy=noisy)
    whole = run("adamw_", implementation(backend), inputs)
    groups, group_lr, group_decay, first = inputs[15:19]
    for begin, end in ((0, 3), (3, 500), (500, 777), (777, 70_001)):
        buffers = [inputs[i][begin:end] for i in range(4)]
        table = groups[(first + begin) // 64 - first // 64 :], group_lr, group_decay, first + begin
        places = (*inputs[5:15], *table, inputs[REMAINDER][begin:end], inputs[SEED])
        implementation(backend)(*buffers, inputs[4].clone(), *places)
    assert same((inputs[0], inputs[2], inputs[3], inputs[REMAINDER]), (*whole[:3], whole[4]))


@ON
def test_a_dropped_step_changes_nothing(backend):
    inputs = drawn(1031, steps=3, found_inf=True, first=9)
    inputs[1][::7] = torch.nan
    before = [inputs[i].clone() for i in (0, 2, 3, 4, REMAINDER)]
    implementation(backend)(*inputs)
    assert same([inputs[i] for i in (0, 2, 3, 4, REMAINDER)], before)


def named(inputs):
    return {
        "lr": inputs[LR], "betas": inputs[BETA1:EPS], "eps": inputs[EPS], "weight_decay": inputs[DECAY],
        "remainder": inputs[REMAINDER], "seed": inputs[SEED],
    }  # fmt: skip


def test_the_function_passes_what_the_op_takes():
    inputs = drawn(100, steps=3)
    expected = run("adamw_", OPS["adamw_"].overload, inputs)
    before = inputs[REMAINDER]._version
    adamw_(*inputs[:5], **named(inputs))
    assert same((inputs[0], *inputs[2:5], inputs[REMAINDER]), expected)
    assert inputs[REMAINDER]._version > before


def test_bytes_of_a_step():
    assert OPS["adamw_"].traffic(*drawn(128)) == 128 * 18 + 16  # the count is read and written


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"remainder": torch.zeros(4, dtype=torch.int32)},
            "must be int16 and its param bfloat16, got torch.int32 and",
        ),
        ({"param": torch.zeros(4)}, "its param bfloat16, got torch.int16 and torch.float32"),
        ({"remainder": None}, "or bfloat16 with a remainder, got torch.bfloat16"),
        (
            {"remainder": torch.zeros(5, dtype=torch.int16)},
            r"expected remainder of shape .* got \(5,\)",
        ),
        ({"low_precision_out": torch.zeros(4).half()}, "low_precision_out is given, but param itself"),
        ({"exp_avg": torch.zeros(4).half()}, "param is torch.bfloat16 but exp_avg is torch.float16"),
        ({"exp_avg": torch.zeros(4)}, "exp_avg is torch.float32 but exp_avg_sq is torch.bfloat16"),
        ({"grad": torch.zeros(4).double()}, "param is torch.bfloat16 but grad is torch.float64"),
        ({"seed": -1}, r"seed must lie in \[0, 2\^63\), got -1"),
        ({"remainder": torch.zeros(8, dtype=torch.int16)[::2]}, r"remainder must be contiguous, got strides"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_wrong_arguments(change, message):
    names = ("param", "grad", "exp_avg", "exp_avg_sq")
    given = {name: torch.zeros(4, dtype=torch.bfloat16) for name in names}
    given |= {"step": torch.tensor(0), "remainder": torch.zeros(4, dtype=torch.int16)}
    with pytest.raises(ValueError, match="adamw_: .*" + message):
        adamw_(**{**given, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({0: torch.zeros(4)}, "param must be float32 or float64, or bfloat16 with a remainder, got Float"),
        ({REMAINDER: torch.zeros(4, dtype=torch.int32)}, "param is BFloat16 but remainder is Int"),
        ({2: torch.zeros(4)}, "exp_avg is Float but exp_avg_sq is BFloat16"),
        ({5: torch.zeros(4).half()}, "param is BFloat16 but low_precision_out is Half"),
    ],
    ids=("param", "remainder", "exp_avg", "low_precision_out"),
)
def test_raw_calls_check_dtypes(change, message):
    inputs = replaced(drawn(4), change)
    with pytest.raises(RuntimeError, match="adamw_: .*" + message):
        OPS["adamw_"].overload(*inputs)


KERNEL = """
#include "cpu/adamw.cpp"
namespace fastmp::FASTMP_ISA {
extern "C" void small(void* p, const float* g, void* m, void* v, void* remainder, int64_t n) {
  AdamwSpan span{p, g, m, v, nullptr, remainder, 0, n};
  span.factor = 1, span.weight1 = 0.5, span.beta2 = 0.5, span.decay = 1, span.step_size = 0;
  span.inv_root = 1, span.eps = 1, span.seed = 0x0123456789ABCDEF, span.first = 3, span.count = 42;
  update<float, float, BFloat16, Remainder>(span);
}
}  // namespace fastmp::FASTMP_ISA
"""


@pytest.mark.full
def test_instruction_sets_agree(tmp_path):
    libraries = compiled(tmp_path, KERNEL, runnable())
    inputs = exact_inputs(1009, 3, steps=41)
    expected = run("adamw_", OPS["adamw_"].overload, replaced(inputs, {LR: 0.0}))
    for library in libraries.values():
        p, m, v, remainder = (inputs[i].clone() for i in (0, 2, 3, REMAINDER))
        library.small(*pointers(p, inputs[1], m, v, remainder), ctypes.c_int64(1009))
        assert same((p, m, v, remainder), (*expected[:3], expected[4]))


@pytest.mark.gpu
@pytest.mark.parametrize("first", (0, 2, 3))
def test_masters_on_a_gpu_are_those_of_the_classic_state(first):
    classic, small = (
        list(drawn(5000, device="cuda", steps=3, first=first, split=split, noisy=False))
        for split in (False, True)
    )
    classic[5] = None
    for state in (classic, small):
        OPS["adamw_"].overload(*state)
    assert same((join_master(small[0], small[REMAINDER]), *small[2:5]), (classic[0], *classic[2:5]))


@pytest.mark.gpu
def test_averages_on_a_gpu_are_those_of_the_cpu():
    inputs = exact_inputs(5001, 7, steps=41)
    on_gpu = tuple(a.cuda() if isinstance(a, torch.Tensor) else a for a in inputs)
    left, right = (run("adamw_", OPS["adamw_"].overload, a)[1:3] for a in (inputs, on_gpu))
    assert same(left, [a.cpu() for a in right])
