"""The ops of a mixture of experts in a row: router, sort, grouped products, weighted sum; and back."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from dispatch_modes import NoDeviceWaits
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fastmp.ops import (
    apply_capacity,
    grouped_mlp_in,
    grouped_mm,
    permutation,
    permute,
    topk_router,
    unpermute,
)


def chain(x: Tensor, router: Tensor, w1: Tensor, w2: Tensor, k: int, capacity: int | None = None) -> tuple:
    """Output (T, H), squared log-sum-exps and offsets; x (T, H), w1 (E, 2F, H), w2 (E, H, F)."""
    chosen = topk_router(F.linear(x, router), k, normalize=True)
    indices, probs = chosen.indices, chosen.probs
    if capacity is not None:
        indices, probs = apply_capacity(indices, probs, len(w1), capacity, "probs")
    row_of, offsets = permutation(indices, len(w1))
    rows = permute(x, row_of, row_of.numel())
    hidden = grouped_mlp_in(rows, w1, offsets, form="silu", gated=True)
    return unpermute(grouped_mm(hidden, w2, offsets), row_of, probs), chosen.z_sum, offsets


def every_expert_on_every_token(x: Tensor, router: Tensor, w1: Tensor, w2: Tensor, k: int) -> tuple:
    """The same in plain torch; ties go to the lower expert."""
    logits = F.linear(x, router)
    order = logits.sort(dim=1, descending=True, stable=True).indices[:, :k]
    chosen = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, order, True)
    probs = logits.softmax(1).masked_fill(~chosen, 0)
    gate, up = torch.einsum("th,efh->tef", x, w1).chunk(2, -1)
    outputs = torch.einsum("tef,ehf->teh", F.silu(gate) * up, w2)
    weights = probs / probs.sum(1, keepdim=True)
    return torch.einsum("te,teh->th", weights, outputs), logits.logsumexp(1).square().sum()


def leaves(
    tokens: int, experts: int, pattern: str, seed: int, hidden: int = 8, ffn: int = 12
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    x, router = normal(tokens, hidden), normal(experts, hidden)
    if pattern == "equal logits":
        router.zero_()
    elif pattern == "one expert":  # far ahead of all others for every token
        x[:, 0] = x[:, 0].abs() + 1
        router[-1, 0] += 50
    elif pattern == "equal tokens":
        x.copy_(x[:1].repeat(tokens, 1))
    made = [x, router, normal(experts, 2 * ffn, hidden) / 3, normal(experts, hidden, ffn) / 3]
    return [leaf.requires_grad_() for leaf in made]


@settings(max_examples=100)
@given(
    tokens=st.sampled_from((0, 1, 2, 7, 33)),
    experts=st.sampled_from((1, 2, 5, 16)),
    slots=st.sampled_from((1, 2, 3, "all")),
    pattern=st.sampled_from(("any", "equal logits", "one expert", "equal tokens")),
    source=st.randoms(use_true_random=False),
)
def test_any_routing(tokens, experts, slots, pattern, source):
    """Outputs and every gradient: empty experts, one expert for all, equal tokens, k = E, no tokens."""
    k = experts if slots == "all" else min(slots, experts)
    inputs = leaves(tokens, experts, pattern, source.getrandbits(16))
    *ours, offsets = chain(*inputs, k)
    wanted = every_expert_on_every_token(*inputs, k)
    assert offsets[-1] == tokens * k
    if pattern == "equal logits":
        counts = offsets.diff(prepend=offsets.new_zeros(1))
        assert counts.tolist() == [tokens] * k + [0] * (experts - k)
    grads = [torch.randn_like(t) for t in wanted]
    ours += torch.autograd.grad(ours, inputs, grads)
    wanted += torch.autograd.grad(wanted, inputs, grads)
    for value, want in zip(ours, wanted, strict=True):
        torch.testing.assert_close(value, want, rtol=1e-10, atol=1e-10)


def test_dropped_assignments_add_nothing_and_get_nothing():
    """A capacity of two tokens: output and gradients are those of the assignments that are left."""
    inputs = leaves(24, 4, "any", 0)
    output, _, offsets = chain(*inputs, 2, capacity=2)
    assert offsets.tolist() == [2, 4, 6, 8]
    grads = torch.autograd.grad(output.sum(), inputs)
    idle = ~output.detach().any(1)
    assert idle.sum() >= 24 - 8 and not grads[0][idle].any()
    assert all(grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize("capacity", (None, 40))
@pytest.mark.parametrize("main_grad", (False, True))
def test_the_host_never_waits(main_grad, capacity):
    """Forward and backward at a real size, where shapes are all that is known."""
    tokens, hidden, experts, k, ffn = 4096, 2048, 128, 8, 768
    with FakeTensorMode(), NoDeviceWaits():
        shapes = (tokens, hidden), (experts, hidden), (experts, 2 * ffn, hidden), (experts, hidden, ffn)
        inputs = [torch.empty(s, dtype=torch.bfloat16, device="meta", requires_grad=True) for s in shapes]
        if main_grad:
            for weight in inputs[2:]:
                weight.main_grad = torch.empty(weight.shape, dtype=torch.float32, device="meta")
        output, z_sum, offsets = chain(*inputs, k, capacity)
        assert output.shape == (tokens, hidden) and offsets.shape == (experts,)
        sent = torch.empty_like(output), torch.empty_like(z_sum)
        grads = torch.autograd.grad((output, z_sum), inputs, sent, allow_unused=True)
    got = [None if grad is None else grad.shape for grad in grads]
    wanted = [leaf.shape for leaf in inputs]
    assert got == (wanted[:2] + [None, None] if main_grad else wanted)


def test_compiles_to_one_graph():
    inputs = leaves(16, 4, "any", 1)
    torch.compiler.reset()
    compiled = torch.compile(chain, backend="aot_eager", fullgraph=True)
    results = []
    for function in (chain, compiled):
        output, z_sum, offsets = function(*inputs, 2)
        results.append((output, z_sum, offsets, *torch.autograd.grad((output.sum(), z_sum), inputs)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
def test_error_in_narrow_types_is_that_of_plain_torch(dtype):
    """With one choice of experts for all: another one, from logits that rounding moved, is no error."""
    x, _, w1, w2 = (leaf.detach().to(dtype) for leaf in leaves(256, 8, "any", 2, hidden=32, ffn=48))
    indices = torch.tensor(
        [random.Random(t).sample(range(8), 2) for t in range(256)], dtype=torch.int32
    )  # two of eight
    probs = torch.rand(256, 2, generator=torch.Generator().manual_seed(3))
    row_of, offsets = permutation(indices, 8)

    def run(dtype: torch.dtype, ours: bool) -> Tensor:
        tokens, first, second = (t.to(dtype) for t in (x, w1, w2))
        if ours:
            hidden = grouped_mlp_in(permute(tokens, row_of, 512), first, offsets, form="silu", gated=True)
            return unpermute(grouped_mm(hidden, second, offsets), row_of, probs.to(torch.float32))
        gate, up = torch.einsum("th,tkfh->tkf", tokens, first[indices.long()]).chunk(2, -1)
        parts = torch.einsum("tkf,tkhf->tkh", F.silu(gate) * up, second[indices.long()])
        return (parts * probs[..., None]).sum(1).to(dtype)

    truth = run(torch.float64, False)
    ours, theirs = (
        ((run(dtype, side).double() - truth).norm() / truth.norm()).item() for side in (True, False)
    )
    assert ours <= 1.1 * theirs
