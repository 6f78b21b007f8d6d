"""The Triton kernel of adamw_ in Triton's interpreter, against the reference."""

from __future__ import annotations

import pytest
import torch
from adamw_tools import exact_inputs, masters, same

from fastmp.ops import adamw as module
from fastmp.ops.adamw import join_master, split_master
from fastmp.testing.ops import run
from fastmp.testing.samples.optimizer_steps import adamw_arguments

pytestmark = pytest.mark.interpret

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def drawn(num_elements, dtype, seed=0, **options):
    return adamw_arguments(num_elements, dtype, torch.Generator().manual_seed(seed), **options)


def check(inputs):
    results, expected = (run("adamw_", f, inputs) for f in (module.launch, module.reference))
    for value, want in zip(results, expected):
        if value.dtype == torch.bfloat16:  # the interpreter does not round to nearest
            torch.testing.assert_close(value, want, rtol=1e-2, atol=0, equal_nan=True)
        elif value.dtype == torch.int64:
            assert torch.equal(value, want)  # nothing is left in the upper half, where programs are counted
        else:
            tolerance = {torch.float64: 1e-13, torch.float32: 1e-6}.get(value.dtype, 1e-3)
            torch.testing.assert_close(value, want, rtol=tolerance, atol=tolerance / 3, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_elements", (0, 1, 3, 1023, 2048, 5000, 5002))
def test_equals_reference(num_elements, dtype):
    check(drawn(num_elements, dtype))
    for first in (320, 70, 129):  # neighbours of one group come in fours, in twos (float64), alone
        check(drawn(num_elements, dtype, steps=41, first=first, scalars=True, found_inf=False))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_dropped_step_changes_nothing(dtype):
    inputs = drawn(5000, dtype, steps=6, found_inf=True)
    inputs[1][::3] = torch.nan
    for flag in (inputs[9], torch.tensor(1.0), torch.tensor([torch.nan])):
        results = run("adamw_", module.launch, (*inputs[:9], flag, *inputs[10:]))
        for value, before in zip(results, (inputs[0], *inputs[2:5])):
            assert torch.equal(value, before)


@pytest.mark.parametrize("begin", (1, 4, 777))
def test_slices_off_the_boundaries(begin):
    inputs = drawn(4096, torch.float32)
    check(tuple(a[begin:] if isinstance(a, torch.Tensor) and a.dim() else a for a in inputs))


@pytest.mark.parametrize("steps", (0, 1, 6, 500, 10**6))
@pytest.mark.parametrize("beta", (0.0, 0.3, 0.95, 0.99999))
def test_bias_correction(beta, steps):
    """On both sides of where the series ends, and where the power underflows."""
    for dtype in (torch.float64, torch.float32):
        inputs = drawn(5, dtype, steps=steps)
        check((*inputs[:11], beta, beta, *inputs[13:]))


@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")
def test_special_values():
    inputs = drawn(8, torch.float32)
    inputs[1].copy_(torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1e-30, 3e38, -1e20]))
    check(inputs)


def test_several_steps_count():
    inputs = drawn(5000, torch.float32, found_inf=False)
    for t in range(5):
        inputs[9].fill_(t == 2)
        module.launch(*inputs)
        assert inputs[4] == (t if t >= 2 else t + 1)


def of_parts(results):
    """Masters and averages of the small state, all in float32, and the count."""
    param, m, v, step, remainder = results
    return join_master(param, remainder), m.float(), v.float(), step


@pytest.mark.parametrize("first", (320, 70, 129))
@pytest.mark.parametrize("num_elements", (0, 1, 2047, 5002))
@pytest.mark.parametrize("noisy", (False, True))
def test_small_states_equal_the_reference(num_elements, first, noisy):
    options = {"steps": 9, "first": first, "split": True, "noisy": noisy, "scalars": True}
    inputs = drawn(num_elements, torch.bfloat16, **options)
    results, expected = (run("adamw_", f, inputs) for f in (module.launch, module.reference))
    unit = 2.0**-7 if noisy else 1e-6  # a last place of float32 may turn the rounding of few averages
    for value, want, bound in zip(of_parts(results)[:3], of_parts(expected)[:3], (1e-6, unit, unit)):
        torch.testing.assert_close(value, want, rtol=bound, atol=bound / 3)
    for value, want in zip(results[1:3], expected[1:3]):
        assert not num_elements or (value != want).double().mean() <= (2e-3 if noisy else 1)
    assert results[3] == expected[3]


@pytest.mark.parametrize("first", (0, 2, 3, (1 << 34) + 1))
def test_averages_without_other_rounding_are_bitwise_those_of_the_reference(first):
    for num_elements in (33, 2100):
        inputs = exact_inputs(num_elements, first, steps=41)
        results, expected = (run("adamw_", f, inputs) for f in (module.launch, module.reference))
        assert same(results[1:3], expected[1:3])


def test_masters_are_restored_bitwise():
    master = masters()[:: 1 << 8]
    param, remainder = split_master(master)
    inputs = drawn(len(master), torch.bfloat16, split=True)
    inputs = (param, torch.zeros_like(param), *inputs[2:10], 0.0, *inputs[11:14], 0.0, *inputs[15:])
    results = run("adamw_", module.launch, (*inputs[:19], remainder, 0))
    assert same((results[0], results[-1]), (param, remainder))


def test_what_is_no_number_stays_none():
    inputs = drawn(64, torch.float32, split=True, noisy=True)
    payloads = torch.tensor([0x7FFFFFFF, 0x7F800001, -1, 0x7FC00000], dtype=torch.int32)
    inputs[1][::16] = payloads.view(torch.float32)
    param, m, v, _, _ = run("adamw_", module.launch, inputs)
    for value in (param, m, v):
        assert torch.equal(value.isnan(), inputs[1].isnan())
