"""The Triton kernel of adamw_ in Triton's interpreter, against the reference."""

from __future__ import annotations

import pytest
import torch

from fastmp.ops import adamw as module
from fastmp.ops.adamw import join_master
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
