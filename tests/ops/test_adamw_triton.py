"""The Triton kernel of adamw_ in Triton's interpreter, against the reference."""

from __future__ import annotations

import pytest
import torch

from fastmp.ops import adamw as module
from fastmp.testing.ops import run
from fastmp.testing.samples.adamw import arguments

pytestmark = pytest.mark.interpret

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def drawn(num_elements, dtype, seed=0, **options):
    return arguments(num_elements, dtype, torch.Generator().manual_seed(seed), **options)


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
    for first in (320, 70, 129):  # neighbours of one group come in fours, in twos, alone
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
