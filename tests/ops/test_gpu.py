"""Every op on a GPU against float64 on NaN-poisoned memory."""

from __future__ import annotations

import pytest
import torch

from fastmp.ops import OPS
from fastmp.testing.ops import check_op


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ("triton", "cuda", "reference"))
@pytest.mark.parametrize("op", sorted(OPS))
def test_op_on_gpu(op, backend):
    if backend not in OPS[op].implementations:
        pytest.skip(f"{op} has no {backend} implementation here")
    for result in check_op(op, "cuda", backend=backend):
        assert result.ok, f"{result}"


# with sums over rows
ARGUMENTS = {
    "bias_gelu_backward": lambda x, grad: (grad, x, x[0], "tanh"),
    "rms_norm_backward": lambda x, grad: (grad, None, x, x[0], x.square().mean(1).rsqrt()[None]),
}


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ("triton", "cuda"))
@pytest.mark.parametrize("op", ARGUMENTS)
def test_sums_over_rows_are_deterministic_on_gpu(op, backend):
    run = OPS[op].implementations.get(backend)
    if run is None:
        pytest.skip(f"{op} has no {backend} implementation here")
    generator = torch.Generator("cuda").manual_seed(0)
    x, grad = (torch.randn(1024, 12288, device="cuda", generator=generator) for _ in range(2))
    arguments = ARGUMENTS[op](x, grad)
    first = run(*arguments)
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(first, run(*arguments), strict=True))
