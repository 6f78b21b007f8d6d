"""Log-probabilities and entropies over a sharded vocabulary: those of one rank, and what is communicated."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from marks import full
from rank_cases import in_turn

from fastmp.ops import linear_log_probs
from fastmp.tensor_parallel.linear_loss import vocab_parallel_linear_log_probs
from fastmp.testing.parallel import count_collectives
from fastmp.testing.ranks import run_ranks

S, B, H, V = 8, 5, 12, 24
CLOSE = {"rtol": 1e-10, "atol": 1e-10}


def problem():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(S, B, H, generator=generator, dtype=torch.float64)
    weight = torch.randn(V, H, generator=generator, dtype=torch.float64)
    target = torch.randint(V - 3, (S, B), generator=generator)
    target[::3, 1] = -100
    grads = torch.randn(2, S, B, generator=generator, dtype=torch.float64)
    temperature = torch.rand(S, B, generator=generator, dtype=torch.float64) + 0.5
    return hidden, weight, target, grads, temperature


def check_one_rank(rank, tp, sp):
    """Each rank's part of what one rank computes; the outputs, which must be equal on all ranks."""
    hidden, weight, target, grads, of_tokens = problem()
    place = {"group": dist.group.WORLD if tp > 1 else None, "sequence_parallel": sp}
    outputs = []
    for temperature, size, chunk in itertools.product((1.0, 0.7, of_tokens), (V, V - 3), (S * B, 7)):
        options = {"temperature": temperature, "return_entropy": True, "vocab_size": size}
        whole = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        want = linear_log_probs(*whole, target, **options)
        dhidden, dweight = torch.autograd.grad(want, whole, list(grads))
        dhidden = dhidden.chunk(tp)[rank] if sp else dhidden
        x = (hidden.chunk(tp)[rank] if sp else hidden).clone().requires_grad_()
        w = weight.chunk(tp)[rank].clone().requires_grad_()
        with count_collectives() as forward:
            found = vocab_parallel_linear_log_probs(
                x, w, target, **place, **options, workspace=chunk * V // tp * 8
            )
        with count_collectives() as backward:
            ours = torch.autograd.grad(found, (x, w), list(grads))
        torch.testing.assert_close(found, want, **CLOSE)
        torch.testing.assert_close(ours, (dhidden, dweight.chunk(tp)[rank]), **CLOSE)
        if tp > 1:
            gathered = [("all_gather", [(S * B, H), (S * B // tp, H)])] if sp else []
            assert forward.calls == [*gathered, ("all_gather", [(tp, S * B, 4), (1, S * B, 4)])]
            assert len(backward.calls) == 1 + sp
        outputs.append([values.tolist() for values in found])
    return outputs


@pytest.mark.parametrize("tp", [2, *full([4])])
def test_equals_one_rank(tp):
    results = run_ranks(in_turn, tp, check_one_rank, [(False,), (True,)])
    assert all(outputs == results[0] for outputs in results), "the ranks' outputs differ in their bits"


def test_alone():
    check_one_rank(0, 1, sp=False)


def check_kept_logits(rank, tp):
    """Logits that the forward pass kept, and the hidden states it gathered, serve both backward passes."""
    hidden, weight, target, grads, _ = problem()
    whole = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    dhidden, dweight = torch.autograd.grad(linear_log_probs(*whole, target), whole, grads[0])
    x, w = (each.chunk(tp)[rank].clone().requires_grad_() for each in (hidden, weight))
    place = {"group": dist.group.WORLD, "sequence_parallel": True}
    found = vocab_parallel_linear_log_probs(x, w, target, **place)
    for _ in range(2):
        ours = torch.autograd.grad(found, (x, w), grads[0], retain_graph=True)
        torch.testing.assert_close(ours, (dhidden.chunk(tp)[rank], dweight.chunk(tp)[rank]), **CLOSE)


def test_a_second_backward_over_kept_logits():
    run_ranks(check_kept_logits, 2)


def check_errors(rank, tp):
    hidden, weight, target, _, _ = problem()
    part, place = weight.chunk(tp)[rank], {"group": dist.group.WORLD}
    for message, ids, options in (
        ("target 24 is outside the vocabulary of 24", target.where(target != target[1, 0], 24), {}),
        ("vocab_size is 25, but weight has 24 rows in 2 shards", target, {"vocab_size": 25}),
        ("temperature must be positive and finite, got -1.0", target, {"temperature": -1.0}),
    ):
        with pytest.raises(ValueError, match=f"vocab_parallel_linear_log_probs: {message}"):
            vocab_parallel_linear_log_probs(hidden, part, ids, **place, **options)


def test_errors_name_the_op():
    run_ranks(check_errors, 2)
