"""Distillation over a sharded vocabulary: the losses and gradients of one rank, and what is communicated."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from marks import full
from rank_cases import in_turn

from fastmp.ops import linear_distillation, linear_topk_distillation
from fastmp.tensor_parallel.linear_loss import (
    vocab_parallel_linear_distillation,
    vocab_parallel_linear_topk_distillation,
)
from fastmp.testing.parallel import count_collectives
from fastmp.testing.ranks import run_ranks

S, B, H, TEACHER_H, V, K = 8, 3, 12, 7, 24, 4
CLOSE = {"rtol": 1e-10, "atol": 1e-10}
DIVERGENCES = ("forward_kl", "reverse_kl", "jsd")


def problem():
    generator = torch.Generator().manual_seed(0)
    hidden, weight, teacher, teacher_weight = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((S, B, H), (V, H), (S, B, TEACHER_H), (V, TEACHER_H))
    )
    grads, temperature = torch.rand(2, S, B, generator=generator, dtype=torch.float64) + 0.5
    mask = torch.rand(S, B, generator=generator) < 0.7
    return hidden, weight, teacher, teacher_weight, grads, temperature, mask


def check_one_rank(rank, tp, sp, topk):
    """Each rank's part of what one rank computes; the losses, which must be equal on all ranks."""
    hidden, weight, teacher, teacher_weight, grads, of_tokens, mask = problem()
    place = {"group": dist.group.WORLD if tp > 1 else None, "sequence_parallel": sp}
    own = lambda x: x.chunk(tp)[rank].clone()  # noqa: E731
    outputs = []
    cases = itertools.product(DIVERGENCES, ((1.0, V, None), (of_tokens, V - 3, mask)), ("none", "mean"))
    for divergence, (temperature, size, counted), reduction in cases:
        options = {"divergence": divergence, "temperature": temperature, "vocab_size": size}
        options |= {"mask": counted, "reduction": reduction}
        one, many = linear_distillation, vocab_parallel_linear_distillation
        given = teacher, teacher_weight
        shards = own(teacher) if sp else teacher, own(teacher_weight)
        if topk:
            one, many = linear_topk_distillation, vocab_parallel_linear_topk_distillation
            log_probs, ids = (teacher @ teacher_weight[:size].T).log_softmax(-1).topk(K)
            given = shards = ids, log_probs
        whole = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        upstream = grads if reduction == "none" else torch.tensor(0.7, dtype=torch.float64)
        want = one(*whole, *given, **options)
        dhidden, dweight = torch.autograd.grad(want, whole, upstream)
        x, w = (own(hidden) if sp else hidden.clone()).requires_grad_(), own(weight).requires_grad_()
        with count_collectives() as calls:
            found = many(x, w, *shards, **place, **options, workspace=9 * V // tp * 8)
            ours = torch.autograd.grad(found, (x, w), upstream)
        torch.testing.assert_close(found, want, **CLOSE)
        torch.testing.assert_close(ours, (own(dhidden) if sp else dhidden, own(dweight)), **CLOSE)
        if tp > 1:
            check_traffic(calls.calls, tp, topk)
        outputs.append(found.tolist())
    return outputs


def check_traffic(calls, tp, topk):
    """No logits, and no more numbers a token than the statistics have."""
    widths = {H, TEACHER_H, *((K + 2,) if topk else (4, 2))}
    for name, shapes in calls:
        assert {shape[-1] for shape in shapes} <= widths, (name, shapes)


@pytest.mark.parametrize("topk", (False, True), ids=("hidden states", "top k"))
@pytest.mark.parametrize("tp", [2, *full([4])])
def test_equals_one_rank(tp, topk):
    results = run_ranks(in_turn, tp, check_one_rank, [(False, topk), (True, topk)])
    assert all(outputs == results[0] for outputs in results), "the ranks' losses differ in their bits"


@pytest.mark.parametrize("topk", (False, True), ids=("hidden states", "top k"))
def test_alone(topk):
    check_one_rank(0, 1, False, topk)


def check_errors(rank, tp):
    hidden, weight, teacher, teacher_weight, *_ = problem()
    own, place = weight.chunk(tp)[rank], {"group": dist.group.WORLD}
    with pytest.raises(ValueError, match=r"vocab_parallel_linear_distillation: expected teacher_weight of"):
        vocab_parallel_linear_distillation(hidden, own, teacher, teacher_weight, **place)
    ids = torch.full((S, B, 1), V)
    with pytest.raises(
        ValueError, match="vocab_parallel_linear_topk_distillation: teacher_ids has 24, outside"
    ):
        vocab_parallel_linear_topk_distillation(hidden, own, ids, -torch.ones(S, B, 1), **place)


def test_errors_name_the_op():
    run_ranks(check_errors, 2)
