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


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ("triton", "cuda"))
def test_bias_gradient_is_deterministic_on_gpu(backend):
    run = OPS["bias_gelu_backward"].implementations.get(backend)
    if run is None:
        pytest.skip(f"bias_gelu_backward has no {backend} implementation here")
    generator = torch.Generator("cuda").manual_seed(0)
    x, grad = (torch.randn(4096, 3072, device="cuda", generator=generator) for _ in range(2))
    first = run(grad, x, x[0], "tanh")
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(first, run(grad, x, x[0], "tanh"), strict=True))
