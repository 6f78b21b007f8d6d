"""Which pairs an expert of limited capacity keeps, against a loop over experts."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

from fastmp.ops import apply_capacity

POLICY = pytest.mark.parametrize("policy", ("probs", "position"))


def kept_by_a_loop(indices: Tensor, probs: Tensor, num_experts: int, capacity: int, policy: str) -> Tensor:
    kept = torch.full_like(indices, -1)
    for expert in range(num_experts):
        pairs = [(token, slot) for token, slot in (indices == expert).nonzero().tolist()]
        if policy == "probs":
            pairs.sort(key=lambda pair: -probs[pair])  # stable: ties to the earlier token
        for pair in pairs[:capacity]:
            kept[pair] = expert
    return kept


@POLICY
@given(source=st.randoms(use_true_random=False))
def test_equals_a_loop(policy, source: random.Random):
    """Random experts, few levels of probability, pairs dropped before and experts that do not exist."""
    num_experts, tokens = source.randint(1, 6), source.randint(0, 9)
    k, capacity = source.randint(1, num_experts), source.randint(1, 5)
    generator = torch.Generator().manual_seed(source.getrandbits(32))
    indices = torch.rand(tokens, num_experts, generator=generator).argsort(-1)[:, :k].to(torch.int32)
    probs = torch.randint(4, (tokens, k), generator=generator) / 4
    strange = torch.rand(tokens, k, generator=generator)
    indices = indices.where(strange > 0.1, -1).where(strange < 0.9, num_experts + 3)
    kept, weights = apply_capacity(indices, probs, num_experts, capacity, policy)
    assert kept.dtype == torch.int32 and weights.dtype == probs.dtype
    assert torch.equal(kept, kept_by_a_loop(indices, probs, num_experts, capacity, policy))
    assert torch.equal(weights, probs.where(kept >= 0, 0))


def test_ties_go_to_the_earlier_token():
    indices = torch.tensor([[1], [1], [1], [1]])
    probs = torch.tensor([[0.5], [0.25], [0.5], [0.5]])
    assert apply_capacity(indices, probs, 2, 2, "probs")[0].flatten().tolist() == [1, -1, 1, -1]
    assert apply_capacity(indices, probs, 2, 2, "position")[0].flatten().tolist() == [1, 1, -1, -1]
    probs[3] = math.nan  # as in torch.sort, more than any number
    assert apply_capacity(indices, probs, 2, 2, "probs")[0].flatten().tolist() == [1, -1, -1, 1]


@POLICY
def test_gradients_reach_kept_pairs_only(policy):
    indices, probs = torch.zeros(5, 1, dtype=torch.int32), torch.rand(5, 1, requires_grad=True)
    kept, weights = apply_capacity(indices, probs, 1, 3, policy)
    weights.sum().backward()
    assert torch.equal(probs.grad != 0, kept >= 0) and (kept >= 0).sum() == 3


@POLICY
def test_two_graphs_for_all_sizes_and_no_wait_for_the_device(policy):
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(apply_capacity, fullgraph=True, backend=counter)
    for tokens in (5, 9, 13, 8):
        indices, probs = torch.randint(4, (tokens, 1)), torch.rand(tokens, 1)
        expected = apply_capacity(indices, probs, 4, 1, policy)
        for value, want in zip(compiled(indices, probs, 4, 1, policy), expected, strict=True):
            assert torch.equal(value, want)
    assert counter.frame_count == 2  # one for the first number of tokens, one for any
    mode = FakeTensorMode()
    fakes = [mode.from_tensor(t.to("meta")) for t in (indices, probs)]
    with mode:  # shapes that depend on data raise
        kept, weights = apply_capacity(*fakes, 4, 1, policy)
    assert kept.shape == weights.shape == (8, 1)


def test_wrong_arguments():
    indices, probs = torch.zeros(3, 2, dtype=torch.int32), torch.zeros(3, 2)
    with pytest.raises(ValueError, match="at least 1 token, got 0"):
        apply_capacity(indices, probs, 2, 0)
    with pytest.raises(ValueError, match="got 'first'"):
        apply_capacity(indices, probs, 2, 1, "first")
    with pytest.raises(ValueError, match=r"expected probs of .* for indices of shape \(3, 2\), got \(3, 1\)"):
        apply_capacity(indices, probs[:, :1], 2, 1)
