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


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements_on_gpu():
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GiB of free GPU memory")
    x = torch.zeros(1 << 16, (1 << 15) + 64, device="cuda", dtype=torch.bfloat16)
    x[-1] = 1
    y = torch.ops.fastmp.bias_gelu(x, None, "tanh")
    assert y[-1].float().sub(0.8412).abs().max() < 1e-2 and not y[:-1].any()
    target = torch.full((len(x),), x.shape[1] - 1, device="cuda")
    stats = torch.ops.fastmp.cross_entropy_stats(x, target, 0, x.shape[1], False)
    assert stats[-1].tolist() == pytest.approx([1.0, x.shape[1], 1.0])
