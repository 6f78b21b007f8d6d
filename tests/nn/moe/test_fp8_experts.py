"""Experts in FP8: the function and gradients of dequantised operands, expert by expert."""

from __future__ import annotations

import pytest
import torch
from marks import full

from fastmp.config import ACTIVATIONS, GPTConfig, MoEConfig
from fastmp.config.precision import Fp8Recipe
from fastmp.nn import Placement
from fastmp.nn.activation import activation_function
from fastmp.nn.moe.experts import GroupedExperts
from fastmp.ops import dequantize_rows, quantize_rows, quantize_weight
from fastmp.ops.wgrad import WgradQueue, defer_wgrad

L, H, F = 3, 64, 96
OFFSETS = torch.tensor([5, 5, 18], dtype=torch.int32)  # an expert without rows, and rows of no expert


def make(activation: str, dtype: torch.dtype = torch.float64) -> GroupedExperts:
    torch.manual_seed(0)
    moe = MoEConfig(num_experts=L, expert_ffn_hidden_size=F)
    config = GPTConfig(hidden_size=H, num_heads=1, activation=activation, init_std=0.1, moe=moe)
    return GroupedExperts(config, Placement(dtype=dtype, fp8=Fp8Recipe(32)))


def rounded(x):
    return dequantize_rows(*quantize_rows(x, block=32), dtype=x.dtype)


def rounded_weight(w):
    q, _, scale = quantize_weight(w, block=32)
    return q.to(w.dtype) * scale.to(w.dtype).repeat_interleave(32, -1).repeat_interleave(32, -2)


def expected(experts, x, grad):
    """Return output, gradient of x and of both weights, by a loop over the experts."""
    fc1, fc2 = rounded_weight(experts.fc1.detach()), rounded_weight(experts.fc2.detach())
    activate = activation_function(experts.activation)
    y, dx = torch.zeros_like(x), torch.zeros_like(x)
    grads = torch.zeros_like(fc1), torch.zeros_like(fc2)
    for i, (start, end) in enumerate(zip((0, *OFFSETS.tolist()), OFFSETS.tolist(), strict=False)):
        rows = rounded(x[start:end])
        h = (rows @ fc1[i].t()).requires_grad_()
        f = activate(h)
        y[start:end] = rounded(f.detach()) @ fc2[i].t()
        f.backward(rounded(grad[start:end]) @ fc2[i])
        dx[start:end] = rounded(h.grad) @ fc1[i]
        grads[0][i], grads[1][i] = h.grad.t() @ rows, grad[start:end].t() @ rounded(f.detach())
    return y, dx, *grads


@pytest.mark.parametrize("activation", ["swiglu", *full([name for name in ACTIVATIONS if name != "swiglu"])])
def test_grouped_gemms_of_dequantised_operands(activation):
    experts = make(activation)
    x, grad = torch.randn(2, 20, H, dtype=torch.float64)
    y = experts(x.requires_grad_(), OFFSETS)
    y.backward(grad)
    results = y, x.grad, experts.fc1.grad, experts.fc2.grad
    torch.testing.assert_close(results, expected(experts, x.detach(), grad), rtol=1e-9, atol=1e-9)
    assert not y[18:].any() and not x.grad[18:].any()


def test_deferred_weight_gradients():
    experts, queue = make("swiglu"), WgradQueue()
    x, grad = torch.randn(2, 20, H, dtype=torch.float64)
    with defer_wgrad(queue):
        experts(x.requires_grad_(), OFFSETS).backward(grad)
    assert experts.fc1.grad is None and experts.fc2.grad is None
    WgradQueue.run(queue.take())
    *_, fc1, fc2 = expected(experts, x.detach(), grad)
    torch.testing.assert_close((experts.fc1.grad, experts.fc2.grad), (fc1, fc2), rtol=1e-9, atol=1e-9)


def test_saves_rows_in_fp8_and_one_activation():
    experts, saved = make("swiglu", torch.bfloat16), []
    x = torch.randn(18, H, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        experts(x, OFFSETS)
    assert sum(t.nbytes for t in saved) == 18 * (H + H // 32 + 2 * 2 * F) + OFFSETS.nbytes


def test_sizes_that_blocks_do_not_divide():
    moe = MoEConfig(num_experts=2, expert_ffn_hidden_size=96)
    config = GPTConfig(hidden_size=128, num_heads=1, moe=moe)
    with pytest.raises(ValueError, match="FP8 blocks of 128 do not divide expert_ffn_hidden_size 96"):
        GroupedExperts(config, Placement(fp8=Fp8Recipe()))
