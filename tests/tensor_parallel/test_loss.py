"""The sharded cross-entropy against torch's on the whole vocabulary in float64, and what it communicates."""

from __future__ import annotations

import loss_tools
import pytest
import torch
import torch._dynamo
import torch.distributed as dist
import torch.nn.functional as F
from loss_tools import OPTIONS
from rank_cases import in_turn

from fastmp.tensor_parallel.loss import vocab_parallel_cross_entropy
from fastmp.testing.parallel import count_collectives
from fastmp.testing.ranks import run_ranks

S, B, V = 6, 5, 24


def problem(options, dtype=torch.float64):
    """Logits (S, B, V) of some size, and all else as in `loss_tools.problem`."""
    logits, *rest = loss_tools.problem([(S, B, V)], options, V)
    return logits.mul_(5).to(dtype), *rest


def truth(
    logits, target, *, vocab_size=V, label_smoothing=0.0, z_loss=0.0, ignore_index=-100, token_weight=None
):
    real = logits.double()[..., :vocab_size]
    loss = F.cross_entropy(
        real.flatten(0, 1),
        target.flatten(),
        reduction="none",
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
    ).view_as(target)
    loss = loss + z_loss * real.logsumexp(-1).square() * (target != ignore_index)
    return loss if token_weight is None else loss * token_weight


def check_loss(rank, tp, options):
    group = dist.group.WORLD
    logits, target, grad_loss, options = problem(options)
    whole = logits.clone().requires_grad_()
    expected = truth(whole, target, **options)
    expected.backward(grad_loss)

    shard = logits.chunk(tp, -1)[rank].clone().requires_grad_()
    with count_collectives() as forward:
        loss = vocab_parallel_cross_entropy(shard, target, group=group, **options)
    with count_collectives() as backward:
        loss.backward(grad_loss)
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(shard.grad, whole.grad.chunk(tp, -1)[rank], rtol=1e-10, atol=1e-10)
    assert torch.equal(shard, logits.chunk(tp, -1)[rank]), "the logits were modified"

    numbers = 5 if options.get("label_smoothing") else 3
    assert forward.calls == [("all_gather", [(tp, S * B, numbers), (1, S * B, numbers)])]
    assert backward.counts == {}
    return loss.tolist()


@pytest.mark.parametrize("tp", [2, 4])
def test_equals_torch_on_the_whole_vocabulary(tp):
    results = run_ranks(in_turn, tp, check_loss, [(options,) for options in OPTIONS.values()])
    assert all(loss == results[0] for loss in results), "the ranks' losses differ in their bits"


def check_dtype(rank, tp, dtype):
    logits, target, grad_loss, options = problem(OPTIONS["everything"], dtype)
    options["token_weight"], grad_loss = options["token_weight"].float(), grad_loss.float()
    whole = logits.double().requires_grad_()
    expected = truth(whole, target, **options)
    expected.backward(grad_loss.double())
    shard = logits.chunk(tp, -1)[rank].clone().requires_grad_()
    loss = vocab_parallel_cross_entropy(shard, target, group=dist.group.WORLD, **options)
    loss.backward(grad_loss)
    assert loss.dtype == torch.float32 and shard.grad.dtype == dtype
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(shard.grad, whole.grad.chunk(tp, -1)[rank].to(dtype))
    return loss.tolist()


def test_dtypes():
    results = run_ranks(in_turn, 4, check_dtype, [(torch.float32,), (torch.bfloat16,), (torch.float16,)])
    assert all(loss == results[0] for loss in results)


def check_in_place(rank, tp):
    """The gradient takes the logits' memory, to the bit the one a fresh gradient would be."""
    group = dist.group.WORLD
    logits, target, grad_loss, _ = problem({})
    weight = torch.ones(V // tp, V // tp, dtype=torch.float64)
    grads, places = [], []
    for in_place in (False, True):
        leaf = logits.chunk(tp, -1)[rank].clone().requires_grad_()
        x = leaf @ weight
        kept = []
        x.register_hook(lambda grad, kept=kept: kept.append(grad.data_ptr()))
        loss = vocab_parallel_cross_entropy(x, target, group=group, grad_in_place=in_place)
        grads.append(torch.autograd.grad(loss, leaf, grad_loss)[0])
        places.append(kept[0] == x.data_ptr())
    assert torch.equal(*grads)
    assert places == [False, True]


def test_gradient_in_place():
    run_ranks(check_in_place, 2)


def check_saved(rank, tp):
    """Between forward and backward: the logits themselves and a few numbers a token."""
    logits, target, _, _ = problem({})
    shard = logits.chunk(tp, -1)[rank].clone().requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        vocab_parallel_cross_entropy(shard, target, group=dist.group.WORLD)
    large = [t for t in kept if t.numel() > 4 * S * B]
    assert [t.data_ptr() for t in large] == [shard.data_ptr()]


def test_what_is_kept():
    run_ranks(check_saved, 2)


def check_layouts(rank, tp):
    group = dist.group.WORLD
    logits, target, _, _ = problem({})
    shard = logits.chunk(tp, -1)[rank]  # a slice: rows further apart than they are long
    expected = vocab_parallel_cross_entropy(shard.contiguous(), target, group=group)
    for arranged in (
        shard,
        shard.transpose(0, 1).contiguous().transpose(0, 1),
        shard.transpose(0, 2).contiguous().transpose(0, 2),
    ):
        assert torch.equal(vocab_parallel_cross_entropy(arranged, target, group=group), expected)
    assert torch.equal(vocab_parallel_cross_entropy(shard[2, 3], target[2, 3], group=group), expected[2, 3])
    assert vocab_parallel_cross_entropy(shard[:0], target[:0], group=group).shape == (0, B)
    ignored = vocab_parallel_cross_entropy(shard.clone().requires_grad_(), target.fill_(-100), group=group)
    assert torch.count_nonzero(ignored) == 0


def test_layouts_shapes_and_all_ignored():
    run_ranks(check_layouts, 2)


def check_errors(rank, tp):
    group = dist.group.WORLD
    logits, target = torch.randn(4, 12), torch.tensor([1, 2, 3, 4])
    for message, arguments, options in (
        ("expected target of shape (4,) for logits of shape (4, 12), got (3,)", (logits, target[:3]), {}),
        (
            "vocab_size is 25, but the logits have 24 columns in 2 shards",
            (logits, target),
            {"vocab_size": 25},
        ),
        ("vocab_size is 0, but the logits have 24 columns", (logits, target), {"vocab_size": 0}),
        (
            "expected token_weight of shape (4,) for logits of shape (4, 12), got (2, 2)",
            (logits, target),
            {"token_weight": torch.ones(2, 2)},
        ),
        ("target must be torch.int64, got torch.int32", (logits, target.int()), {}),
        ("target 24 is outside the vocabulary of 24", (logits, torch.tensor([0, 24, 1, 2])), {}),
        (
            "target 23 is outside the vocabulary of 20",
            (logits, torch.tensor([0, 23, 1, 2])),
            {"vocab_size": 20},
        ),
        ("label_smoothing must lie in [0, 1], got 1.5", (logits, target), {"label_smoothing": 1.5}),
    ):
        with pytest.raises(ValueError) as caught:
            vocab_parallel_cross_entropy(*arguments, group=group, **options)
        assert message in str(caught.value)


def test_errors_name_both_values():
    run_ranks(check_errors, 2)


def check_compiled(rank, tp, options):
    logits, target, grad_loss, options = problem(options)
    shard = logits.chunk(tp, -1)[rank].clone().requires_grad_()

    def run(shard, target):
        return vocab_parallel_cross_entropy(shard.sin(), target, group=dist.group.WORLD, **options)

    eager = run(shard, target)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")(shard, target)
    assert torch.equal(eager, compiled)
    assert torch.equal(
        torch.autograd.grad(compiled, shard, grad_loss)[0], torch.autograd.grad(eager, shard, grad_loss)[0]
    )


def test_compiles_in_one_graph(warm_compiler):
    run_ranks(check_compiled, 2, OPTIONS["everything"], timeout=240)
